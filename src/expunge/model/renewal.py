"""Give weights fresh values: in place, or as values for a copy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from expunge.errors import InputError, ModelError
from expunge.model.copying import copied


def fresh_values(model: nn.Module, names: Collection[str], fresh: nn.Module | None = None) -> dict[str, Tensor]:
    """New values of these parameters, frozen ones left out, and of the buffers of modules all of whose parameters are among them.

    Where these are all of the model's, so are the statistics of norms that have no parameters.
    From the network `fresh`, or from `reset_parameters` of the modules that hold them. The model is left as it is.
    """
    first_names = {parameter: name for name, parameter in model.named_parameters()}  # of one that modules share
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wanted = {first_names[parameters[name]] for name in names if parameters[name].requires_grad}
    everything = wanted == {name for name, value in model.named_parameters() if value.requires_grad}
    new = _renewed(model, None if everything else wanted) if fresh is None else _like(model, fresh)
    modules = _whole(model, wanted, everything)
    buffers = {_join(prefix, name) for prefix, module in modules.items() for name, _ in module.named_buffers(recurse=False)}
    values, held = new.state_dict(), model.state_dict()
    return {name: values[name].detach().to(held[name], copy=True) for name in values if name in wanted | buffers}


def _whole(model: nn.Module, wanted: Collection[str], everything: bool) -> dict[str, nn.Module]:
    """The modules all of whose parameters are wanted; one that has none, and can be reset, where everything is."""

    def goes(module: nn.Module, own: list[str]) -> bool:
        return all(name in wanted for name in own) if own else everything and _renewal(module) is not None

    return {prefix: module for prefix, module in model.named_modules() if goes(module, _own(prefix, module))}


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


def _renewed(model: nn.Module, wanted: Collection[str] | None) -> nn.Module:
    new = copied(model)
    reset(new, wanted)
    return new


def renewable(model: nn.Module) -> tuple[str, ...]:
    """The parameters in modules that `reset` can give fresh values."""
    return tuple(name for prefix, module in model.named_modules() if _renewal(module) is not None for name in _own(prefix, module))


def _renewal(module: nn.Module) -> Callable[[], Any] | None:
    # Attention and transformers of torch name it with an underscore.
    renew = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    try:
        inspect.signature(renew).bind()  # type: ignore[arg-type]
    except (TypeError, ValueError):  # there is none, or one that asks for more than the module knows
        return None
    return renew


def reset(model: nn.Module, wanted: Collection[str] | None = None) -> None:
    """Reset trainable parameters, all or those that are wanted, in place by `reset_parameters`, inner modules first, as they were built.

    Raises `ModelError` where one of them would keep its old values; the model is of no use then.
    """
    rule = "fresh weights need reset_parameters on every module with parameters, or `fresh`"
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad and (wanted is None or name in wanted)}
    identities = {id(parameter) for parameter in parameters.values()}
    renewals, unknown = [], []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not any(id(parameter) in identities for parameter in own) and (own or wanted is not None):
            continue
        renew = _renewal(module)
        if renew is not None:
            renewals.append(renew)
        elif own:
            unknown.append(f"{name or 'the model itself'} ({type(module).__name__})")
    if unknown:
        raise ModelError(f"model: {rule}; missing in {', '.join(unknown)}")
    # A reset that writes elsewhere (pruned, weight-normed and spectral-normed layers have another tensor as weight) leaves these.
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(torch.nan)
    for renew in reversed(renewals):
        renew()
    if kept := [name for name, parameter in parameters.items() if not torch.isfinite(parameter).all()]:
        raise ModelError(f"model: {rule}; reset_parameters does not reach {', '.join(kept)}")
