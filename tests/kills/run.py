"""Kill every command again and again: python -m tests.kills.run [--kills 100] [--seed 0]

Each command is run once undisturbed. Then it is started, ended by SIGKILL at a moment drawn by the seed, and started again, until it has
been killed its share of times and ends by itself. Half of the moments are drawn over the whole time the command takes, half within a few
milliseconds after it has changed its folder for the first time, or the second, and so on. Whenever it ends by itself there must be the
same files as after the undisturbed run, no more and no less, with the same values in them; seconds may differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START = [sys.executable, "-m", "tests.kills.small"]
SHORT = ["--epochs", "1", "--tuning-epochs", "1", "--quiet"]
TRAINED = ["train", "--network", "resnet8", "--epochs", "3", "--batch-size", "256", "--seeds", "0,1", "--quiet"]
BENCH = ["bench", "run", "table1", "--methods", "finetune", "fisher-mask", "--device", "cpu"]
SECONDS = ("seconds", "work_seconds")
CHANGES = (0, 0, 0, 0, 1, 2, 4, 8)  # a lock is the first, what is saved at the end comes later
PATIENCE = 300.0  # seconds for processes whose parent was killed


@dataclass(frozen=True)
class Command:
    """Arguments in which OUT is a folder, and which of the others must have ended there before."""

    arguments: tuple[str, ...]
    after: str | None = None


COMMANDS = {
    "demo": Command(("demo", *SHORT, "--out", "OUT/demo")),
    "compare": Command(("compare", "--methods", "ssd", "finetune", "--models", *SHORT, "--out", "OUT/compare")),
    "train": Command((*TRAINED, "--out", "OUT/train")),
    "bench run": Command((*BENCH, "--jobs", "1", "--cells", "OUT/cells.json", "--out", "OUT/results")),
    "bench run, two processes": Command((*BENCH, "--jobs", "2", "--out", "OUT/results")),
    "report": Command(("report", "OUT/results/smoke", "-o", "OUT/page.html"), after="bench run"),
    "bench report": Command(("bench", "report", "--out", "OUT/results"), after="bench run"),
}


@dataclass
class Victim:
    """A command, the folder it works in, how often it has been killed there, and what it left whenever it ended before that."""

    name: str
    folder: Path
    kills: int = 0
    endings: list[dict[str, Any]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        arguments = [argument.replace("OUT", str(self.folder)) for argument in COMMANDS[self.name].arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        told = {"stdout": subprocess.DEVNULL, "stderr": (self.folder.parent / f"{self.folder.name}.log").open("ab")}
        runner = subprocess.Popen([*START, *arguments], **told, env=environment, cwd=ROOT, start_new_session=True)
        told["stderr"].close()
        self.groups.append(runner.pid)
        return runner

    def prepare(self) -> None:
        """An empty folder, or the results that the command needs."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if (before := COMMANDS[self.name].after) is None:
            self.folder.mkdir(parents=True)
            return
        source = Victim(before, self.folder.parent.parent / "before" / before)  # run once: seconds are in the page, too
        if not source.folder.exists():
            source.prepare()
            finish(source)
        shutil.copytree(source.folder, self.folder)

    def kill(self, moment: float, changes: int, whole_group: bool) -> None:
        """One start and one kill, after so many changes of the folder or, where that is 0, at the moment.

        Where the command ended before, that is noted, and it begins with an empty folder the next time.
        """
        runner = self.start()
        before, started = written(self.folder), time.monotonic()
        while runner.poll() is None:
            if changes and (now := written(self.folder)) != before:
                before, changes = now, changes - 1
                if not changes:
                    time.sleep(moment / 50)
                    break
            elif not changes and time.monotonic() - started >= moment:
                break
            time.sleep(0.001)
        if runner.poll() is None:
            (os.killpg if whole_group else os.kill)(runner.pid, signal.SIGKILL)
        if runner.wait() == -signal.SIGKILL:
            self.kills += 1
        elif runner.returncode == 0:
            self.wait_for_orphans()
            self.endings.append(values(self.folder))
            self.prepare()
        else:
            raise SystemExit(f"{self.name} ended with {runner.returncode}: {self.said()}")

    def said(self) -> str:
        """The end of its log, which goes with the folder."""
        return (self.folder.parent / f"{self.folder.name}.log").read_text(errors="replace")[-2000:]

    def wait_for_orphans(self) -> None:
        """Processes whose parent was killed end after what they have in hand."""
        deadline = time.monotonic() + PATIENCE
        for group in self.groups:
            while alive(group):
                if time.monotonic() > deadline:
                    raise SystemExit(f"{self.name} left processes that do not end, of group {group}: {self.folder}.log")
                time.sleep(0.02)
        self.groups.clear()


