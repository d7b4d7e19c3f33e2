"""One cell from its two networks to its result."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from expunge import __version__, metrics
from expunge.data.batches import Data, measuring_size
from expunge.editing.patches import Patch
from expunge.errors import DivergedError, ExpungeError, InputError
from expunge.experiments.cells import Cell
from expunge.experiments.construction import Parts, method_of, parts, relearning_of, scenario_of
from expunge.experiments.networks import Store, original, retrained
from expunge.experiments.results import DIVERGED, NO_DATA
from expunge.methods import METHODS, Method, Run
from expunge.methods.lookup import is_path
from expunge.metrics import Predictions
from expunge.storage.tensors import weights_digest
from expunge.unlearning import Record, unlearn
from expunge.vision.networks import head
from expunge.vision.scenarios import Scenario

REFERENCE = "retrain"
CLASSIFIER = "mask-classifier"


def perform(cell: Cell, store: Store) -> dict[str, Any]:
    """The result of a cell whose networks are in the store; a method that refuses or diverges is a result too.

    Anything else that is refused, such as a damaged file of a network or a method that this process does not know, says nothing of the
    cell, and is raised.
    """
    started = time.perf_counter()
    result: dict[str, Any] = {"cell": cell.as_json(), "digest": cell.digest, "error": None, "history": []}
    try:
        images = parts(cell.dataset, cell.validation, store.data, store.device)
        scenario = scenario_of(cell.scenario, images, cell.seed)
        before, reference = store.load(original(cell)), store.load(retrained(cell))
    except ExpungeError as error:
        if not is_result(error):
            raise
        result["error"] = reason(error)
    else:
        method = None if cell.method["name"] == REFERENCE else _known(cell)
        try:
            result |= _measured(cell, method, images, scenario, before, reference)
        except ExpungeError as error:
            if _of_the_machine(error):
                raise
            result["error"] = f"{DIVERGED}: {error}" if isinstance(error, DivergedError) else str(error)
    return result | {"seconds": time.perf_counter() - started, **surroundings(store.device)}


def _known(cell: Cell) -> Method:
    """The cell's method; one that another process put into METHODS is not known here."""
    name = cell.method["name"]
    if name not in METHODS and not is_path(name):
        rule = "must be in METHODS of the process that runs the cell; with several jobs those are new processes, which know expunge's own"
        raise InputError("method", f"{rule} alone: name it by its import path, package.module:Class, or run it with one job", name)
    return method_of(cell)


def is_result(error: Exception) -> bool:
    """Whether what stopped a cell before its method's turn is worth a note: there are no data, or a training diverged."""
    return _no_data(error) or (isinstance(error, DivergedError) and not _of_the_machine(error))


def _no_data(error: Exception) -> bool:
    return isinstance(error, InputError) and error.argument == "data"


