"""Measure how often the audit is wrong: retrained networks that it accuses, cheats that it lets pass.

audit_errors.py                                                     the digits: about an hour on one core
audit_errors.py --setup cifar10 --device cuda --jobs 12             ResNet20s of CIFAR-10: seven minutes on an H200
audit_errors.py --setup cifar10-paper --device cuda --jobs 12       the six networks of results/models

Thresholds were chosen on networks of classes 3 and 0 of the digits; this reports on others, with other seeds. Networks, finished parts and
every verdict are kept in --cache, and the same command goes on where it stopped. Any number of processes may share the work (--jobs, or the
same command again elsewhere); whoever writes last has all rows.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from audit_cheats import MADE, Filter, Noisy, masked
from audit_setups import SETUPS, Setup
from torch import nn

import expunge
from expunge.audit import auditing
from expunge.audit.intervals import clopper_pearson
from expunge.audit.keeping import Folder
from expunge.errors import UncheckedWarning
from expunge.metrics import accuracy
from expunge.storage.locks import try_lock
from expunge.storage.tensors import weights_digest
from expunge.training.side_by_side import Training, train_together
from expunge.vision.scenarios import Scenario, category

RESULTS = Path(__file__).parent / "results"
WORSE = {"partly", "cosmetic", "damaged"}
EXPECTED: dict[str, set[str]] = {
    "retrained": {"not distinguished"},
    "classifier masked": {"cosmetic"},
    "logit filter": {"cosmetic"},
    "original itself": WORSE,
    "random weights": {"damaged"},
    "output noise": WORSE,
    "over-ascent": WORSE,
    "neighbours' leak": WORSE,
    "hidden in low bits": WORSE,
}
LONG = ("output noise", "over-ascent", "neighbours' leak", "hidden in low bits")  # to make, or to audit: of few originals


class Case(NamedTuple):
    """Which network is audited beside how many retrained ones; `number` is that of its original, or its own where it was retrained."""

    name: str
    label: int
    number: int
    references: int


class Networks:
    """Trained once, and kept."""

    def __init__(self, folder: Path, setup: Setup, device: str = "cpu") -> None:
        self.folder, self.setup, self.device = folder, setup, device
        self.data = setup.data(device)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.scenario = cache(self._scenario)
        self.sets_checked: set[int] = set()

    def _scenario(self, label: int) -> Scenario:
        return category(self.data.train, [label], test=self.data.test)

    def kept(self, name: str, make: Callable[[], nn.Module]) -> nn.Module:
        path = self.folder / f"{name}.pt"
        with alone(path.with_suffix(".lock")):  # no two processes make the same
            if path.exists():
                model = self.setup.build(0, self.device)
                model.load_state_dict(torch.load(path, weights_only=True, map_location=self.device))
            else:
                model = make()
                write_whole(path, lambda unfinished: torch.save(model.state_dict(), unfinished))
        return model.eval()

    def original(self, number: int) -> nn.Module:
        if self.setup.saved is not None:
            return self.setup.saved("original", number, self.device)
        return self.kept(f"original-{number}", lambda: self._trained([("original", -1, number)])[0])

    def retrained(self, label: int, number: int) -> nn.Module:
        if self.setup.saved is not None:
            return self.setup.saved("retrained", number, self.device)
        return self.kept(f"without{label}-{number}", lambda: self._trained([("retrained", label, number)])[0])

    def _trained(self, which: list[tuple[str, int, int]]) -> list[nn.Module]:
        trainings = []
        for kind, label, number in which:
            seed = self.setup.original_seed(number) if kind == "original" else self.setup.retrained_seed(label, number)
            data = self.data.train if kind == "original" else self.scenario(label).retrain
            trainings.append(Training(self.setup.build(seed, self.device), data, self.setup.tuning(seed, self.device)))
        train_together(trainings)
        return [training.model for training in trainings]

    def train(self, at_once: int) -> None:
        """Train all networks that are missing, so many side by side."""
        if self.setup.saved is not None:
            return
        numbers = range(self.setup.count)
        named = {f"original-{number}": ("original", -1, number) for number in numbers}
        named |= {f"without{label}-{number}": ("retrained", label, number) for label in self.setup.classes for number in numbers}
        missing = [name for name in named if not (self.folder / f"{name}.pt").exists()]
        for start in range(0, len(missing), at_once):
            group, began = missing[start : start + at_once], time.monotonic()
            models = self._trained([named[name] for name in group])
            seconds = time.monotonic() - began
            for name, model in zip(group, models, strict=True):
                self.kept(name, lambda model=model: model)
            kind, label, _ = named[group[-1]]
            known = accuracy(models[-1], self.data.train if kind == "original" else self.scenario(label).retrain)
            print(f"{len(group)} networks in {seconds:.1f} s; {group[-1]} knows {100 * known:.2f} % of its data", flush=True)

    def references(self, case: Case) -> list[nn.Module]:
        """Those that follow in its block, and never the network itself."""
        start = case.number // self.setup.block * self.setup.block
        size = min(self.setup.block, self.setup.count - start)
        numbers = [start + (case.number - start + step) % size for step in range(1, min(case.references, size - 1) + 1)]
        return [self.retrained(case.label, number) for number in numbers]

    def audited(self, case: Case) -> nn.Module:
        before, scenario = self.original(case.number), self.scenario(case.label)
        if case.name in MADE:
            name = f"{case.name.replace(' ', '-')}-{case.label}-{case.number}"
            return self.kept(name, lambda: MADE[case.name](before, scenario, case.label, self.setup.making))
        seed = 1000 * case.label + case.number
        torch.manual_seed(seed)
        others: dict[str, Callable[[], nn.Module]] = {
            "retrained": lambda: self.retrained(case.label, case.number),
            "classifier masked": lambda: self.kept(f"masked-{case.label}-{case.number}", lambda: masked(before, scenario)),
            "logit filter": lambda: Filter(before, case.label, infinite=case.number % 2 == 1).eval(),
            "original itself": lambda: before,
            "random weights": lambda: self.setup.build(seed, self.device).eval(),
            "output noise": lambda: Noisy(before, 4.0).eval(),
        }
        return others[case.name]()


def cases(labels: tuple[int, ...], count: int, few: int, references: tuple[int, ...] = (5, 1, 0, 11), block: int = 20) -> Iterator[Case]:
    """Some of each kind first, then all retrained networks, then all others: so that a table of what is finished is worth reading.

    Networks beyond the first block are retrained ones alone, beside references of five and one.
    """
    retrained, *cheats = EXPECTED
    cheap = [name for name in cheats if name not in LONG]
    some, many = tuple(number for number in references if number <= 5), tuple(number for number in references if number > 5)
    first = min(count, block)
    for names, numbers, beside in (
        ([retrained, *cheats], range(few), some),
        ([retrained], range(few), many),
        ([retrained], range(few, first), references),
        (cheap, range(few, first), some),
        (cheats, range(few), many),
        ([retrained], range(first, count), tuple(number for number in some if number)),
    ):
        for number, label, name, number_beside in itertools.product(numbers, labels, names, beside):
            yield Case(name, label, number, number_beside)


def asked_of(setup: Setup) -> list[Case]:
    return [*cases(setup.classes, setup.count, setup.few, setup.references, setup.block)]


def verdict(case: Case, networks: Networks, keep: Any = None) -> expunge.audit.Audit:
    scenario = networks.scenario(case.label)
    sets = scenario.forget, scenario.remain, networks.data.test
    before, after, retrained = networks.original(case.number), networks.audited(case), networks.references(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncheckedWarning)
        return expunge.audit(before, after, *sets, retrained, keep=keep or Shared(networks.folder / "parts"), progress=False)


class Shared(Folder):
    """Parts that several processes want: one computes, the others wait for it."""

    def __call__(self, key: str, kind: Any, compute: Callable[[], Any]) -> Any:
        with alone(self.folder / "locks" / hashlib.sha256(key.encode()).hexdigest()[:32]):
            return super().__call__(key, kind, compute)


class alone:  # noqa: N801, a context as those of contextlib
    """Wait until no other process has this lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        while True:
            self.lock = try_lock(self.path)
            if self.lock.__enter__():
                return
            self.lock.__exit__(None, None, None)
            time.sleep(0.05)

    def __exit__(self, *error: Any) -> None:
        self.lock.__exit__(None, None, None)


