"""Fresh values of a trained model's weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from expunge.errors import InputError, ModelError
from expunge.model.copying import copied


def fresh_values(model: nn.Module, names: Collection[str], fresh: nn.Module | None = None) -> dict[str, Tensor]:
    """New values of these parameters, frozen ones left out, and of the buffers of modules all of whose parameters are among them.

    From the network `fresh`, or from `reset_parameters` of the modules that hold them. The model is left as it is.
    """
    first_names = {parameter: name for name, parameter in model.named_parameters()}  # of one that modules share
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wanted = {first_names[parameters[name]] for name in names if parameters[name].requires_grad}
    owners = _owners(model, wanted)
    new = _renewed(model, owners, wanted) if fresh is None else _like(model, fresh)
    whole = [prefix for prefix, module in owners.items() if all(name in wanted for name in _own(prefix, module))]
    buffers = {_join(prefix, name) for prefix in whole for name, _ in owners[prefix].named_buffers(recurse=False)}
    values, held = new.state_dict(), model.state_dict()
    return {name: values[name].detach().to(held[name], copy=True) for name in values if name in wanted | buffers}


def _owners(model: nn.Module, wanted: Collection[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    return {prefix: module for prefix, module in modules.items() if any(name in wanted for name in _own(prefix, module))}


def _own(prefix: str, module: nn.Module) -> list[str]:
    return [_join(prefix, name) for name, _ in module.named_parameters(recurse=False)]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _like(model: nn.Module, fresh: nn.Module) -> nn.Module:
    """The fresh network, where it has the model's parameters."""
    forms = [{name: tuple(value.shape) for name, value in network.state_dict().items()} for network in (model, fresh)]
    if different := sorted(name for name in {*forms[0], *forms[1]} if forms[0].get(name) != forms[1].get(name)):
        raise InputError("fresh", "must build a network with the same parameters", ", ".join(different[:4]))
    return fresh


def _renewed(model: nn.Module, owners: dict[str, nn.Module], wanted: Collection[str]) -> nn.Module:
    rule = "fresh weights need reset_parameters on every module that holds them, or `fresh`"
    new = copied(model)
    modules = {prefix: new.get_submodule(prefix) for prefix in owners}
    # Attention and transformers of torch name it with an underscore.
    renewals: dict[str, Any] = {
        prefix: getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        for prefix, module in modules.items()
    }
    if unknown := [prefix or "the model itself" for prefix, renew in renewals.items() if renew is None]:
        raise ModelError(f"model: {rule}; missing in {', '.join(unknown[:4])}")
    parameters = dict(new.named_parameters())
    # A reset that writes elsewhere (pruned, weight-normed and spectral-normed layers hold another tensor as weight) leaves these.
    with torch.no_grad():
        for name in wanted:
            parameters[name].fill_(torch.nan)
    for renew in reversed(renewals.values()):
        renew()
    if kept := [name for name in wanted if not torch.isfinite(parameters[name]).all()]:
        raise ModelError(f"model: {rule}; reset_parameters does not reach {', '.join(sorted(kept)[:4])}")
    return new
