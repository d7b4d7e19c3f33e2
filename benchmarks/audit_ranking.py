"""Rank methods by what 64 shadows tell of them (U-LiRA), and by measures that need far fewer networks: do the rankings agree?

audit_ranking.py --device cuda --stage train       64 shadows and 8 networks without any candidate, side by side
audit_ranking.py --device cuda --jobs 14           every shadow forgets by every method; of some the whole audit
audit_ranking.py --stage collect --out FOLDER      the answers and audits in two files; audit_rank_table.py makes the table of them

ResNet20s on 9,000 samples of CIFAR-10, 1,000 of them candidates, half of which each shadow is trained on and then forgets. Everything is
kept in --folder; the same command goes on where it stopped, and --seconds ends in time. Six minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from audit_errors import Shared, write_whole
from torch import nn
from torch.utils.data import Subset

import expunge
from expunge import Constant, OneCycle, Steps, Tuning, replay
from expunge.audit.membership import confidence
from expunge.audit.shadows import Shadows
from expunge.data.batches import measuring_size
from expunge.errors import UncheckedWarning
from expunge.methods import SSD, ByFisher, Finetune, FisherMask, NegGradPlus, RandomMask, ResetAndDistil, SalUn
from expunge.metrics import accuracy, logits
from expunge.storage.locks import try_lock
from expunge.storage.tensors import save_tensors
from expunge.training.distillation import Distillation
from expunge.training.side_by_side import Training, train_together
from expunge.vision import datasets, zoo

NEVER = 8  # networks trained without any candidate: the first half are retrained references, the others `out`
TARGETS = 6  # shadows of which the whole audit is made
NOTHING = "nothing done"


def methods(precision: Any) -> dict[str, Any]:
    """Methods that differ much, by settings written down before any of them was run here; first those that matter most."""
    short = Tuning(OneCycle(0.05, 3), precision=precision)
    again = Tuning(replay(Steps(), 3), precision=precision)
    taught = Tuning(OneCycle(0.1, 3), precision=precision, distillation=Distillation())
    return {
        "Finetune": Finetune(short),
        "ResetAndDistil": ResetAndDistil(0.35, taught),
        "FisherMask, as released": FisherMask.as_released(tuning=again),
        "SSD": SSD(),
        "SalUn": SalUn(tuning=Tuning(Constant(0.013, 2), batch_size=256, weight_decay=5e-4, precision=precision)),
        "RandomMask, 20 %": RandomMask.as_released(0.2, again),
        "NegGradPlus": NegGradPlus(0.95, Tuning(Constant(0.01, 2), momentum=0.0, weight_decay=0.0, precision=precision)),
        "ResetAndDistil, by Fisher": ResetAndDistil(ByFisher(), taught),
    }


@dataclass(frozen=True)
class Ranking:
    """The data, the shadows and the methods."""

    folder: Path
    device: str = "cpu"
    samples: int = 9000
    candidates: int = 1000
    epochs: int = 24
    shadows: int = 64
    at_once: int = 16

    @cached_property
    def precision(self) -> Any:
        return "bfloat16" if self.device == "cuda" else "float32"

    @cached_property
    def data(self) -> Any:
        images = datasets.load("cifar10", verify=False).train
        rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(18))[: self.samples]
        return images.take(rows).to(self.device)

    @cached_property
    def ensemble(self) -> Shadows:
        tuning = Tuning(OneCycle(0.1, self.epochs), seed=5000, precision=self.precision)
        rows = torch.arange(self.candidates)
        return Shadows(self.build, self.data, rows, tuning, self.folder / "shadows", self.shadows, at_once=self.at_once)

    @cached_property
    def remain(self) -> Subset[Any]:
        return Subset(self.data, range(self.candidates, self.samples))

    def build(self, seed: int) -> nn.Module:
        return zoo.build("resnet20", 10, 3, seed, torch.device(self.device))

    def never(self) -> list[nn.Module]:
        """Networks of the same recipe, trained on the remain data alone."""
        path, models = self.folder / "never.pt", [self.build(9000 + number) for number in range(NEVER)]
        if path.exists():
            for model, state in zip(models, torch.load(path, weights_only=True, map_location=self.device), strict=True):
                model.load_state_dict(state)
        else:
            tuning = self.ensemble.tuning
            train_together([Training(model, self.remain, replace(tuning, seed=9000 + n)) for n, model in enumerate(models)])
            write_whole(path, lambda unfinished: torch.save([model.state_dict() for model in models], unfinished))
        return [model.eval() for model in models]

    def train(self, seconds: float) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        known = accuracy(self.never()[0], self.remain)
        print(f"{time.monotonic() - started:6.1f} s: {NEVER} networks without candidates, the first knows {100 * known:.2f} %", flush=True)

        def noted(done: int) -> None:
            print(f"{time.monotonic() - started:6.1f} s: {done} of {self.shadows} shadows are trained", flush=True)

        self.ensemble.train(seconds, progress=False, noted=noted)

    def unlearn(self, name: str, method: Any, seconds: float) -> int:
        """Have all shadows forget that no other process has at work, and keep the weights of those whose audit is made."""
        ensemble, targets = self.ensemble, {}
        for number in range(min(TARGETS, self.shadows)):
            targets[tuple(ensemble.rows[ensemble.members[number]].tolist())] = number

        def forgetting(model: nn.Module, forget: Subset[Any], remain: Subset[Any]) -> nn.Module:
            new = expunge.unlearn(model, forget, remain, method, watch={}, progress=False).model
            if (number := targets.get(tuple(forget.indices))) is not None:
                write_whole(self._weights(name, number), lambda unfinished: torch.save(new.state_dict(), unfinished))
            return new

        return ensemble.unlearn(forgetting, about=repr(method), seconds=seconds, progress=False)

    def _weights(self, name: str, number: int) -> Path:
        return self.folder / f"{name.replace(' ', '-')}-{number}.pt"

    def audit(self, name: str, number: int) -> dict[str, Any]:
        """Every measure of one shadow that forgot, without shadows; its own members and the candidates that it never saw."""
        ensemble = self.ensemble
        before, after = self.build(0), self.build(0)
        before.load_state_dict(ensemble._weights(number))
        path = self._weights(name, number)
        after.load_state_dict(before.state_dict() if name == NOTHING else torch.load(path, weights_only=True, map_location=self.device))
        members, never = ensemble.members[number], self.never()
        forget, test = (Subset(self.data, ensemble.rows[rows].tolist()) for rows in (members, ~members))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncheckedWarning)
            report = expunge.audit(
                before.eval(), after.eval(), forget, self.remain, test, never[: NEVER // 2], never[NEVER // 2 :],
                keep=Shared(self.folder / "parts"), progress=False,
            )  # fmt: skip
        values = {
            measure.name: {"after": measure.after.value, "retrained": [value.value for value in measure.retrained]}
            for measure in report.measures
            if measure.after is not None
        }
        return {"method": name, "target": number, "verdict": report.verdict.word, "sentence": report.verdict.sentence, "values": values}

    def work(self, seconds: float) -> None:
        """What one of several processes does: forget by every method, then audit."""
        started, asked = time.monotonic(), methods(self.precision)

        def left() -> float:
            return seconds - (time.monotonic() - started)

        for name, method in asked.items():
            done = self.unlearn(name, method, left())
            print(f"{time.monotonic() - started:6.1f} s: {name}, {done} of {self.shadows}", flush=True)
        for number in range(min(TARGETS, self.shadows)):
            for name in (NOTHING, *asked):
                path = self.folder / "audits" / f"{name.replace(' ', '-')}-{number}.json"
                with try_lock(self.folder / "locks" / path.name) as free:
                    if not free or path.exists() or left() < 0 or (name != NOTHING and not self._weights(name, number).exists()):
                        continue
                    path.parent.mkdir(exist_ok=True)
                    row = self.audit(name, number)
                    write_whole(path, lambda unfinished, row=row: unfinished.write_text(json.dumps(row)))
                    print(f"{time.monotonic() - started:6.1f} s: audit of {name}, {number}: {row['verdict']}", flush=True)

    def collect(self, out: Path) -> None:
        """φ of every candidate by every network, float64, and the audits; of methods that all shadows have forgotten by."""
        ensemble, tensors = self.ensemble, {}
        about = {"recipe": repr(ensemble.tuning), "samples": str(self.samples), "torch": torch.__version__}
        asked = Subset(self.data, ensemble.rows.tolist())
        answers = [logits(model, asked, batch_size=measuring_size(model)) for model in self.never()]
        tensors["never"] = torch.stack([confidence(part.logits, part.targets) for part in answers])
        tensors["labels"], tensors["members"] = answers[0].targets, ensemble.members.to(torch.uint8)
        for name, method in methods(self.precision).items():
            if missing := ensemble.missing(self.unlearn, about=repr(method)):
                print(f"{name}: {len(missing)} shadows are missing, left out")
                continue
            signals = ensemble.signals(self.unlearn, about=repr(method))
            tensors[f"method {name}"], tensors["trained"] = signals.unlearned, signals.trained
            about[name] = repr(method)
        out.mkdir(parents=True, exist_ok=True)
        save_tensors(out / "ranking.safetensors", tensors, {"kind": "ranking", **about})
        audits = [json.loads(path.read_text()) for path in sorted((self.folder / "audits").glob("*.json"))]
        write_whole(out / "ranking-audits.json", lambda path: path.write_text(json.dumps(audits)))
        print(f"{sorted(tensors)}; {len(audits)} audits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("train", "work", "collect"), default="work")
    parser.add_argument("--folder", type=Path, default=Path("runs/audit-ranking"))
    parser.add_argument("--out", type=Path, default=Path("runs/audit-ranking"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    for name, kind in (("device", str), ("samples", int), ("candidates", int), ("epochs", int), ("shadows", int), ("at_once", int)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(Ranking, name))
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ("device", "samples", "candidates", "epochs", "shadows", "at_once")
    ranking = Ranking(options.folder, **{name: getattr(options, name) for name in names})
    stages: dict[str, Callable[[], None]] = {
        "train": lambda: ranking.train(options.seconds),
        "work": lambda: ranking.work(options.seconds),
        "collect": lambda: ranking.collect(options.out),
    }
    if options.jobs == 1:
        stages[options.stage]()
        return
    for process in [subprocess.Popen([sys.executable, *sys.argv, "--jobs", "1"]) for _ in range(options.jobs)]:
        process.wait()


if __name__ == "__main__":
    main()
