"""Make a new model that forgets samples, in one call; the caller's model is never changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from expunge.data.batches import Batches, Data, as_batches, device_of, to_device
from expunge.data.classes import check_classes
from expunge.data.columns import as_dataset
from expunge.data.labels import as_labels
from expunge.data.objective import Batch, Objective, check_objective
from expunge.data.overlap import check_disjoint
from expunge.editing.patches import Patch, own_tensors
from expunge.errors import GoalNotMetWarning, InputError, LostAccuracyWarning, ModelError, UncheckedWarning, naming
from expunge.methods import METHODS, Choice, Choose, FisherMask, Method, Run
from expunge.metrics.accuracy import check_targets, tally, unlearn_score
from expunge.model import heads
from expunge.model.checks import check_finite, check_model, check_unsharded, finite_tensors, screened
from expunge.model.copying import copied, unwrapped
from expunge.outcome import Outcome, Record
from expunge.runtime.callers import level_of_caller
from expunge.runtime.modes import in_mode, seeded
from expunge.runtime.progress import is_shown
from expunge.storage.codec import decode, encode
from expunge.training.carrying import Carried
from expunge.training.keeping import clock
from expunge.validate import check_whole, shown


def unlearn(
    model: nn.Module,
    forget: Data,
    remain: Data | None = None,
    method: Method | None = None,
    *,
    validation: Data | None = None,
    max_drop: float | None = None,
    epochs: float | None = None,
    seconds: float | None = None,
    objective: Objective = Objective(),
    head: Sequence[str] | str | None = None,
    watch: Mapping[str, Data] | None = None,
    batch_size: int = 128,
    progress: bool | None = None,
) -> Outcome:
    """Make a copy of the model forget.

    Data are datasets, loaders or iterables of batches, (x, y) or mappings; or all samples at once, a tuple (x, y).

    `method` None: one is chosen by what is there, within `epochs` over the remain data and `seconds`, so that accuracy on held-out data
    falls by no more than `max_drop` (0.02); `outcome.choice` tells which and why. `validation` are data that the model was never trained
    on: only they can show that samples look unseen. See `Choose`.

    `watch` maps names to data. Their accuracies are recorded before anything is done and after every epoch; {} records none. None watches
    the forget data and the remain data; these only before, after the edit and at the end, since a pass over them takes long, and none
    where the objective says `classes=False`.

    `head` names the classifier's parameters, or its module, where they cannot be read from the graph. `batch_size` is for measuring;
    training has its own, in the method's `Tuning`. `progress` None: shown where standard error is a terminal or a notebook runs.

    A model in DistributedDataParallel, as accelerate prepares it, is taken as the module inside; `outcome.model` is such a module.
    The caller's weights, modes, flags, gradients and random states stay as they are, also when this raises.
    """
    model = unwrapped(model)
    if isinstance(model, nn.Module):
        check_unsharded(model, "use fisher.sharded_diagonal, masks.select and ShardedPatch (docs/scale.md)")
    check_model(model)
    method = _chosen(method, validation, {"max_drop": max_drop, "epochs": epochs, "seconds": seconds})
    if not callable(method) or isinstance(method, type):
        kind = METHODS.get(method, FisherMask) if isinstance(method, str) else method if isinstance(method, type) else FisherMask
        raise InputError("method", f"must be a method with its settings, such as {kind.__name__}()", shown(method))
    check_whole("batch_size", batch_size, minimum=1)
    batch_size, progress = int(batch_size), is_shown(progress)
    check_objective(objective)
    if watch is None and objective.classes is False:  # nothing has an accuracy
        watch = {}
    head = None if head is None else heads.named(model, head)
    if watch is not None and not isinstance(watch, Mapping):
        raise InputError("watch", 'must map names to data, such as {"test": test_set}', type(watch).__name__)
    if strange := [name for name in watch or () if not isinstance(name, str)]:
        raise InputError("watch", 'must name data by text, such as {"test": test_set}', shown(strange[0]))
    if remain is not None and remain is forget:
        raise InputError("remain", "must not be the forget set", "the same object")
    if remain is not None:
        forget, remain = as_dataset(forget, "forget"), as_dataset(remain, "remain")
    if validation is not None and (validation is forget or validation is remain):
        raise InputError("validation", "must be data that the model was never trained on", "the forget or the remain data")
    validation = None if validation is None else as_dataset(validation, "validation")
    # The copy and whatever is made of it must be trainable, also where the caller is in inference mode.
    with torch.inference_mode(False), seeded(0, device_of(model)):
        forget = _rereadable(forget, "forget", batch_size)
        remain = None if remain is None else _rereadable(remain, "remain", batch_size)
        validation = None if validation is None else _rereadable(validation, "validation", batch_size)
        watched = {"remain": remain, "forget": forget} if watch is None else watch
        arguments = {name: name if watch is None else f"watch[{name!r}]" for name in watched}
        watched_batches = {name: as_batches(data, arguments[name], batch_size) for name, data in watched.items() if data is not None}
        changed = copied(model)
        changed.zero_grad(set_to_none=True)
        logits = _check_forget(changed, forget, objective, batch_size)
        if remain is not None:
            check_disjoint(forget, remain, objective, progress)
        if validation is not None:
            _check_unseen(changed, validation, forget, remain, objective, batch_size, progress)
        for name, batches in watched_batches.items():
            check_watched(changed, batches, arguments[name], objective)
        # No batch of a loader is read beyond what a method reads: it may be costly, or a stream.
        if remain is not None and not isinstance(remain, DataLoader) and not any(data is remain for data in watched.values()):
            _first_logits(changed, as_batches(remain, "remain", batch_size), "remain", objective)
        finite = finite_tensors(changed)

        def still_finite() -> None:
            check_finite(changed, finite, f"after {type(method).__name__}")

        def measure(name: str) -> tuple[int, int]:
            with naming(arguments[name]):
                return tally(changed, watched_batches[name], objective, batch_size)

        history = _History(measure, tuple(watched_batches), seldom=("remain",) if watch is None else ())
        history.record(None)

        def record(epoch: int) -> None:
            if type(epoch) is not int or epoch < 0 or epoch <= max(history.epochs, default=-1):
                after = f", after {history.epochs[-1]}" if history.epochs else ""
                raise InputError("after_epoch", "a method must call it with whole numbers that go up, from 0 on", f"{shown(epoch)}{after}")
            still_finite()  # before accuracies are measured, whose error would say less
            history.record(epoch)

        used: list[tuple[Method, Choice]] = []
        run = Run(
            objective,
            head,
            batch_size,
            progress,
            record,
            logits,
            history.epochs,
            model,
            forget,
            validation=validation,
            take_records=history.take,
            put_records=history.put,
            tell=lambda chosen, choice: used.append((chosen, choice)),
            history=history.carried(),
        )
        edit = method(changed, forget, remain, run)
        if edit is not None and not isinstance(edit, Patch):
            raise InputError("method", "must return the Patch that `run.edit` gave, or None", shown(edit))
        run.begin()
        changed.zero_grad(set_to_none=True)
        still_finite()
        worked = history.worked()
        history.complete()
        patch = _difference(model, changed)
    method, choice = used[-1] if used else (method, None)
    if choice is not None:
        if choice.goal_met is False:
            warnings.warn(
                f"goal not met, the outcome is the best there was: {'; '.join(choice.missing)}",
                GoalNotMetWarning,
                stacklevel=level_of_caller(),
            )
    elif watch is None and remain is not None and (cost := _cost(history.records, history.labels["remain"])):
        warnings.warn(cost, LostAccuracyWarning, stacklevel=level_of_caller())
    return Outcome(changed, patch, history.records, worked, method, edit, choice)


def _chosen(method: Any, validation: Data | None, settings: Mapping[str, Any]) -> Any:
    """The method given, or one that chooses; settings of a choice beside a method that is none are refused."""
    named = {name: value for name, value in settings.items() if value is not None}
    if method is None:
        return Choose(**named)
    if named:
        name, value = next(iter(named.items()))
        raise InputError(name, "is for a method to be chosen; leave it out where a method is given, or set it there", shown(value))
    if validation is not None and not getattr(method, "takes_validation", False):
        raise InputError(
            "validation", "is for a method to be chosen; leave it out where a method is given (`watch` measures)", shown(method)
        )
    return method


def _check_unseen(
    model: nn.Module, validation: Data, forget: Data, remain: Data | None, objective: Objective, batch_size: int, progress: bool
) -> None:
    """Validation data must fit the model, and hold no sample of the others."""
    check_watched(model, as_batches(validation, "validation", batch_size), "validation", objective)
    for others, name in ((forget, "the forget set"), (remain, "the remain data")):
        if others is None:
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                check_disjoint(others, validation, objective, progress)
            except InputError as error:
                rule = error.rule.replace("the forget set", name) if error.argument == "remain" else error.rule
                raise InputError("validation" if error.argument == "remain" else error.argument, rule, error.found) from error
        if any(issubclass(warning.category, UncheckedWarning) for warning in caught):
            rule = f"validation: could not be compared with {name}, so make sure that no sample is in both"
            warnings.warn(rule, UncheckedWarning, stacklevel=level_of_caller())


def _difference(model: nn.Module, changed: nn.Module) -> Patch | None:
    """Everything that was changed. Buffers that a forward pass makes or reshapes (caches) are skipped: a patch cannot store them."""
    tensors, results = own_tensors(model), own_tensors(changed)
    parameters = dict(model.named_parameters())
    same = [name for name, tensor in tensors.items() if name in results and _form(tensor) == _form(results[name])]
    if parameters.keys() ^ dict(changed.named_parameters()).keys() or not parameters.keys() <= {*same}:
        return None
    return Patch.between(model, changed, same)


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


class _History:
    """Records with a clock that stands still while accuracies are measured; `seldom` are not measured between epoch 0 and the end.

    `measure(name)` returns the number of right labels, and of all labels.
    """

    def __init__(self, measure: Callable[[str], tuple[int, int]], watched: Sequence[str], seldom: Sequence[str]) -> None:
        self.measure, self.watched, self.seldom = measure, watched, seldom
        self.records: list[Record] = []
        self.epochs: list[int] = []
        self.labels: dict[str, int] = {}
        self.started = clock()
        self.measuring = 0.0

    def worked(self) -> float:
        return clock() - self.started - self.measuring

    def record(self, epoch: int | None) -> None:
        """Record the current model; epoch None: before anything was done to it."""
        seconds = 0.0 if epoch is None else self.worked()
        if epoch is not None:
            self.epochs.append(epoch)
        self.records.append(self._measured(Record(epoch, {}, None, seconds), () if not epoch else self.seldom))

    def take(self) -> tuple[list[Record], list[int]]:
        """Take out all records but that of the caller's model: of a trial, which another may follow."""
        taken = self.records[1:], self.epochs[:]
        del self.records[1:], self.epochs[:]
        return taken

    def put(self, taken: tuple[list[Record], list[int]]) -> None:
        self.take()
        self.records += taken[0]
        self.epochs += taken[1]

    def carried(self) -> Carried:
        """All records and the seconds of work, for a training that goes on after a kill."""

        def get() -> dict[str, Any]:
            return {"records": encode(self.records), "epochs": [*self.epochs], "worked": self.worked()}

        def put(values: Any) -> None:
            self.records[:], self.epochs[:] = decode(tuple[Record, ...], values["records"]), values["epochs"]
            self.measuring = clock() - self.started - values["worked"]

        return Carried(get, put, of_losses=False)

    def complete(self) -> None:
        """Measure what the last record lacks."""
        self.records[-1] = self._measured(self.records[-1])

    def _measured(self, record: Record, without: Sequence[str] = ()) -> Record:
        paused, accuracies = clock(), {}
        for name in self.watched:
            if name in record.accuracies:
                accuracies[name] = record.accuracies[name]
            elif name not in without:
                right, self.labels[name] = self.measure(name)
                accuracies[name] = right / self.labels[name]
        self.measuring += clock() - paused
        score = unlearn_score(accuracies["remain"], accuracies["forget"]) if {"remain", "forget"} <= accuracies.keys() else None
        return replace(record, accuracies=accuracies, unlearn_score=score)


