"""Find the layers that produce output channels, and what belongs to each channel, by following a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from expunge.data.batches import device_of, first_samples, to_device
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError, ModelError
from expunge.model.checks import check_module
from expunge.runtime.modes import eager, in_mode, seeded, unchanged


@dataclass(frozen=True)
class Layer:
    """A convolution or Linear by its module's name, how many output channels (units) it has, and the BatchNorm they go to directly."""

    name: str
    channels: int
    norm: str | None


def find(model: nn.Module, batch: Batch, objective: Objective = Objective(), head: Sequence[str] = ()) -> tuple[Layer, ...]:
    """The layers whose channels may be masked, in the model's order: those that two samples of `batch` go through.

    A BatchNorm belongs to a layer where its input is the layer's output and nothing else: not a concatenation, a sum or a pooled
    output, and not where it serves several layers. Left out: the `head`'s layers, and weights that are frozen or no parameter
    of the module itself (weight norm).
    """
    check_module(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    unknown = [name for name in head if name not in named]
    if unknown:
        raise InputError("head", "must name parameters of the model", unknown)
    head_parameters = {named[name] for name in head}
    flow = _follow(model, batch, objective)
    names = {module: name for name, module in model.named_modules()}
    layers = []
    for module, name in names.items():
        weight = module._parameters.get("weight")
        if module in flow.called and weight is not None and weight.requires_grad and weight not in head_parameters:
            norm = flow.norm_of(module)
            layers.append(Layer(name, _channels(module), None if norm is None else names[norm]))
    if not layers:
        raise ModelError("model: no convolution or Linear is left to mask: all are the classifier's, frozen or reparametrised")
    return tuple(layers)


def mask(model: nn.Module, layers: Iterable[Layer], chosen: Mapping[str, Tensor], with_norm: bool = False) -> dict[str, Tensor]:
    """What produces the chosen channels: rows of the weight and entries of the bias; `with_norm` adds those of BatchNorm's γ and β.

    `chosen` maps a layer's name to one bool per channel. Frozen parameters are left out.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts: dict[str, Tensor] = {}

    def add(parameter: nn.Parameter | None, part: Tensor) -> None:
        if parameter is not None and parameter.requires_grad:
            part = part.to(parameter.device)
            # Layers may share a parameter: what either layer loses, it loses.
            parts[names[parameter]] = parts[names[parameter]] | part if names[parameter] in parts else part

    for layer in layers:
        module, channels = model.get_submodule(layer.name), chosen[layer.name]
        add(module._parameters["weight"], _rows(module, channels))
        add(module._parameters.get("bias"), channels)
        if with_norm and layer.norm is not None:
            norm = model.get_submodule(layer.norm)
            add(norm._parameters["weight"], channels)
            add(norm._parameters["bias"], channels)
    return parts


def cleared_statistics(model: nn.Module, layers: Iterable[Layer], chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The running means and variances of the layers' BatchNorms by name, zero at the chosen channels."""
    values = {}
    for layer in layers:
        for key in ("running_mean", "running_var") if layer.norm is not None else ():
            name = f"{layer.norm}.{key}"
            buffer = model.get_buffer(name)
            values[name] = buffer.masked_fill(chosen[layer.name].to(buffer.device), 0)
    return values


@dataclass
class _Flow:
    """Which layers a forward pass called, and whose output each BatchNorm took as its input (None: no single layer's)."""

    called: set[nn.Module] = field(default_factory=set)
    sources: dict[nn.Module, set[nn.Module | None]] = field(default_factory=dict)
    # By the address of their memory. The tensors are kept, so that no address is used twice.
    outputs: dict[int, tuple[nn.Module, Tensor, int]] = field(default_factory=dict)

    def note_layer(self, layer: nn.Module, arguments: Any, output: Tensor) -> None:
        self.called.add(layer)
        self.outputs[output.untyped_storage().data_ptr()] = (layer, output, output._version)

    def note_norm(self, norm: nn.Module, arguments: tuple[Tensor, ...], keywords: Mapping[str, Tensor], output: Tensor) -> None:
        self.sources.setdefault(norm, set()).add(self.source(arguments[0] if arguments else keywords["input"]))

    def source(self, inputs: Tensor) -> nn.Module | None:
        """The layer whose whole output this is, as it came out or with its dimensions moved or joined, channels still apart."""
        address = inputs.untyped_storage().data_ptr()
        if address not in self.outputs:
            return None
        layer, output, version = self.outputs[address]
        axis = channel_axis(layer)
        same_channels = inputs.shape[1] == output.shape[axis] and inputs.stride(1) == output.stride(axis)
        untouched = output._version == version  # an in-place operation leaves the memory, not the values
        return layer if untouched and same_channels and inputs.numel() == output.numel() else None

    def norm_of(self, layer: nn.Module) -> nn.Module | None:
        norms = [norm for norm, sources in self.sources.items() if layer in sources]
        return norms[0] if len(norms) == 1 and self.sources[norms[0]] == {layer} else None


def channel_axis(module: nn.Module) -> int:
    """The dimension of a module's output that counts channels."""
    return -1 if isinstance(module, nn.Linear) else 1


def _follow(model: nn.Module, batch: Batch, objective: Objective) -> _Flow:
    flow, hooks, device = _Flow(), [], device_of(model)
    try:
        for module in model.modules():
            if isinstance(module, (_ConvNd, nn.Linear)):
                hooks.append(module.register_forward_hook(flow.note_layer))
            elif isinstance(module, _BatchNorm):
                hooks.append(module.register_forward_hook(flow.note_norm, with_kwargs=True))
        # Not inference mode: its tensors do not count the changes made to them.
        with in_mode(model, training=False), seeded(0, device), unchanged(model), torch.inference_mode(False), torch.no_grad(), eager():
            objective.logits(model, to_device(first_samples(batch), device))
    finally:
        for hook in hooks:
            hook.remove()
    return flow


def _channels(module: nn.Module) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.out_channels)  # type: ignore[arg-type]


def _rows(module: nn.Module, chosen: Tensor) -> Tensor:
    """One bool per channel as a mask of the weight that produces them."""
    weight = module._parameters["weight"]
    assert weight is not None
    if not isinstance(module, _ConvTransposeNd):
        return chosen.reshape(-1, *(1,) * (weight.dim() - 1)).expand(weight.shape).contiguous()
    # (in, out / groups, ...): group g of the inputs makes group g of the outputs.
    groups, kernel = module.groups, weight.shape[2:]
    parts = chosen.reshape(groups, 1, -1, *(1,) * len(kernel))
    return parts.expand(groups, weight.shape[0] // groups, weight.shape[1], *kernel).reshape(weight.shape)
