"""Run `expunge train`: train a network as the paper does."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from expunge.errors import InputError
from expunge.runtime.exits import uninterrupted
from expunge.storage.files import check_folder, shown_folder


@dataclass(frozen=True)
class Train:
    """Train a network by the paper's recipe, or with settings of your own. The same command resumes after a stop."""

    dataset: str = "digits"
    """digits, cifar10, cifar100, mnist, fashion-mnist, tiny-imagenet, or a folder of class folders of pictures."""
    network: str = "resnet20"
    """Such as resnet20, vgg16, googlenet or densenet100."""
    seed: int | None = None
    """Decides the weights and the order of the images; 0 without it."""
    seeds: str | None = None
    """In place of seed: several networks that share the device, such as 0,1,2. On a GPU faster than one after the other."""
    without: int | None = None
    """Leave this class out: the network an unlearned one is compared with."""
    size: int | None = None
    """Resize pictures to squares of so many pixels: tiny-imagenet, or a folder."""
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


def run_train(options: Train) -> None:
    with uninterrupted():
        from expunge.report import training as training_report
        from expunge.runtime.modes import check_seeds, device_named
        from expunge.storage.locks import lock_all
        from expunge.vision import datasets, recipes
        from expunge.vision.zoo import Trained, plan, train_networks

    check_folder("out", options.out)
    if options.seed is not None and options.seeds is not None:
        raise InputError(
            "seed", "must not be given beside seeds; seeds names all networks", f"--seed {options.seed} --seeds {options.seeds}"
        )
    seeds = [options.seed or 0] if options.seeds is None else _numbers("seeds", options.seeds)
    check_seeds("seed" if options.seeds is None else "seeds", *seeds)
    device = device_named(options.device)
    if options.compile and device.type != "cuda":
        raise InputError("compile", "is for a GPU", device)
    numbers = {name: getattr(options, name) for name in ("epochs", "rate", "batch_size", "weight_decay")}
    recipe = recipes.changed(recipes.recipe_for(options.dataset), **numbers, augment=options.augment or None)
    with _called(name="dataset", label="without"):
        images = datasets.load(options.dataset, options.data, size=options.size).to(device)
        jobs, watch = plan(options.dataset, options.network, images, seeds, options.without, recipe.augment, options.size)
    if not options.quiet:
        note = recipes.NOTES.get(options.dataset)
        description = training_report.recipe_line(recipe) + (f" ({note})" if note else "")
        print(f"{options.network} on {options.dataset}: {description}", file=sys.stderr, flush=True)
    latest: dict[str, Trained] = {}
    sized = {} if options.size is None else {"size": options.size}

    def print_results(networks: Sequence[Trained]) -> None:
        for network in networks:
            print(f"{network.job.name}: {training_report.line(network.curve[-1])}, weights {network.digest}")

    try:
        names, shown = [job.name for job in jobs], training_report.shown(recipe.epochs, not options.quiet)
        with lock_all("out", options.out, names), shown as show:

            def noted(trained: Trained) -> None:
                latest[trained.job.name] = trained
                if show is not None:
                    show(trained)

            with _called(keep="out"):
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
                    about={"dataset": options.dataset, "without": options.without, "device": str(device)} | sized,
                    noted=noted,
                )
    except KeyboardInterrupt:
        print(
            f"The state after a whole epoch, mostly the last, is in {shown_folder(options.out)}; the same command goes on from there.",
            file=sys.stderr,
        )
        raise
    except OSError:  # such as a full disk at the very end: report what was trained
        print_results([trained for trained in latest.values() if trained.curve[-1].epoch == recipe.epochs])
        raise
    print_results(trained)
    print(f"Weights, curves and settings: {shown_folder(options.out)}")


@contextmanager
def _called(**options: str) -> Iterator[None]:
    """An error about an argument names the option it came from."""
    try:
        yield
    except InputError as error:
        if error.argument not in options:
            raise
        raise InputError(options[error.argument], error.rule, error.found) from error


def _numbers(argument: str, text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise InputError(argument, "must be whole numbers with commas between them", text) from error
