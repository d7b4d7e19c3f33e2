"""Compute per-sample gradients by the definition: for parameters without a closed form, and to check every closed form against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.overrides import TorchFunctionMode

from expunge.data.batches import batch_size, take
from expunge.data.calling import RAW, error_summary, not_about_inputs
from expunge.data.objective import Batch, Objective
from expunge.errors import ModelError
from expunge.fisher.closed_forms.drawn import Drawn, Part
from expunge.fisher.closed_forms.scratch import chunks, wide
from expunge.fisher.planning.derived import DESCRIBING
from expunge.runtime.modes import vmap_unwarned
from expunge.runtime.nested import map_tensors, tensors

MASKED, AGREEING = -1e4, 1e-6  # outputs so low may be masks; what they agree to, of themselves
Squares = dict[str, Tensor]
Size = Callable[[Tensor], Tensor]  # of a sample's gradient, entry by entry: its square, or its absolute value
Note = Callable[[slice, Tensor], None]  # takes the logits that samples of these numbers have, each of them alone


def fresh(batch: Batch) -> Batch:
    """A copy for one forward pass: a model may change its input in place, and the caller's may carry a graph."""
    return map_tensors(batch, lambda tensor: tensor.detach().clone())


def looped(
    model: nn.Module,
    names: Sequence[str],
    batch: Batch,
    cotangents: Sequence[Tensor],
    objective: Objective,
    size: Size = torch.square,
    note: Note | None = None,
) -> Squares:
    """One sample after the other, with plain autograd: slow and obvious. Works for whatever can be differentiated at all."""
    # All gradients are asked for: torch's GroupNorm crashes in channels-last memory where that of its input is not.
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad or name in set(names)}
    totals = {name: wide(torch.zeros_like(parameters[name])) for name in names}
    for index in range(batch_size(batch)):
        with torch.enable_grad():
            logits = objective.logits(model, fresh(take(batch, slice(index, index + 1))))
        if note is not None:
            note(slice(index, index + 1), logits.detach())
        add_single(totals, parameters, logits, [cotangent[index : index + 1] for cotangent in cotangents], size)
    return totals


def add_single(
    totals: Squares, parameters: Mapping[str, nn.Parameter], logits: Tensor, cotangents: Sequence[Tensor], size: Size = torch.square
) -> None:
    """totals += (∂⟨logits, cotangent⟩)² of a single sample, or another size of it, for each of its cotangents."""
    if not logits.requires_grad:
        return
    for number, cotangent in enumerate(cotangents):
        more = number + 1 < len(cotangents)
        for name, gradient in gradients(logits, parameters, cotangent, retain_graph=more).items():
            if gradient is not None and name in totals:
                totals[name].add_(size(wide(gradient.detach())))


def gradients(
    logits: Tensor, parameters: Mapping[str, nn.Parameter], cotangent: Tensor, retain_graph: bool = False
) -> dict[str, Tensor | None]:
    """∂⟨logits, cotangent⟩ by plain autograd; None for a parameter that is not used."""
    values, sent = list(parameters.values()), cotangent.to(logits.dtype)
    try:
        found = torch.autograd.grad(logits, values, sent, retain_graph=retain_graph, allow_unused=True)
    except RAW as error:
        if not_about_inputs(error):
            raise
        raise ModelError(f"the model must be differentiable; its backward pass raised {error_summary(error)}") from error
    return {name: _dense(gradient) for name, gradient in zip(parameters, found, strict=True)}


