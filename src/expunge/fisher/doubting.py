"""Tell rounding from an error of the plan, where the gradients of drawn samples differ from a plain pass in float32.

A ReLU whose input is nearly zero opens in one pass and stays shut in another of the same sample, by rounding alone, and changes gradients
by percents. No tolerance separates that from a row counted to another sample; these do, the cheap ones first:

1. A plain pass in the memory format of the planned one rounds alike. Where it gives what the plan gives, the plan is right, if the model
   is the same function in both formats; that is shown in float64, where nothing flips, once per call.
2. The drawn samples of all batches that wait, together, in float64: there the plan equals the plain pass, and the rows that the pass over
   a sample's own batch counts to it are those it has in this company, apart from what rounding does to them (rows.py). Where these are
   further apart than the rounding that was measured, flips may be the reason; once per call a few samples of such a batch must show the
   plan in float64, where there are none.
3. The whole batch in float64, by the plan and plainly: only for batches whose rows are not explained so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from expunge.data.batches import batch_size, device_of, take
from expunge.data.calling import out_of_memory
from expunge.data.objective import Batch, Objective
from expunge.fisher.closed_forms import tf32
from expunge.fisher.comparing import Comparison, Differences, Kept, Tolerated, judged, keep
from expunge.fisher.planning.definition import random_like, tolerance
from expunge.fisher.planning.plan import Plan
from expunge.fisher.rows import explained
from expunge.fisher.samples import fresh, gradients
from expunge.model.copying import copied
from expunge.runtime.nested import map_tensors, tensors

KEPT_ENTRIES = 1 << 22  # of a copy's weights
FAINTEST = 1e-14  # of the largest gradient: what is less in float64 is rounding, as that of the bias of attention's keys
FEW = 7  # other samples, in whose company a plan must hold in float64
FLIPPED = 0.1  # of a gradient: what is off by more is never put down to the memory format
Result = TypeVar("Result")
BY_FORMAT, BY_ROWS, BY_BATCH, BY_PRECISION = "by the memory format", "by the rows", "by the whole batch", "without TF32"


class Doubts:
    """Settles doubts about a float32 model; its copy in float64 is kept from one to the next, if it is not large.

    `settled`: how many, in which way.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], objective: Objective) -> None:
        self.model, self.parameters, self.objective = model, parameters, objective
        self.settled: Counter[str] = Counter()
        self._copy: nn.Module | None = None
        self._formats_agree: bool | None = None  # not known yet
        self._holds_among_few: bool | None = None

    @property
    def possible(self) -> bool:
        return any(value.dtype != torch.float64 for value in self.parameters.values())

    def unexplained(
        self, comparison: Comparison, group: Sequence[Kept], plan: Plan, found: Differences, tolerated: Tolerated
    ) -> Sequence[Kept]:
        """Those of the batches for which rounding is not shown to explain the differences, without the whole batch."""
        if not self.possible or found.together:
            return group
        alike = found.largest <= FLIPPED and _tried(lambda: self._alike_in_its_format(comparison, found, tolerated), False)
        if alike:
            self.settled[BY_FORMAT] += 1
            return []
        left = _tried(lambda: self._not_their_own(comparison, group, plan, found), group)
        self.settled[BY_ROWS] += not left
        return left

    def unflipped(self, samples: Batch) -> Batch | None:
        """The samples in the memory format in which a plain pass rounds as the planned one does, once a doubt was settled so."""
        return in_channels_last(samples) if self._formats_agree else None

    def _alike_in_its_format(self, comparison: Comparison, found: Differences, tolerated: Tolerated) -> bool:
        samples = in_channels_last(comparison.samples)
        if samples is None or self._formats_agree is False:
            return False
        if comparison.differences(self.model, self.parameters, self.objective, tolerated, samples, sorted(found.wrong)):
            return False
        if self._formats_agree is None:
            self._formats_agree = self._same_function(take(comparison.samples, slice(0, 1)))
        return self._formats_agree

    def _same_function(self, sample: Batch) -> bool:
        """Whether the plain model gives this sample the same gradients in channels-last memory, in float64."""
        model, parameters = self._double()
        with exact(model), torch.enable_grad():
            forms = double(sample), in_channels_last(double(sample))
            plain, other = (self.objective.logits(model, fresh(form)) for form in forms)
            sent = random_like(plain)
            reference, attributed = (gradients(logits, parameters, sent) for logits in (plain, other))
        return not judged({name: value for name, value in attributed.items() if value is not None}, reference, tolerance)

    def _not_their_own(self, comparison: Comparison, group: Sequence[Kept], plan: Plan, found: Differences) -> Sequence[Kept]:
        """The batches whose rows are not explained; all, where the plan does not hold for the drawn samples in float64."""
        model, parameters = self._double()
        rows, cotangents = torch.arange(sum(map(len, group)), device=comparison.logits.device), comparison.cotangents
        turn, wide = group[0].turn, cotangents.double()
        with exact(model):
            reference = keep(model, parameters, plan, double(comparison.samples), rows, self.objective, lambda logits: wide, turn)
            weights = random_like(wide.new_empty(len(rows)))
            if Comparison([reference], plan, weights).differences(model, parameters, self.objective, tolerance):
                return group
        # The same in the caller's precision: what rounding does to these rows is measured, not guessed.
        rounded = keep(self.model, self.parameters, plan, comparison.samples, rows, self.objective, lambda logits: cotangents, turn)
        given, sizes = ([kept.parts for kept in group], rounded.parts, reference.parts, found.wrong), [len(kept) for kept in group]
        owned, measured = explained(*given), explained(*given, flips=False)
        if owned is None or measured is None:
            return group
        left, unmeasured = (
            [kept for kept, own in zip(group, own.split(sizes), strict=True) if not own.all()]
            for own in map(torch.tensor, (owned, measured))
        )
        if unmeasured and self._holds_among_few is None:
            self._holds_among_few = not self._in_float64(*in_smaller_company(unmeasured[0].batch, unmeasured[0].rows, FEW), plan, None)
        return left if self._holds_among_few or not unmeasured else unmeasured

    def over_the_whole_batch(self, kept: Kept, plan: Plan, found: Differences) -> Differences:
        """The same comparison in float64; in smaller company where the batch does not fit into memory so."""
        return self.with_another_cotangent(kept, plan, found, None) if self.possible else found

    def with_another_cotangent(self, kept: Kept, plan: Plan, found: Differences, noise: float | None = FAINTEST) -> Differences:
        """A comparison in float64 of what is sent back at random: a loss may send hardly anything back to a part of the outputs."""
        batch, rows = kept.batch, kept.rows
        while True:
            try:
                exactly = self._in_float64(batch, rows, plan, noise)
                self.settled[BY_BATCH] += 1
                return exactly
            except Exception as error:  # a model that cannot be copied, or cannot run in float64
                if not out_of_memory(error) or batch_size(batch) < 2 * len(rows) + 2:
                    return found
            batch, rows = in_smaller_company(batch, rows)

    def _in_float64(self, batch: Batch, rows: Tensor, plan: Plan, noise: float | None) -> Differences:
        model, parameters = self._double()
        with exact(model):
            again = keep(model, parameters, plan, double(batch), rows, self.objective, random_like)
            weights = random_like(torch.empty(len(rows), device=rows.device, dtype=torch.float64))
            return Comparison([again], plan, weights).differences(model, parameters, self.objective, tolerance, noise=noise)

    def _double(self) -> tuple[nn.Module, dict[str, nn.Parameter]]:
        if self._copy is None:
            self._copy = copied(self.model).double()
            for name, value in self._copy.named_parameters():
                value.requires_grad_(name in self.parameters)
        copy, named = self._copy, dict(self._copy.named_parameters())
        if sum(value.numel() for value in named.values()) > KEPT_ENTRIES:
            self._copy = None
        return copy, {name: named[name] for name in self.parameters}


