"""Choose the way to compute each parameter's squares, on two samples, and check it there against the definition.

A closed form is used for a parameter only if, on the first samples of the data, it gives what one backward pass per sample gives.
What has no closed form, or fails the check (shared weights, modules called twice, tables indexed by hand), goes by torch.func, and
what that cannot do, one sample after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from expunge.data.batches import batch_size, device_of, take
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError
from expunge.fisher.closed_forms import tf32
from expunge.fisher.closed_forms.scratch import Scratch
from expunge.fisher.planning.choices import in_the_order_of_samples, possible_layouts, why_none
from expunge.fisher.planning.definition import PROBE, Altered, agreeing, alike, alone_in, defined, random_like
from expunge.fisher.planning.interception import Interception
from expunge.fisher.planning.layouts import Layout
from expunge.fisher.planning.mixing import comparable, mixes
from expunge.fisher.planning.passes import closed_forms
from expunge.fisher.planning.plan import Plan
from expunge.fisher.samples import Squares, UnseenUse, batched, fresh, is_usable
from expunge.model.copying import copied
from expunge.runtime.cuda_graphs import uncollected
from expunge.runtime.nested import map_tensors

SEVERAL = (1.0, 2.0, -1.0)  # times a cotangent: torch.func may be right for one, and wrong for several at once, as of torch.cdist


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
    choices = in_the_order_of_samples(possible_layouts(fewer, more), fewer, more)
    single = choices.keys() == parameters.keys() and all(len(layouts) == 1 for layouts in choices.values())
    if not single or mixes(fewer.notes.mixing, more.notes.mixing) or not is_usable(alone) or not alike(together[:1], alone):
        return None
    return _described(Plan({name: layouts[0] for name, layouts in choices.items()}, surveyed=False, logits=together.shape), more)


@tf32.switched_off()  # its rounding, of some percent in a deep network, would hide the errors that the check is for
def survey(model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Batch, objective: Objective) -> Plan:
    """A plan for these parameters, from the first samples of a batch of at least two.

    Where rounding alone may have failed a closed form (a ReLU that flips changes a gradient by percents), a copy in float64 decides.
    """
    probe = take(batch, slice(0, PROBE))
    try:
        return _survey(model, parameters, probe, objective, doubting=any(value.dtype != torch.float64 for value in parameters.values()))
    except Altered:
        return Plan(looped=list(parameters), reasons=dict.fromkeys(parameters, "torch's fast path gives other outputs"))
    except _Doubt:
        pass
    except InputError:
        with torch.enable_grad():
            objective.logits(model, fresh(probe))  # raises the same, if that is not for being watched
        alone_in(model, probe, 0, objective)
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
    reference, _ = defined(model, parameters, probe, together, cotangent, objective)
    batched_names, looped_names = _without_closed_forms(model, list(parameters), probe, cotangent, reference, objective)
    return Plan(batched=batched_names, looped=looped_names)


class _Doubt(Exception):
    """A closed form failed its check."""


def _survey(model: nn.Module, parameters: Mapping[str, nn.Parameter], probe: Batch, objective: Objective, doubting: bool = False) -> Plan:
    together, more = _watched(model, parameters, probe, objective)
    cotangent = random_like(together)
    reference, plain = defined(model, parameters, probe, together, cotangent, objective)
    _, fewer = _watched(model, parameters, take(probe, slice(0, 1)), objective)
    mixing = more.notes.mixing
    if not comparable(fewer.notes.mixing, mixing):  # a model may keep what its first pass has made
        mixing = _watched(model, parameters, probe, objective)[1].notes.mixing
    choices, plan = possible_layouts(fewer, more), Plan(mixes=mixes(fewer.notes.mixing, mixing), logits=together.shape)
    ordered = in_the_order_of_samples(choices, fewer, more)  # a wrong order of rows may give two samples their squares, too
    for name, possible in choices.items():
        others = possible if len(more.met[name]) <= 1 else []  # of several uses each has to be in this order
        choices[name] = ordered[name] or others
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
    plan.reasons |= {name: why_none(name, more, fewer) for name in rest if name not in plan.reasons}
    if rest:
        plan.batched, plan.looped = _without_closed_forms(model, rest, probe, cotangent, reference, objective)
    return plan


def _described(plan: Plan, more: Interception) -> Plan:
    """With what the parameters' gradients take."""
    work = more.notes.work
    plan.ways = {name: " + ".join(sorted(operations)) for name, operations in work.operations.items()}
    plan.work, plan.entries = dict(work.multiplications), work.entries // PROBE
    return plan


def _without_closed_forms(
    model: nn.Module, names: Sequence[str], probe: Batch, cotangent: Tensor, reference: Squares, objective: Objective
) -> tuple[list[str], list[str]]:
    """Which of these parameters torch.func gives the reference for, on the probe; the others go one sample at a time."""
    try:
        squares = batched(model, names, probe, [scale * cotangent for scale in SEVERAL], objective)
    except UnseenUse as error:
        others = [name for name in names if name not in error.names]
        batched_names, looped_names = _without_closed_forms(model, others, probe, cotangent, reference, objective) if others else ([], [])
        return batched_names, [*looped_names, *sorted(error.names)]
    except Exception:  # whatever vmap cannot express: data-dependent control flow, operations without a batching rule
        squares = {}
    times = sum(scale**2 for scale in SEVERAL)
    agreed = agreeing(squares, {name: times * reference[name] for name in squares})
    return [name for name in names if name in agreed], [name for name in names if name not in agreed]


def _watched(model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Batch, objective: Objective) -> tuple[Tensor, Interception]:
    """A plain forward pass, and which parameters it used where."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    own = [*model.parameters(), *model.buffers()]
    watch = Interception(names, None, batch_size(batch), Scratch(), constants=own)
    with torch.enable_grad(), watch as interception:  # some differentiate
        return objective.logits(model, fresh(batch)).detach(), interception


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
    if not alike(result.logits, plain):
        return None
    if outside := result.unexpected & set(layouts):
        return outside
    expected = {name: reference[name] for name in layouts}
    silent = {name: torch.zeros_like(tensor) for name, tensor in expected.items() if name not in result.squares}
    return set(layouts) - agreeing(result.squares | silent, expected, beside)
