"""Results as the benchmark writes them, made up: two settings, methods the page knows and one it does not, two seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from expunge.experiments.cells import Cell
from expunge.storage.codec import decode

METHODS = ("retrain", "finetune", "fisher-mask", "random-mask", "mine<b>&co")


def accuracies(remain: float, forget: float, **more: Any) -> dict[str, Any]:
    return {"remain": remain, "forget": forget, "unlearn_score": remain / (1 + forget), **more}


def result(
    method: str = "fisher-mask", seed: int = 0, experiments: tuple[str, ...] = ("table1", "table2"), **changes: Any
) -> dict[str, Any]:
    """One cell's file; `changes` are put over it, those with cell_ in front over its cell."""
    place = METHODS.index(method) if method in METHODS else 2
    steps = [
        accuracies(0.80 + 0.01 * epoch - 0.002 * seed - 0.003 * place, max(0.0, 0.6 - 0.1 * epoch - 0.2 * place), seconds=1.0, epoch=epoch)
        for epoch in range(6)
    ]
    cell = {
        "dataset": "cifar10",
        "network": "resnet20",
        "scenario": {"kind": "category", "label": 0},
        "method": {"name": method, "reading": "text", **({"ratio": 0.02} if "mask" in method else {})},
        "seed": seed,
        "recipe": {"epochs": 160, "rate": 0.1, "made_for": "".join(experiments)},  # a cell of its own for each
        "tuning": {"schedule": "replayed", "epochs": 5},
        "validation": 0.0,
        "precision": "float32",
        "relearn": None,
    }
    cell |= {name.removeprefix("cell_"): value for name, value in changes.items() if name.startswith("cell_")}
    told = {
        "cell": cell,
        "digest": decode(Cell, cell).digest,
        "experiments": list(experiments),
        "seconds": 12.5,
        "work_seconds": 3.25,
        "versions": {"expunge": "0.1.0", "torch": "2.13.0"},
        "hardware": {"device": "cpu"},
        "weights": {"before": f"b{seed}", "after": f"a{method}{seed}", "retrained": f"r{seed}"},
        "before": accuracies(0.85, 0.876, attack=0.9),
        "retrained": accuracies(0.855, 0.0, attack=0.1),
        "masked": accuracies(0.79, 0.3) if "mask" in method else None,
        "history": steps,
        "best": {"on": "test", "epoch": 5, **{key: steps[5][key] for key in ("remain", "forget", "unlearn_score")}},
        "last": steps[5],
        "stability": accuracies(0.02, 0.01 * place),
        "relearn": {"epochs": None if method == "retrain" else 2 + place, "limit": 20, "goal": 0.1, "losses": [2.0, 0.1]},
        "agreement": 0.9,
        "divergence": 0.2,
        "agreement_by": {"remain": 0.91, "forget": 0.8},
        "divergence_by": {"remain": 0.1, "forget": 0.3},
        "attack": 0.2,
        "class_accuracies": {
            part: [0.0 if part != "before" and index == 0 else 0.85 for index in range(10)] for part in ("before", "after", "retrained")
        },
        "predicted": {
            part: [1.0 if part == "before" and index == 0 else 0.1 for index in range(10)] for part in ("before", "after", "retrained")
        },
        "masked_share": {"classifier.weight": 0.2, "conv.weight": 0.01} if "mask" in method else None,
        "error": None,
    }
    return told | {name: value for name, value in changes.items() if not name.startswith("cell_")}


ONE_CYCLE = {"schedule": "one-cycle", "epochs": 5}
DISTILLED = {"schedule": "replayed", "epochs": 5, "distillation": {"temperature": 4.0, "weight": 0.9}}
FORGETTING: dict[str, tuple[dict[str, Any], dict[str, Any] | None, int, float]] = {  # method, tuning, epochs, back after one epoch
    "original": ({"name": "original"}, None, 0, 1.0),
    "retrain": ({"name": "retrain"}, None, 160, 0.1),
    "classifier": ({"name": "mask-classifier"}, None, 0, 0.9),
    "masked": ({"name": "fisher-mask", "ratio": 0.02}, {"schedule": "replayed", "epochs": 5}, 5, 0.8),
    "distilled": ({"name": "fisher-mask", "ratio": 0.02}, DISTILLED, 5, 0.6),
    "by depth": ({"name": "reset-and-distil", "reset": 0.35}, ONE_CYCLE, 5, 0.2),
    "by Fisher": ({"name": "reset-and-distil", "reset": {"ratio": 0.6}}, ONE_CYCLE, 5, 0.3),
}


