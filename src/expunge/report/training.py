"""Show a training: its recipe, and every epoch as it ends."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from expunge.runtime.display import counted
from expunge.vision.recipes import Recipe
from expunge.vision.zoo import Point, Trained

Show = Callable[[Trained], None]


def recipe_line(recipe: Recipe) -> str:
    """The recipe's numbers in one line."""
    parts = [counted(recipe.epochs, "epoch"), f"batches of {recipe.batch_size}", f"rate {recipe.rate:g}"]
    if recipe.decays:
        parts.append(f"×0.1 after {' and '.join(f'{part * recipe.epochs:g}' for part in recipe.decays)}")
    if recipe.warmup:
        parts.append(f"rising over the first {recipe.warmup * recipe.epochs:g}")
    parts += [f"momentum {recipe.momentum:g}", f"weight decay {recipe.weight_decay:g}"]
    return ", ".join([*parts, "cropped and mirrored at random" if recipe.augment else "no augmentation"])


def line(point: Point) -> str:
    """The loss and the accuracies after an epoch."""
    loss = [] if point.loss is None else [f"loss {point.loss:.4f}"]
    return ", ".join([*loss, *(f"{name} {100 * value:.2f} %" for name, value in point.accuracies.items())])


class Clock:
    """The time left per network, by the epochs of this call; epochs of an earlier call do not count."""

    def __init__(self, epochs: int) -> None:
        self.epochs, self.started = epochs, time.monotonic()
        self._before: dict[str, int] = {}

    def left(self, trained: Trained) -> str:
        """The time left after the last epoch of the curve."""
        epoch = trained.curve[-1].epoch
        before = self._before.setdefault(trained.job.name, epoch - 1)
        seconds = round((time.monotonic() - self.started) / (epoch - before) * (self.epochs - epoch))
        return f"{timedelta(seconds=seconds)} left" if epoch < self.epochs else "done"


@contextmanager
def shown(epochs: int, enabled: bool) -> Iterator[Show | None]:
    """A function that shows each epoch of each network on standard error: a bar on a terminal, a line elsewhere."""
    if not enabled:
        yield None
    elif sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        with _bars(epochs) as show:
            yield show
    else:
        yield _lines(epochs)


def _lines(epochs: int) -> Show:
    clock = Clock(epochs)

    def show(trained: Trained) -> None:
        point = trained.curve[-1]
        print(f"{trained.job.name}: epoch {point.epoch}/{epochs}, {line(point)}, {clock.left(trained)}", file=sys.stderr, flush=True)

    return show


@contextmanager
def _bars(epochs: int) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
    with Progress(*columns, console=Console(stderr=True)) as bars:
        clock, tasks = Clock(epochs), dict[str, TaskID]()

        def show(trained: Trained) -> None:
            point, name = trained.curve[-1], trained.job.name
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=epochs, status="")
            bars.update(tasks[name], completed=point.epoch, status=f"{line(point)}, {clock.left(trained)}")

        yield show
