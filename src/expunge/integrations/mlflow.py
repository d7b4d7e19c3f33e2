"""Log deletion requests, audits and outcomes to MLflow: parameters, metrics, the verdict as a tag, the files that may be handed on."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from expunge.audit.report import Audit, load_audit
from expunge.errors import InputError
from expunge.outcome import Outcome, Record
from expunge.requests.folder import AUDIT, EDIT, OPENINGS, PATCH, RECEIPT, State, misfits, read_state
from expunge.requests.ledger import head
from expunge.storage.codec import decode
from expunge.storage.documents import excerpt, read_json
from expunge.storage.folders import LITTER

AT_ONCE = 100  # what a server takes in one call, at least
LONGEST = 500  # characters of a parameter, which every version takes
Metrics = Mapping[str, float]


def log_request(folder: str | os.PathLike[str], run_id: str | None = None, leave_out: Collection[str] = ()) -> str:
    """Log the last request of a folder that `expunge unlearn` wrote, and return the id of the run.

    To this run, else to the active one, else to one of its own. Metrics have the request's number as step, parameters have it in their
    name, so several requests can go to one run, such as that of the training. All files of the folder are artifacts but openings.json,
    which is private, and those to `leave_out`: whoever has `patch.safetensors` and the weights has the original ones.
    """
    path = Path(folder)
    for what in misfits(path) if (path / RECEIPT).exists() else [f"no {RECEIPT}"]:
        raise InputError("folder", "must be as `expunge unlearn` left it", what)
    state = read_state(path)
    assert state is not None
    _check_names(leave_out, os.listdir(path))
    receipt = state.receipt
    first, last = (decode(Record, part) for part in receipt.measured["accuracies"])
    metrics = {f"request.{name}_accuracy_before": value for name, value in first.accuracies.items()}
    metrics |= {f"request.{name}_accuracy_after": value for name, value in last.accuracies.items()}
    metrics |= {"request.seconds": receipt.measured["seconds"], "request.forgotten": receipt.forgotten}
    if (path / AUDIT).is_file():
        metrics |= _measures(decode(Audit, read_json(path / AUDIT), "the audit"))
    with _run(run_id, f"deletion request {receipt.number}") as (client, run):
        _log(client, run, metrics, _parameters(state), _tags(state), receipt.number)
        for name in sorted(os.listdir(path)):
            if name not in {OPENINGS, *LITTER, *leave_out}:
                client.log_artifact(run, os.fspath(path / name), f"request-{receipt.number}")
        return run


def log_audit(audit: Audit | str | os.PathLike[str], run_id: str | None = None) -> str:
    """Log an audit, or that of a folder which `expunge audit` or `Audit.save` wrote with its files, and return the id of the run."""
    found = audit if isinstance(audit, Audit) else load_audit(audit)
    tags = {"expunge.verdict": found.verdict.word, "expunge.verdict_sentence": found.verdict.sentence}
    sizes = {f"audit.{name}_samples": str(size) for name, size in found.sizes.items()}
    with _run(run_id, "audit of forgetting") as (client, run):
        _log(client, run, _measures(found), sizes | {"audit.retrained_networks": str(found.retrained), "audit.done": found.done}, tags, 0)
        if not isinstance(audit, Audit):
            for path in sorted(Path(audit).iterdir()):
                if path.is_file() and path.name not in LITTER:
                    client.log_artifact(run, os.fspath(path), "audit")
        return run


def log_outcome(outcome: Outcome, run_id: str | None = None) -> str:
    """Log what `expunge.unlearn` returned, the watched accuracies epoch by epoch, and return the id of the run; no files."""
    tags = {} if outcome.choice is None else {"expunge.goal": outcome.choice.state()}
    method = outcome.method if isinstance(outcome.method, str) else repr(outcome.method)
    with _run(run_id, "unlearning") as (client, run):
        for record in outcome.epochs:
            _log(client, run, {f"{name}_accuracy": value for name, value in record.accuracies.items()}, {}, {}, record.epoch or 0)
        before = {f"{name}_accuracy_before": value for name, value in outcome.history[0].accuracies.items()} if outcome.history else {}
        _log(client, run, before | {"unlearning_seconds": outcome.seconds}, {"unlearning.method": method}, tags, 0)
        return run


class LogEpochs:
    """What `expunge.train` takes as `after_epoch`: logs what `measure()` returns, numbers by name, after every epoch.

    `train(model, data, tuning, after_epoch=LogEpochs(lambda: {"test": accuracy(model, test)}))`
    """

    def __init__(self, measure: Callable[[], Metrics], run_id: str | None = None) -> None:
        self.measure, self.run_id = measure, run_id

    def __call__(self, epoch: int) -> None:
        metrics = {_key(name): float(value) for name, value in self.measure().items()}
        with _run(self.run_id, "training") as (client, run):
            _log(client, run, metrics, {}, {}, epoch)
            self.run_id = run  # one for all epochs, where none was active


def check_run(run_id: str | None) -> None:
    """Before the work: whether MLflow is there, can be reached, and has this run, not a deleted one."""
    module = _mlflow()
    with _told(module):
        if run_id is None and module.get_tracking_uri().startswith("http"):  # a store on disk would be made, by a dry run too
            module.MlflowClient().search_experiments(max_results=1)
        elif run_id is not None and (stage := module.MlflowClient().get_run(run_id).info.lifecycle_stage) != "active":
            raise InputError("mlflow", "must be a run that can be written", f"{run_id}, which is {stage}")


def _check_names(leave_out: Collection[str], there: Collection[str]) -> None:
    """A name that is no file's, as by a comma that is missing, would log what was to stay."""
    if isinstance(leave_out, str) or any(name not in {*there, PATCH, EDIT, OPENINGS} for name in leave_out):
        raise InputError("leave_out", 'must be names of files of the folder, such as ("patch.safetensors", "edit.safetensors")', leave_out)


