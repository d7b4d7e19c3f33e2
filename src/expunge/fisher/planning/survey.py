"""Choose the way to compute each parameter's squares, on two samples, and check it there against the definition.

A closed form is used for a parameter only if, on the first samples of the data, it gives what one backward pass per sample gives.
What has no closed form, or fails the check (shared weights, modules called twice, tables indexed by hand), goes by torch.func, and
what that cannot do, one sample after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from expunge.data.batches import batch_size, device_of, take
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError, ModelError
from expunge.fisher.closed_forms import tf32
from expunge.fisher.closed_forms.scratch import Scratch, wide
from expunge.fisher.planning.interception import Interception
from expunge.fisher.planning.layouts import Layout, infer
from expunge.fisher.planning.mixing import comparable, mixes
from expunge.fisher.planning.orders import fitting
from expunge.fisher.planning.passes import closed_forms
from expunge.fisher.samples import (
    Squares,
    UnseenUse,
    add_single,
    batched,
    fresh,
    is_usable,
    output_error,
    relative_errors,
    sizes_of,
    unmasked,
)
from expunge.model.copying import copied
from expunge.runtime.cuda_graphs import uncollected
from expunge.runtime.nested import map_tensors

COUPLED = (
    "the model's output for a sample changes with the rest of its batch, or from call to call, in eval mode, so gradients "
    "of single samples do not exist (batch statistics, functional dropout, or the sample dimension not first)"
)
DROPPED = "squeeze(), say, drops the dimension of a single sample; name another, as in squeeze(1)"
NOT_FINITE = "the model's output is not finite for a sample of the data, so it has no gradient; found NaN or infinity"
NOISE = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the largest gradient: below it there is but rounding
SEVERAL = (1.0, 2.0, -1.0)  # times a cotangent: torch.func may be right for one, and wrong for several at once, as of torch.cdist
PROBE = 2  # samples: passes of one and of two show where the samples are; two gradients separate sums of squares from squares of sums


@dataclass
class Plan:
    """How each parameter's squares are formed."""

    layouts: dict[str, Layout] = field(default_factory=dict)  # by closed form
    batched: list[str] = field(default_factory=list)  # by torch.func
    looped: list[str] = field(default_factory=list)  # one sample at a time
    idle: list[str] = field(default_factory=list)  # not used so far
    ways: dict[str, str] = field(default_factory=dict)  # the operations they are used in
    work: dict[str, int] = field(default_factory=dict)  # multiplications behind their gradients
    reasons: dict[str, str] = field(default_factory=dict)  # why others have none
    entries: int = 0  # that a sample has in the outputs of these operations
    mixes: bool = False  # there are operations that may mix samples
    surveyed: bool = True  # shown to give what the definition gives, on two samples
    logits: torch.Size | None = None  # of some samples

    def revise(self, names: set[str]) -> None:
        """Drop the closed forms of parameters that were used in another way, as control flow that depends on the data may do."""
        for name in names:
            if self.layouts.pop(name, None) is not None:
                self.reasons[name] = "a later batch did not confirm it"
        self.idle = [name for name in self.idle if name not in names]
        self.batched = [name for name in self.batched if name not in names]
        self.looped += sorted(names - {*self.looped})


@tf32.switched_off()
def obvious_plan(model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Batch, objective: Objective) -> Plan | None:
    """A plan from two forward passes, of one sample and of two, where each parameter has one closed form that might fit; else None.

    Where rows may be in two orders, those of the first sample show in which. Nothing is computed by it yet: the first batch's comparisons
    and audit must show that it holds. A survey takes three times as long.
    """
    probe = take(batch, slice(0, PROBE))
    try:
        with uncollected():
            together, more = _watched(model, parameters, probe, objective)
            alone, fewer = _watched(model, parameters, take(probe, slice(0, 1)), objective)
    except Exception:  # a survey says what is wrong
        return None
    choices = {name: _fitting(name, layouts, fewer, more) for name, layouts in _choices(fewer, more).items()}
    single = choices.keys() == parameters.keys() and all(len(layouts) == 1 for layouts in choices.values())
    if not single or mixes(fewer.notes.mixing, more.notes.mixing) or not is_usable(alone) or not _alike(together[:1], alone):
        return None
    return _described(Plan({name: layouts[0] for name, layouts in choices.items()}, surveyed=False, logits=together.shape), more)


def _fitting(name: str, layouts: list[Layout], fewer: Interception, more: Interception) -> list[Layout]:
    return fitting(layouts, fewer.met[name], more.met[name], PROBE, _own)


