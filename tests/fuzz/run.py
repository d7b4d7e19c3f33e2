"""Read ten thousand changed files: each must be read or refused in one line, without a crash, a hang or a lot of memory.

    python -m tests.fuzz.run [--cases 10000] [--seed 0] [--only TARGET] [--case NUMBER] [--keep FOLDER]

Files are read in processes that are watched from here. A file that ends otherwise is kept, and `--case NUMBER` reads it again.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT = 20.0  # seconds a file
START = 300.0  # seconds until the first: torch has to be imported
MEMORY = 2**29  # bytes a file may make a process grow by
ADDRESSES = 6 * 2**30  # bytes of address space, above those at the start, after which nothing more is to be had
READ, REFUSED = "read", "refused"


def case_file(folder: Path, number: int) -> Path:
    """Where a process that works in this folder has a copy of the file it reads, and leaves it if that ends as it should not."""
    return folder.with_suffix(f".{number}")


# --- in a watched process


def schedule(targets: dict[str, Any], only: str | None) -> list[str]:
    names = [name for name, target in targets.items() for _ in range(target.weight)]
    return [name for name in names if only in (None, name)]


@dataclass
class Case:
    """The changed file with this number: always the same for a seed."""

    number: int
    seed: int
    only: str | None

    def read(self, folder: Path, held: dict[str, dict[str, bytes]]) -> dict[str, Any]:
        from tests.fuzz.targets import TARGETS

        names = schedule(TARGETS, self.only)
        name = names[self.number % len(names)]
        target, random = TARGETS[name], Random(f"{self.seed} {self.number}")
        place = folder / name
        if name not in held:
            held[name] = target.good()
            for path, content in held[name].items():
                self._write(place / path, content)
        file = random.choice(list(target.mutations))
        content = random.choice(target.mutations[file])(random, held[name][file])
        changed = place / target.name_of(file, content)
        self._write(changed, content)
        case_file(folder, self.number).write_bytes(content)
        say({"begin": self.number, "target": name})
        try:
            ending = outcome(lambda: target.read(place, random))
        finally:
            if changed != place / file:
                changed.unlink()
            self._write(place / file, held[name][file])
        if ending["outcome"] in (READ, REFUSED):
            case_file(folder, self.number).unlink()
        return {"end": self.number, "target": name, **ending}

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def outcome(read: Any) -> dict[str, Any]:
    """How a reading ended, and by how many bytes it made the process grow."""
    import traceback

    from expunge.errors import ExpungeError

    before = resident(reset=True)
    try:
        read()
        ending = {"outcome": READ}
    except (ExpungeError, OSError) as error:
        lines = len(str(error).splitlines())
        ending = {"outcome": REFUSED} if lines == 1 else {"outcome": f"an error of {lines} lines", "text": repr(error)}
    except Exception as error:
        ending = {"outcome": type(error).__name__, "text": traceback.format_exc()}
    grown = resident() - before
    return ending if grown < MEMORY else {"outcome": f"{grown / 2**20:.0f} MiB of memory", "text": str(ending)}


def resident(reset: bool = False) -> int:
    """The most memory since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 0


def work(options: argparse.Namespace) -> None:
    import resource
    import warnings

    import torch

    from tests.fuzz import targets  # noqa: F401

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ADDRESSES,) * 2)
    held: dict[str, dict[str, bytes]] = {}
    for number in range(options.first, options.cases, options.step):
        say(Case(number, options.seed, options.only).read(Path(options.folder), held))


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


# --- in the process that watches


@dataclass
class Watched:
    """A process that reads every `step`-th file from `next` on; started again after one that ended or stopped it."""

    options: argparse.Namespace
    next: int
    step: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    heard: bytes = b""
    begun: dict[str, Any] = field(default_factory=dict)
    deadline: float = 0.0

    def start(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        command = [sys.executable, "-m", "tests.fuzz.run", "--worker", "--folder", str(self.folder), "--first", str(self.next)]
        command += ["--step", str(self.step), "--cases", str(self.options.cases), "--seed", str(self.options.seed)]
        command += [] if self.options.only is None else ["--only", self.options.only]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        with self.folder.with_suffix(".stderr").open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, env=environment)
        self.heard, self.begun, self.deadline = b"", {}, time.monotonic() + START

    def messages(self) -> list[dict[str, Any]] | None:
        """What it said since; None where it will say nothing more."""
        assert self.process is not None and self.process.stdout is not None
        heard = os.read(self.process.stdout.fileno(), 2**16)
        *lines, self.heard = (self.heard + heard).split(b"\n")
        return [json.loads(line) for line in lines] if heard else None

    def stop(self) -> int:
        assert self.process is not None
        self.process.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return self.process.wait()

    @property
    def done(self) -> bool:
        return self.next >= self.options.cases

    @property
    def errors(self) -> str:
        return self.folder.with_suffix(".stderr").read_text()[-2000:]


