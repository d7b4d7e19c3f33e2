"""Run one cell, from its two networks to its result."""

from __future__ import annotations

import math
import platform
import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from expunge import __version__, metrics
from expunge.data.batches import Data, as_batches, measuring_size
from expunge.editing.patches import Patch
from expunge.errors import DivergedError, ExpungeError, InputError, NoEffectWarning
from expunge.experiments.cells import CHOSEN, REFERENCE, UNCHANGED, Cell
from expunge.experiments.choosing import chosen
from expunge.experiments.construction import Parts, curve_tuning_of, method_of, parts, relearning_of, scenario_of, tuning_of
from expunge.experiments.networks import Store, original, retrained
from expunge.experiments.results import DIVERGED, NO_DATA, Accuracies, Best, Epoch, Evidence, Relearn, Result, Stability
from expunge.methods import METHODS, Method, Run
from expunge.methods.lookup import is_path
from expunge.metrics import Predictions
from expunge.model.stages import stage_ends
from expunge.runtime.checkout import commit
from expunge.runtime.modes import generator
from expunge.storage.tensors import weights_digest
from expunge.unlearning import Record, unlearn
from expunge.vision.networks import head
from expunge.vision.scenarios import Scenario
from expunge.vision.scenarios.rows import drawn
from expunge.vision.zoo import save_network

CLASSIFIER = "mask-classifier"
PROBED = 20000  # training samples that probes are fitted on


def perform(cell: Cell, store: Store) -> tuple[Result, nn.Module | None]:
    """The result of a cell whose networks are in the store, and its network. A method that raises or diverges is a result too.

    Any other error, such as a damaged file of a network or a method that this process does not know, says nothing about the cell, and is
    raised.
    """
    started, after = time.perf_counter(), None
    measures: dict[str, Any] = {}
    try:
        images = parts(cell.dataset, cell.validation, store.data, store.device)
        scenario = scenario_of(cell.scenario, images, cell.seed)
        before = store.load(original(cell))
        reference = store.load(retrained(cell)) if store.holds(retrained(cell)) else None
    except ExpungeError as error:
        if not is_result(error):
            raise
        measures["error"] = reason(error)
    else:
        _check_known(cell)
        try:
            after, measures = _measured(cell, images, scenario, before, reference)
        except ExpungeError as error:
            if _of_the_machine(error):
                raise
            measures["error"] = f"{DIVERGED}: {error}" if isinstance(error, DivergedError) else str(error)
        else:
            if cell.method["name"] == REFERENCE:
                measures["work_seconds"] = store.seconds(retrained(cell))
    return Result(cell, cell.digest, time.perf_counter() - started, **surroundings(store.device), **measures), after


def save(network: nn.Module, cell: Cell, store: Store, path: Path) -> None:
    """The network of a cell, for `load_network`."""
    images = parts(cell.dataset, cell.validation, store.data, store.device)
    save_network(path, network, cell.network, images.classes, images.channels)


def _check_known(cell: Cell) -> None:
    """A method that another process put into METHODS is not known here, and settings it does not have are of another version."""
    name = cell.method["name"]
    if name in UNCHANGED:
        return
    if name not in METHODS and not is_path(name):
        rule = "must be in METHODS of the process that runs the cell; with several jobs those are new processes, which know expunge's own"
        raise InputError("method", f"{rule} alone: name it by its import path, package.module:Class, or run it with one job", name)
    if cell.method["reading"] != CHOSEN:
        method_of(cell)


def is_result(error: Exception) -> bool:
    """Whether an error before the method's turn is a result: there are no data, or a training diverged."""
    return _no_data(error) or (isinstance(error, DivergedError) and not _of_the_machine(error))


def _no_data(error: Exception) -> bool:
    return isinstance(error, InputError) and error.argument == "data"


def _of_the_machine(error: BaseException | None) -> bool:
    """Whether an error comes from memory, a disk or a missing module: it says nothing about the method, and may not occur again."""
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
    versions |= {"commit": commit()} if commit() else {}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"versions": versions, "hardware": {"device": device.type, "name": name, "threads": torch.get_num_threads()}}


