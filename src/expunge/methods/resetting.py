"""Give part of a network fresh weights, and let it learn the rest again from the network it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from expunge.data.batches import Data, device_of
from expunge.data.labels import IGNORED
from expunge.editing.patches import Patch
from expunge.errors import InputError, ModelError
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.methods.streams import tune_phases
from expunge.methods.training import built
from expunge.model import heads
from expunge.model.checks import check_names
from expunge.model.copying import copied
from expunge.model.depth import last_parameters
from expunge.runtime.modes import seeded
from expunge.training.distillation import Distillation, teach
from expunge.training.schedules import OneCycle
from expunge.training.tuning import Tuning
from expunge.validate import check_builder, check_number, check_whole, shown


@dataclass(frozen=True)
class ResetAndDistil:
    """Fresh weights for the deepest layers, then a short training on the remain data with the original as teacher.

    minimise mean_r (1 − α)·L(z, y) + α·T²·KL(softmax(t/T) ‖ softmax(z/T)), t the original's logits without those of forgotten classes.

    `reset` a share of the depth, counted from the output in the order in which the model calls its layers (0.35 of a ResNet20 is its last
    stage and the classifier), or names of parameters and modules. `classes` that are forgotten as a whole; None: those labels of the
    forget data that no remain sample has. Nothing else of the forget data is read, and nothing at all where `classes` are named. `fresh`
    builds the network with new weights; without it `reset_parameters` of the modules is called. Frozen parameters stay.
    """

    reset: float | tuple[str, ...] = 0.35
    distillation: Distillation = Distillation()
    tuning: Tuning = Tuning(OneCycle(0.1, 5))
    classes: tuple[int, ...] | None = None
    fresh: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.reset, (str, tuple, list)):
            object.__setattr__(self, "reset", check_names("reset", self.reset) if self.reset else ())
        else:
            check_number("reset", self.reset, 0, 1, ends="[]", rule="must be a share of the depth in [0, 1], or names of parameters")
            object.__setattr__(self, "reset", float(self.reset))
        if not isinstance(self.distillation, Distillation):
            raise InputError("distillation", "must be a Distillation, such as Distillation(temperature=4)", shown(self.distillation))
        check_tuning(self.tuning, "ResetAndDistil")
        if self.classes is not None:
            if not isinstance(self.classes, (tuple, list)):
                raise InputError("classes", "must be a tuple of labels, or None", shown(self.classes))
            for label in self.classes:
                check_whole("classes", label, least=0)
            object.__setattr__(self, "classes", tuple(map(int, self.classes)))
        check_builder("fresh", self.fresh, "must be a function that builds the network with new weights, or None")

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        needs_remain(remain, "ResetAndDistil")
        forgotten = self._forgotten(forget, remain, run)
        taught = teach(remain, model, run.objective, self.tuning.batch_size, forgotten, "remain")
        with seeded(self.tuning.seed, device_of(model)):
            patch = Patch.setting(model, fresh_values(model, self._names(model, remain, run), self.fresh))
        patch.apply(model)
        phase = self.distillation.phase(taught, "remain", run.objective)
        tune_phases(model, lambda epoch: [phase], self.tuning, run)
        return patch

    def _names(self, model: nn.Module, remain: Data, run: Run) -> tuple[str, ...]:
        if isinstance(self.reset, tuple):
            return heads.named(model, self.reset, "reset") if self.reset else ()
        return last_parameters(model, next(iter(run.batches(remain, "remain"))), self.reset, run.objective)

    def _forgotten(self, forget: Data, remain: Data, run: Run) -> tuple[int, ...]:
        if self.classes == ():
            return ()
        kept = _labels(remain, "remain", run)
        if self.classes is None:
            return () if kept is None else tuple(sorted((_labels(forget, "forget", run) or set()) - kept))
        if kept is not None and (both := sorted({*self.classes} & kept)):
            raise InputError("remain", f"must not hold samples of the forgotten classes {self.classes}; leave them out", both)
        return self.classes


def _labels(data: Data, argument: str, run: Run) -> set[int] | None:
    """All labels; None where targets are no labels."""
    labels: set[int] = set()
    for batch in run.batches(data, argument):
        targets = run.objective.targets(batch)
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dtype == torch.bool:
            return None
        labels |= {*targets.unique().tolist()}
    return labels - {IGNORED}


def fresh_values(model: nn.Module, names: Sequence[str], build: Callable[[], nn.Module] | None = None) -> dict[str, Tensor]:
    """New values of these parameters, frozen ones left out, and of the buffers of modules all of whose parameters are among them.

    From the network that `build` makes, or from `reset_parameters` of the modules that hold them.
    """
    held = dict(model.named_parameters())
    wanted = {name for name in names if name in held and held[name].requires_grad}
    owners = _owners(model, wanted)
    new = _rebuilt(model, build) if build is not None else _renewed(model, owners, wanted)
    whole = [prefix for prefix, module in owners.items() if all(_join(prefix, name) in wanted for name, _ in _own(module))]
    buffers = {_join(prefix, name) for prefix in whole for name, value in owners[prefix].named_buffers(recurse=False) if value is not None}
    persistent = new.state_dict()
    return {
        name: persistent[name].detach().clone()
        for name in [*held, *dict(model.named_buffers())]
        if name in wanted | buffers & persistent.keys()
    }


def _owners(model: nn.Module, wanted: set[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    return {prefix: module for prefix, module in modules.items() if any(_join(prefix, name) in wanted for name, _ in _own(module))}


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _rebuilt(model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
    new = built(build)
    forms = [{name: tuple(value.shape) for name, value in network.state_dict().items()} for network in (model, new)]
    if different := sorted(name for name in {*forms[0], *forms[1]} if forms[0].get(name) != forms[1].get(name)):
        raise InputError("fresh", "must build a network with the same parameters", ", ".join(different[:4]))
    return new.to(next(model.parameters()))


def _renewed(model: nn.Module, owners: dict[str, nn.Module], wanted: set[str]) -> nn.Module:
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