def _of_the_machine(error: BaseException | None) -> bool:
    """Whether memory, a disk or a module that is missing is behind an error: that says nothing of the method, and may be well tomorrow."""
    while error is not None:
        if isinstance(error, (MemoryError, OSError, ImportError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):  # how torch says that there is no memory
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def reason(error: Exception) -> str:
    return f"{NO_DATA if _no_data(error) else DIVERGED}: {error}"


def surroundings(device: torch.device) -> dict[str, Any]:
    versions = {"expunge": __version__, "torch": torch.__version__, "numpy": numpy.__version__, "python": platform.python_version()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"versions": versions, "hardware": {"device": device.type, "name": name, "threads": torch.get_num_threads()}}


def _measured(
    cell: Cell, method: Method | None, images: Parts, scenario: Scenario, before: nn.Module, reference: nn.Module
) -> dict[str, Any]:
    """Everything that is told of a cell; without a method it is that of the reference, the retrained network."""
    said = {"before": _said(before, scenario), "retrained": _said(reference, scenario)}
    found: dict[str, Any] = {name: _accuracies(each) for name, each in said.items()}
    if method is None:
        after, history, edit, seconds = reference, _only_record(cell, reference, scenario), None, None
    else:
        kept = Kept(method)
        outcome = unlearn(before, scenario.forget, scenario.remain, kept, watch=scenario.watch, batch_size=128, progress=False)
        after, history, edit, seconds = outcome.model, outcome.epochs, outcome.edit, outcome.seconds
    on = metrics.best_epoch(history, "validation" if cell.validation else "test")
    if method is not None:
        after.load_state_dict(kept.weights[on.epoch])
    said["after"] = _said(after, scenario)
    epochs = [_epoch(record) for record in history]
    best = next(each for each in epochs if each["epoch"] == on.epoch)
    by = {name: (metrics.agreement(each, other), _finite(metrics.divergence(each, other))) for name, each, other in _pairs(said)}
    return found | {
        "work_seconds": seconds,
        "weights": {"before": weights_digest(before), "after": weights_digest(after), "retrained": weights_digest(reference)},
        "masked": None if edit is None else _masked(epochs[0]),
        "history": epochs,
        "best": {"on": on.chosen_on, **{name: best[name] for name in ("epoch", "remain", "forget", "unlearn_score")}},
        "last": epochs[-1],
        "stability": asdict(metrics.stability(history)) if len(history) > 2 else None,
        "relearn": None if cell.relearn is None else _relearned(cell, after, before, scenario),
        "agreement": by["all"][0],
        "divergence": by["all"][1],
        "agreement_by": {name: value[0] for name, value in by.items() if name != "all"},
        "divergence_by": {name: value[1] for name, value in by.items() if name != "all"},
        "attack": metrics.attack_success(said["after"]["attack"]) if "attack" in said["after"] else None,
        "class_accuracies": {name: _by_class(each, cell, images.classes) for name, each in said.items()},
        "predicted": {name: list(metrics.predicted_shares(each["forget"]).values()) for name, each in said.items()},
        "masked_share": None if edit is None else _shares(edit, before),
    }


class Kept:
    """A method, and the weights after each of its epochs, kept on the CPU: `unlearn` gives the last ones."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.weights: dict[int, dict[str, Tensor]] = {}

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch | None:
        def after_epoch(epoch: int) -> None:
            self.weights[epoch] = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
            run.after_epoch(epoch)

        keeping = replace(run, after_epoch=after_epoch)
        edit = self.method(model, forget, remain, keeping)
        keeping.begin()  # where the method made no record
        return edit


def _said(model: nn.Module, scenario: Scenario) -> dict[str, Predictions]:
    return {name: metrics.logits(model, data, batch_size=measuring_size(model)) for name, data in scenario.tests.items()}


def _accuracies(said: Mapping[str, Predictions]) -> dict[str, Any]:
    remain, forget = metrics.accuracy_of(said["remain"]), metrics.accuracy_of(said["forget"])
    attack = {"attack": metrics.attack_success(said["attack"])} if "attack" in said else {}
    return {"remain": remain, "forget": forget, "unlearn_score": metrics.unlearn_score(remain, forget), **attack}


def _epoch(record: Record) -> dict[str, Any]:
    found = {name.replace(" ", "_"): value for name, value in record.accuracies.items() if name != "validation attack"}
    return {"epoch": record.epoch, **found, "unlearn_score": record.unlearn_score, "seconds": record.seconds}


def _masked(first: Mapping[str, Any]) -> dict[str, Any]:
    return {name: first[name] for name in ("remain", "forget", "unlearn_score", "attack") if name in first}


def _only_record(cell: Cell, model: nn.Module, scenario: Scenario) -> list[Record]:
    """The retrained network's history is its last epoch: it was not chosen among several."""
    found = {name: metrics.accuracy(model, data, batch_size=measuring_size(model)) for name, data in scenario.watch.items()}
    return [Record(cell.recipe["epochs"], found, metrics.unlearn_score(found["remain"], found["forget"]), 0.0)]


def _pairs(said: Mapping[str, Mapping[str, Predictions]]) -> list[tuple[str, Predictions, Predictions]]:
    """What the network says beside what the retrained one says: on remain and on forget data, and on all of them."""
    found = [(name, said["after"][name], said["retrained"][name]) for name in ("remain", "forget")]
    return [*found, ("all", _joined(said["after"]), _joined(said["retrained"]))]


def _finite(value: float) -> float | None:
    """JSON has no infinity, which a network that is sure of the wrong class may reach."""
    return value if math.isfinite(value) else None


def _joined(said: Mapping[str, Predictions]) -> Predictions:
    both = (said["remain"], said["forget"])
    return Predictions(torch.cat([each.logits for each in both]), torch.cat([each.targets for each in both]))


def _by_class(said: Mapping[str, Predictions], cell: Cell, classes: int) -> list[float | None]:
    """On the test set: its classes are apart in remain and forget where a category is forgotten, all of it is "remain" elsewhere."""
    found = metrics.class_accuracies(_joined(said) if cell.scenario["kind"] == "category" else said["remain"])
    return [found.get(label) for label in range(classes)]


def _shares(patch: Patch, model: nn.Module) -> dict[str, float]:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    edited = {name: patch.edits[name].indices.numel() if name in patch.edits else 0 for name in sizes}
    return {name: edited[name] / size for name, size in sizes.items()}


def _relearned(cell: Cell, model: nn.Module, before: nn.Module, scenario: Scenario) -> dict[str, Any]:
    """The paper fixes the network of MaskClassifier and re-learns its classifier alone."""
    only = head(model) if cell.method["name"] == CLASSIFIER else None
    found = metrics.relearn_time(model, before, scenario.forget, scenario.train, relearning_of(cell), only=only, progress=False)
    return asdict(found)
