"""`expunge demo`: a network forgets a digit by a handful of methods."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

from expunge.cli.digits_runs import check_epochs, shown_and_saved
from expunge.runtime.exits import uninterrupted
from expunge.storage.files import check_folder


@dataclass(frozen=True)
class Demo:
    """Train a small network on handwritten digits, make it forget one by Finetune, MaskClassifier, RandomMask and FisherMask (two
    settings), and compare with Retrain. All methods: `expunge compare`."""

    seed: int = 0
    """Decides the split, the weights and the order of the images."""
    label: int = 0
    """The digit to forget."""
    out: str = "runs/demo"
    """Folder for the models, result.json and tradeoff.png."""
    epochs: int = 40
    """Of training, and of retraining."""
    tuning_epochs: int = 5
    """Of fine-tuning: the training's schedule, compressed."""
    quiet: bool = False
    """No progress, the table alone."""


def run_demo(options: Demo) -> None:
    with uninterrupted():
        from expunge.experiments import demo
        from expunge.metrics import accuracy
        from expunge.report import demo as demo_report
        from expunge.runtime.modes import check_seeds, one_thread
        from expunge.storage.folders import reserved
        from expunge.vision.datasets.digits import digits
        from expunge.vision.scenarios import category

    def say(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    check_folder("out", options.out)
    check_seeds("seed", options.seed)
    check_epochs(options)
    data = digits(options.seed)
    test = category(data.test, options.label)
    rows = []
    with reserved("out", options.out, "demo") as place:
        with one_thread():
            say("a network that knows all ten digits")
            model = demo.trained(data.train, options.epochs, options.seed, progress=not options.quiet)
            before = demo.Accuracies(accuracy(model, test.remain), accuracy(model, test.forget))
            say(f"forgetting {options.label}")
            for row in demo.rows(model, data, options.label, options.epochs, options.tuning_epochs, options.seed, not options.quiet):
                say(f"{row.name}: remain {100 * row.tuned.remain:.1f} %, forget {100 * row.tuned.forget:.1f} %")
                rows.append(row)
        saved = shown_and_saved(
            [lambda: demo_report.table(before, rows), lambda: demo_report.notes(rows)],
            lambda: place.save(lambda folder: demo_report.save(folder, asdict(options), before, model, rows)),
        )
        print(f"Models, result and picture: {saved}/")