def _parameters(state: State) -> dict[str, str]:
    receipt, settings = state.receipt, state.settings
    values = {
        "method": receipt.method,
        "asked": " ".join([settings.method or "choose", *settings.given]),
        "forget": receipt.forget,
        "forgotten": receipt.forgotten,
        "samples": receipt.samples,
        "device": receipt.code.device,
        "expunge": receipt.code.expunge,
        "torch": receipt.code.torch,
    }
    return {f"request_{receipt.number}.{name}": str(value) for name, value in values.items()}


def _tags(state: State) -> dict[str, str]:
    """Of the last request; with the digest of the ledger's last line, noted elsewhere, a ledger that is rewritten is found."""
    receipt = state.receipt
    audited = (receipt.measured.get("audit") or {}).get("verdict")
    tags = {
        "request": str(receipt.number),
        "verdict": audited["word"] if audited else "no audit",
        "weights_before": receipt.weights_before,
        "weights_after": receipt.weights_after,
        "ledger": head(state.ledger),
    }
    if audited:
        tags["verdict_sentence"] = audited["sentence"]
    if "goal_met" in receipt.measured:
        tags["goal"] = {True: "met", False: "not met", None: "not measured in full"}[receipt.measured["goal_met"]]
    return {f"expunge.{name}": value for name, value in tags.items()}


def _measures(audit: Audit) -> dict[str, float]:
    """Every measure of the networks before and after, and the mean of those retrained."""
    values: dict[str, float] = {}
    for measure in audit.measures:
        retrained = measure.floor or measure.retrained
        mean = sum(part.value for part in retrained) / len(retrained) if retrained else None
        for when, value in (("before", measure.before), ("after", measure.after), ("retrained", mean)):
            if value is not None:
                values[f"audit.{_key(measure.name)}.{when}"] = value if isinstance(value, float) else value.value
    return values


def _key(name: str) -> str:
    """A name as MLflow takes it: letters, numbers, dots, dashes and underscores."""
    return re.sub(r"[^\w.\-]+", "_", name, flags=re.ASCII).strip("_")


@contextmanager
def _run(run_id: str | None, name: str) -> Iterator[tuple[Any, str]]:
    """A client, and the run: the one given, else the active one, else a new one, which ends here."""
    module = _mlflow()
    with _told(module):
        client = module.MlflowClient()
        if run_id is not None:
            client.get_run(run_id)
            yield client, run_id
        elif (active := module.active_run()) is not None:
            yield client, active.info.run_id
        else:
            with module.start_run(run_name=name) as run:
                yield client, run.info.run_id


def _log(client: Any, run: str, metrics: Metrics, parameters: Mapping[str, str], tags: Mapping[str, str], step: int) -> None:
    from mlflow.entities import Metric, Param, RunTag

    now, numbers = int(time.time() * 1000), list(metrics.items())
    client.log_batch(
        run,
        params=[Param(name, excerpt(value, LONGEST)) for name, value in parameters.items()],
        tags=[RunTag(name, value) for name, value in tags.items()],
    )
    for start in range(0, len(numbers), AT_ONCE):
        client.log_batch(run, metrics=[Metric(_key(name), value, now, step) for name, value in numbers[start : start + AT_ONCE]])


def _mlflow() -> Any:
    try:
        import mlflow
    except ImportError as error:
        raise InputError("mlflow", "needs the package mlflow: pip install 'expunge[mlflow]'") from error
    return mlflow


@contextmanager
def _told(module: Any) -> Iterator[None]:
    """What MLflow does not take is told on one line."""
    try:
        yield
    except module.exceptions.MlflowException as error:
        raise InputError("mlflow", "must take what is logged", excerpt(" ".join(str(error).split()))) from error
