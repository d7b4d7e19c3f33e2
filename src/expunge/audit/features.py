"""Take the inner outputs of a network while it answers: the end of every stage, and what its classifier is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from expunge.data.objective import Batch, Objective
from expunge.errors import ModelError
from expunge.metrics.probing import pooled
from expunge.model.depth import call_order
from expunge.model.stages import stage_ends

LAST = "classifier's input"


@dataclass(frozen=True)
class Places:
    """Where to look: the modules that end the stages, by their names, and the classifier, the last matrix that is called."""

    stages: tuple[str, ...]
    classifier: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """What the features are called, which is the same for networks whose modules have other names."""
        stages = tuple(f"stage {number}" for number, _ in enumerate(self.stages, start=1))
        return stages if self.classifier is None else (*stages, LAST)


def places_of(model: nn.Module, batch: Batch, objective: Objective) -> Places:
    """A wrapper around a network has the network's own places: modules are noted when they are called, whatever encloses them."""
    try:
        stages = stage_ends(model, batch, objective)
    except ModelError:  # no pictures: the classifier's input alone
        stages = ()
    called = call_order(model, batch, objective)
    matrices = [name for name in called if any(part.dim() > 1 for part in model.get_submodule(name).parameters(False))]
    last = max(matrices, key=called.__getitem__) if matrices else None
    if last is None or not isinstance(model.get_submodule(last), nn.Linear):
        return Places(stages, None)
    with taking(model, Places((), last)) as features:  # one that is never called by itself has no input
        call_order(model, batch, objective)
    return Places(stages, last if LAST in features else None)


@contextmanager
def taking(model: nn.Module, places: Places) -> Iterator[dict[str, Tensor]]:
    """Within the context every forward pass leaves its features here, a row per sample, by `Places.names`."""
    latest: dict[str, Tensor] = {}

    def output_of(name: str, module: str) -> Any:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            latest[name] = pooled(output, module)

        return hook

    def input_of(name: str, module: str) -> Any:
        def hook(_: nn.Module, inputs: Any) -> None:
            latest[name] = pooled(inputs[0], module)

        return hook

    hooks = [
        model.get_submodule(module).register_forward_hook(output_of(name, module))
        for name, module in zip(places.names, places.stages, strict=False)
    ]
    if places.classifier is not None:
        hooks.append(model.get_submodule(places.classifier).register_forward_pre_hook(input_of(LAST, places.classifier)))
    try:
        yield latest
    finally:
        for hook in hooks:
            hook.remove()
