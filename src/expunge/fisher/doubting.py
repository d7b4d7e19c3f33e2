"""Tell rounding from an error of the plan, where the gradients of drawn samples differ from a plain pass in float32.

A ReLU whose input is nearly zero opens in one pass and stays shut in another of the same sample, by rounding alone, and changes gradients
by percents. No tolerance separates that from a row counted to another sample; these do, the cheap ones first:

1. A plain pass in the memory format of the planned one rounds alike. Where it gives what the plan gives, the plan is right, if the model
   is the same function in both formats; that is shown in float64, where nothing flips, once per call.
2. Each drawn sample alone, in float64: there the plan equals the plain pass, and the rows that the float32 pass over the whole batch
   counts to the sample are its own. Inputs are continuous, so they must agree closely; slopes may differ by what a flip changes.
3. The whole batch in float64, by the plan and plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from expunge.data.batches import device_of, take
from expunge.data.objective import Batch, Objective
from expunge.fisher.closed_forms import tf32
from expunge.fisher.closed_forms.drawn import Part
from expunge.fisher.comparing import Comparison, Differences, Kept, Tolerated, allowed, judged, keep, largest
from expunge.fisher.planning.survey import Plan, random_like, tolerance
from expunge.fisher.samples import fresh, gradients
from expunge.model.copying import copied
from expunge.runtime.nested import map_tensors, tensors

FLIPPED = 0.1  # of a gradient: what is off by more is never put down to rounding without the whole batch


class Doubts:
    """Settles doubts about a float32 model; its copy in float64 is kept from one to the next."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], objective: Objective) -> None:
        self.model, self.parameters, self.objective = model, parameters, objective
        self._copy: nn.Module | None = None
        self._formats_agree: bool | None = None  # not known yet

    @property
    def possible(self) -> bool:
        return any(value.dtype != torch.float64 for value in self.parameters.values())

    def rounding_alone(self, comparison: Comparison, group: Sequence[Kept], plan: Plan, found: Differences, tolerated: Tolerated) -> bool:
        """Whether rounding is shown to explain these differences, without the whole batch."""
        if not self.possible or found.together or found.largest > FLIPPED:
            return False
        ways = (
            lambda: self._alike_in_its_format(comparison, found, tolerated),
            lambda: all(self._its_own(kept.cut(slice(row, row + 1)), plan, found) for kept in group for row in range(len(kept))),
        )
        return any(_shown(way) for way in ways)

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

    def _its_own(self, kept: Kept, plan: Plan, found: Differences) -> bool:
        """Whether the plan holds for this single sample in float64, and what was kept of it in its batch belongs to it."""
        model, parameters = self._double()
        sample, sent = double(kept.samples), kept.cotangents.double()
        with exact(model):
            alone = keep(model, parameters, plan, sample, torch.zeros_like(kept.rows), self.objective, lambda logits: sent, kept.turn)
            comparison = Comparison([alone], plan, torch.ones(1, device=sent.device))
            if comparison.differences(model, parameters, self.objective, tolerance):
                return False
        if [part[:2] for part in kept.parts] != [part[:2] for part in alone.parts]:
            return False
        pairs = [pair for pair in zip(kept.parts, alone.parts, strict=True) if found.wrong & {*pair[0][:2]}]
        return found.wrong <= {name for part, _ in pairs for name in part[:2]} and all(same_rows(*pair) for pair in pairs)

    def over_the_whole_batch(self, kept: Kept, plan: Plan, found: Differences) -> Differences:
        """The same comparison in float64."""
        if not self.possible:
            return found
        try:
            model, parameters = self._double()
            with exact(model):
                again = keep(model, parameters, plan, double(kept.batch), kept.rows, self.objective, random_like)
                weights = random_like(torch.empty(len(kept), device=kept.rows.device, dtype=torch.float64))
                return Comparison([again], plan, weights).differences(model, parameters, self.objective, tolerance)
        except Exception:  # a model that cannot be copied, or cannot run in float64
            return found

    def _double(self) -> tuple[nn.Module, dict[str, nn.Parameter]]:
        if self._copy is None:
            self._copy = copied(self.model).double()
            for name, value in self._copy.named_parameters():
                value.requires_grad_(name in self.parameters)
        named = dict(self._copy.named_parameters())
        return self._copy, {name: named[name] for name in self.parameters}


def _shown(way: Callable[[], bool]) -> bool:
    try:
        return way()
    except Exception:  # a model that cannot be copied, or cannot run in another format or in float64: nothing is shown
        return False


def same_rows(part: Part, alone: Part) -> bool:
    """Whether the rows that a pass over a batch counts to a sample are those that its use has for the sample alone, flips aside."""
    if part.inputs.shape != alone.inputs.shape or part.slopes.shape != alone.slopes.shape:
        return False
    if part.inputs.shape == part.slopes.shape and torch.equal(part.inputs, part.slopes):
        return False  # a gradient alone, as of lifted parameters, does not show whose it is
    inputs, slopes = alone.inputs.double(), alone.slopes.double()
    near = largest(part.inputs - inputs) <= allowed(part.slopes) / 10 * largest(inputs)
    return bool(near & ((part.slopes - slopes).norm() <= FLIPPED * slopes.norm()))


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