def write_whole(path: Path, save: Callable[[Path], Any]) -> None:
    save(unfinished := path.with_suffix(f".{os.getpid()}"))
    unfinished.replace(path)  # whole: another process may read it


def remember_readings(folder: Path) -> None:
    """Read each network once, and check each class's sets once, for all audits of this program: they are the same in all of them.

    The audit itself does both for every call.
    """
    read, check, checked = auditing.read, auditing.check_sets, set()

    def kept_read(model: nn.Module, sets: Any, objective: Any, batch_size: int, sample: int, argument: str, inside: bool = True) -> Any:
        if not inside:
            return read(model, sets, objective, batch_size, sample, argument, inside)
        about = {name: value for name, value in vars(model).items() if isinstance(value, int | float) and name != "training"}
        key = f"{weights_digest(model)} {type(model).__name__} {about} {len(sets['forget'])} {sets['forget'][0][1]} {batch_size} {sample}"
        path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.pt"
        with alone(path.with_suffix(".lock")):
            if path.exists():
                return torch.load(path, weights_only=False)
            reading = read(model, sets, objective, batch_size, sample, argument)
            parts = {name: replace(part, marks=None) for name, part in reading.parts.items()}  # fingerprints are of this process alone
            reading = replace(reading, parts=parts)
            write_whole(path, lambda unfinished: torch.save(reading, unfinished))
            return reading

    def check_once(sets: Any, objective: Any, progress: bool) -> None:
        key = int(sets["forget"][0][1])
        if key not in checked:
            check(sets, objective, progress)
            checked.add(key)

    folder.mkdir(parents=True, exist_ok=True)
    auditing.read, auditing.check_sets = kept_read, check_once  # type: ignore[assignment]
    auditing.data_digest = cache(auditing.data_digest)  # type: ignore[assignment]