def _tried(way: Callable[[], Result], otherwise: Result) -> Result:
    try:
        return way()
    except Exception:  # a model that cannot be copied, or cannot run in another format or in float64: nothing is shown
        return otherwise


def in_smaller_company(batch: Batch, rows: Tensor, most: int | None = None) -> tuple[Batch, Tensor]:
    """These samples and half of the others, or so many at most, and their numbers there."""
    others = torch.ones(batch_size(batch), dtype=torch.bool, device=rows.device).index_fill(0, rows, False).nonzero().squeeze(1)
    return take(batch, torch.cat([rows, others[: len(others) // 2 if most is None else most]])), torch.arange(len(rows), device=rows.device)


def double(batch: Batch) -> Batch:
    return map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def in_channels_last(batch: Batch) -> Batch | None:
    """The batch with its images in channels-last memory; None where that changes nothing."""
    if not any(_planes(tensor) for tensor in tensors(batch)):
        return None
    return map_tensors(batch, lambda tensor: tensor.contiguous(memory_format=torch.channels_last) if _planes(tensor) else tensor)


def _planes(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_floating_point() and not tensor.is_contiguous(memory_format=torch.channels_last)


@contextmanager
def exact(model: nn.Module) -> Iterator[None]:
    """Without the roundings that the caller has allowed."""
    with torch.autocast(device_of(model).type, enabled=False), tf32.switched_off():
        yield