def _cost(history: Sequence[Record], labels: int) -> str | None:
    """The warning for a training that ended far below the remain accuracy before: 5 points, and more than 4 labels.

    Where answers turn by chance, as many right as wrong, m of them are √m apart: from 5 lost labels on it is more than two deviations.
    """
    before, last = (history[place].accuracies["remain"] for place in (0, -1))
    edited = history[1].accuracies.get("remain", before)  # a method may have begun with epoch 1
    if not history[-1].epoch or before - last <= 0.05 or (before - last) * labels < 4.5:
        return None
    fell = f"the accuracy on the remain data fell from {100 * before:.1f} % to {100 * last:.1f} %"
    if last < edited:
        return f"{fell}, by training (it was {100 * edited:.1f} % before the first epoch): try a lower learning rate or fewer epochs"
    return f"{fell}, and training did not bring back what the edit took ({100 * edited:.1f} %): change fewer weights, or train longer"


def _rereadable(data: Data, argument: str, batch_size: int) -> Data:
    """Data that can be read again: the batches of an iterator are kept in memory, and so is a length that was learned."""
    batches = as_batches(data, argument, batch_size)
    return batches if isinstance(data, Iterator) or (isinstance(data, DataLoader) and batches.known is None) else data


def _check_forget(model: nn.Module, forget: Data, objective: Objective, batch_size: int) -> torch.Size:
    """Check all forget data before anything is done, since they are few, and return the shape of a batch of logits."""
    device, logits = device_of(model), None
    with naming("forget"), in_mode(model, training=False), torch.no_grad():
        for batch in screened(as_batches(forget, "forget", batch_size), "forget", objective):
            batch = to_device(batch, device)
            first = logits is None
            if logits is None:
                logits = objective.logits(model, batch)
                if not torch.isfinite(logits).all():
                    raise ModelError("model: its outputs on the forget data must be finite")
            objective.check_batch(logits.shape, batch, same_batch=first)
    assert logits is not None  # data without a batch are refused where they are read
    return logits.shape


def _first_logits(model: nn.Module, data: Batches, argument: str, objective: Objective) -> tuple[Batch, Tensor]:
    """The first batch and its logits, before anything is done."""
    device = device_of(model)
    with naming(argument), seeded(0, device), in_mode(model, training=False), torch.no_grad():
        batch = to_device(next(iter(data)), device)
        return batch, objective.logits(model, batch)


def check_watched(
    model: nn.Module, data: Batches, argument: str, objective: Objective, advice: str = " (watch={} measures no accuracy)"
) -> None:
    """Check one batch before anything is done: an accuracy that cannot be measured would raise only after the first epoch."""
    batch, logits = _first_logits(model, data, argument, objective)
    try:
        targets = as_labels(objective.targets(batch))
        check_targets(logits, targets)
        check_classes(objective, logits.shape, "accuracy needs")
    except InputError as error:
        raise InputError(argument, f"{error.rule}{advice}", error.found) from error