@tf32.switched_off()  # its rounding, of some percent in a deep network, would hide the errors that the check is for
def survey(model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Batch, objective: Objective) -> Plan:
    """A plan for these parameters, from the first samples of a batch of at least two.

    Where rounding alone may have failed a closed form (a ReLU that flips changes a gradient by percents), a copy in float64 decides.
    """
    probe = take(batch, slice(0, PROBE))
    try:
        return _survey(model, parameters, probe, objective, doubting=any(value.dtype != torch.float64 for value in parameters.values()))
    except _Altered:
        return Plan(looped=list(parameters), reasons=dict.fromkeys(parameters, "torch's fast path gives other outputs"))
    except _Doubt:
        pass
    except InputError:
        with torch.enable_grad():
            objective.logits(model, fresh(probe))  # raises the same, if that is not for being watched
        _alone(model, probe, 0, objective)
        return Plan(looped=list(parameters), reasons=dict.fromkeys(parameters, "its operations cannot be watched (nested tensors, say)"))
    try:
        twin = copied(model).double()
        named = dict(twin.named_parameters())
        wide_probe = map_tensors(probe, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        with torch.autocast(device_of(twin).type, enabled=False):
            return _survey(twin, {name: named[name] for name in parameters}, wide_probe, objective)
    except Exception:  # a model that cannot be copied or cannot run in float64: the plan it has itself is exact too
        return _survey(model, parameters, probe, objective)


@tf32.switched_off()
def survey_without_closed_forms(model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Batch, objective: Objective) -> Plan:
    """A plan by torch.func, or one sample at a time: closed forms are of squares, and other sizes of a gradient have none here."""
    probe = take(batch, slice(0, PROBE))
    with torch.no_grad():
        together = objective.logits(model, fresh(probe))
    cotangent = random_like(together)
    reference, _ = _defined(model, parameters, probe, together, cotangent, objective)
    batched_names, looped_names = _without_closed_forms(model, list(parameters), probe, cotangent, reference, objective)
    return Plan(batched=batched_names, looped=looped_names)


class _Doubt(Exception):
    """A closed form failed its check."""


class _Altered(Exception):
    """The model gives other outputs while its operations are watched, as where torch has a fast path of its own."""


def _survey(model: nn.Module, parameters: Mapping[str, nn.Parameter], probe: Batch, objective: Objective, doubting: bool = False) -> Plan:
    together, more = _watched(model, parameters, probe, objective)
    cotangent = random_like(together)
    reference, plain = _defined(model, parameters, probe, together, cotangent, objective)
    _, fewer = _watched(model, parameters, take(probe, slice(0, 1)), objective)
    mixing = more.notes.mixing
    if not comparable(fewer.notes.mixing, mixing):  # a model may keep what its first pass has made
        mixing = _watched(model, parameters, probe, objective)[1].notes.mixing
    choices, plan = _choices(fewer, more), Plan(mixes=mixes(fewer.notes.mixing, mixing), logits=together.shape)
    for name, possible in choices.items():  # a wrong order of rows may give two samples their squares, too
        others = possible if len(more.met[name]) <= 1 else []  # of several uses each has to be in this order
        choices[name] = _fitting(name, possible, fewer, more) or others
    plan.reasons |= {name: "used again, on samples in another order" for name, left in choices.items() if not left}
    choices = {name: left for name, left in choices.items() if left}
    while choices:
        layouts = {name: untried[0] for name, untried in choices.items()}
        wrong = _wrong(model, parameters, layouts, probe, cotangent, reference, plain, objective, more.beside)
        if wrong is None:  # the pass itself failed: a parameter given once per sample met an operation that needs its true shape
            bare = {name for name in choices if more.shapes.get(name, [None]) == [None] or not layouts[name].frames}
            wrong = bare or set(choices)
        if not wrong:
            break
        wrong |= {one for pair in more.beside.items() if wrong & {*pair} for one in pair}  # of one operation: in the same place
        left = {name: untried[name in wrong :] for name, untried in choices.items() if untried[name in wrong :]}
        if doubting and len(left) < len(choices):
            raise _Doubt
        plan.reasons |= dict.fromkeys(set(choices) - set(left), "its closed form fails the check")
        choices = left
    plan.layouts = {name: untried[0] for name, untried in choices.items()}
    _described(plan, more)
    used = {name for watched in (more, fewer) for name in (*+watched.uses, *(watched.derived.rows if watched.derived else ()))}
    plan.idle = [name for name in parameters if not (name in used or bool(reference[name].any()))]
    rest = [name for name in parameters if name not in plan.layouts and name not in plan.idle]
    plan.reasons |= {name: _reason(name, more, fewer) for name in rest if name not in plan.reasons}
    if rest:
        plan.batched, plan.looped = _without_closed_forms(model, rest, probe, cotangent, reference, objective)
    return plan


def _described(plan: Plan, more: Interception) -> Plan:
    """With what the parameters' gradients take."""
    work = more.notes.work
    plan.ways = {name: " + ".join(sorted(operations)) for name, operations in work.operations.items()}
    plan.work, plan.entries = dict(work.multiplications), work.entries // PROBE
    return plan


def _reason(name: str, more: Interception, fewer: Interception) -> str:
    """Why a parameter has no closed form to try."""
    if name in more.notes.chosen:
        return "used on rows chosen by their content"
    if name in more.alone and more.uses[name] > 1:
        return "used by a convolution and again"
    if more.derived is not None and name in more.derived.rows:
        return "made into another weight" if more.derived.rows[name] is None else "used by itself and in tensors made of it"
    if name in more.outside:
        return "used in operations without closed form"
    if more.uses[name] != fewer.uses[name]:
        return "one sample and two use it differently"
    if None in more.shapes.get(name, []) and len(more.shapes[name]) > 1:
        return "used by itself and in other operations"
    if len(more.shapes.get(name, [])) > 1:
        return "used again, on rows that may be in several orders"
    return "samples not along one dimension"


def _without_closed_forms(
    model: nn.Module, names: Sequence[str], probe: Batch, cotangent: Tensor, reference: Squares, objective: Objective
) -> tuple[list[str], list[str]]:
    """Which of these parameters torch.func gives the reference for, on the probe; the others go one sample at a time."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # of torch's, where vmap has a loop of its own
            squares = batched(model, names, probe, [scale * cotangent for scale in SEVERAL], objective)
    except UnseenUse as error:
        others = [name for name in names if name not in error.names]
        batched_names, looped_names = _without_closed_forms(model, others, probe, cotangent, reference, objective) if others else ([], [])
        return batched_names, [*looped_names, *sorted(error.names)]
    except Exception:  # whatever vmap cannot express: data-dependent control flow, operations without a batching rule
        squares = {}
    times = sum(scale**2 for scale in SEVERAL)
    alike = _agreeing(squares, {name: times * reference[name] for name in squares})
    return [name for name in names if name in alike], [name for name in names if name not in alike]


def _watched(model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Batch, objective: Objective) -> tuple[Tensor, Interception]:
    """A plain forward pass, and which parameters it used where."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    own = [*model.parameters(), *model.buffers()]
    watch = Interception(names, None, batch_size(batch), Scratch(), constants=own)
    with torch.enable_grad(), watch as interception:  # some differentiate
        return objective.logits(model, fresh(batch)).detach(), interception


def random_like(logits: Tensor) -> Tensor:
    """A random cotangent rather than the loss's own, which vanishes on well-fitted samples."""
    generator = torch.Generator(logits.device).manual_seed(0)  # drawn where it is needed: a copy would wait for the device
    return torch.randn(logits.shape, generator=generator, dtype=torch.float64, device=logits.device).to(logits.dtype)


def _defined(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], probe: Batch, together: Tensor, cotangent: Tensor, objective: Objective
) -> tuple[Squares, Tensor]:
    """The probe's squares by the definition and its logits, each sample alone. Checks that samples do not depend on each other."""
    totals, outputs = {name: wide(torch.zeros_like(value)) for name, value in parameters.items()}, []
    for index in range(PROBE):
        one = slice(index, index + 1)
        alone = _alone(model, probe, index, objective)
        if not is_usable(alone):
            raise ModelError(NOT_FINITE)
        if alone.dim() < together.dim():
            shapes = f"alone it has shape {tuple(alone.shape)}, beside another {tuple(together[one].shape)}"
            raise ModelError(f"the model's output for a sample changes with the rest of its batch: {shapes}; {DROPPED}")
        if not _alike(together[one], alone):
            with torch.enable_grad():
                unwatched = objective.logits(model, fresh(probe))[one]
            raise _Altered if _alike(unwatched, alone) else ModelError(COUPLED)
        add_single(totals, parameters, alone, [cotangent[one]])
        outputs.append(alone.detach())
    return totals, torch.cat(outputs)


