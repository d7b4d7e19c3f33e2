"""Compute the Fisher diagonal of random models: each must equal a loop over single samples or be refused in one line, and none may crash.

    python -m tests.fuzz.modules [--first 0] [--count 10000] [--seconds 600] [--seed 0] [--number NUMBER] [--keep FOLDER]
        [--queued]

A run that was cut goes on with `--first`. Models run in processes that are watched from here. One that ends otherwise is made smaller and
kept as a Python file of its own.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz.run import ROOT, START, Watched, case_file, say, watch

ENGINE = "engine"  # what runs; before it, torch alone
SIMILAR = 3  # failures that seem to have one cause are made smaller
SHRINKING = 8.0  # seconds to make one failure smaller; less than a watched process may be silent for


# --- in a watched process


def work(options: argparse.Namespace) -> None:
    import torch

    from tests.fuzz.modules import queued, trial
    from tests.fuzz.modules.grammar import compose

    torch.set_num_threads(1)
    if options.queued:
        queued.confirm_as_on_cuda()
    seen: Counter[str] = Counter()
    for number in range(options.first, options.count, options.step):
        if time.time() > options.until:
            return
        program, file = compose(options.seed, number), case_file(Path(options.folder), number)
        file.write_text(trial.kept(program, trial.Outcome("the process ended"), options.queued))
        say({"begin": number})
        outcome = trial.run(program.source(), on_engine=partial(say, {"begin": number, "target": ENGINE}))
        if outcome.failed:
            likely = cause(outcome.word, outcome.text, program.names())
            seen[likely] += 1
            if seen[likely] <= SIMILAR or likely == outcome.word:
                program, outcome = trial.minimised(program, outcome, SHRINKING)
            file.write_text(trial.kept(program, outcome, options.queued))
        else:
            file.unlink()
        say({"end": number, "outcome": outcome.word, "text": outcome.text, "failed": outcome.failed, "parts": program.names()})


def cause(word: str, text: str, parts: list[str]) -> str:
    """What failures have in common that are likely one: the coupling, or the message without its numbers; else the word alone."""
    if coupled := [part for part in parts if "COUPLED" in part]:
        return f"{word}: {', '.join(coupled)}"
    return word if word == "wrong" else f"{word}: {re.sub(r'[0-9]+', '', text.strip().splitlines()[-1])[:120]}"


# --- in the process that watches


class Worker(Watched):
    def start(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.fuzz.modules", "--worker", "--folder", str(self.folder), "--first", str(self.next)]
        command += ["--step", str(self.step), "--count", str(self.options.count), "--seed", str(self.options.seed)]
        command += ["--until", str(self.options.until), *(["--queued"] if self.options.queued else [])]
        with self.folder.with_suffix(".stderr").open("w") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        self.heard, self.begun, self.deadline = b"", {}, time.monotonic() + START

    @property
    def done(self) -> bool:
        return self.next >= self.options.count or time.time() > self.options.until


@dataclass
class Report:
    """How often which ending was, why models were refused, and those that ended as none should, by what was left of them."""

    keep: Path
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[tuple[str, bool]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)

    def note(self, message: dict[str, Any], file: Path) -> None:
        if "failed" not in message and message["target"] != ENGINE:  # torch 2.13 has such faults
            message = {**message, "outcome": f"torch alone: {message['outcome']}", "failed": False}
            file.unlink()
        self.counts[message["outcome"]] += 1
        if message["outcome"] == "refused":
            self.refusals[message["text"], any("COUPLED" in part for part in message["parts"])] += 1
        if message.get("failed", True):
            self.keep.mkdir(parents=True, exist_ok=True)
            path = self.keep / f"model-{self.seed}-{message['end']}.py"
            path.write_text(file.read_text())
            file.unlink()
            parts = message.get("parts", [])
            self.causes[cause(message["outcome"], message["text"] or "?", parts)] += 1
            self.failures.append(f"{path}: {message['outcome']} [{', '.join(parts)}]\n    {message['text'][-600:]}")

    def print(self, seconds: float) -> None:
        for (text, coupled), count in self.refusals.most_common():
            print(f"{count:5} refused{'' if coupled else ' though independent'}: {text}")
        for failure in self.failures:
            print(f"\n{failure}")
        for text, count in self.causes.most_common():
            print(f"{count:5} failures: {text}")
        total = self.counts.total()
        print(f"{total} models in {seconds:.0f} s: " + ", ".join(f"{count} {word}" for word, count in self.counts.most_common()))
        print(f"{len(self.failures)} failures")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.modules", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after the model that is running then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="one model alone")
    parser.add_argument("--queued", action="store_true", help="confirm as on a GPU, where fewer samples are compared")
    parser.add_argument("--keep", default="fuzz-failures", help="folder for the models that ended as none should")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help="number of the first model; --count is that of the one after the last")
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    if options.worker:
        work(options)
        return 0
    options.until = time.time() + options.seconds
    first, step = options.first, options.jobs
    if options.number is not None:
        first, step, options.count, options.jobs = options.number, 1, options.number + 1, 1
    started, report = time.perf_counter(), Report(Path(options.keep), options.seed)
    with TemporaryDirectory(prefix="expunge-fuzz-") as folder:
        workers = [Worker(options, first + job, step, Path(folder) / str(job)) for job in range(options.jobs)]
        with suppress(KeyboardInterrupt):  # what was found so far is told
            watch(workers, report)
    report.print(time.perf_counter() - started)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
