"""Every way to a diagonal Fisher that is measured: ours, PyTorch's own, and the other libraries'.

A variant turns a model into a pass: batches of (x, y) in, {parameter name: Σ_n (∂ℓ_n/∂θ)²} out. A peer that leaves a
parameter out leaves out its name; one that cannot do a model raises, and the benchmark prints what it said.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Sums = dict[str, Tensor]
Pass = Callable[[Sequence[tuple[Tensor, Tensor]]], Sums]


@dataclass(frozen=True)
class Variant:
    """`prepare(model)` may change the model: it is given a copy. `claim`: "exact", "not exact", or "none" where no Fisher is formed."""

    prepare: Callable[[nn.Module], Pass]
    claim: str = "exact"
    packages: tuple[str, ...] = ()
    splits: bool = False  # holds per-sample gradients of a whole batch: measured at the micro-batch size at which it is fastest


def add(sums: Sums, name: str, value: Tensor) -> None:
    if name in sums:
        sums[name] += value
    else:
        sums[name] = value.clone()


def total_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y, reduction="sum")


def plain(model: nn.Module) -> Pass:
    """The yardstick: an eval-mode forward and backward that forms every `.grad`."""

    def run(batches: Sequence[tuple[Tensor, Tensor]]) -> Sums:
        for x, y in batches:
            model.zero_grad(set_to_none=True)
            total_loss(model, x, y).backward()
        return {}

    return run


def plain_channels_last(model: nn.Module) -> Pass:
    run = plain(model.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    return lambda batches: run([(x.contiguous(memory_format=torch.channels_last), y) for x, y in batches])


def engine(model: nn.Module) -> Pass:
    import expunge.fisher

    return lambda batches: expunge.fisher.diagonal(model, batches, kind="empirical", progress=False).sums


def vmap(model: nn.Module) -> Pass:
    """vmap(grad(ℓ)) over the samples, squared and summed."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(values: Sums, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(model, (values, buffers), (x[None],)), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def run(batches: Sequence[tuple[Tensor, Tensor]]) -> Sums:
        sums: Sums = {}
        for x, y in batches:
            for name, gradient in gradients(parameters, x, y).items():
                add(sums, name, gradient.square().sum(0))
        return sums

    return run


def one_sample_loop(model: nn.Module) -> Pass:
    """A backward a sample; in float64 this is the reference."""

    def run(batches: Sequence[tuple[Tensor, Tensor]]) -> Sums:
        sums: Sums = {}
        for x, y in batches:
            for index in range(len(x)):
                model.zero_grad(set_to_none=True)
                total_loss(model, x[index : index + 1], y[index : index + 1]).backward()
                for name, parameter in model.named_parameters():
                    add(sums, name, gradient_of(parameter).square())
        return sums

    return run


def squared_batch_gradient(model: nn.Module) -> Pass:
    """n·(mean gradient)² of each batch, often taken for the Fisher: cross terms between samples make it another quantity."""

    def run(batches: Sequence[tuple[Tensor, Tensor]]) -> Sums:
        sums: Sums = {}
        for x, y in batches:
            model.zero_grad(set_to_none=True)
            total_loss(model, x, y).backward()
            for name, parameter in model.named_parameters():
                add(sums, name, gradient_of(parameter).square() / len(x))
        return sums

    return run


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def backpack(model: nn.Module) -> Pass:
    """BackPACK's SumGradSquared; with a summed loss its factor is 1. First-order extensions need only the layers extended."""
    import backpack as library
    from backpack.extensions import SumGradSquared

    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None and not list(module.children()):
            library.extend(module)

    def run(batches: Sequence[tuple[Tensor, Tensor]]) -> Sums:
        sums: Sums = {}
        for x, y in batches:
            model.zero_grad(set_to_none=True)
            with warnings.catch_warnings(), library.backpack(SumGradSquared()):
                warnings.simplefilter("ignore")  # it warns of layers it leaves out; the table says so
                total_loss(model, x, y).backward()
            for name, parameter in model.named_parameters():
                if hasattr(parameter, "sum_grad_squared"):
                    add(sums, name, parameter.sum_grad_squared)
                    del parameter.sum_grad_squared
        return sums

    return run


