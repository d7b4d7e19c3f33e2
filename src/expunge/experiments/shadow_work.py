"""Describe the shadows of an audit as plain data that any process can read, and build them: of a task, or of a built-in dataset."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate

from expunge.audit.shadows import Shadows
from expunge.data.batches import as_batches
from expunge.data.labels import as_labels
from expunge.data.objective import Objective
from expunge.data.overlap import check_disjoint
from expunge.errors import InputError, UncheckedWarning
from expunge.experiments.results import BROKEN
from expunge.methods import Method
from expunge.requests.settings import Settings, build_method
from expunge.requests.task import Task, load_task
from expunge.runtime.modes import device_named
from expunge.storage.codec import Within, decode
from expunge.storage.documents import excerpt, read_json
from expunge.training.tuning import Tuning
from expunge.vision import datasets
from expunge.vision.augmentation import Augmentation
from expunge.vision.datasets import Images
from expunge.vision.recipes import Recipe, recipe_for
from expunge.vision.zoo import Augmented, build, network_of

SEEDS = 1000  # the first seed of a shadow: far from those that networks are trained with


@dataclass(frozen=True)
class ShadowWork:
    """So many shadows, which forget by a method; of a task, or of a built-in `dataset` and the network that the file `before` names.

    `forget` are the rows of the training data that the audited network was to forget. Candidates are these and as many test samples of
    their labels, drawn by the `seed`. Without a `device` on what there is; `threads` of a CPU, None: as torch has it.
    """

    folder: str
    forget: tuple[int, ...]
    method: str
    given: tuple[str, ...] = ()
    number: int = 64
    task: str | None = None
    before: str | None = None
    dataset: str = "digits"
    data: str | None = None
    size: int | None = None
    seed: int = 0
    at_once: Annotated[int, Within(1)] = 1
    device: str | None = None
    threads: Annotated[int, Within(1)] | None = None


@dataclass(frozen=True)
class Prepared:
    """Shadows to train, the method that each is to forget by, and the rows of their data that the audited network was to forget."""

    ensemble: Shadows
    method: Method
    forgotten: tuple[int, ...]

    def done(self) -> bool:
        """Whether all are trained and have forgotten."""
        return not self.ensemble.missing(self.method)

    def left(self) -> str:
        """How far they are, in words."""
        trained, forgot = (self.ensemble.number - len(self.ensemble.missing(method)) for method in (None, self.method))
        return f"{trained} of {self.ensemble.number} shadows are trained, {forgot} have forgotten"

    def cost(self) -> str:
        """What is left to do, in words."""
        ensemble = self.ensemble
        samples = len(ensemble.data) - len(ensemble.rows) + len(ensemble.rows) // 2
        epochs = f"{ensemble.tuning.schedule.epochs:g} epochs of {samples:,} samples"
        name = repr(self.method) if len(repr(self.method)) < 200 else type(self.method).__name__
        return (
            f"{ensemble.number} shadows: {len(ensemble.missing())} trainings of {epochs}, {ensemble.at_once} at once, and then "
            f"{len(ensemble.missing(self.method))} forget {len(ensemble.rows) // 2} samples each by {name}"
        )


def read_shadow_work(path: str | os.PathLike[str]) -> ShadowWork:
    try:
        return decode(ShadowWork, read_json(path), "the shadows")
    except BROKEN as error:
        rule = f"{os.fspath(path)} must be shadows as `expunge audit --shadows` writes them ({excerpt(error)})"
        raise InputError("shadows", rule) from error


def prepare(work: ShadowWork) -> Prepared:
    """Check everything, and write nothing."""
    return _of_task(work, load_task(work.task)) if work.task is not None else _of_dataset(work)


def _of_task(work: ShadowWork, task: Task) -> Prepared:
    if task.recipe is None:
        raise InputError("task", f"{task.path} must have recipe(), the Tuning that the network was trained by: shadows are trained by it")
    device = device_named(work.device)
    train, test = _dataset(task.train, "train", task), _dataset(task.test, "test", task)
    labels, test_labels = (_labels(data, name, task.objective) for name, data in (("train", train), ("test", test)))
    rows = _unseen(labels, test_labels, work)
    method = build_method(Settings(work.method, work.given), task.recipe)
    validation = _validation(task, method, Subset(test, rows.tolist()))
    data = _joined(train, test, rows)
    made = _prepared(work, data, len(train), len(rows), lambda seed: task.fresh().to(device), task.recipe, method, task.objective)
    return replace(made, ensemble=replace(made.ensemble, validation=validation))


def _of_dataset(work: ShadowWork) -> Prepared:
    if work.before is None:
        raise InputError("before", "must be the file of a network, which says what the shadows are")
    device = device_named(work.device)
    images = datasets.load(work.dataset, work.data, size=work.size).to(device)
    recipe, tuning = _recipe(Path(work.before), work.dataset)
    rows = _unseen(images.train.labels.cpu(), images.test.labels.cpu(), work)
    network, classes, channels = network_of(work.before)
    plain = _joined(images.train, images.test, rows)
    method = build_method(Settings(work.method, work.given), tuning)
    data = Augmented(plain, Augmentation(images.size[0] // 8)) if recipe.augment else plain

    def fresh(seed: int) -> nn.Module:
        return build(network, classes, channels, seed, device)

    made = _prepared(work, data, len(images.train), len(rows), fresh, tuning, method, Objective())
    if not recipe.augment:
        return made
    return replace(made, ensemble=replace(made.ensemble, asked=Subset(plain, made.ensemble.rows.tolist())))


def _prepared(
    work: ShadowWork,
    data: Any,
    trained: int,
    unseen: int,
    fresh: Callable[[int], nn.Module],
    recipe: Tuning,
    method: Method,
    objective: Objective,
) -> Prepared:
    candidates = [*work.forget, *range(trained, trained + unseen)]
    ensemble = Shadows(
        build=fresh,
        data=data,
        candidates=candidates,
        tuning=replace(recipe, seed=recipe.seed + SEEDS),
        folder=work.folder,
        number=work.number,
        seed=work.seed,
        at_once=work.at_once,
        objective=objective,
    )
    return Prepared(ensemble, method, work.forget)


def _unseen(labels: Tensor, test_labels: Tensor, work: ShadowWork) -> Tensor:
    """Rows of test samples of the forgotten labels, at most as many as are forgotten: samples that the audited network never saw."""
    if outside := [row for row in work.forget if not 0 <= row < len(labels)]:
        raise InputError("forget", f"must be rows of the training data, 0 to {len(labels) - 1}", outside[0])
    like = torch.isin(test_labels, labels[list(work.forget)].unique()).nonzero().flatten()
    order = torch.randperm(len(like), generator=torch.Generator().manual_seed(work.seed))
    return like[order[: len(work.forget)]].sort().values


def _validation(task: Task, method: Method, unseen: Any) -> Any:
    """The data that a request of the task chose by, if its method did; shadows are trained on half of the unseen candidates."""
    if not getattr(method, "takes_validation", False) or (validation := task.validation) is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncheckedWarning)  # each shadow warns
            check_disjoint(unseen, validation, task.objective)
    except InputError as error:
        rule = error.rule.partition(";")[0].replace("the forget set", "test(): shadows choose by the one and forget some of the other")
        raise InputError("task", f"validation() of {task.path} {rule}", error.found) from error
    return validation


def _dataset(data: Any, name: str, task: Task) -> Any:
    source = as_batches(data, name).source
    if isinstance(source, DataLoader) and source.collate_fn is not default_collate:
        raise InputError("task", f"{name}() of {task.path} must return a dataset, for shadows, or a loader without a collator of its own")
    dataset = source.dataset if isinstance(source, DataLoader) else source
    if not hasattr(dataset, "__getitem__"):
        raise InputError("task", f"{name}() of {task.path} must return a dataset, for shadows", type(data).__name__)
    return dataset


def _labels(data: Any, name: str, objective: Objective) -> Tensor:
    return torch.cat([as_labels(objective.targets(batch)).cpu() for batch in as_batches(data, name, 512)])


def _joined(train: Any, test: Any, rows: Tensor) -> Any:
    """The training data, then some test samples: as one dataset of tensors where both are, which is faster."""
    if isinstance(train, Images) and isinstance(test, Images):
        chosen = test.take(rows)
        return Images(torch.cat([train.pixels, chosen.pixels]), torch.cat([train.labels, chosen.labels]), train.mean, train.std)
    if type(train) is TensorDataset and type(test) is TensorDataset and _forms(train) == _forms(test):
        return TensorDataset(*(torch.cat([own, more[rows]]) for own, more in zip(train.tensors, test.tensors, strict=True)))
    return ConcatDataset([train, Subset(test, rows.tolist())])


def _forms(data: TensorDataset) -> list[Any]:
    return [(tensor.dtype, tensor.shape[1:], tensor.device) for tensor in data.tensors]


def _recipe(before: Path, dataset: str) -> tuple[Recipe, Tuning]:
    """How `expunge train` says that it trained the network, in the file beside it; without one the dataset's recipe."""
    file = before.with_suffix(".json")
    if not file.exists():
        return recipe_for(dataset), recipe_for(dataset).tuning()
    try:
        content = read_json(file)
        known = {field.name for field in fields(Recipe)}
        given = {name: value for name, value in content["recipe"].items() if name in known}
        recipe = Recipe(**given | {"decays": tuple(given.get("decays", Recipe.decays))})
        return recipe, recipe.tuning(precision=content.get("precision", "float32"))
    except BROKEN as error:
        rule = f"{file} must say how the network was trained, as `expunge train` wrote it ({excerpt(error)})"
        raise InputError("before", rule) from error
