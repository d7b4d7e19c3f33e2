"""Compute the exact diagonal of the Fisher information of any module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from expunge.data.batches import Batches, Data, as_batches, device_of, take
from expunge.data.objective import Objective, check_objective
from expunge.fisher import kinds
from expunge.fisher.adders import Batchwise, Samplewise
from expunge.fisher.borrowing import check_differentiable, undisturbed, wanted_parameters
from expunge.fisher.confirming import Revised
from expunge.fisher.naming import objective_name
from expunge.fisher.planning.plan import Plan
from expunge.fisher.reading import checked
from expunge.fisher.sums import FisherSums
from expunge.model.copying import unwrapped
from expunge.runtime.progress import is_shown, track
from expunge.storage.digests import digest_beside
from expunge.validate import check_choice, check_whole

KINDS = ("empirical", "expected", "sampled", "batch")


def diagonal(
    model: nn.Module,
    batches: Data,
    *,
    kind: str = "empirical",
    objective: Objective | None = None,
    parameters: Iterable[str] | None = None,
    draws: int = 1,
    seed: int = 0,
    batch_size: int = 128,
    progress: bool | None = None,
) -> FisherSums:
    """Σ_n (∂ log p(y_n|x_n, w) / ∂w)² for every parameter, one gradient per sample, the model in eval mode.

    kind "empirical"  at the true labels (the paper's text, section "Masking with Fisher Information")
    kind "expected"   Σ_y p(y|x_n) (∂ log p(y|x_n))², exact over all labels, one forward pass shared
    kind "sampled"    an unbiased estimate of the expected one from `draws` backward passes, seeded, for many classes
    kind "batch"      Departure: the released program's rule. For each label the gradient of the batch-mean loss, squared, times the
                      batch-mean probability, one term per batch. It changes with the batch size and is not a sum over samples.

    Where a sample has a distribution at each of several positions (logits (N, K, ...), or (N, tokens, K) with the objective TOKENS),
    "expected" and "sampled" are of the joint log-probability of its scored positions: Σ_t Σ_k p_tk (∂ log p_tk)², as positions are
    independent given the input (fisher/token_kinds.py). "expected" takes a pass per position and label, at most 1,024.

    Apart from rounding, the result does not depend on the batch size or on the order of the samples. `parameters`: the names of the
    parameters to include (default: all with requires_grad). `batch_size` cuts a dataset; a loader keeps its own batches. `progress`: None
    shows it where standard error is a terminal or a notebook runs. The model, its modes, flags, grads, hooks and the random state are
    left as they were.
    """
    check_choice("kind", kind, KINDS)
    kinds.check_draws(kind, draws)
    check_whole("seed", seed, minimum=0)
    objective = Objective() if objective is None else objective
    check_objective(objective)
    kinds.check_distribution(kind, objective)
    model = unwrapped(model)
    chosen = wanted_parameters(model, parameters)
    check_whole("batch_size", batch_size, minimum=1)
    data = as_batches(batches, batch_size=int(batch_size))
    digest, name = digest_beside(model), objective_name(objective, kind)  # before functions note their calls
    totals, count = summed(model, data, chosen, kind, objective, draws, seed, progress)
    return FisherSums(totals, count, kind, digest(), name)


def summed(
    model: nn.Module,
    data: Batches,
    parameters: Mapping[str, nn.Parameter],
    kind: str,
    objective: Objective,
    draws: int,
    seed: int,
    progress: bool | None = False,
    plan: Plan | None = None,
) -> tuple[dict[str, Tensor], int]:
    """The sums of `diagonal` and of how many samples or batches they are, without its checks of arguments and the digest.

    `plan` is followed, and revised, as one that the first batch would have given.
    """
    with undisturbed(model, parameters):
        if kind == "batch":
            adder: Batchwise | Samplewise = Batchwise(model, parameters, objective)
        else:
            adder = Samplewise(model, parameters, objective, kind, draws, seed, data.known, plan)
        device, sample = device_of(model), None
        while True:
            try:
                batches = checked(iter(data), device, objective)
                for batch, adder.labels in track(batches, f"Fisher ({kind})", total=data.known, enabled=is_shown(progress)):
                    sample = take(batch, slice(0, 1)) if sample is None else sample
                    adder.add(batch)
                adder.finish()
                break
            except Revised as error:
                adder.restart(error.names)
        totals = adder.totals()
        check_differentiable(model, totals, sample, objective)
    return totals, adder.count
