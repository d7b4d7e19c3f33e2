"""Run `expunge demo`: a network forgets a digit by a handful of methods."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from expunge.cli.compare import show
from expunge.runtime.exits import uninterrupted
from expunge.storage.files import check_folder


@dataclass(frozen=True)
class Demo:
    """Train a small network on handwritten digits, make it forget one by Finetune, MaskClassifier, RandomMask, FisherMask (two settings)
    and ResetAndDistil, and compare with Retrain. All methods: `expunge compare`."""

    seed: int = 0
    """Decides the weights and the order of the images."""
    label: int = 0
    """The digit to forget."""
    out: str = "runs/demo"
    """Folder for the networks, the results and the page."""
    epochs: int = 40
    """Of training, and of retraining."""
    tuning_epochs: int = 5
    """Of fine-tuning: the training's schedule, compressed."""
    quiet: bool = False
    """No progress, the table alone."""


def run_demo(options: Demo) -> int:
    with uninterrupted():
        from expunge.experiments.comparison import DEMO, comparison, names, scenario_settings
        from expunge.runtime.modes import check_seeds

    check_folder("out", options.out)
    check_seeds("seed", options.seed)
    scenario = scenario_settings("category", [options.label])
    plan = comparison("demo", scenario, names(DEMO), options.epochs, options.tuning_epochs, options.seed)
    return show(plan, asdict(options), options.out, models=True, jobs=1, quiet=options.quiet)