def evidence(back: float) -> dict[str, Any]:
    unseen = [0.0, back, *(1 - (1 - back) / 2**epoch for epoch in range(1, 5))]
    probes = {"stage1": 0.7, "stage2": 0.5 + back / 4}
    losses = [5 * (1 - back) / 2**epoch for epoch in range(6)]
    return {"loss_attack": 0.5, "probes": probes, "relearn_losses": losses, "relearn_accuracies": unseen, "relearn_unseen": unseen}


def forgetting(seeds: tuple[int, ...] = (0, 1)) -> list[dict[str, Any]]:
    """A class with evidence, samples with the loss attack alone, poison without either; the retrained network of the class also without."""
    asked, samples, poison = {"rate": 0.01, "epochs": 5}, {"kind": "subset", "fraction": 0.05}, {"kind": "poisoned", "n": 200}
    made = []
    for seed in seeds:
        for key, (method, tuning, epochs, back) in FORGETTING.items():
            parts: dict[str, Any] = {
                "cell_method": {"reading": "text", **method},
                "cell_tuning": tuning,
                "last": accuracies(0.86, 0.02, epoch=epochs, seconds=1.0, attack=0.03),
                "relearn": None,
            }
            measured = parts | {"cell_evidence": asked, "evidence": evidence(back + 0.05 * seed * (back < 0.9))}
            made.append(result(method["name"], seed, ("forget",), **measured))
            made.append(
                result(method["name"], seed, ("forget",), **measured | {"cell_scenario": samples, "evidence": {"loss_attack": 0.5}})
            )
            if key != "original":
                made.append(result(method["name"], seed, ("forget",), **parts, cell_scenario=poison))
        made.append(result("retrain", seed, ("forget",), cell_tuning=None, relearn=None))
    return made


def many() -> list[dict[str, Any]]:
    """Something for every part of the page."""
    made = [result(method, seed) for method in METHODS for seed in (0, 1)]
    made += [result(method, seed, cell_network="vgg16") for method in METHODS for seed in (0, 1)]
    made += [result("influence", seed, history=[], masked=None) for seed in (0, 1)]
    poison = {"kind": "poisoned", "n": 200}
    made += [
        result(
            "fisher-mask", seed, ("table3",), cell_scenario=poison, cell_method={"name": "fisher-mask", "reading": reading, "ratio": ratio}
        )
        for seed in (0, 1)
        for ratio in (0.15, 0.2)
        for reading in ("text", "released")
    ]
    made += [result(method, 0, ("fig-relearn",), cell_relearn={"rate": 0.1, "limit": 20}) for method in METHODS]
    made += [
        result("fisher-mask", 0, ("fig-ratio",), cell_method={"name": "fisher-mask", "reading": "text", "ratio": ratio})
        for ratio in (0.02, 0.06, 0.12)
    ]
    rates: list[dict[str, Any]] = [{"schedule": "replayed", "epochs": 5}, {"schedule": "constant", "rate": 0.1, "epochs": 5}]
    made += [result("finetune", 0, ("fig-schedule",), cell_tuning=tuning) for tuning in rates]
    nothing = {
        name: None
        for name in ("before", "retrained", "masked", "best", "last", "stability", "relearn", "agreement", "divergence", "attack")
    }
    empty: dict[str, Any] = {"history": [], "class_accuracies": {}, "predicted": {}, "masked_share": None}
    made += forgetting()
    made.append(result("finetune", 7, ("table4",), error="no data: cifar10 <not here>", **nothing, **empty))
    return made


def write(folder: Path, results: list[dict[str, Any]]) -> Path:
    for each in results:
        path = folder / "cells" / f"{each['digest']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(each, sort_keys=True))
    return folder
