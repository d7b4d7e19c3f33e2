"""Intercept the operations of one pass: those on known parameters go through their closed forms.

Working on operations rather than on modules, functional use, subclasses, and modules that hold their weights for others to use
(attention) need nothing special.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from expunge.fisher.closed_forms.convolution import Geometry
from expunge.fisher.closed_forms.drawn import Drawn
from expunge.fisher.closed_forms.rules import Affine, Convolution, FrozenBatchNorm, Linear
from expunge.fisher.closed_forms.scratch import Scratch
from expunge.fisher.closed_forms.shared import Shared
from expunge.fisher.closed_forms.tables import Embedding, Lift
from expunge.fisher.closed_forms.uses import Use, settle
from expunge.fisher.planning.constants import Constants
from expunge.fisher.planning.derived import DESCRIBING, ELEMENTWISE, Derived
from expunge.fisher.planning.layouts import Layout
from expunge.fisher.planning.notes import Notes
from expunge.fisher.planning.operations import Operation
from expunge.fisher.planning.orders import Met

LIFTED = "bare"  # the operation's name where a parameter is used outside any known one


class Interception(TorchFunctionMode):
    """While active, records the uses of the named parameters and, where `layouts` knows them, squares their per-sample gradients.

    Without layouts it is a survey's, which takes `notes` of all operations.

    `shapes`  name -> shapes of the outputs of its operations (None where it has no known operation), as seen in the forward pass
    `met`     name -> what the operations gave in which it met the data, in a survey
    `beside`  a bias -> the weight of the same operation
    `alone`   names used where a second use would have no closed form
    `squares` name -> totals of the squared gradients, filled by the backward passes
    `outside` names used where no closed form applies; they need per-sample gradients
    `path`    a number that stands for the operations so far and the shapes they gave
    `reads`   whether the model took numbers out of tensors, or changes gradients by hooks: it may choose or move rows out of sight
    `asks`    whether it asked tensors for a yes or no, which may be about the whole batch
    """

    def __init__(
        self,
        names: Mapping[int, str],
        layouts: Mapping[str, Layout] | None,
        samples: int,
        scratch: Scratch,
        drawn: Drawn | None = None,
        constants: Iterable[Tensor] = (),
    ):
        super().__init__()
        self.names, self.layouts, self.samples, self.scratch = names, layouts, samples, scratch
        self.drawn, self.reads, self.asks, self.path = drawn, False, False, 0
        self.squares: dict[str, Tensor] = {}
        self.shapes: dict[str, list[tuple[int, ...] | None]] = {}
        self.beside: dict[str, str] = {}
        self.alone: set[str] = set()
        self.vectors: list[tuple[str, Tensor]] = []
        self.outside: set[str] = set()
        self.uses: Counter[str] = Counter()
        self._lifted: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        several = frozenset(name for name, layout in (layouts or {}).items() if layout.others)
        self.shared = Shared(several) if several else None
        followed = None if layouts is None else {name: layout for name, layout in layouts.items() if layout.derived}
        own = list(constants)
        self.constants = Constants(own)
        self.notes, self.met = Notes(names, self.constants), Met(names, self.constants)
        self.derived = Derived(own, self.constants, names, followed, samples) if followed is None or followed else None

    def settle(self, parameters: Mapping[str, Tensor]) -> None:
        """After a backward pass: square what has waited for its end."""
        settle(self.squares, self.vectors)
        if self.shared is not None:
            self.shared.settle(self.squares, self.scratch)
        if self.derived is not None:
            self.derived.settle(parameters, self.squares, self.drawn)

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self.derived is None:
            return self._run(RULES.get(function), function, args, kwargs or {})
        operation, rule = Operation(function, args, kwargs or {}), RULES.get(function)
        made_of = self.derived.made_of(operation)
        if not made_of:
            operation, failed = self.derived.meet(operation)
            self.outside |= failed
        operation.gives(self._run(_as_it_is if made_of else rule, function, operation.args, operation.kwargs))
        if self.layouts is None:
            self.notes.add(operation)
        self.derived.note(operation, made_of)
        self.constants.note(operation)
        if self.layouts is None and rule is not _attention:  # which has operations of its own
            self.met.note(operation)
        return operation.result

    def _run(self, rule: Callable[..., Any] | None, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        label = getattr(function, "__name__", "")
        self.reads |= rule is None and label in READING
        self.asks |= label in ASKING
        result = self.bare(function, args, kwargs) if rule is None else rule(self, function, args, kwargs)
        self.path = hash((self.path, function, result.shape if isinstance(result, Tensor) else None))
        return result

    def name(self, parameter: Any) -> str | None:
        return self.names.get(id(parameter))

    def use(self, weight: Any, bias: Any, output: tuple[int, ...] | None, shared: bool = False, several: bool = True) -> Use | None:
        """Note a use of these parameters; the `Use` to square them with, or None where the operation should run as it is.

        `shared`: the operation has a closed form for an output without a sample dimension, too. `several`: also for a parameter that has
        other uses.
        """
        names = self.name(weight), self.name(bias)
        known = [name for name in names if name is not None]
        if len(known) == 2:
            self.beside[known[1]] = known[0]
        for name in known:
            self.uses[name] += 1
            self.shapes.setdefault(name, []).append(output)
        if not several:
            self.alone.update(known)
        if self.layouts is None or not known:
            return None
        layout, *others = map(self._layout_of_use, known)
        fits = layout is not None and not layout.derived and output and layout.fits(output, self.samples) and (layout.frames or shared)
        if layout is None or not fits or any(other != layout for other in others):
            self.outside.update(known)
            return None
        return Use(*names, layout, self.samples, self.scratch, self.squares, self.vectors, self.drawn, self.shared)

    def _layout_of_use(self, name: str) -> Layout | None:
        layout = None if self.layouts is None else self.layouts.get(name)
        return None if layout is None else layout.of_use(self.uses[name] - 1)

    def bare(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A parameter in an operation without a rule: lifted where broadcasting says how, else noted as outside."""
        if not kwargs and not any(id(value) in self.names or isinstance(value, (list, tuple)) for value in args):
            return function(*args)  # most have none
        direct = [(index, name) for index, value in enumerate(args) if (name := self.name(value)) is not None]
        grouped = [part for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) for part in value]
        nested = {name for value in (*grouped, *kwargs.values()) if (name := self.name(value)) is not None}
        label = getattr(function, "__name__", "")
        if not (direct or nested) or label in DESCRIBING:
            return function(*args, **kwargs)
        self.outside |= nested
        changed = list(args)
        for index, name in direct:
            shape = _lifted_shape(label, args[index], args[1 - index] if len(args) == 2 else None)
            lifted = self._lifted.get(name)
            if shape is None or self.uses[name] > (lifted is not None) or (lifted is not None and lifted[0] != shape):
                self.uses[name] += 1
                self.outside.add(name)
            elif self.layouts is None:
                self.shapes[name] = [None]
            elif name not in self.layouts or self.layouts[name].derived:
                self.outside.add(name)
            else:
                if lifted is None:
                    self.uses[name] += 1
                    lift = Use(name, None, Layout(), self.samples, self.scratch, self.squares, self.vectors, self.drawn)
                    lifted = self._lifted[name] = shape, Lift.apply(lift, shape, args[index])
                changed[index] = lifted[1]
        result = function(*changed, **kwargs)
        if self.layouts is None and isinstance(result, Tensor):  # `p[0]`, `p.mean(0)`: of the samples' copies it would be one
            self.outside |= {name for index, name in direct if result.dim() < args[index].dim()}
        return result


