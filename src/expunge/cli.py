"""The command line: parse, call, print. Nothing heavy is imported before it is known what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from expunge import __version__
from expunge.bench.command import Bench, bench_command, run_bench
from expunge.endings import ended, uninterrupted
from expunge.errors import InputError
from expunge.outputs import check_file, check_folder


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
    """Names such as fisher-mask or ssd-released; all: every method; released: every reading of a released program."""
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


@dataclass(frozen=True)
class Train:
    """Train a network as the paper does, or by numbers of your own; a training that was stopped goes on where it was."""

    dataset: str = "digits"
    """digits, cifar10, cifar100, mnist, fashion-mnist, tiny-imagenet, or a folder of class folders of pictures."""
    network: str = "resnet20"
    """Such as resnet20, vgg16, googlenet or densenet100."""
    seed: int = 0
    """Decides the weights and the order of the images."""
    seeds: str | None = None
    """Several networks that share the device, such as 0,1,2: on a GPU faster than one after the other."""
    without: int | None = None
    """Leave this class out: the network an unlearned one is compared with."""
    data: str | None = None
    """Folder of the datasets; without it EXPUNGE_DATA, else ./data."""
    out: str = "runs/train"
    """Folder for the state, the weights and the curve."""
    epochs: int | None = None
    """Instead of the recipe's, as all numbers that follow."""
    rate: float | None = None
    """At the start; the paper has 0.01 for MNIST in its text, 0.1 in its table."""
    batch_size: int | None = None
    weight_decay: float | None = None
    augment: bool = False
    """Crop and mirror images at random."""
    device: str | None = None
    """cuda if there is one, else cpu."""
    precision: Literal["float32", "bfloat16"] | None = None
    """bfloat16 on a GPU, else float32."""
    compile: bool = False
    """By torch.compile, on a GPU: some seconds at the start, faster steps."""
    quiet: bool = False
    """No progress, the result alone."""


@dataclass(frozen=True)
class Data:
    """A dataset to get, and the folder it goes to."""

    name: str
    folder: str | None


def data_command(do: Literal["get"], name: str, /, data: str | None = None) -> Data:
    """Get a dataset from where it is published: cifar10, cifar100, mnist, fashion-mnist or tiny-imagenet.

    Args:
        do: What to do: get it.
        name: Of the dataset.
        data: Folder for the datasets; without it EXPUNGE_DATA, else ./data.
    """
    return Data(name, data)


@dataclass(frozen=True)
class Report:
    """A folder of results, and the page it becomes."""

    results: str
    out: str