def _alone(model: nn.Module, probe: Batch, index: int, objective: Objective) -> Tensor:
    """The logits of one sample of the probe, which as a whole gives some."""
    try:
        with torch.enable_grad():
            return objective.logits(model, fresh(take(probe, slice(index, index + 1))))
    except InputError as error:
        rule = f"{error.rule}; two samples are taken, but not one alone: {DROPPED}"
        raise InputError(error.argument, rule, error.found) from error.__cause__ or error


def _alike(logits: Tensor, reference: Tensor) -> bool:
    return output_error(logits, reference) < tolerance(reference)


def _own(rows: Tensor, alone: Tensor) -> bool:
    """Whether a sample that has these rows alone has the first of two samples' rows. Those of a near copy are near, too."""
    (off, size), (apart, _) = sizes_of([unmasked(rows[:1], alone), unmasked(rows[1:], rows[:1])])
    return off <= NOISE.get(rows.dtype, NOISE[torch.float32]) * size or (off < tolerance(rows) * size and 2 * off < apart)


def _choices(fewer: Interception, more: Interception) -> dict[str, list[Layout]]:
    """The layouts to try for each parameter that might have a closed form."""
    choices = {}
    for name, shapes in more.shapes.items():
        before = fewer.shapes.get(name, [])
        if name in more.outside or name in more.notes.chosen or more.uses[name] > (1 if name in more.alone else len(shapes)):
            continue
        if len(before) != len(shapes) or (None in shapes and len(shapes) > 1):  # a lifted parameter is squared by itself
            continue
        layouts = [_of_use(old, new) for old, new in zip(before, shapes, strict=True)]
        if len(layouts) == 1:
            choices[name] = layouts[0]
        elif all(len(uses) == 1 for uses in layouts):  # of several orders the check might not show the right one of a use that is faint
            first, *others = (uses[0] for uses in layouts)
            choices[name] = [replace(first, others=tuple(others))]
    if fewer.derived is not None and more.derived is not None:
        for name, rows in more.derived.rows.items():
            fewer_rows = fewer.derived.rows.get(name)
            elsewhere = more.uses[name] or name in more.outside or name in more.notes.chosen
            if rows is not None and fewer_rows is not None and not elsewhere:
                choices[name] = [replace(layout, derived=True) for layout in infer((fewer_rows,), (rows,), PROBE) if layout.frames]
    return {name: layouts for name, layouts in choices.items() if layouts}