@cache
def code() -> str:
    """A digest of the auditor: verdicts of other rules are not counted."""
    digest = hashlib.sha256(torch.__version__.encode())
    for room in ("audit", "metrics"):
        for path in sorted((Path(expunge.__file__).parent / room).glob("*.[pj]*")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def table(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Of every kind of network and number of references: how often it is called what it should be, with the exact interval."""
    summary = []
    for name in EXPECTED:
        for references in sorted({int(str(row["references"])) for row in rows}):
            words = [str(row["verdict"]) for row in rows if row["name"] == name and row["references"] == references]
            if not words:
                continue
            expected = {"cannot tell"} if name == "retrained" and not references else EXPECTED[name]  # nothing clears it then
            right = clopper_pearson(sum(word in expected for word in words), len(words))
            counts = {word: words.count(word) for word in sorted({*words}, key=lambda word: -words.count(word))}
            summary.append(
                {"name": name, "references": references, "n": len(words), "right": right.value, "low": right.low, "high": right.high}
                | {"verdicts": counts}
            )
    return summary


def markdown(summary: list[dict[str, object]]) -> str:
    """The table of docs/audit.md."""
    references = sorted({int(str(row["references"])) for row in summary}, reverse=True)
    lines = ["| network | " + " | ".join(f"{number} retrained" if number else "none" for number in references) + " |"]
    lines.append("|---" * (len(references) + 1) + "|")
    for name in EXPECTED:
        cells = {row["references"]: _cell(row) for row in summary if row["name"] == name}
        lines.append(f"| {name} | " + " | ".join(cells.get(number, "") for number in references) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, object]) -> str:
    count, right, low, high = (float(str(row[name])) for name in ("n", "right", "low", "high"))
    verdicts: dict[str, int] = row["verdicts"]  # type: ignore[assignment]
    words = ", ".join(f"{number} {word}" for word, number in verdicts.items())
    return f"{round(right * count)} of {count:.0f} ({100 * low:.0f}–{100 * high:.0f} %): {words}"


def collect(folder: Path, result: Path, setup: Setup) -> list[dict[str, object]]:
    """All verdicts that this auditor has given so far, in the order of `cases`, and the table of them, written into the result.

    Rows that the result has of an earlier auditor stay where this one has none, with its digest.
    """
    finished = {path.name: json.loads(path.read_text()) | {"auditor": code()} for path in (folder / code()).glob("*.json")}
    earlier = json.loads(result.read_text()) if result.exists() else {"rows": []}
    for row in earlier["rows"]:
        case = Case(row["name"], row["label"], row["number"], row["references"])
        finished.setdefault(_file(case), {"auditor": earlier.get("auditor")} | row)
    ordered = [_file(case) for case in asked_of(setup)]
    rows = [finished[name] for name in ordered if name in finished]
    auditors = sorted({str(row["auditor"]) for row in rows})
    conditions = {
        "torch": torch.__version__,
        "networks": setup.about,
        "classes": setup.classes,
        "auditors": auditors,
        "asked": len(ordered),
    }
    seeds = {"originals": setup.seeds[0], "retrained": setup.seeds[1], "references": "the numbers that follow"}
    content = conditions | {"seeds": seeds, "table": table(rows), "rows": rows}
    write_whole(result, lambda path: path.write_text(json.dumps(content, indent=1) + "\n"))
    return table(rows)


def _file(case: Case) -> str:
    return f"{'-'.join(map(str, case)).replace(' ', '-')}.json"


def audit_all(networks: Networks, asked: list[Case], rows: Path) -> None:
    """Judge what is not judged yet and no other process is at work on."""
    started = time.monotonic()
    for number, case in enumerate(asked, start=1):
        path = rows / code() / _file(case)
        with try_lock(rows / "locks" / path.name) as free:
            if not free or path.exists():
                continue
            began = time.monotonic()
            given = verdict(case, networks).verdict
            seconds = round(time.monotonic() - began, 2)
            row = case._asdict() | {"verdict": given.word, "sentence": given.sentence}
            write_whole(path, lambda unfinished, row=row: unfinished.write_text(json.dumps(row)))
            print(f"{time.monotonic() - started:6.0f} s, {number} of {len(asked)}:", *case, f"({seconds} s)", given.sentence, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", choices=SETUPS, default="digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache", type=Path, default=Path("runs/audit-errors"))
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the audits")
    parser.add_argument("--at-once", type=int, default=10, help="networks trained side by side")
    parser.add_argument("--epochs", type=int, help="of the networks")
    parser.add_argument("--count", type=int, help="how many networks of each kind")
    parser.add_argument("--size", type=int, help="the first images alone, to try the program")
    parser.add_argument("--classes", type=int, nargs="+", help="to forget, in place of the setup's")
    parser.add_argument("--only", choices=EXPECTED, help="one kind of network")
    parser.add_argument("--references", type=int, help="audits beside this number of retrained networks alone")
    parser.add_argument("--first", type=int, default=0, help="networks from this number on")
    parser.add_argument("--train", action="store_true", help="train the networks side by side, and audit nothing")
    parser.add_argument("--audit", action="store_true", help="audit, and write no table: what --jobs starts")
    parser.add_argument("--collect", action="store_true", help="write the table of what is finished, and audit nothing")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    setup = SETUPS[options.setup](**{name: value for name in ("epochs", "count", "size") if (value := getattr(options, name)) is not None})
    setup = setup if options.classes is None else replace(setup, classes=tuple(options.classes))
    folder = options.cache / f"{setup.name}-{hashlib.sha256(setup.about.encode()).hexdigest()[:8]}"
    rows = folder / "verdicts"
    (rows / code()).mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if not options.collect:
        asked = [case for case in asked_of(setup) if options.only in (None, case.name) and case.number >= options.first]
        asked = [case for case in asked if options.references in (None, case.references)]
        if options.jobs > 1:
            Networks(folder, setup, options.device).train(options.at_once)
            print(f"networks after {time.monotonic() - started:.0f} s", flush=True)
            command = [sys.executable, *(part for part in sys.argv if part != "--train"), "--jobs", "1", "--audit"]
            for process in [] if options.train else [subprocess.Popen(command) for _ in range(options.jobs)]:
                process.wait()
        else:
            networks = Networks(folder, setup, options.device)
            if options.train:
                networks.train(options.at_once)
                return
            remember_readings(folder / "readings")
            if options.audit:  # beside others: first what they all need, each of them another
                asked.sort(key=lambda case: (case.references, case.name != "original itself", case.name != "retrained"))
            audit_all(networks, asked, rows)
    if not options.audit:
        suffix = "" if setup.name == "digits" else f"_{setup.name.replace('-', '_')}"
        print(markdown(collect(rows, options.out or RESULTS / f"audit_errors{suffix}.json", setup)))


if __name__ == "__main__":
    main()
