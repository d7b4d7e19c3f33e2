"""Compute the cotangents of the logits whose squared per-sample gradients sum to each kind of Fisher information.

A pass with cotangent c_n adds (J_nᵀ c_n)² for every sample n, J_n being the Jacobian of its logits. With z the logits and p = softmax(z):

- empirical   c = ∂ℓ(z, y)/∂z at the true label y; for the log-loss p − e_y.
- expected    one pass per label k with c = √p_k (p − e_k):  Σ_k p_k (∂ log p_k)², exactly.
- sampled     `draws` passes with k drawn from q_k ∝ p_k‖e_k − p‖² and c = √(p_k / (draws·q_k)) (p − e_k): the expected one in the mean.
              Plain draws from p return the top label, whose gradient is nearly zero, almost every time; q draws what carries the gradient.
              On trained networks q has the smallest error of three such estimators (benchmarks/sampled_error.py, docs/fisher.md).

Where a sample has a distribution at each of several positions, token_kinds.py has the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy
import torch
from torch import Tensor, nn

from expunge.data.batches import take
from expunge.data.classes import check_class_logits
from expunge.data.labels import IGNORED, known_labels
from expunge.data.objective import Batch, Objective
from expunge.data.tokens import of_tokens
from expunge.errors import InputError, ModelError
from expunge.fisher import token_kinds
from expunge.validate import check_whole

NO_GRADIENT = (
    "the model's output must have a gradient by its parameters; found none (a forward pass under torch.no_grad or torch.inference_mode, "
    "or an output that is detached, as that of argmax is)"
)
MAX_DRAWS = 10**6  # per sample: all are drawn at once
Cotangents = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]  # (logits, targets, noise) -> one (N, ...) tensor per pass


def empirical(objective: Objective) -> Cotangents:
    def passes(logits: Tensor, targets: Tensor, noise: Tensor) -> Sequence[Tensor]:
        if logits.is_inference():
            raise ModelError(NO_GRADIENT)
        outputs = logits.detach().requires_grad_()
        with torch.enable_grad():
            # Copies: a loss may work in place.
            losses = objective.per_sample(outputs.clone(), targets.clone() if isinstance(targets, Tensor) else targets)
            (gradient,) = torch.autograd.grad(losses.sum(), outputs)
        return [gradient]

    return passes


def check_losses_apart(parameters: Mapping[str, nn.Parameter], logits: Tensor, batch: Batch, objective: Objective) -> None:
    """Raise InputError where losses use parameters otherwise than by the model's outputs: these parts of gradients would be missing."""
    if logits.is_inference():
        raise ModelError(NO_GRADIENT)
    one = take(batch, slice(0, 1))
    outputs = logits[:1].detach().requires_grad_()
    with torch.enable_grad(), known_labels():
        losses = objective.per_sample(outputs.clone(), objective.targets(one))
    names = {id(parameter): name for name, parameter in parameters.items()}
    nodes, seen = [losses.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (name := names.get(id(getattr(node, "variable", None)))) is not None:
            rule = "must depend on the model by its outputs alone; let its forward pass return what else they need"
            raise InputError("objective.losses", rule, f"the parameter {name} in them")
        nodes += [following for following, _ in node.next_functions]


def check_distribution(kind: str, objective: Objective) -> None:
    """All kinds but "empirical" do not ask the losses, but take the softmax of the logits for the model's own distribution."""
    if kind != "empirical" and not (of_tokens(objective) and kind != "batch"):
        check_class_logits(objective, f'the kind "{kind}" (unlike "empirical") needs')


def check_draws(kind: str, draws: int) -> None:
    """Settings that would be ignored are refused."""
    check_whole("draws", draws, minimum=1, maximum=MAX_DRAWS)
    if draws != 1 and kind != "sampled":
        raise InputError("draws", 'must be 1 unless the kind is "sampled", the only one that draws', f'{draws} with the kind "{kind}"')


def of_kind(kind: str, objective: Objective) -> Cotangents:
    """The cotangents of a kind, where the objective's outputs are distributions over classes or tokens."""
    if kind == "empirical":
        return empirical(objective)
    one, several = {"expected": (expected, token_kinds.expected), "sampled": (sampled, token_kinds.sampled)}[kind]
    place = 2 if of_tokens(objective) else 1

    def passes(logits: Tensor, targets: Tensor, noise: Tensor) -> Sequence[Tensor]:
        if logits.dim() == 2 and place == 1:
            return one(logits, targets, noise)
        skipped = getattr(objective.losses, "ignore_index", IGNORED)  # torch's modules have it
        if skipped != IGNORED:
            rule = f"the model's own distribution needs {IGNORED} at positions that do not count, and a loss that skips these"
            raise InputError("kind", rule, f"ignore_index={skipped}")
        return several(logits, targets, noise, place)

    return passes


def expected(logits: Tensor, targets: Tensor, noise: Tensor) -> Sequence[Tensor]:
    return _EachLabel(_probabilities(logits), logits.dtype)


class _EachLabel(Sequence[Tensor]):
    """√p_k (p − e_k) for each label k, computed when it is indexed: all at once would be N·K² numbers."""

    def __init__(self, probabilities: Tensor, dtype: torch.dtype) -> None:
        self.probabilities, self.dtype = probabilities, dtype

    def __len__(self) -> int:
        return self.probabilities.shape[1]

    @overload
    def __getitem__(self, label: int) -> Tensor: ...
    @overload
    def __getitem__(self, label: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, label: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(label, slice):
            return [self[one] for one in range(*label.indices(len(self)))]
        if not 0 <= label < len(self):
            raise IndexError(label)
        chances = self.probabilities[:, label]
        return _scored(self.probabilities, torch.full_like(chances, label, dtype=torch.int64), chances.sqrt()).to(self.dtype)


def sampled(logits: Tensor, targets: Tensor, noise: Tensor) -> Sequence[Tensor]:
    """`noise` holds one uniform number per sample and draw."""
    probabilities = _probabilities(logits)
    sizes = (1 - 2 * probabilities + probabilities.square().sum(1, keepdim=True)).clamp_(min=0)  # ‖e_k − p‖²
    weights = probabilities * sizes
    total = weights.sum(1, keepdim=True)
    # A sample whose weights all vanish has no gradient at any label: any draw will do.
    chances = torch.where(total > 0, weights / total, 1 / probabilities.shape[1])
    edges, passes = chances.cumsum(1), []
    for draw in noise.to(edges).unbind(1):
        labels = torch.searchsorted(edges, draw[:, None] * edges[:, -1:], right=True).squeeze(1).clamp_(max=edges.shape[1] - 1)
        chosen = (probabilities / chances).gather(1, labels[:, None]).squeeze(1)
        passes.append(_scored(probabilities, labels, (chosen / noise.shape[1]).sqrt()).to(logits.dtype))
    return passes


def uniform_noise(generator: numpy.random.Generator, samples: int, draws: int) -> Tensor:
    """Uniform numbers in the order of the samples, so that a draw does not depend on how they are cut into batches."""
    return torch.from_numpy(generator.random((samples, draws)))


def _scored(probabilities: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    """scale · (p − e_label), row by row."""
    return (probabilities - torch.nn.functional.one_hot(labels, probabilities.shape[1])) * scale[:, None]


def _probabilities(logits: Tensor) -> Tensor:
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise InputError("kind", "the model's own distribution needs logits of shape (N, K) with K of at least 2", tuple(logits.shape))
    return logits.detach().double().softmax(1)