def finish(victim: Victim) -> float:
    """Run a command to its end; its seconds."""
    started = time.monotonic()
    runner = victim.start()
    if runner.wait() != 0:
        raise SystemExit(f"{victim.name} ended with {runner.returncode}: {victim.said()}")
    victim.wait_for_orphans()
    return time.monotonic() - started


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def written(folder: Path) -> list[tuple[str, int]]:
    """What a command has written so far: names and when they changed."""
    found = []
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                found.append((f"{parent}/{name}", os.stat(f"{parent}/{name}").st_mtime_ns))
            except FileNotFoundError:
                pass
    return sorted(found)


def values(folder: Path) -> dict[str, Any]:
    """Every file below the folder, hidden ones too, and what is in it: JSON without seconds and without the folder's own name."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            found[f"{name}/"] = None
        elif path.suffix == ".json":
            found[name] = timeless(json.loads(path.read_bytes()), str(folder))
        elif path.suffix == ".html":
            page = path.read_text().replace(str(folder), "OUT")
            found[name] = re.sub(r"[\d.]+", "0", page) if path.with_name("result.json").exists() else page  # with seconds of its own
        else:
            found[name] = path.read_bytes()
    return found


def timeless(content: Any, folder: str) -> Any:
    if isinstance(content, dict):
        return {name: timeless(value, folder) for name, value in content.items() if name not in SECONDS}
    if isinstance(content, list):
        return [timeless(value, folder) for value in content]
    return content.replace(folder, "OUT") if isinstance(content, str) else content


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    left = [f"left over: {name}" for name in found.keys() - expected.keys()]
    lost = [f"lost: {name}" for name in expected.keys() - found.keys()]
    return sorted([*left, *lost, *(f"other values: {name}" for name in expected.keys() & found.keys() if expected[name] != found[name])])


def tormented(name: str, kills: int, generator: random.Random, folder: Path, seconds: float) -> tuple[Victim, dict[str, Any]]:
    """A command that was killed so often and then ended; what it left."""
    victim = Victim(name, folder)
    victim.prepare()
    while victim.kills < kills:
        victim.kill(generator.uniform(0, seconds), generator.choice(CHANGES), generator.random() < 0.7)
    finish(victim)
    return victim, values(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill every command again and again, and look at what it leaves in the end.")
    parser.add_argument("--kills", type=int, default=100, help="over all commands")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", nargs="*", default=list(COMMANDS), choices=list(COMMANDS))
    options = parser.parse_args()
    generator, failed, total = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory(prefix="expunge-kills-") as temporary:
        for number, name in enumerate(options.commands):
            kills = options.kills // len(options.commands) + (number < options.kills % len(options.commands))
            whole = Victim(name, Path(temporary) / "whole" / str(number))
            whole.prepare()
            seconds = finish(whole)
            victim, found = tormented(name, kills, generator, Path(temporary) / "killed" / str(number), seconds)
            expected = values(whole.folder)
            wrong = [line for ending in (*victim.endings, found) for line in differences(expected, ending)]
            failed, total = failed + bool(wrong), total + victim.kills
            told = "the same files and values" if not wrong else "; ".join(wrong[:10])
            print(f"{name}: {victim.kills} kills ({len(victim.endings)} times it ended before), {told}", flush=True)
    print(f"{total} kills over {len(options.commands)} commands, {failed} of which left something else than an undisturbed run")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
