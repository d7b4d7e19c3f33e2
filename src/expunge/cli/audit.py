"""Run `expunge audit`: does a saved network still know what it was to forget?"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from expunge.cli import audit_shadows
from expunge.errors import ExpungeError, InputError, UncheckedWarning
from expunge.runtime.exits import on_one_line, uninterrupted
from expunge.storage.files import check_folder, shown_folder

PARTS = "parts"  # in the folder: what is finished, by digest
LOCK = "audit"


@dataclass(frozen=True)
class Audit:
    """Say whether a network still knows what it was to forget, how sure that is, and what cannot be said. The same command resumes after a
    stop. Networks are files of `expunge train` or of `save_network`; with a task file, weights of the model it has."""

    before: str
    """The original network, a safetensors file."""
    after: str
    """The network that was to forget."""
    forget: str
    """What: label=3, label=3,5, or rows=FILE with the numbers of training samples, one per line; with a task as in `expunge unlearn`."""
    task: str | None = None
    """Your Python file with model(), train(), test(), instead of a dataset."""
    retrained: tuple[str, ...] = ()
    """Networks trained without the forget data, best five or more."""
    never_trained: tuple[str, ...] = ()
    """Networks never trained on the forget data, one to four, for attacks on single samples; retrained ones may be named again."""
    dataset: str = "digits"
    """digits, cifar10, cifar100, mnist, fashion-mnist, tiny-imagenet, or a folder of class folders of pictures."""
    size: int | None = None
    """Resize pictures to squares of so many pixels: tiny-imagenet, or a folder."""
    data: str | None = None
    """Folder of the datasets; without it EXPUNGE_DATA, else ./data."""
    out: str = "runs/audit"
    """Folder for the report: result.json, model-card.md, audit.html; finished parts are kept in its parts/."""
    policy: str | None = None
    """File of JSON with the thresholds of the verdict, in place of the package's."""
    done: str = ""
    """In words, for the report: how the network was made to forget."""
    relearn: bool = True
    """Let copies re-learn, which takes longest."""
    device: str | None = None
    """cuda if there is one, else cpu."""
    shadows: int = 0
    """Attack by so many shadows, best 64 or more: networks like the original, each trained on half of the forget samples and of as many
    test samples, then made to forget them; U-LiRA, RULI, KLOM and the ε score. A task must have recipe()."""
    method: str | None = None
    """How the audited network was made to forget, and each shadow will be: such as fisher-mask, or path/to/file.py:Class."""
    set: tuple[str, ...] = ()
    """Settings of the method, such as ratio=0.05."""
    request: str | None = None
    """In place of both: a folder that `expunge unlearn` made, which has them."""
    seconds: float | None = None
    """Begin no shadow that may not end within so many seconds; the same command goes on. It exits with 1 until all are done."""
    jobs: int | None = None
    """Processes that share the shadows; without it one on a GPU, one per core on a CPU."""
    at_once: int | None = None
    """Shadows that one process trains side by side; without it 8 on a GPU, 1 on a CPU."""
    on: Literal["processes", "ray"] = "processes"
    """Shadows in processes of this machine, or as tasks of a Ray cluster (RAY_ADDRESS, else this machine), which sees the folders."""
    shadow_folder: str | None = None
    """For the shadows, which serve audits of other methods too; without it shadows/ in OUT."""
    dry_run: bool = False
    """Check everything, tell how many shadows are to be trained, and write nothing."""
    quiet: bool = False
    """No progress, the result alone."""