def report_command(results: str, /, out: str = "report.html") -> Report:
    """One page of a folder of results: tables, figures, the paper's numbers. It needs no network, and prints.

    Args:
        results: Folder that holds cells/, such as results/smoke.
        out: The page.
    """
    return Report(results, out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code: 2 for a mistake in what was asked, 1 for what broke, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return ended(lambda: _main(given))


def _main(given: list[str]) -> int:
    if given == ["--version"]:
        print(f"expunge {__version__}")
        return 0
    with uninterrupted():
        command = _parsed(given)
    return run(command) or 0


def _parsed(given: list[str]) -> Demo | Compare | Train | Bench | Report | Data:
    import tyro

    # Said here, since tyro is not imported above.
    report_command.__annotations__["out"] = Annotated[str, tyro.conf.arg(aliases=("-o",))]
    return tyro.extras.subcommand_cli_from_dict(
        {"demo": Demo, "compare": Compare, "train": Train, "bench": bench_command, "report": report_command, "data": data_command},
        prog="expunge",
        description="Take data out of a trained network. `expunge --version` tells the version.",
        args=given,
    )


def run(command: Demo | Compare | Train | Bench | Report | Data) -> int | None:
    match command:
        case Demo():
            run_demo(command)
        case Compare():
            run_compare(command)
        case Train():
            run_train(command)
        case Bench(do="report"):
            run_bench_report(command)
        case Bench():
            return run_bench(command)
        case Report():
            run_report(command)
        case Data():
            run_data(command)
    return None


def run_report(options: Report) -> None:
    with uninterrupted():
        from expunge import report

    check_file("out", options.out)
    print(report.write(options.results, options.out))


def run_data(options: Data) -> None:
    with uninterrupted():
        from expunge.vision.datasets import data_folder
        from expunge.vision.downloads import get

    check_folder("data", data_folder() if options.folder is None else options.folder)
    for path in get(options.name, options.folder, progress=True):
        print(path)


def run_bench_report(options: Bench) -> None:
    with uninterrupted():
        from expunge import report

    page = f"{options.out}/{options.profile}.html"
    check_file("out", page)
    print(report.write(f"{options.out}/{options.profile}", page))


def run_demo(options: Demo) -> None:
    with uninterrupted():
        from expunge import demo, demo_report
        from expunge.folders import reserved
        from expunge.metrics import accuracy
        from expunge.modes import check_seeds, one_thread
        from expunge.vision.digits import digits
        from expunge.vision.scenarios import category

    def say(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    check_folder("out", options.out)
    check_seeds("seed", options.seed)
    _check_epochs(options)
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
        saved = _shown_and_saved(
            [lambda: demo_report.table(before, rows), lambda: demo_report.notes(rows)],
            lambda: place.save(lambda folder: demo_report.save(folder, asdict(options), before, model, rows)),
        )
        print(f"Models, result and picture: {saved}/")


def run_compare(options: Compare) -> None:
    with uninterrupted():
        from expunge import comparison, comparison_report, demo
        from expunge.folders import reserved
        from expunge.modes import check_seeds, one_thread
        from expunge.progress import track
        from expunge.vision.digits import digits

    told = asdict(options)
    check_folder("out", options.out)
    check_seeds("seed", options.seed)
    _check_epochs(options)
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
                saved = _shown_and_saved([table, notes], lambda: place.save(save, stopped=not finished))
                print(f"Result and picture: {saved}/" + ("" if finished else " (stopped: what was done so far)"))


def _shown_and_saved(texts: Sequence[Callable[[], str]], save: Callable[[], Path]) -> Path:
    """Print what was found, then save it: a disk may be full, and then it has been shown. Saved also where nobody reads it."""
    try:
        for text in texts:
            print(text())
        sys.stdout.flush()
    finally:
        saved = save()
    return saved


def run_train(options: Train) -> None:
    with uninterrupted():
        from expunge import training_report
        from expunge.locks import held_alone
        from expunge.modes import check_seeds, device_named
        from expunge.vision import datasets, recipes
        from expunge.vision.training import Trained, plan, train_networks

    check_folder("out", options.out)
    seeds = [options.seed] if options.seeds is None else _numbers("seeds", options.seeds)
    check_seeds("seed" if options.seeds is None else "seeds", *seeds)
    device = device_named(options.device)
    if options.compile and device.type != "cuda":
        raise InputError("compile", "is for a GPU", device)
    numbers = {name: getattr(options, name) for name in ("epochs", "rate", "batch_size", "weight_decay")}
    recipe = recipes.changed(recipes.recipe_for(options.dataset), **numbers, augment=options.augment or None)
    with _called(name="dataset", label="without"):
        images = datasets.load(options.dataset, options.data).to(device)
        jobs, watch = plan(options.dataset, options.network, images, seeds, options.without, recipe.augment)
    if not options.quiet:
        note = recipes.NOTES.get(options.dataset)
        told = training_report.told(recipe) + (f" ({note})" if note else "")
        print(f"{options.network} on {options.dataset}: {told}", file=sys.stderr, flush=True)
    latest: dict[str, Trained] = {}

    def tell(networks: Sequence[Trained]) -> None:
        for network in networks:
            print(f"{network.job.name}: {training_report.line(network.curve[-1])}, weights {network.digest}")

    try:
        names, shown = [job.name for job in jobs], training_report.shown(recipe.epochs, not options.quiet)
        with held_alone("out", options.out, names), shown as show:

            def noted(trained: Trained) -> None:
                latest[trained.job.name] = trained
                if show is not None:
                    show(trained)

            trained = train_networks(
                options.network,
                images.classes,
                images.channels,
                jobs,
                recipe,
                device=device,
                precision=options.precision or ("bfloat16" if device.type == "cuda" else "float32"),
                compiled=options.compile,
                watch=watch,
                out=options.out,
                about={"dataset": options.dataset, "without": options.without, "device": str(device)},
                noted=noted,
            )
    except KeyboardInterrupt:
        print(f"The state after the last whole epoch is in {options.out}/; the same command goes on from there.", file=sys.stderr)
        raise
    except OSError:  # such as a full disk at the very end: what was found is told
        tell([trained for trained in latest.values() if trained.curve[-1].epoch == recipe.epochs])
        raise
    tell(trained)
    print(f"Weights, curves and settings: {options.out}/")


def _check_epochs(options: Demo | Compare) -> None:
    for name in ("epochs", "tuning_epochs"):
        if getattr(options, name) < 1:
            raise InputError(name, "must be at least 1", getattr(options, name))


@contextmanager
def _called(**options: str) -> Iterator[None]:
    """A mistake in an argument is told by the name of the option it came from."""
    try:
        yield
    except InputError as error:
        if error.argument not in options:
            raise
        raise InputError(options[error.argument], error.rule, error.found) from error


def _numbers(argument: str, given: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in given.split(",")))
    except ValueError as error:
        raise InputError(argument, "must be whole numbers with commas between them", given) from error


if __name__ == "__main__":
    sys.exit(main())