READING = set("tolist item numpy __array__ __int__ __index__ __float__ register_hook".split())
ASKING = set("__bool__ is_nonzero equal allclose".split())


def _lifted_shape(label: str, parameter: Tensor, other: Any) -> tuple[int, ...] | None:
    """The parameter's shape with a sample dimension of 1 in front, or None where no such reading is safe to try.

    Against an operand (N, ...) it is aligned from the right, as broadcasting does; alone it must already start with 1.
    """
    if label in ELEMENTWISE and isinstance(other, Tensor) and other.dim() > parameter.dim():
        return (1,) * (other.dim() - parameter.dim()) + tuple(parameter.shape)
    return tuple(parameter.shape) if parameter.dim() > 1 and parameter.shape[0] == 1 else None


def _arguments(names: str, args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> list[Any]:
    order = names.split()
    arguments = dict(zip(order, args, strict=False)) | kwargs
    return [arguments.get(name, defaults.get(name)) for name in order]


def _linear(mode: Interception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs, weight, bias = _arguments("input weight bias", args, kwargs)
    use = mode.use(weight, bias, (*inputs.shape[:-1], weight.shape[0])) if weight.dim() == 2 and inputs.dim() > 1 else None
    return function(*args, **kwargs) if use is None else Linear.apply(use, False, inputs, weight, bias)


def _addmm(mode: Interception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3 or mode.name(args[2]) is None or args[0].dim() != 1:
        return mode.bare(function, args, kwargs)
    bias, inputs, weight = args
    use = mode.use(weight, bias, (*inputs.shape[:-1], weight.shape[1]))
    return function(*args) if use is None else Linear.apply(use, True, inputs, weight, bias)


def _matmul(mode: Interception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or mode.name(args[1]) is None or args[1].dim() != 2 or args[0].dim() < 2 or mode.name(args[0]) is not None:
        return mode.bare(function, args, kwargs)
    use = mode.use(args[1], None, (*args[0].shape[:-1], args[1].shape[1]))
    return function(*args) if use is None else Linear.apply(use, True, args[0], args[1], None)


def _convolution(dimensions: int, transposed: bool) -> Callable[..., Any]:
    names = "input weight bias stride padding " + ("output_padding groups dilation" if transposed else "dilation groups")

    def rule(mode: Interception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = dict(zip(names.split(), args, strict=False)) | kwargs
        inputs, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
        if inputs.dim() != dimensions + 2:
            return mode.bare(function, args, kwargs)
        use = mode.use(weight, bias, (inputs.shape[0],), several=False)
        if use is None:
            return function(*args, **kwargs)
        kernel = tuple(weight.shape[2:])
        defaults = {"stride": 1, "dilation": 1, "output_padding": 0}
        stride, dilation, extra = (_per_dimension(arguments.get(name, default), dimensions) for name, default in defaults.items())
        padding = arguments.get("padding", 0)
        if isinstance(padding, str):
            if padding == "same":
                whole = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
                inputs = F.pad(inputs, [side for total in reversed(whole) for side in (total // 2, total - total // 2)])
            padding = 0
        geometry = Geometry(kernel, stride, _per_dimension(padding, dimensions), dilation, arguments.get("groups", 1))
        return Convolution.apply(use, geometry, transposed, extra, inputs, weight, bias)

    return rule


def _batch_norm(mode: Interception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = "input running_mean running_var weight bias training momentum eps"
    inputs, mean, variance, weight, bias, training, _, epsilon = _arguments(names, args, kwargs, training=False, eps=1e-5)
    if training or mean is None:
        return mode.bare(function, args, kwargs)
    use = mode.use(weight, bias, (inputs.shape[0],))
    fixed = not any(value is not None and value.requires_grad for value in (weight, bias))
    if use is None and mode.layouts is not None and fixed:  # torch's own gives wrong gradients where memory formats meet on thin images
        use = Use(None, None, Layout(), mode.samples, mode.scratch, mode.squares, mode.vectors)
    return function(*args, **kwargs) if use is None else FrozenBatchNorm.apply(use, inputs, mean, variance, weight, bias, epsilon)


def _normalisation(names: str, channel: Callable[[Tensor, Any], int]) -> Callable[..., Any]:
    """A norm that is the same operation without weights, followed by γ and β."""

    def rule(mode: Interception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = dict(zip(names.split(), args, strict=False)) | kwargs
        inputs, weight, bias = arguments["input"], arguments.get("weight"), arguments.get("bias")
        first = weight if weight is not None else bias
        use = None if first is None else mode.use(weight, bias, tuple(inputs.shape))
        if use is None or use.layout.dimension >= channel(inputs, first):
            mode.outside.update(name for name in (mode.name(weight), mode.name(bias)) if name and use)
            return function(*args, **kwargs)
        plain = function(**(arguments | {"weight": None} | ({"bias": None} if "bias" in names else {})))
        return Affine.apply(use, channel(inputs, first), plain, weight, bias)

    return rule


def _embedding(mode: Interception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    indices, weight, padding, limit, _, scaled, _ = _arguments(names, args, kwargs)
    if limit is not None or scaled:
        return mode.bare(function, args, kwargs)
    use = mode.use(weight, None, (*indices.shape, weight.shape[1]), shared=True)
    if use is None:
        return function(*args, **kwargs)
    padding = -1 if padding is None else padding % weight.shape[0]
    return Embedding.apply(use, padding, indices, weight)


def _as_it_is(mode: Interception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _attention(mode: Interception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention's function as it stands, but with its own linear maps seen by the mode."""
    with mode:
        return _undispatched(function)(*args, **kwargs)


def _undispatched(function: FunctionType) -> FunctionType:
    """A copy of one of torch's Python functions that does not hand itself to the mode again."""
    never = dict.fromkeys(("has_torch_function", "has_torch_function_variadic", "has_torch_function_unary"), lambda *_: False)
    copy = FunctionType(function.__code__, function.__globals__ | never, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _view(mode: Interception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In channels-last memory a view of a flattened image does not exist; a reshape does."""
    if mode.name(args[0]) is not None or kwargs or any(isinstance(value, torch.dtype) for value in args):
        return mode.bare(function, args, kwargs)
    return torch.Tensor.reshape(*args)


def _sliced(mode: Interception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the CPU the gradient of a slice comes back in planes, and two formats in one operation are many times slower."""
    image = args[0]
    if image.device.type != "cpu" or image.dim() != 4 or not (image.requires_grad and _last(image)) or mode.name(image) is not None:
        return mode.bare(function, args, kwargs)
    image = torch.ops.aten.alias.default(image)  # with its own strides, where a view of one sample has others
    image.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
    return function(image, *args[1:], **kwargs)


def _last(image: Tensor) -> bool:
    return not image.is_contiguous() and image.is_contiguous(memory_format=torch.channels_last)


def _per_dimension(value: int | Iterable[int], dimensions: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dimensions if len(values) == 1 else values


RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.conv1d: _convolution(1, False),
    torch.conv2d: _convolution(2, False),
    torch.conv3d: _convolution(3, False),
    torch.conv_transpose1d: _convolution(1, True),
    torch.conv_transpose2d: _convolution(2, True),
    torch.conv_transpose3d: _convolution(3, True),
    F.batch_norm: _batch_norm,
    F.layer_norm: _normalisation("input normalized_shape weight bias eps", lambda inputs, weight: inputs.dim() - weight.dim()),
    F.rms_norm: _normalisation("input normalized_shape weight eps", lambda inputs, weight: inputs.dim() - weight.dim()),
    F.group_norm: _normalisation("input num_groups weight bias eps", lambda inputs, weight: 1),
    F.instance_norm: _normalisation("input running_mean running_var weight bias use_input_stats momentum eps", lambda inputs, weight: 1),
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attention,
    torch.Tensor.view: _view,
    torch.Tensor.__getitem__: _sliced,
}
