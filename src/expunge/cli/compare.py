"""`expunge compare`: every method on one network of the digits."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from expunge.cli.digits_runs import check_epochs, shown_and_saved
from expunge.runtime.exits import uninterrupted
from expunge.storage.files import check_folder


@dataclass(frozen=True)
class Compare:
    """Every method, or some, on one network that must forget some of the handwritten digits: accuracies, measures, seconds."""

    scenario: Literal["category", "poisoned", "mislabelled", "subset"] = "category"
    """What must be forgotten."""
    label: tuple[int, ...] | None = None
    """category: the digit, or several (0)."""
    n: int | None = None
    """poisoned: samples with a trigger (60)."""
    trigger: int | None = None
    """poisoned: width of the white square in the corner (2)."""
    fraction: float | None = None
    """mislabelled, subset: share of the training data (0.1 and 0.05)."""
    remain_fraction: float | None = None
    """Remain data at hand, as a share of the training data; without it all are."""
    remain: bool = True
    """Whether there are remain data at hand at all."""
    methods: tuple[str, ...] = ("all",)
    """Names such as fisher-mask or ssd-released; all: every method; released: every reading of a released program; of your own:
    package.module:Class or path/to/file.py:Class."""
    seed: int = 0
    """Decides the split, the weights, the order of the images and what is drawn."""
    epochs: int = 40
    """Of training, and of retraining."""
    tuning_epochs: int = 5
    """Of every method's training."""
    out: str = "runs/compare"
    """Folder for result.json and tradeoff.png."""
    models: bool = False
    """Save the networks there too."""
    quiet: bool = False
    """No progress, the table alone."""


def run_compare(options: Compare) -> None:
    with uninterrupted():
        from expunge.experiments import comparison, demo
        from expunge.report import comparison as comparison_report
        from expunge.runtime.modes import check_seeds, one_thread
        from expunge.runtime.progress import track
        from expunge.storage.folders import reserved
        from expunge.vision.datasets.digits import digits

    told = asdict(options)
    check_folder("out", options.out)
    check_seeds("seed", options.seed)
    check_epochs(options)
    names = comparison.names(options.methods)
    parts = ("label", "n", "trigger", "fraction", "remain_fraction", "remain", "seed")
    scenario = comparison.scenario_of(digits(options.seed), options.scenario, **{part: told[part] for part in parts})
    shown = not options.quiet
    found: list[comparison.Row | comparison.Refused] = []
    finished = False

    def table() -> str:
        return comparison_report.table(found, terminal=sys.stdout.isatty())

    def notes() -> str:
        return comparison_report.notes(scenario, found)

    def save(folder: Path) -> None:
        comparison_report.save(folder, told, scenario, found, finished, options.models)

    with reserved("out", options.out, "compare") as place:
        try:
            with one_thread():
                model = demo.trained(scenario.train, options.epochs, options.seed, progress=shown)
                rows = comparison.rows(model, scenario, names, options.epochs, options.tuning_epochs, options.seed)
                for row in track(rows, scenario.name, 2 + len({*names} - {comparison.REFERENCE}), enabled=shown):
                    found.append(row)
            finished = True
        finally:  # a comparison that was stopped tells what it has found so far
            if found:
                saved = shown_and_saved([table, notes], lambda: place.save(save, stopped=not finished))
                print(f"Result and picture: {saved}/" + ("" if finished else " (stopped: what was done so far)"))
