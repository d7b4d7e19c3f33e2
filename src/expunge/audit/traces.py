"""Score planted samples later, by the answers of a network that should have forgotten them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from expunge.audit.intervals import Interval, as_scores, binomial, bootstrap_mean, check_confidence, clopper_pearson
from expunge.audit.planting import Key
from expunge.data.batches import device_of, row_reader
from expunge.data.indices import resolved
from expunge.data.objective import Objective
from expunge.errors import DivergedError, InputError
from expunge.model.checks import check_module
from expunge.runtime.modes import in_mode, seeded, unchanged
from expunge.validate import check_number, check_whole

PERCENT = -2.3263478740408408  # the 1 % quantile of a normal distribution


def confusion(logits: Tensor, labels: Tensor, first: int, second: int, confidence: float = 0.95) -> Interval:
    """Of samples of two classes, by their true labels, the share taken for the other of both: IC-ERR on unseen samples (SCRUB).

    On the planted samples it is the share that still gets its swapped label. A network trained without them has a confusion too.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise InputError("labels", f"must be one for each row of logits, {tuple(logits.shape)}", tuple(labels.shape))
    if first == second:
        raise InputError("second", "must be another class than first", second)
    predicted, labels = logits.argmax(1).cpu(), labels.cpu()
    if bool(logits.isnan().any()):
        raise DivergedError("the logits are NaN: the model diverged, nothing was measured")
    wrong = ((labels == first) & (predicted == second)) | ((labels == second) & (predicted == first))
    total = int(((labels == first) | (labels == second)).sum())
    if absent := [label for label in (first, second) if not bool((labels == label).any())]:
        raise InputError("labels", f"must hold samples of the classes {first} and {second}", f"none of {absent[0]}")
    return clopper_pearson(int(wrong.sum()), total, confidence)


@dataclass(frozen=True)
class NoiseTrace:
    """GUS: `mean` is 0 and `beyond` 1 % for a network that never saw the noise; a mean below 0 is the trace of training on it.

    `beyond` is the share of samples below −2.33, the 1 % quantile of a normal distribution: the true positives at 1 % false positives.
    """

    mean: Interval
    beyond: Interval


def noise_trace(model: nn.Module, dataset: Any, key: Key, objective: Objective = Objective(), batch_size: int = 128) -> NoiseTrace:
    """I_n = ⟨ξ_n, g_n⟩ / (σ·‖g_n‖), g_n the gradient of the loss by the clean input of planted sample n, ξ_n its noise (Pawelczyk et al.).

    `dataset` is the one before planting. Without training on ξ, I is normal with deviation 1 whatever the network. Where g is 0, I is 0.
    """
    check_module(model)
    if key.noise is None or len(dataset) != key.size:
        rule = f"must be that of noise planted in this dataset of {len(dataset)} samples"
        raise InputError("key", rule, f"{key.kind}, {key.size} samples")
    read, device = row_reader(resolved(dataset, "dataset")), device_of(model)
    scores = []
    with seeded(0, device), in_mode(model, training=False), unchanged(model), torch.inference_mode(False), torch.enable_grad():
        for places in torch.arange(len(key.rows)).split(batch_size):
            clean, *between, label = (part.to(device) for part in read(key.rows[places]))
            clean = clean.detach().clone().requires_grad_()
            batch = (clean, *between, label)
            losses = objective.per_sample(objective.logits(model, batch), objective.targets(batch))
            gradient = torch.autograd.grad(losses.sum(), clean)[0].double().flatten(1).cpu()
            dots = (gradient * key.noise[places].double().flatten(1)).sum(1)
            scores.append(dots / (key.deviation * gradient.norm(dim=1)).clamp(min=1e-300))
    values = as_scores("the gradients", torch.cat(scores))
    return NoiseTrace(bootstrap_mean(values), clopper_pearson(int((values < PERCENT).sum()), len(values)))


@dataclass(frozen=True)
class OneRun:
    """A lower bound of ε at this confidence: no (ε, δ)-private procedure with a smaller ε is guessed so well. 0: nothing was found."""

    epsilon: float
    guesses: int
    accuracy: Interval
    delta: float
    confidence: float


def one_run_epsilon(key: Key, scores: Any, guesses: Sequence[int] | None = None, delta: float = 1e-5, confidence: float = 0.95) -> OneRun:
    """Guess that the half of `guesses` with the largest scores was included and that with the smallest was not (Steinke et al., 2023).

    `scores` are larger for canaries that the network knows, such as `membership.confidence` of logits and `key.labels`, one for each
    canary, left out ones too. With m canaries, r guesses and v right ones, a procedure that is (ε, δ)-private has
    p = P(X ≥ v) + 2mδ·max_i P(v − i ≤ X < v)/i, X binomial of r and 1/(1 + e^−ε); ε is the largest with p < 1 − confidence.
    Several numbers of guesses share that probability evenly (Bonferroni); None: a tenth, a quarter, a half and all of the canaries.

    Departures: none from the program in the paper's appendix D. What is private or not is training and unlearning together.
    """
    check_number("delta", delta, 0, 1, ends="[)")
    check_confidence(confidence)
    values, canaries = as_scores("scores", scores), len(key.rows)
    if key.kind != "coins" or len(values) != canaries:
        raise InputError("scores", f"must be one for each canary of a key of coins, {canaries} of {key.kind}", len(values))
    tried = sorted({max(2, canaries // part) for part in (10, 4, 2, 1)} if guesses is None else set(guesses))
    if not tried:
        raise InputError("guesses", "must be one number or more")
    for number in tried:
        check_whole("guesses", number, minimum=2, maximum=canaries)
    order = values.argsort(descending=True, stable=True)
    runs = []
    for number in (int(number) // 2 * 2 for number in tried):
        top, bottom = order[: number // 2], order[len(order) - number // 2 :]
        right = int(key.included[top].sum()) + int((~key.included[bottom]).sum())
        runs.append((_private(canaries, number, right, delta, (1 - confidence) / len(tried)), number, right))
    epsilon, number, right = max(runs)
    return OneRun(epsilon, number, clopper_pearson(right, number, confidence), delta, confidence)


def _private(canaries: int, guesses: int, right: int, delta: float, allowed: float) -> float:
    """The largest ε that is refuted."""
    low, high = 0.0, 1.0
    if _probability(canaries, guesses, right, low, delta) >= allowed:
        return 0.0
    while _probability(canaries, guesses, right, high, delta) < allowed:
        high += 1
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(canaries, guesses, right, middle, delta) < allowed else (low, middle)
    return low


def _probability(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    shares = binomial(guesses, 1 / (1 + math.exp(-epsilon)))
    below = shares[:right].flip(0).cumsum(0) / torch.arange(1, right + 1)  # P(v − i ≤ X < v) / i
    return min(1.0, float(shares[right:].sum()) + 2 * canaries * delta * float(below.max() if right else 0))