@dataclass
class Report:
    """How often which kind of file ended how, and the files that ended as none should."""

    keep: Path
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def note(self, message: dict[str, Any], file: Path) -> None:
        ending = message["outcome"] if message["outcome"] in (READ, REFUSED) else "FAILED"
        self.counts[message["target"], ending] += 1
        if ending == "FAILED":
            kept = self.keep / f"{message['end']}-{message['target']}"
            self.keep.mkdir(parents=True, exist_ok=True)
            shutil.move(file, kept)
            self.failures.append(f"{kept}: {message['outcome']}\n{message.get('text', '')}")

    def print(self, seconds: float) -> None:
        for target in dict.fromkeys(target for target, _ in self.counts):
            parts = {ending: self.counts[target, ending] for ending in (READ, REFUSED, "FAILED")}
            print(f"{target:18} " + ", ".join(f"{count} {ending}" for ending, count in parts.items()))
        for failure in self.failures:
            print(f"\n{failure}")
        print(f"{self.counts.total()} files in {seconds:.0f} s, {len(self.failures)} failures")


def watch(workers: list[Watched], report: Report) -> None:
    try:
        _watch(workers, report)
    finally:
        for worker in workers:
            if worker.process is not None:
                worker.stop()


def _watch(workers: list[Watched], report: Report) -> None:
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            worker.start()
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[union-attr]
        while selector.get_map():
            ready = {key.data.folder for key, _ in selector.select(0.5)}
            for key in list(selector.get_map().values()):
                worker = key.data
                if worker.folder in ready and _listen(worker, report):
                    continue
                if worker.folder not in ready and time.monotonic() < worker.deadline:
                    continue
                selector.unregister(key.fileobj)
                if _ended(worker, report, hung=worker.folder not in ready):
                    worker.start()
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)


def _listen(worker: Watched, report: Report) -> bool:
    """Take what it says; whether more may come."""
    messages = worker.messages()
    for message in messages or ():
        worker.deadline = time.monotonic() + TIMEOUT
        if "begin" in message:
            worker.begun = message
        else:
            report.note(message, case_file(worker.folder, message["end"]))
            worker.next, worker.begun = message["end"] + worker.step, {}
    return messages is not None


def _ended(worker: Watched, report: Report, hung: bool) -> bool:
    """A process that said nothing more: it is done, or a file has ended or stopped it; whether to start another."""
    code = worker.stop()
    if worker.begun:
        how = f"nothing within {TIMEOUT:.0f} s" if hung else f"the process ended with {code}"
        message = {"end": worker.begun["begin"], "target": worker.begun.get("target"), "outcome": how, "text": worker.errors}
        report.note(message, case_file(worker.folder, message["end"]))
        worker.next = worker.begun["begin"] + worker.step
    elif code not in (0, -9) or (hung and not worker.done):
        raise RuntimeError(f"a process could not read anything: {code}\n{worker.errors}")
    return not worker.done


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one kind of file")
    parser.add_argument("--case", type=int, help="one file alone, by its number")
    parser.add_argument("--keep", default="fuzz-failures", help="folder for the files that ended as none should")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def workers_of(options: argparse.Namespace, folder: Path) -> Iterator[Watched]:
    if options.case is not None:
        options.cases = options.case + 1
        yield Watched(options, options.case, 1, folder / "0")
        return
    for first in range(min(options.jobs, options.cases)):
        yield Watched(options, first, options.jobs, folder / str(first))


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    if options.worker:
        work(options)
        return 0
    started, report = time.perf_counter(), Report(Path(options.keep))
    with TemporaryDirectory(prefix="expunge-fuzz-") as folder:
        watch(list(workers_of(options, Path(folder))), report)
    report.print(time.perf_counter() - started)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
