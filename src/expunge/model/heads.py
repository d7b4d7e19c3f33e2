"""Find the classifier's parameters by walking the autograd graph, never guessing from a size or a name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from expunge.data.batches import device_of, first_samples, to_device
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError, ModelError
from expunge.model.checks import check_module, check_names
from expunge.runtime.modes import eager, in_mode, seeded, unchanged
from expunge.runtime.nested import map_tensors
from expunge.validate import is_whole, shown

ADVICE = "name the classifier's parameters yourself with head="

# Nodes with one input that hand a parameter on, whole, in another layout or type.
VIEWS = frozenset(
    "T Transpose Permute NumpyT View UnsafeView ReshapeAlias Reshape Alias Expand Squeeze Unsqueeze Clone ToCopy CopyBackwards".split()
)
# Nodes that sum over products of features and weights: here a layer begins.
CONTRACTIONS = frozenset(
    "Addmm Mm Bmm Baddbmm Addbmm Addmv Mv Dot Vdot Matmul Linear MkldnnLinear Convolution ConvolutionOverrideable CudnnConvolution "
    "MkldnnConvolution MiopenConvolution MpsConvolution Trilinear Einsum Cdist SparseAddmm ScaledMm".split()
)
# The first input of these is what is added, not a factor.
WITH_ADDEND = frozenset("Addmm Baddbmm Addbmm Addmv SparseAddmm".split())
ADDITIONS = frozenset("Add Sub Rsub".split())


def find(model: nn.Module, batch: Batch, objective: Objective = Objective()) -> tuple[str, ...]:
    """The names of the classifier's parameters, in the model's order.

    From the logits the autograd graph is walked back to the first contraction (matrix product, convolution) on each path, which must have
    a matrix of the model as a direct factor. The head is these matrices and every parameter at or after them (bias, scale, temperature).
    Two samples of `batch` go through the model in eval mode; frozen parameters count too. A graph that does not show which matrix is the
    classifier's (weight norm, attention right before the logits, opaque operations) raises `ModelError`.

    Paper: "we do not mask parameters in the final classifier"; it does not say how to find it.
    """
    check_module(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    with _differentiable(model), unchanged(model):
        samples = map_tensors(first_samples(batch), lambda tensor: tensor.detach().clone())
        logits = objective.logits(model, to_device(samples, device_of(model)))
        if logits.grad_fn is None:
            raise ModelError(f"the logits do not depend on any parameter through autograd; {ADVICE}")
        head = _walk(logits.grad_fn, names)
    return tuple(name for parameter, name in names.items() if parameter in head)


def named(model: nn.Module, head: Sequence[str] | str, argument: str = "head") -> tuple[str, ...]:
    """The parameters of these names; the name of a module stands for all its parameters."""
    names = check_names(argument, head)
    parameters, modules = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_modules(remove_duplicate=False))
    listed: dict[str, None] = {}
    for name in names:
        inner = [parameter for parameter in parameters if name in modules and parameter.startswith(f"{name}.")]
        if name not in parameters and not inner:
            rule = f"must name parameters of the model, or modules that hold some, such as {', '.join(list(parameters)[-2:])}"
            raise InputError(argument, rule, repr(name))
        listed |= dict.fromkeys([name] if name in parameters else inner)
    return tuple(listed)


def class_rows(model: nn.Module, names: Sequence[str], label: int) -> dict[str, Tensor]:
    """A mask of what a head holds for one label.

    Row `label` of its matrices, output channel `label` of its convolutions, entry `label` of its vectors. Matrices
    are read as (K, ...), as `nn.Linear` and convolutions hold them; single numbers (a temperature) belong to no label.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    unknown = [name for name in names if name not in by_name]
    if unknown or not names:
        raise InputError("names", "must be parameters of the model, at least one", unknown)
    matrices = [by_name[name] for name in names if by_name[name].dim() >= 2]
    if not matrices:
        raise ModelError(f"no matrix or convolution among the head's parameters {', '.join(names)}; {ADVICE}")
    classes = max(matrices, key=Tensor.numel).shape[0]
    if not is_whole(label) or not 0 <= label < classes:
        raise InputError("label", f"must be in [0, {classes})", shown(label))
    rows = {}
    for name in names:
        mask = torch.zeros_like(by_name[name], dtype=torch.bool, memory_format=torch.contiguous_format)
        owner = model.get_submodule(name.rpartition(".")[0])
        if mask.dim() and mask.shape[0] == classes and not isinstance(owner, nn.modules.conv._ConvTransposeNd):
            mask[int(label)] = True
        elif mask.dim() and mask.shape[-1] == classes == mask.numel():
            mask[..., int(label)] = True
        elif mask.numel() != 1:
            raise ModelError(f"{name} has shape {tuple(mask.shape)}, which does not begin with the head's {classes} labels; {ADVICE}")
        rows[name] = mask
    return rows


def _walk(root: Node, names: dict[nn.Parameter, str]) -> set[nn.Parameter]:
    head: set[nn.Parameter] = set()
    matrix_seen = False
    pending, seen = [root], {root}
    while pending:
        node = pending.pop()
        operation = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
        inputs = [following for following, _ in node.next_functions]
        parameters = [_attached(following, names) for following in inputs]
        direct = [parameter for parameter in parameters if parameter is not None]
        if operation in CONTRACTIONS or operation.startswith("ScaledDotProduct"):
            factors = parameters[1:] if operation in WITH_ADDEND else parameters
            if not any(parameter is not None and parameter.dim() >= 2 for parameter in factors):
                raise ModelError(f"the last {operation} before the logits has no matrix of the model directly in it; {ADVICE}")
            matrix_seen = True
            head.update(direct)
            continue
        # A checkpointed block hides its parameters from the graph: the layer before it would be taken for the head.
        if isinstance(node, BackwardCFunction) and (direct or operation.startswith("CheckpointFunction")):
            raise ModelError(f"what {operation}, an operation of the model's own, does with its parameters cannot be read; {ADVICE}")
        for entering in direct:
            if operation not in ADDITIONS and sum(size > 1 for size in entering.shape) > 1:
                raise ModelError(f"{names[entering]} enters {operation} before the logits, which is no known layer; {ADVICE}")
        head.update(direct)
        for following, parameter in zip(inputs, parameters, strict=True):
            if following is not None and parameter is None and following not in seen:
                seen.add(following)
                pending.append(following)
    if not matrix_seen:
        raise ModelError(f"no matrix product or convolution with a parameter leads to the logits; {ADVICE}")
    return head


def _attached(node: Node | None, names: dict[nn.Parameter, str]) -> nn.Parameter | None:
    """The parameter an edge comes from directly, or through views and casts of it alone."""
    while node is not None:
        if node.name().endswith("AccumulateGrad"):
            variable = node.variable  # type: ignore[attr-defined]
            return variable if variable in names else None
        if re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2]) not in VIEWS or len(node.next_functions) != 1:
            return None
        node = node.next_functions[0][0]
    return None


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Eval mode, autograd on for every parameter, nothing compiled, which would hide the graph; mode, flags and random numbers are as
    they were afterwards."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with in_mode(model, training=False), seeded(0, device_of(model)), torch.inference_mode(False), torch.enable_grad(), eager():
            for parameter, _ in flags:
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.requires_grad_(True)
            yield
    finally:
        for parameter, required in flags:
            parameter.requires_grad_(required)