def _of_use(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> list[Layout]:
    return [Layout()] if before is None or after is None else infer(before, after, PROBE)


def _wrong(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    layouts: Mapping[str, Layout],
    probe: Batch,
    cotangent: Tensor,
    reference: Squares,
    plain: Tensor,
    objective: Objective,
    beside: Mapping[str, str],
) -> set[str] | None:
    """The names whose closed form does not give the reference on the probe; None where the pass cannot be made at all."""
    try:
        result = closed_forms(model, parameters, layouts, (), probe, lambda logits: [cotangent], objective, Scratch())
    except Exception:  # whatever a model does with a shape it does not expect
        return None
    if not _alike(result.logits, plain):
        return None
    if outside := result.unexpected & set(layouts):
        return outside
    expected = {name: reference[name] for name in layouts}
    silent = {name: torch.zeros_like(tensor) for name, tensor in expected.items() if name not in result.squares}
    return set(layouts) - _agreeing(result.squares | silent, expected, beside)


def _agreeing(squares: Squares, reference: Squares, beside: Mapping[str, str] | None = None) -> set[str]:
    """The names whose squares equal the reference up to rounding.

    Where both are but rounding (the bias of attention's keys) that shows nothing; in float64 it may pass, else with the weight beside.
    """
    alike = {name: tensor for name, tensor in reference.items() if squares[name].shape == tensor.shape}
    errors = relative_errors([(squares[name], tensor) for name, tensor in alike.items()])
    agreeing = {name for (name, tensor), error in zip(alike.items(), errors, strict=True) if error < tolerance(tensor)}
    if len(agreeing) == len(reference):
        return agreeing
    sizes = {
        name: max((float(part.abs().max()) for part in (squares[name], tensor) if part.numel()), default=0.0)
        for name, tensor in alike.items()
    }
    top = max((float(tensor.max()) for tensor in reference.values() if tensor.numel()), default=0.0)
    for name, tensor in alike.items():
        faint = sizes[name] <= NOISE.get(tensor.dtype, NOISE[torch.float32]) ** 2 * top
        if faint and (tensor.dtype == torch.float64 or (beside or {}).get(name) in agreeing):
            agreeing.add(name)
    return agreeing


def tolerance(tensor: Tensor) -> float:
    """How far two sound computations may be apart; a wrong layout or a square of sums is off by a good part of the whole."""
    if tensor.dtype == torch.float64:
        return 1e-6
    coarse = tensor.dtype != torch.float32 or torch.is_autocast_enabled(tensor.device.type)
    return 0.15 if coarse else 1e-2
