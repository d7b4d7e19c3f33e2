"""Note how a network was trained, as plain data in a file, and make the `Tuning` of it that a task's recipe() returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from expunge.errors import InputError
from expunge.requests.canonical import canonical, digest
from expunge.storage.codec import Amount, Count, decode, encode
from expunge.storage.documents import excerpt, read_json
from expunge.training.recorded import Recorded
from expunge.training.tuning import Precision, Tuning

RECIPE = "recipe.json"
SPEED = {"foreach", "fused", "capturable", "differentiable"}  # how an optimizer computes, and not what
NONE = -1  # in place of the number of a group
Builder = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Recipe:
    """How a network was trained. `settings` are those of the optimizer's groups, without rates; `groups` the group of every parameter that
    requires a gradient, in the model's order, -1 for none. `rates` are at even distances over the epochs. `clip` is the largest norm of a
    step's gradient. `not_kept` says in words what a `Tuning` cannot do as it was done."""

    optimizer: str  # a name of torch.optim; with its module where it is another's
    settings: tuple[Mapping[str, Any], ...]
    groups: tuple[int, ...]
    rates: tuple[Amount, ...]
    epochs: Count
    batch_size: Count
    seed: Count = 0
    precision: Precision = "float32"
    clip: Amount | None = None
    not_kept: tuple[str, ...] = ()
    kind: Literal["expunge recipe 1"] = "expunge recipe 1"

    def tuning(self, optimizer: Builder | None = None) -> Tuning:
        """For a task's recipe(). Plain gradient descent has no builder of its own, so that `choose` takes its rate too."""
        known = Tuning(Recorded(self.rates, self.epochs), self.batch_size, seed=self.seed, precision=self.precision)
        if optimizer is not None:
            return replace(known, optimizer=optimizer)
        if "." in self.optimizer or not isinstance(kind := getattr(torch.optim, self.optimizer, None), type) or kind is Optimizer:
            rule = "must be one of torch.optim to be built again; give recorded_recipe(folder, optimizer=...) a function that builds yours"
            raise InputError("optimizer", rule, excerpt(self.optimizer))
        plain = {**self.settings[0], "momentum": 0, "weight_decay": 0, **{name: None for name in SPEED}}
        simple = {"momentum": 0, "weight_decay": 0, "dampening": 0, "nesterov": False, "maximize": False, **{name: None for name in SPEED}}
        if kind is torch.optim.SGD and len(self.settings) == 1 and plain == simple and self.clip is None and NONE not in self.groups:
            return replace(known, momentum=self.settings[0]["momentum"], weight_decay=self.settings[0]["weight_decay"])
        return replace(known, optimizer=Rebuilt(self))


@dataclass(frozen=True, repr=False)
class Rebuilt:
    """Builds the optimizer of a recipe; `Tuning` takes it as `optimizer`.

    Where other parameters require gradients than in the recipe, all have the settings of the first group.
    """

    recipe: Recipe

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        trained, recipe = list(parameters), self.recipe
        groups = recipe.groups if len(recipe.groups) == len(trained) else (0,) * len(trained)
        parts = [
            {**settings, "params": [parameter for parameter, group in zip(trained, groups, strict=True) if group == number]}
            for number, settings in enumerate(recipe.settings)
        ]
        built: Optimizer = getattr(torch.optim, recipe.optimizer)([part for part in parts if part["params"]], lr=recipe.rates[0])
        if recipe.clip is not None:
            built.register_step_pre_hook(self._clip)
        return built

    def _clip(self, optimizer: Optimizer, *_: Any) -> None:
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(every, self.recipe.clip or 0.0)

    def __repr__(self) -> str:
        return f"Rebuilt({self.recipe.optimizer}, {digest(canonical(encode(self.recipe)))[:8]})"


def recorded_recipe(folder: str | os.PathLike[str], optimizer: Builder | None = None) -> Tuning:
    """The `Tuning` of a training that `KeepForRequests` noted in a folder; `optimizer` builds one that torch does not have."""
    path = Path(folder)
    path = path / RECIPE if path.is_dir() else path
    try:
        recipe: Recipe = decode(Recipe, read_json(path), "the recipe")
        if not recipe.settings or any(not NONE <= group < len(recipe.settings) for group in recipe.groups):
            raise ValueError("groups must be numbers of the settings")
        settings = tuple(
            {name: tuple(value) if isinstance(value, list) else value for name, value in part.items()} for part in recipe.settings
        )
        return replace(recipe, settings=settings).tuning(optimizer)
    except FileNotFoundError as error:
        raise InputError("folder", f"must be one that KeepForRequests wrote, with a {RECIPE}", os.fspath(folder)) from error
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("folder", f"must hold a {RECIPE} as it was written ({excerpt(error)})", os.fspath(folder)) from error


def read_optimizer(optimizer: Optimizer, model: nn.Module) -> tuple[str, tuple[dict[str, Any], ...], tuple[int, ...]]:
    """An optimizer as a recipe has it: its name, the settings of its groups, and the group of every parameter of the model."""
    kind = type(optimizer)
    own = kind.__module__.startswith("torch.optim") and hasattr(torch.optim, kind.__name__)
    place = {id(parameter): number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    settings = tuple(
        {name: value for name, value in group.items() if name not in {"params", "lr", "initial_lr", *SPEED} and _is_plain(value)}
        for group in optimizer.param_groups
    )
    groups = tuple(place.get(id(parameter), NONE) for parameter in model.parameters() if parameter.requires_grad)
    return kind.__name__ if own else f"{kind.__module__}.{kind.__qualname__}", settings, groups


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))
