"""Run `expunge unlearn`, `undo`, `verify` and `prove`: deletion requests on one's own model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from expunge.errors import ExpungeError, InputError
from expunge.runtime.exits import on_one_line, uninterrupted
from expunge.storage.files import check_file, check_folder, shown_folder

if TYPE_CHECKING:
    from expunge.requests.prepared import Prepared


@dataclass(frozen=True)
class Unlearn:
    """Make a model of your own forget samples: new weights, a patch that leads back, an audit, a receipt and a ledger, in a folder.
    A later request in the same folder adds its samples to those before. The same command goes on after a stop."""

    task: str
    """Your Python file with model(), train(), test(); it may have objective(), validation(), recipe(), keys()."""
    weights: str
    """The trained weights, .safetensors; a .pt file of plain tensors is read too."""
    forget: str
    """0-99,200; label=3; key=4711 or keys=FILE, by the task's keys(); predicate=NAME, a function of the task file; or a file of ids: text,
    .csv, .npy (ids or a boolean mask)."""
    out: str
    """Folder of this model's requests."""
    column: str | None = None
    """Of a .csv file: the column of the ids; without it "id", or the only one."""
    method: str | None = None
    """Such as fisher-mask, ssd, retrain; choose, by what there is; of your own: path/to/file.py:Class. Without it that of the last request
    in the folder; choose in a new one."""
    set: tuple[str, ...] = ()
    """Settings of the method, such as ratio=0.05 tuning=None; of choose: epochs=20 max_drop=0.01. Without them, and without --method, those
    of the last request in the folder."""
    batch_size: int = 128
    """For measuring; training has the recipe's own."""
    device: str | None = None
    """cuda if there is one, else cpu."""
    threads: int | None = None
    """Of the CPU; without it as torch has it. The receipt notes how many: the weights are the same to the bit for that number."""
    sums: str | None = None
    """A store that `expunge fisher build` made: fisher-mask then makes a pass over the samples to forget alone."""
    audit: bool = True
    """Audit the new weights: a page, numbers, and the verdict in the receipt."""
    retrained: tuple[str, ...] = ()
    """Weights trained without all samples that were forgotten in this folder, for the audit, best five or more: without any it can
    convict, but not clear."""
    sign: str | None = None
    """A private Ed25519 key, PEM, to sign the receipt with."""
    mlflow: str | None = None
    """Log the request to this run of MLflow, by its id; "new" for a run of its own. Where: MLFLOW_TRACKING_URI."""
    dry_run: bool = False
    """Check everything, tell what would be done and what it would cost, and write nothing."""
    quiet: bool = False
    """No progress, the result alone."""


@dataclass(frozen=True)
class Undo:
    folder: str
    out: str


@dataclass(frozen=True)
class Verify:
    receipt: str
    weights: str | None
    task: str | None
    proof: str | None
    key: str | None


@dataclass(frozen=True)
class Prove:
    folder: str
    id: int
    out: str


def undo_command(folder: str, /, out: str) -> Undo:
    """Give back the weights as they were before all requests of a folder, bit for bit.

    Args:
        folder: The folder that `expunge unlearn` wrote.
        out: A new file, .safetensors.
    """
    return Undo(folder, out)


def verify_command(
    receipt: str, /, weights: str | None = None, task: str | None = None, proof: str | None = None, key: str | None = None
) -> Verify:
    """Check a receipt offline, and name whatever does not fit.

    Args:
        receipt: receipt.json in its folder, or in a copy of that, or this folder; openings.json may be left out.
        weights: Weights in use: are they those after?
        task: The task file: the edit is replayed, and the weights compared to the bit.
        proof: Of one id, as `expunge prove` writes it; it needs receipt.json and ledger.jsonl alone.
        key: A public Ed25519 key, PEM: the receipt must be signed by its owner.
    """
    return Verify(receipt, weights, task, proof, key)


def prove_command(folder: str, /, id: int, out: str) -> Prove:
    """Write a proof that one sample was forgotten, which shows no other.

    Args:
        folder: The folder that `expunge unlearn` wrote, with its openings.json.
        id: The sample's row in the training data; openings.json lists those of every request.
        out: A file, .json.
    """
    return Prove(folder, id, out)