def _measured(
    cell: Cell, images: Parts, scenario: Scenario, before: nn.Module, reference: nn.Module | None
) -> tuple[nn.Module, dict[str, Any]]:
    """The network of the cell at its best epoch (with evidence: at its last), and all measures of it."""
    if cell.method["name"] in UNCHANGED:
        after, epoch = (reference, cell.epochs) if cell.method["name"] == REFERENCE else (before, 0)
        assert after is not None  # the store trains what a cell of the retrained network needs
        history, edit, seconds, setting = _only_record(epoch, after, scenario), None, None, None
        best = metrics.best_epoch(history, "validation" if cell.validation else "test")
    else:
        started = time.perf_counter()
        method = chosen(before, scenario, tuning_of(cell)) if cell.method["reading"] == CHOSEN else method_of(cell)
        choosing = time.perf_counter() - started
        kept = Kept(method)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)  # as a planned ratio of 0 has, or a choice: tables show it
            outcome = unlearn(before, scenario.forget, scenario.remain, kept, watch=scenario.watch, batch_size=128, progress=False)
        history = [replace(record, seconds=record.seconds + choosing) for record in outcome.epochs]
        after, edit, seconds = outcome.model, outcome.edit, outcome.seconds + choosing
        setting = re.sub(r" at 0x\w+", "", repr(method))  # where a function was, which differs from run to run
        best = metrics.best_epoch(history, "validation" if cell.validation else "test")
        if cell.evidence is None:
            after.load_state_dict(kept.weights[best.epoch])
    networks = {"before": before, "after": after} | ({} if reference is None else {"retrained": reference})
    outputs = {name: _outputs(model, scenario) for name, model in networks.items()}
    epochs = tuple(_epoch(record) for record in history)
    at_best = next(epoch for epoch in epochs if epoch.epoch == best.epoch)
    return after, {
        "before": _accuracies(outputs["before"]),
        **({} if reference is None else {"retrained": _accuracies(outputs["retrained"]), **_nearness(outputs)}),
        "setting": setting,
        "work_seconds": seconds,
        "weights": {name: weights_digest(network) for name, network in networks.items()},
        "masked": None if edit is None else Accuracies(epochs[0].remain, epochs[0].forget, epochs[0].unlearn_score, epochs[0].attack),
        "history": epochs,
        "best": Best(best.chosen_on, at_best.epoch, at_best.remain, at_best.forget, at_best.unlearn_score),
        "last": epochs[-1],
        "stability": Stability(**asdict(metrics.stability(history))) if len(history) > 2 else None,
        "relearn": None if cell.relearn is None else _relearned(cell, after, before, scenario),
        "evidence": None if cell.evidence is None else _evidence(cell, after, images, scenario),
        "attack": metrics.attack_success(outputs["after"]["attack"]) if "attack" in outputs["after"] else None,
        "class_accuracies": {name: _by_class(predictions, cell, images.classes) for name, predictions in outputs.items()},
        "predicted": {name: list(metrics.predicted_shares(predictions["forget"]).values()) for name, predictions in outputs.items()},
        "masked_share": None if edit is None else _shares(edit, before),
    }


class Kept:
    """A method, and the weights after each of its epochs, kept on the CPU: `unlearn` returns the last ones."""

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


def _outputs(model: nn.Module, scenario: Scenario) -> dict[str, Predictions]:
    return {name: metrics.logits(model, data, batch_size=measuring_size(model)) for name, data in scenario.tests.items()}


def _accuracies(outputs: Mapping[str, Predictions]) -> Accuracies:
    remain, forget = metrics.accuracy_of(outputs["remain"]), metrics.accuracy_of(outputs["forget"])
    attack = metrics.attack_success(outputs["attack"]) if "attack" in outputs else None
    return Accuracies(remain, forget, metrics.unlearn_score(remain, forget), attack)


def _epoch(record: Record) -> Epoch:
    accuracies = {name.replace(" ", "_"): value for name, value in record.accuracies.items() if name != "validation attack"}
    score = metrics.unlearn_score(accuracies["remain"], accuracies["forget"])
    return Epoch(epoch=record.epoch or 0, unlearn_score=score, seconds=record.seconds, **accuracies)