def run_audit(options: Audit) -> int:
    with uninterrupted():
        from expunge.audit.auditing import audit
        from expunge.audit.keeping import Folder
        from expunge.audit.policy import load_policy
        from expunge.audit.settings import Settings
        from expunge.data.objective import Objective
        from expunge.report.audit_files import check_owner, write_audit
        from expunge.report.request_audit import of_task
        from expunge.requests.task import load_task
        from expunge.runtime.display import counted
        from expunge.runtime.modes import device_named, one_thread
        from expunge.storage.locks import lock_all
        from expunge.vision.zoo import load_network

    audit_shadows.check_options(options)
    check_folder("out", options.out)
    check_owner(options.out)
    policy = load_policy() if options.policy is None else load_policy(options.policy)
    device = device_named(options.device)
    task = None if options.task is None else load_task(options.task)

    receipts: dict[str, str] = {}  # digests of weights as receipts have them

    def networks(argument: str, *paths: str) -> list[Any]:
        if task is not None:
            loaded = [of_task(task, path, argument, device) for path in paths]
            receipts[argument] = loaded[-1][1] if loaded else ""
            return [network for network, _ in loaded]
        return [_saved(argument, path, lambda path=path: load_network(path, device)) for path in paths]

    before, after = networks("before", options.before)[0], networks("after", options.after)[0]
    retrained, out = networks("retrained", *options.retrained), networks("never_trained", *options.never_trained)
    forget, remain, test, rows = _sets(options, device) if task is None else _sets_of_task(options, task)
    plan = audit_shadows.planned(options, rows, before, device.type, policy) if options.shadows else None
    if options.dry_run:
        print(f"audit of {len(rows)} samples beside {counted(len(retrained), 'retrained network')}")
        if plan is not None:
            print(on_one_line(plan[1].cost()))
        print(f"nothing was written; without --dry-run the result is in {shown_folder(options.out)}")
        return 0
    settings = Settings() if options.relearn else replace(Settings(), rounds=0)
    # For pictures as small as the digits threads only wait for each other.
    threads = one_thread() if options.dataset == "digits" and task is None else nullcontext()
    with _nothing_left(Path(options.out)), lock_all("out", options.out, [LOCK]), threads, warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always", UncheckedWarning)
        keep, shown, shadows, done = Folder(Path(options.out) / PARTS), not options.quiet, None, options.done
        if plan is not None:
            work, prepared = plan
            if not audit_shadows.trained(options, work, prepared, device.type):
                return 1
            shadows = prepared.ensemble.evidence(prepared.method, prepared.forgotten)
            done = done or (f"expunge unlearn, {prepared.method!r}" if options.request is not None else "")
        found = audit(
            before,
            after,
            forget,
            remain,
            test,
            retrained,
            out,
            shadows=shadows,
            objective=Objective() if task is None else task.objective,
            settings=settings,
            policy=policy,
            done=done,
            keep=keep,
            progress=shown,
        )
        if task is not None:
            found = replace(found, weights={**found.weights, "before": receipts["before"], "after": receipts["after"]})
        write_audit(options.out, found, asdict(options))
    for warning in noted:
        print(f"expunge: {warning.message}", file=sys.stderr, flush=True)
    print(found)
    print(f"Report, page and a section for a model card: {shown_folder(options.out)}")
    return 0


def _sets(options: Audit, device: Any) -> tuple[Any, Any, Any, list[int]]:
    """Forget, remain and test data of a built-in dataset, and the rows to forget."""
    import torch

    from expunge.vision import datasets
    from expunge.vision.scenarios import category, subset

    images = _named("dataset", lambda: datasets.load(options.dataset, options.data, size=options.size).to(device))
    kind, _, value = options.forget.partition("=")
    if kind == "label":
        labels = _numbers(value.split(","))
        scenario = _named("forget", lambda: category(images.train, labels, test=images.test))
        rows = torch.isin(images.train.labels.cpu(), torch.tensor(labels)).nonzero().flatten().tolist()
    elif kind == "rows":
        rows = _numbers(Path(value).read_text().split())
        scenario = _named("forget", lambda: subset(images.train, rows, test=images.test))
    else:
        raise InputError("forget", "must be label=NUMBER (several with commas) or rows=FILE", options.forget)
    return scenario.forget, scenario.remain, images.test, rows


def _sets_of_task(options: Audit, task: Any) -> tuple[Any, Any, Any, list[int]]:
    import torch

    from expunge.requests.forget_sets import forget_rows

    chosen = list(forget_rows(options.forget, task))
    rows = torch.zeros(task.rows.samples, dtype=torch.bool)
    rows[chosen] = True
    return task.rows.at(rows.nonzero().flatten(), True), task.rows.at((~rows).nonzero().flatten(), False), task.test, chosen


def _named(argument: str, make: Any) -> Any:
    """An error about an argument names the option it came from."""
    try:
        return make()
    except InputError as error:
        raise InputError(argument, error.rule, error.found) from error


def _saved(argument: str, path: str, load: Any) -> Any:
    """A network of a file, which may be one that only a task can read."""
    from expunge.requests.weights import PICKLES

    try:
        return _named(argument, load)
    except InputError as error:
        if error.found != "no kind" and Path(path).suffix not in PICKLES:
            raise
        rule = "must be a file of `expunge train` or `save_network`; for weights of a model of your own give --task too"
        raise InputError(argument, rule, path) from error


@contextmanager
def _nothing_left(folder: Path) -> Iterator[None]:
    """After a mistake a new folder is gone again, unless it has finished parts."""
    was_there = folder.exists()
    try:
        yield
    except ExpungeError:
        if not was_there:
            with suppress(OSError):
                (folder / "locks" / f"{LOCK}.lock").unlink()
                (folder / "locks").rmdir()
                folder.rmdir()
        raise


def _numbers(words: list[str]) -> list[int]:
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise InputError("forget", "must be whole numbers", " ".join(words)[:80]) from error
