"""The jobs of the trials, in the order of their worth: python -m benchmarks.forgetting.plan FOLDER [wrong-labels]"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.forgetting.trial import network_name

LABELS = {1: 3, 2: 6, 3: 9}  # a class for every seed
EPOCHS, RELEARN = 5, 4
STAGE = {"by": "depth", "share": 0.35}
RESETS: dict[str, dict[str, Any]] = {
    "nothing": {"by": "none"},
    "classifier": {"by": "names", "names": ["classifier"]},
    "last block": {"by": "names", "names": ["classifier", "stage3.2"]},
    "last stage": STAGE,
    "last two stages": {"by": "names", "names": ["classifier", "stage3", "stage2"]},
    "all": {"by": "depth", "share": 1.0},
    "fisher kernels 2 %": {"by": "units", "unit": "kernel", "score": "difference", "ratio": 0.02},
    "fisher kernels 10 %": {"by": "units", "unit": "kernel", "score": "difference", "ratio": 0.1},
    "fisher kernels 30 %": {"by": "units", "unit": "kernel", "score": "difference", "ratio": 0.3},
    "fisher kernels 30 %, classifier out": {"by": "units", "unit": "kernel", "score": "difference", "ratio": 0.3, "head": False},
    "fisher ratio kernels 10 %": {"by": "units", "unit": "kernel", "score": "ratio", "ratio": 0.1},
    "fisher ratio kernels 30 %": {"by": "units", "unit": "kernel", "score": "ratio", "ratio": 0.3},
    "random kernels 10 %": {"by": "units", "unit": "kernel", "score": "random", "ratio": 0.1},
    "random kernels 30 %": {"by": "units", "unit": "kernel", "score": "random", "ratio": 0.3},
    "fisher channels 10 %": {"by": "units", "unit": "channel", "score": "difference", "ratio": 0.1},
    "fisher channels 30 %": {"by": "units", "unit": "channel", "score": "difference", "ratio": 0.3},
    "fisher ratio channels 30 %": {"by": "units", "unit": "channel", "score": "ratio", "ratio": 0.3},
    "random channels 30 %": {"by": "units", "unit": "channel", "score": "random", "ratio": 0.3},
    "fisher layers 70k": {"by": "layers", "score": "difference", "weights": 70000},
    "fisher layers 200k": {"by": "layers", "score": "difference", "weights": 200000},
    "fisher ratio layers 70k": {"by": "layers", "score": "ratio", "weights": 70000},
    "fisher ratio layers 200k": {"by": "layers", "score": "ratio", "weights": 200000},
    "fisher ratio kernels 50 % of the last stage": {
        "by": "units", "unit": "kernel", "score": "ratio", "ratio": 0.5, "inside": ["stage3", "classifier"],
    },
    "random kernels 50 % of the last stage": {
        "by": "units", "unit": "kernel", "score": "random", "ratio": 0.5, "inside": ["stage3", "classifier"],
    },
}  # fmt: skip


def networks() -> Iterator[dict[str, Any]]:
    for seed in LABELS:
        yield {"job": "network", "seed": seed}
    for seed, label in LABELS.items():
        yield {"job": "network", "seed": seed, "scenario": {"kind": "category", "label": label}, "retrained": True}


def sums() -> Iterator[dict[str, Any]]:
    for seed, label in LABELS.items():
        yield {"job": "fisher", "seed": seed, "scenario": {"kind": "category", "label": label}}


def of_class(group: str, variant: str, **settings: Any) -> Iterator[dict[str, Any]]:
    for seed, label in LABELS.items():
        base = {"job": "trial", "group": group, "variant": variant, "seed": seed, "scenario": {"kind": "category", "label": label}}
        told = {"method": "reset and distil", "reset": STAGE, "temperature": 4.0, "weight": 0.9, "epochs": EPOCHS}
        yield {**base, **told, "compare": True, "probe": True, "relearn": RELEARN, **settings}


def of_samples(variant: str, scenario: dict[str, Any], seed: int, **settings: Any) -> dict[str, Any]:
    told = {"method": "reset and distil", "reset": STAGE, "temperature": 4.0, "weight": 0.9, "epochs": EPOCHS}
    return {"job": "trial", "group": scenario["kind"], "variant": variant, "seed": seed, "scenario": scenario, **told, **settings}


def classes() -> Iterator[dict[str, Any]]:
    yield from of_class("reference", "retrained", method="retrained", relearn=10)
    yield from of_class("reference", "original", method="original", relearn=0)
    yield from of_class("reset", "last stage")
    yield from of_class("exclude", "T 4, weight 0.9", exclude="teacher")
    for name in ("nothing", "classifier", "last block", "last two stages"):
        yield from of_class("reset", name, reset=RESETS[name])
    for name in ("fisher ratio kernels 30 %", "random kernels 30 %", "fisher kernels 30 %", "fisher ratio kernels 10 %"):
        yield from of_class("reset", name, reset=RESETS[name])
    for epochs in (2, 3, 1):
        yield from of_class("epochs", f"{epochs} epochs", epochs=epochs)
    for temperature, weight in ((1.0, 0.9), (2.0, 0.9), (8.0, 0.9), (1.0, 0.5), (4.0, 0.5)):
        yield from of_class("distil", f"T {temperature:g}, weight {weight}", temperature=temperature, weight=weight)
    yield from of_class("distil", "cross-entropy alone", weight=0.0)
    for name in ("fisher ratio channels 30 %", "random channels 30 %", "fisher channels 30 %", "fisher ratio layers 200k"):
        yield from of_class("reset", name, reset=RESETS[name])
    for name in ("fisher layers 200k", "fisher layers 70k", "fisher kernels 30 %, classifier out", "all"):
        yield from of_class("reset", name, reset=RESETS[name])
    for temperature in (1.0, 2.0):
        yield from of_class("exclude", f"T {temperature:g}, weight 0.9", temperature=temperature, exclude="teacher")
    yield from of_class("reference", "fine-tuning, replayed", reset=RESETS["nothing"], weight=0.0, schedule="replayed")
    yield from samples()
    yield from of_class("epochs", "8 epochs", epochs=8)
    for name in ("fisher ratio kernels 50 % of the last stage", "random kernels 50 % of the last stage", "random kernels 10 %"):
        yield from of_class("reset", name, reset=RESETS[name])
    for rate in (0.05, 0.2):
        yield from of_class("rate", f"rate {rate}", rate=rate)
    yield from of_class("rate", "decay 5e-4", decay=5e-4)
    yield from of_class("values", "torch's own initialisation", values="torch")
    for name in ("fisher kernels 2 %", "fisher kernels 10 %", "fisher channels 10 %", "fisher ratio layers 70k"):
        yield from of_class("reset", name, reset=RESETS[name])
    for temperature, weight in ((2.0, 0.5), (8.0, 0.5)):
        yield from of_class("distil", f"T {temperature:g}, weight {weight}", temperature=temperature, weight=weight)
    yield from of_class("exclude", "T 4, weight 1.0", weight=1.0, exclude="teacher")


def added() -> Iterator[dict[str, Any]]:
    """What the first results asked for; run in the same session."""

    def units(unit: str, score: str) -> dict[str, Any]:
        return {"by": "units", "unit": unit, "score": score, "ratio": 0.6}

    for unit in ("kernel", "channel"):
        yield from of_class("reset", f"fisher ratio {unit}s 60 %", reset=units(unit, "ratio"))
        yield from of_class("reset", f"random {unit}s 60 %", reset=units(unit, "random"))
    yield from of_class("reset", "fisher ratio layers 120k", reset={"by": "layers", "score": "ratio", "weights": 120000})
    for epochs in (2, 3):
        name = "fisher ratio kernels 30 %"
        yield from of_class("epochs", f"{name}, {epochs} epochs", reset=RESETS[name], epochs=epochs)
    yield from of_class("epochs", "all, 10 epochs", reset=RESETS["all"], epochs=10)


def samples() -> Iterator[dict[str, Any]]:
    for seed in LABELS:
        subset = {"kind": "subset", "fraction": 2500 / 45000}
        yield of_samples("original", subset, seed, method="original")
        for name in ("nothing", "last stage", "last two stages"):
            yield of_samples(name, subset, seed, reset=RESETS[name])
        yield of_samples("last two stages, 10 epochs", subset, seed, reset=RESETS["last two stages"], epochs=10)


def wrong_labels() -> Iterator[dict[str, Any]]:
    """Wrong labels, each share with a network of its own: which weights, decay, rate, batches, temperature and weight, in ten epochs."""
    fractions, all_fresh = (0.5, 0.3), {"reset": RESETS["all"], "epochs": 10}
    for fraction in fractions:
        yield {"job": "network", "seed": 1, "scenario": {"kind": "mislabelled", "fraction": fraction}}
    variants: dict[str, dict[str, Any]] = {
        "all": {},
        "all, decay 5e-4": {"decay": 5e-4},
        "all, decay 1e-3": {"decay": 1e-3},
        "all, rate 0.2": {"rate": 0.2},
        "all, rate 0.2, decay 5e-4": {"rate": 0.2, "decay": 5e-4},
        "all, rate 0.05, decay 5e-4": {"rate": 0.05, "decay": 5e-4},
        "all, batches of 64": {"batch": 64},
        "all, batches of 64, decay 5e-4": {"batch": 64, "decay": 5e-4},
        "all, weight 0.5": {"weight": 0.5},
        "all, weight 0.5, decay 5e-4": {"weight": 0.5, "decay": 5e-4},
        "all, T 2": {"temperature": 2.0},
        "all, T 8": {"temperature": 8.0},
        "all, cross-entropy alone, decay 5e-4": {"weight": 0.0, "decay": 5e-4},
        "last two stages": {"reset": RESETS["last two stages"]},
        "last two stages, decay 5e-4": {"reset": RESETS["last two stages"], "decay": 5e-4},
        "last stage": {"reset": STAGE},
    }
    for fraction in fractions:
        wrong = {"kind": "mislabelled", "fraction": fraction}
        yield of_samples("original", wrong, 1, method="original")
        for name, changes in variants.items():
            yield of_samples(name, wrong, 1, **{**all_fresh, **changes})


def is_done(folder: Path, job: dict[str, Any]) -> bool:
    """Whether a result of this very job is there; of a network or of sums: whether it is."""
    if job["job"] == "network":
        return (folder / "networks" / f"{network_name(job.get('scenario'), job['seed'], job.get('retrained', False))}.pt").exists()
    if job["job"] == "fisher":
        return False
    file = folder / "results.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return any(job.items() <= line.items() for line in lines)


def write(folder: Path, jobs: Iterator[dict[str, Any]], first: int = 0) -> int:
    """Those that are not done already, by number."""
    (folder / "queue").mkdir(parents=True, exist_ok=True)
    number = first
    for job in jobs:
        if not is_done(folder, job):
            (folder / "queue" / f"{number:05d}.json").write_text(json.dumps(job))
            number += 1
    return number


def everything() -> Iterator[dict[str, Any]]:
    for part in (networks, sums, classes, added, wrong_labels):
        yield from part()


if __name__ == "__main__":
    jobs = wrong_labels if sys.argv[2:] == ["wrong-labels"] else everything
    print(write(Path(sys.argv[1]), jobs()), "jobs")
