"""Follow tensors made of parameters alone to where they meet the data: relative position biases, scales under an exponential.

Up to there they are the same for all samples. Where one meets the data it is given once per sample, so that its gradient comes back once
per sample, G_n; the parameters' own gradients are then ⟨G_n, ∂(tensor)/∂w⟩, by autograd through the few operations it was made with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expunge.fisher.closed_forms.drawn import Drawn, Part
from expunge.fisher.closed_forms.scratch import chunks, wide
from expunge.fisher.closed_forms.tables import LiftDerived
from expunge.fisher.planning.constants import Constants
from expunge.fisher.planning.layouts import Layout
from expunge.fisher.planning.operations import Operation
from expunge.runtime.modes import vmap_unwarned
from expunge.runtime.nested import tensors

# Reading a parameter's shape or type is not using it.
DESCRIBING = set(
    "__get__ __set__ __len__ __hash__ __repr__ dim ndimension size numel nelement stride storage_offset data_ptr type get_device detach "
    "is_floating_point is_complex is_contiguous element_size".split()
)
ELEMENTWISE = set(
    "add mul sub div true_divide multiply subtract divide add_ mul_ sub_ div_ __add__ __radd__ __mul__ __rmul__ __sub__ __rsub__ "
    "__truediv__ __iadd__ __imul__ __isub__ __itruediv__".split()
)


class Derived:
    """Follows the operations of a pass. `rows`: by parameter, how many rows the data had where its tensors met them; None where one met
    them in an operation that no sample dimension can be given to, or where they had another number of rows elsewhere.

    `wanted`: the parameters to follow, where the plan knows them; None in a survey, which follows what might be.
    """

    def __init__(
        self, own: Iterable[Tensor], constants: Constants, names: Mapping[int, str], wanted: Mapping[str, Layout] | None, samples: int
    ) -> None:
        self.constants, self.names, self.wanted, self.samples = constants, names, wanted, samples
        self._parameters = [tensor for tensor in own if id(tensor) in names]
        self.rows: dict[str, int | None] = {}
        self._made: dict[int, tuple[Tensor, frozenset[str]]] = {}  # by id
        self._lifted: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}
        self._gradients: list[tuple[Tensor, frozenset[str], Tensor]] = []

    def made_of(self, operation: Operation) -> frozenset[str]:
        """The parameters that the operation's result is made of, where these and constants are all it takes; else none."""
        function, args, kwargs, operands = operation.function, operation.args, operation.kwargs, operation.operands
        if not operands or operation.name in DESCRIBING:
            return frozenset()
        own = [self._made[id(tensor)][1] if id(tensor) in self._made else self._parameter(tensor) for tensor in operands]
        if not any(own) or not all(names or self._is_constant(tensor) for names, tensor in zip(own, operands, strict=True)):
            return frozenset()
        made = any(id(tensor) in self._made for tensor in operands)
        if made and self._spreads(function, args, kwargs):
            return frozenset()
        if self.wanted is None and not made and _has_a_way(function, args, self.samples):
            return frozenset()
        return frozenset().union(*own)

    def note(self, operation: Operation, names: frozenset[str]) -> None:
        if names:
            self._made |= {id(tensor): (tensor, names) for tensor in operation.outputs if tensor.requires_grad}

    def meet(self, operation: Operation) -> tuple[Operation, set[str]]:
        """The operation with such tensors given once per sample, and the parameters of those for which that cannot be done."""
        if not self._made or not any(id(tensor) in self._made for tensor in operation.operands):
            return operation, set()
        function, args, kwargs = operation.function, operation.args, operation.kwargs
        places: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        failed = set[str]()
        for place, value in places.items():
            for tensor in tensors([value]):
                if id(tensor) not in self._made:
                    continue
                names = self._made[id(tensor)][1]
                shape, rows = _alignment(function, places, place) if tensor is value else (None, 0)
                # Again on as many rows as there are samples, or not at all: other rows may be in another order, and no check may show it.
                alike = not any(name in self.rows for name in names) or {rows, *map(self.rows.get, names)} == {self.samples}
                self.rows |= {name: rows if shape is not None and alike else None for name in names}
                if self.wanted is None:
                    continue
                layout = next(iter({self.wanted.get(name) for name in names}))
                if shape is None or not alike or layout is None or not layout.fits((rows,), self.samples):
                    failed |= names
                else:
                    places[place] = self._lift(tensor, names, layout, rows, shape)
        changed = Operation(function, tuple(places[index] for index in range(len(args))), {key: places[key] for key in kwargs})
        return changed, failed

    def settle(self, parameters: Mapping[str, Tensor], squares: dict[str, Tensor], drawn: Drawn | None) -> None:
        """Square the parameters' gradients after a backward pass."""
        if not self._gradients:
            return
        made, sets, slopes = zip(*self._gradients, strict=True)
        names = sorted(set().union(*sets))
        kept: dict[str, list[Tensor]] = {name: [] for name in names if drawn is not None and drawn.takes(name)}
        entries = sum(parameters[name].numel() for name in names)

        def of_one(*parts: Tensor) -> Sequence[Tensor]:
            return torch.autograd.grad(made, [parameters[name] for name in names], parts, retain_graph=True)

        for some in chunks(self.samples, entries + sum(tensor.numel() for tensor in made), made[0]):
            parts = [slope[some.start : some.stop].to(tensor.dtype) for slope, tensor in zip(slopes, made, strict=True)]
            with vmap_unwarned():
                found = torch.func.vmap(of_one)(*parts)  # `is_grads_batched` has a loop for lookups; this is wrong for cdist, which shows
            for name, gradient in zip(names, found, strict=True):
                total = wide(gradient.detach()).square().sum(0)
                squares[name] = squares[name].add_(total) if name in squares else total
                if name in kept:
                    kept[name].append(gradient.detach())
        for name, pieces in kept.items():
            assert drawn is not None
            rows = torch.cat(pieces).index_select(0, drawn.rows)
            drawn.parts.append(Part(name, None, _added, rows, rows))
        self._gradients.clear()

    def _spreads(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it meets a constant that has rows for the samples already, such as a mask repeated for each."""
        places: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        own = {
            place for place, value in places.items() if isinstance(value, Tensor) and (id(value) in self._made or self._parameter(value))
        }
        for place in own:
            rows = _alignment(function, {key: value for key, value in places.items() if key == place or key not in own}, place)[1]
            if rows > 1 and rows % self.samples == 0:
                return True
        return False

    def _is_constant(self, tensor: Tensor) -> bool:
        """Where the plan is known, not what has a gradient of its own, as parameters with another closed form: it would be lost."""
        return tensor in self.constants and (self.wanted is None or not tensor.requires_grad)

    def _parameter(self, tensor: Tensor) -> frozenset[str]:
        name = self.names.get(id(tensor))
        return frozenset() if name is None or (self.wanted is not None and name not in self.wanted) else frozenset((name,))

    def _lift(self, tensor: Tensor, names: frozenset[str], layout: Layout, rows: int, shape: tuple[int, ...]) -> Tensor:
        key = id(tensor), rows, shape
        if key not in self._lifted:
            collect = partial(_collect, self._gradients, tensor, names)
            anchor = next(value for value in self._parameters if self.names[id(value)] in names)
            self._lifted[key] = LiftDerived.apply(collect, layout, self.samples, rows, shape, tensor.detach(), anchor)
        return self._lifted[key]


def _collect(where: list[tuple[Tensor, frozenset[str], Tensor]], tensor: Tensor, names: frozenset[str], gradients: Tensor) -> None:
    where.append((tensor, names, gradients))


def _added(inputs: Tensor, slopes: Tensor) -> tuple[Tensor, None]:
    return slopes.sum(0), None


def _has_a_way(function: Any, args: tuple[Any, ...], samples: int) -> bool:
    """Whether a parameter itself, in this operation, is given once per sample already: (1, ...) alone, or looked up by (1 or N, ...)."""
    if function is F.embedding:
        return bool(args) and args[0].shape[:1] in ((1,), (samples,))
    return sum(isinstance(value, Tensor) for value in args) == 1 and args[0].dim() > 1 and args[0].shape[0] == 1


def _alignment(function: Any, places: Mapping[int | str, Any], place: int | str) -> tuple[tuple[int, ...] | None, int]:
    """The tensor's shape with a first dimension of 1 where the operation broadcasts it, and the number of rows of what it meets."""
    label, made = getattr(function, "__name__", ""), places[place]
    if label in ELEMENTWISE and len(places) <= 2:
        others = [value for key, value in places.items() if key != place]
    elif label == "where" and place in (1, 2):
        others = [value for key, value in places.items() if key != place]
    elif function is F.scaled_dot_product_attention and place in (3, "attn_mask"):
        others = [places.get(0, places.get("query"))]
    else:
        return None, 0
    data = [value for value in others if isinstance(value, Tensor)]
    dimensions = max((value.dim() for value in data), default=0)
    first = max((len(value) for value in data if value.dim() == dimensions), default=0) if dimensions else 0
    if dimensions > made.dim() or (dimensions == made.dim() > 0 and made.shape[0] == 1):
        return (1,) * (dimensions - made.dim()) + tuple(made.shape), first
    return None, 0