def run_unlearn(options: Unlearn) -> None:
    check_folder("out", options.out)
    with uninterrupted():
        from expunge.audit.policy import load_policy
        from expunge.requests.estimate import estimate
        from expunge.requests.measuring import has_labels
        from expunge.requests.prepared import Request
        from expunge.requests.request import checked, fulfil
        from expunge.requests.settings import Settings
        from expunge.runtime.display import counted

    settings = Settings(options.method, options.set, options.batch_size, options.device, options.threads)
    request = Request(options.task, options.weights, options.forget, options.out, options.column, settings, options.sign, options.sums)
    say, progress = (_warn, False) if options.quiet else (_say, None)
    examine, log = _examine(options, progress), _log(options)
    if options.dry_run:
        prepared = checked(request)
        for line in estimate(prepared):
            print(on_one_line(line), flush=True)
        if examine is not None and not has_labels(prepared.task):
            print("audit: none can be made, it needs class logits and labels")
        elif examine is not None and len(prepared.rows) < (least := load_policy().samples):
            print(f"audit: none can be made, it needs at least {least} forget samples")
        elif examine is not None and (why := _unfit(prepared)) is not None:
            print(on_one_line(f"audit: none can be made: {why}"))
        elif examine is not None:
            beside = counted(len(options.retrained), "retrained network") if options.retrained else "no retrained network: it cannot clear"
            print(f"audit: beside {beside}; its time is not in these numbers")
        print(f"nothing was written; without --dry-run the result is in {shown_folder(options.out)}")
        return
    try:
        receipt = fulfil(request, say, progress, examine)
    except KeyboardInterrupt as stopped:
        print(
            on_one_line(str(stopped)) or f"Nothing was changed in {shown_folder(options.out)}; the same command goes on.", file=sys.stderr
        )
        raise
    print(f"request {receipt.number}: {receipt.forgotten} of {receipt.samples} samples forgotten, weights {receipt.weights_after[:16]}")
    audited = (receipt.measured.get("audit") or {}).get("verdict") is not None
    print(f"Weights, patch, {'audit, ' if audited else ''}receipt and ledger: {shown_folder(options.out)}")
    if log is not None:
        print(f"MLflow: run {log()}")


def _unfit(prepared: Prepared) -> ExpungeError | None:
    """Why the data of a request do not suit an audit."""
    from expunge.audit.checks import check_sets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which the audit gives
        try:
            check_sets({"forget": prepared.forget, "remain": prepared.remain, "test": prepared.task.test}, prepared.task.objective)
        except ExpungeError as error:
            return error
    return None


def _examine(options: Unlearn, progress: bool | None) -> Any:
    """The audit, with retrained networks that were read before anything is done."""
    if not options.audit:
        if options.retrained:
            raise InputError("retrained", "is for the audit, which --no-audit leaves out", options.retrained[0])
        return None
    from expunge.report.request_audit import auditing, of_task
    from expunge.requests.task import load_task
    from expunge.runtime.modes import device_named

    device = device_named(options.device)
    networks = [of_task(load_task(options.task), path, "retrained", device)[0] for path in options.retrained]
    return auditing(networks, progress)


def _log(options: Unlearn) -> Callable[[], str] | None:
    """Logs what is done; checked before it is."""
    if options.mlflow is None:
        return None
    from expunge.integrations.mlflow import check_run, log_request

    run = None if options.mlflow == "new" else options.mlflow
    check_run(run)
    return lambda: log_request(options.out, run)


def run_undo(options: Undo) -> None:
    check_file("out", options.out)
    with uninterrupted():
        from expunge.requests.undo import undo

    print(f"{options.out}: the weights before, {undo(options.folder, options.out)[:16]}")


def run_verify(options: Verify) -> int:
    """The exit code: 1 where anything does not fit."""
    with uninterrupted():
        from expunge.requests.verifying import verify

    wrong, whole = 0, True
    for finding in verify(options.receipt, options.weights, options.task, options.proof, options.key):
        wrong, whole = wrong + (not finding.fits), whole and finding.compared
        print(on_one_line(str(finding)), flush=True)
    fits = f"all {'' if whole else 'that was compared '}fits; the receipt says what it does not prove"
    print(f"{wrong} of these do not fit" if wrong else fits)
    return 1 if wrong else 0


def run_prove(options: Prove) -> None:
    check_file("out", options.out)
    with uninterrupted():
        from expunge.requests.verifying import prove

    print(f"{prove(options.folder, options.id, options.out)}: a proof for sample {options.id}")


def _warn(line: str) -> None:
    """Without progress too: that nothing was changed, or a goal not met, is part of the result."""
    if line.startswith("warning: "):
        _say(line)


def _say(line: str) -> None:
    print(on_one_line(line), file=sys.stderr, flush=True)