def nngeometry(model: nn.Module) -> Pass:
    """PMatDiag of the function log p(y|x): its covariance's diagonal is the mean of the squared gradients."""
    from nngeometry.backend import TorchHooksJacobianBackend
    from nngeometry.layercollection import LayerCollection
    from nngeometry.object import PMatDiag

    layers = LayerCollection.from_model(model)

    def log_likelihood(x: Tensor, y: Tensor) -> Tensor:
        return functional.log_softmax(model(x), 1).gather(1, y[:, None])

    parameters = [(name, p) for layer in layers.layers for name, p in model.get_submodule(layer).named_parameters(prefix=layer)]

    def run(batches: Sequence[tuple[Tensor, Tensor]]) -> Sums:
        sums: Sums = {}
        for x, y in batches:
            generator = TorchHooksJacobianBackend(model=model, function=log_likelihood, layer_collection=layers)
            add_flat(sums, parameters, PMatDiag(generator=generator, examples=(x, y)).get_diag() * len(x))
        return sums

    return run


def laplace(backend: str) -> Callable[[nn.Module], Pass]:
    """laplace-torch's empirical Fisher, `diag` of one of its backends."""

    def prepare(model: nn.Module) -> Pass:
        if backend == "curvlinops":
            from laplace.curvature.curvlinops import CurvlinopsEF as Curvature
        else:
            from laplace.curvature.asdl import AsdlEF as Curvature
        curvature: Any = Curvature(model, "classification")

        def run(batches: Sequence[tuple[Tensor, Tensor]]) -> Sums:
            sums: Sums = {}
            for x, y in batches:
                add_flat(sums, list(model.named_parameters()), curvature.diag(x, y)[1])
            return sums

        return run

    return prepare


def add_flat(sums: Sums, parameters: Sequence[tuple[str, Tensor]], flat: Tensor) -> None:
    for (name, parameter), value in zip(parameters, flat.split([p.numel() for _, p in parameters]), strict=True):
        add(sums, name, value.view_as(parameter))


def opacus(model: nn.Module) -> Pass:
    """GradSampleModule: it keeps activations in train mode alone, and refuses BatchNorm in any mode."""
    from opacus.grad_sample import GradSampleModule

    model.train()
    for norm in batch_norms(model):
        norm.eval()
    wrapped = GradSampleModule(model, loss_reduction="sum")

    def run(batches: Sequence[tuple[Tensor, Tensor]]) -> Sums:
        sums: Sums = {}
        for x, y in batches:
            wrapped.zero_grad(set_to_none=True)
            total_loss(wrapped, x, y).backward()
            grown: Any = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
            for name, parameter in grown:
                add(sums, name, parameter.grad_sample.square().sum(0))
                parameter.grad_sample = None
        return sums

    return run


def opacus_frozen_norm(model: nn.Module) -> Pass:
    """Opacus with BatchNorm frozen, which it then lets pass: the nearest it comes, without BatchNorm's own parameters."""
    norms = batch_norms(model)
    if not norms:
        raise ValueError("there is no BatchNorm to freeze: see opacus")
    for norm in norms:
        norm.requires_grad_(False)
    return opacus(model)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


VARIANTS: dict[str, Variant] = {
    "plain": Variant(plain, claim="none"),
    "plain-channels-last": Variant(plain_channels_last, claim="none"),
    "engine": Variant(engine),
    "vmap": Variant(vmap, splits=True),
    "backpack": Variant(backpack, packages=("backpack-for-pytorch",), splits=True),
    "nngeometry": Variant(nngeometry, packages=("nngeometry",), splits=True),
    "laplace-curvlinops": Variant(laplace("curvlinops"), packages=("laplace-torch", "curvlinops-for-pytorch"), splits=True),
    "laplace-asdl": Variant(laplace("asdl"), packages=("laplace-torch", "asdfghjkl"), splits=True),
    "opacus": Variant(opacus, packages=("opacus",), splits=True),
    "opacus-frozen-norm": Variant(opacus_frozen_norm, packages=("opacus",), splits=True),
    "loop": Variant(one_sample_loop),
    "batch-squared": Variant(squared_batch_gradient, claim="not exact"),
}