def _dense(gradient: Tensor | None) -> Tensor | None:
    """That of an embedding with sparse=True is not."""
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def batched(
    model: nn.Module,
    names: Sequence[str],
    batch: Batch,
    cotangents: Sequence[Tensor],
    objective: Objective,
    size: Size = torch.square,
    drawn: Drawn | None = None,
    note: Note | None = None,
) -> Squares:
    """All samples of a chunk at once by torch.func: vmap over samples of the vector-Jacobian products.

    The gradients of the `drawn` samples are kept. Raises UnseenUse where a parameter is used from elsewhere than its module.
    """
    parameters = dict(model.named_parameters())
    chosen = {name: parameters[name].detach() for name in names}
    places, own = _places(model), {id(parameters[name]): name for name in names}
    stacked = torch.stack(list(cotangents), 1)  # (N, passes, ...)

    def one(sample: Batch, rows: Tensor, keeping: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
        def outputs(values: dict[str, Tensor]) -> Tensor:
            @wraps(model.forward)  # its names, by which a mapping's entries are passed
            def call(*args: Any, **kwargs: Any) -> Any:
                return functional_call(
                    model, {place: values[name] for name in names for place in places[name]}, args, kwargs, tie_weights=False
                )

            return objective.logits(call, map_tensors(sample, lambda tensor: tensor[None]))[0]

        logits, pull = vjp(outputs, chosen)[:2]
        (pulled,) = vmap(pull)(rows.to(logits.dtype))
        if any(gradient.shape != (len(rows), *chosen[name].shape) for name, gradient in pulled.items()):
            raise RuntimeError("torch.func has mixed up the samples of a gradient")  # as it does behind nn.PReLU
        kept = {name: gradient[drawn.number] for name, gradient in pulled.items()} if drawn is not None and keeping else {}
        return {name: size(wide(gradient)).sum(0) for name, gradient in pulled.items()}, kept, [logits] if note is not None else []

    totals = {name: wide(torch.zeros_like(value)) for name, value in chosen.items()}
    entries = len(cotangents) * sum(value.numel() for value in chosen.values())
    widest = max((value for value in chosen.values()), key=lambda value: value.element_size())
    wanted = [] if drawn is None else drawn.rows.tolist()
    held: dict[tuple[str, int], Tensor] = {}
    for rows in chunks(batch_size(batch), max(1, entries // 16), widest):  # vmap gains from many samples: a wider budget
        cut = slice(rows.start, rows.stop)
        there = [row for row in wanted if row in rows]
        with torch.no_grad(), vmap_unwarned(), _Uses(own) as uses:  # no gradients for the parameters that are not chosen
            per_sample, kept, outputs = vmap(partial(one, keeping=bool(there)))(fresh(take(batch, cut)), stacked[cut])
        if uses.names:
            raise UnseenUse(uses.names)
        if note is not None:
            note(cut, outputs[0].detach())
        for name, squares in per_sample.items():
            totals[name].add_(squares.sum(0))
        held |= {(name, row): gradient[row - rows.start] for name, gradient in kept.items() for row in there}
    if drawn is not None:
        for name in names:
            kept_rows = torch.stack([held[name, row] for row in wanted])
            drawn.parts.append(Part(name, None, _added, kept_rows, kept_rows))
    return totals


class UnseenUse(Exception):
    """A model uses these parameters through references of its own, where torch.func cannot put others in their place."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(names)
        self.names = names


class _Uses(TorchFunctionMode):
    """Notes which of these tensors operations take, by id."""

    def __init__(self, of: Mapping[int, str]) -> None:
        super().__init__()
        self.of, self.names = of, set[str]()

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result, name = function(*args, **kwargs), getattr(function, "__name__", "")
        if name not in DESCRIBING or (name == "__get__" and isinstance(result, Tensor)):  # `weight.T`
            self.names |= {self.of[id(tensor)] for tensor in tensors((args, kwargs)) if id(tensor) in self.of}
        return result


def _added(inputs: Tensor, slopes: Tensor) -> tuple[Tensor, None]:
    return slopes.sum(0), None


def _places(model: nn.Module) -> dict[str, list[str]]:
    """Each parameter's name, and the names of all places that hold it. A module with two names is one place: torch would restore its
    parameters twice, the second time to the values it had put in."""
    names = {id(value): name for name, value in model.named_parameters()}
    places: dict[str, list[str]] = {name: [] for name in names.values()}
    for prefix, module in model.named_modules():
        for key, value in module._parameters.items():
            if value is not None:
                places[names[id(value)]].append(f"{prefix}.{key}" if prefix else key)
    return places


def unmasked(values: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs of one shape without the entries that a mask has put far down (−10⁹, −∞), where these agree: beside them no difference
    would show."""
    agree = (values == reference) | ((values - reference).abs() < AGREEING * reference.abs())
    masked = agree & (reference <= MASKED)
    return values.masked_fill(masked, 0), reference.masked_fill(masked, 0)


def output_error(values: Tensor, reference: Tensor) -> float:
    """max |value − reference| / max |reference| of two outputs, but for masked entries; infinity, where they have other shapes."""
    return relative_errors([unmasked(values, reference)])[0] if values.shape == reference.shape else math.inf


def is_usable(logits: Tensor) -> bool:
    """Whether a loss may have a gradient there: −∞ is that of a class that is masked."""
    return not bool((torch.isnan(logits) | (logits == torch.inf)).any())


def relative_errors(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """max |value − reference| / max |reference| of each pair; 0 where both vanish."""
    return [difference / size if size else (math.inf if difference else 0.0) for difference, size in sizes_of(pairs)]


def sizes_of(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[float, float]]:
    """max |value − reference| and max |reference| of each pair. The device is waited for once for all of them."""
    return as_pairs(largest_of(pairs))


def as_pairs(sizes: Tensor) -> list[tuple[float, float]]:
    values = sizes.tolist()
    return list(zip(values[::2], values[1::2], strict=True))


def largest_of(pairs: Sequence[tuple[Tensor, Tensor]], order: float = torch.inf) -> Tensor:
    """The same as one tensor of the device, which is not waited for; with another `order`, norms instead of the largest entries."""
    values, references = [value.detach() for value, _ in pairs], [reference.detach() for _, reference in pairs]
    if pairs and all(value.is_cuda and value.numel() and value.dtype == references[0].dtype for value in (*values, *references)):
        # A kernel for many tensors: one by one their launches would take longer than a pass.
        norms = torch._foreach_norm([*torch._foreach_sub(values, references), *references], order)
        return torch.stack(norms).view(2, -1).t().flatten().double()
    parts = [part for value, reference in zip(values, references, strict=True) for part in (value - reference, reference)]
    largest = [_size(part, order) if part.numel() else part.new_zeros(()) for part in parts]
    device = parts[0].device if parts else None
    return torch.stack([value.to(device, torch.float64) for value in largest]) if largest else torch.empty(0, dtype=torch.float64)


def _size(tensor: Tensor, order: float) -> Tensor:
    return tensor.abs().amax() if order == torch.inf else tensor.norm(order)
