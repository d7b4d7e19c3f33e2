"""Run `expunge compare`: every method on one network of the digits."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expunge.cli.running import jobs_for, run_shown
from expunge.runtime.exits import uninterrupted
from expunge.storage.files import check_folder, shown_folder

if TYPE_CHECKING:
    from expunge.experiments.comparison import Plan


@dataclass(frozen=True)
class Compare:
    """Every method, or some, on one network that must forget some of the handwritten digits: accuracies, evidence, seconds. The same
    command resumes after a stop, and adds methods to those that are there."""

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
    """Decides the weights, the order of the images and what is drawn."""
    epochs: int = 40
    """Of training, and of retraining."""
    tuning_epochs: int = 5
    """Of every method's training."""
    out: str = "runs/compare"
    """Folder for the results and the page."""
    models: bool = False
    """Save every method's network there too."""
    jobs: int | None = None
    """Processes that share the work; without it one per core."""
    quiet: bool = False
    """No progress, the table alone."""


def run_compare(options: Compare) -> int:
    with uninterrupted():
        from expunge.experiments import comparison as plans
        from expunge.runtime.modes import check_seeds

    settings = asdict(options)
    check_folder("out", options.out)
    check_seeds("seed", options.seed)
    parts = ("label", "n", "trigger", "fraction", "remain_fraction", "remain")
    scenario = plans.scenario_settings(options.scenario, **{part: settings[part] for part in parts})
    methods = plans.names(options.methods)
    plan = plans.comparison("compare", scenario, methods, options.epochs, options.tuning_epochs, options.seed, plans.RELEARN)
    return show(plan, settings, options.out, options.models, jobs_for("cpu", options.jobs), options.quiet)


def show(plan: Plan, settings: dict[str, Any], out: str, models: bool, jobs: int, quiet: bool) -> int:
    """Run a plan, print its tables, and save its page; what there is also where it was stopped. The exit code."""
    with uninterrupted():
        from expunge.experiments.runner import Task
        from expunge.experiments.worker import Work
        from expunge.report import comparison as comparison_report

    name = plan.experiment.name
    work = Work(
        tasks=tuple(Task(entry.cell, (name,)) for entry in plan.entries),
        folder=out,
        models=str(Path(out) / "models"),
        device="cpu",
        keep=models,
        jobs=min(jobs, len(plan.entries)),
    )
    comparison_report.check_folder_of(plan, out, models)
    place = work.place
    try:
        missing = run_shown(work, quiet)
    finally:  # also what was done before Ctrl-C
        if results := comparison_report.stored(plan, place):
            finished = len(results) == len(work.tasks)
            try:
                comparison_report.show(plan, results)
                sys.stdout.flush()
            finally:  # saved also where nobody reads it
                comparison_report.save(place, plan, results, settings, models, finished)
            saved = "Results, networks and a page" if models else "Results and a page"
            print(f"{saved}: {shown_folder(out)}" + ("" if finished else f" ({len(results)} of {len(work.tasks)} done)"))
    return 1 if missing else 0