def _only_record(epoch: int, model: nn.Module, scenario: Scenario) -> list[Record]:
    """The history of a network that no method trained: what it is, not chosen among several."""
    accuracies = {name: metrics.accuracy(model, data, batch_size=measuring_size(model)) for name, data in scenario.watch.items()}
    return [Record(epoch, accuracies, metrics.unlearn_score(accuracies["remain"], accuracies["forget"]), 0.0)]


def _nearness(outputs: Mapping[str, Mapping[str, Predictions]]) -> dict[str, Any]:
    """How near the network is to the retrained one."""
    nearness = {
        part: (metrics.agreement(ours, theirs), _finite(metrics.divergence(ours, theirs)))
        for part, ours, theirs in _pairs(outputs["after"], outputs["retrained"])
    }
    agreement, divergence = ({name: value[place] for name, value in nearness.items()} for place in (0, 1))
    return {
        "agreement": agreement.pop("all"),
        "divergence": divergence.pop("all"),
        "agreement_by": agreement,
        "divergence_by": divergence,
    }


def _pairs(ours: Mapping[str, Predictions], theirs: Mapping[str, Predictions]) -> list[tuple[str, Predictions, Predictions]]:
    """The outputs of two networks for remain data, for forget data, and for all of them."""
    return [*((name, ours[name], theirs[name]) for name in ("remain", "forget")), ("all", _joined(ours), _joined(theirs))]


def _finite(value: float) -> float | None:
    """JSON has no infinity, which a network that is sure of the wrong class may reach."""
    return value if math.isfinite(value) else None


def _joined(outputs: Mapping[str, Predictions]) -> Predictions:
    both = (outputs["remain"], outputs["forget"])
    return Predictions(torch.cat([part.logits for part in both]), torch.cat([part.targets for part in both]))


def _by_class(outputs: Mapping[str, Predictions], cell: Cell, classes: int) -> list[float | None]:
    """On the test set: its classes are apart in remain and forget where a category is forgotten, all of it is "remain" elsewhere."""
    accuracies = metrics.class_accuracies(_joined(outputs) if cell.scenario["kind"] == "category" else outputs["remain"])
    return [accuracies.get(label) for label in range(classes)]


def _shares(patch: Patch, model: nn.Module) -> dict[str, float]:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    edited = {name: patch.edits[name].indices.numel() if name in patch.edits else 0 for name in sizes}
    return {name: edited[name] / size for name, size in sizes.items()}


def _evidence(cell: Cell, model: nn.Module, images: Parts, scenario: Scenario) -> Evidence:
    """Probes of the test set's samples of the class, its re-learn curve, and the loss attack against test samples of the same classes."""
    size = measuring_size(model)
    seen, unseen = (metrics.logits(model, data, batch_size=size) for data in (scenario.forget, _like_forget(cell, scenario)))
    attack = metrics.loss_attack(seen, unseen)
    if cell.scenario["kind"] != "category":
        return Evidence(attack)
    rows = drawn(torch.arange(len(images.train)), min(PROBED, len(images.train)), generator(cell.seed)).tolist()
    stages = stage_ends(model, next(iter(as_batches(images.test, "test", 2))))
    probes = metrics.linear_probes(model, stages, Subset(images.train, rows), images.test, batch_size=size)
    curve = metrics.relearn_curve(
        model, scenario.forget, scenario.tests["forget"], scenario.train, curve_tuning_of(cell), batch_size=size, progress=False
    )
    recall = {probe.module: probe.recall[cell.scenario["label"]] for probe in probes}
    return Evidence(attack, recall, [_finite(loss) for loss in curve.losses], curve.accuracies, curve.unseen)


def _like_forget(cell: Cell, scenario: Scenario) -> Any:
    """Test samples that are like the forgotten ones but were never trained on: of the class, or of all classes."""
    return scenario.tests["forget" if cell.scenario["kind"] == "category" else "remain"]


def _relearned(cell: Cell, model: nn.Module, before: nn.Module, scenario: Scenario) -> Relearn:
    """The paper fixes the network of MaskClassifier and re-learns its classifier alone."""
    only = head(model) if cell.method["name"] == CLASSIFIER else None
    relearned = metrics.relearn_time(model, before, scenario.forget, scenario.train, relearning_of(cell), only=only, progress=False)
    return Relearn(relearned.epochs, relearned.limit, relearned.goal, [_finite(loss) for loss in relearned.losses])
