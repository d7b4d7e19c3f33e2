"""Plant samples before training whose trace can be told later: swapped labels, noise on inputs, canaries by coin flips."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from expunge.data.batches import OnDevice, as_batches, row_reader
from expunge.data.indices import resolved, rows_of
from expunge.errors import InputError
from expunge.runtime.modes import generator
from expunge.storage.tensors import load_tensors, save_tensors
from expunge.validate import check_number, check_positive, check_whole, is_whole

Kind = Literal["swapped", "noise", "coins"]
FILE = "planting key"


@dataclass(frozen=True, eq=False, repr=False)
class Key:
    """What was planted where. Keep it apart from the training: who has it can tell the samples, and undo them.

    `rows` of the dataset were planted, with `labels` in place of `true_labels`; `noise` was added to their inputs. Of coins, only those
    `included` are in the planted data. `places` are the planted samples' rows in the planted data, the forget set of a later request.
    """

    kind: Kind
    rows: Tensor
    labels: Tensor
    true_labels: Tensor
    included: Tensor
    size: int
    noise: Tensor | None = None
    deviation: float = 0.0

    def __repr__(self) -> str:
        return f"Key({self.kind}, {int(self.included.sum())} of {len(self.rows)} samples included, dataset of {self.size})"

    @property
    def places(self) -> Tensor:
        return torch.searchsorted(self.kept, self.rows[self.included])

    @cached_property
    def kept(self) -> Tensor:
        """The rows of the dataset that the planted data have."""
        kept = torch.ones(self.size, dtype=torch.bool)
        kept[self.rows[~self.included]] = False
        return kept.nonzero().flatten()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the key as safetensors, whole or not at all."""
        tensors = {name: getattr(self, name) for name in ("rows", "labels", "true_labels", "included")}
        tensors |= {} if self.noise is None else {"noise": self.noise}
        form = {"planted": self.kind, "size": str(self.size), "deviation": repr(self.deviation)}
        return save_tensors(path, tensors, {"kind": FILE} | form)


def load_key(path: str | os.PathLike[str]) -> Key:
    """Read a key that `Key.save` wrote."""
    tensors, form = load_tensors(path, FILE)
    try:
        key = Key(form["planted"], size=int(form["size"]), deviation=float(form["deviation"]), **tensors)  # type: ignore[arg-type]
        number = len(key.rows)
        whole = all(len(part) == number for part in tensors.values()) and key.included.dtype == torch.bool
        inside = number > 0 and 0 <= int(key.rows.min()) and int(key.rows.max()) < key.size and torch.equal(key.rows, key.rows.unique())
        if not (whole and inside and key.kind in get_args(Kind) and (key.kind == "noise") == (key.noise is not None)):
            raise ValueError("its parts do not fit together")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("path", f"must hold all of a planting key ({error})", os.fspath(path)) from error
    return key


class Planted(Dataset[Any]):
    """A dataset of (input, ..., label) with what a key plants; nothing is copied before a sample is read."""

    def __init__(self, dataset: Any, key: Key, targets: Tensor) -> None:
        self.dataset, self.key = dataset, key
        self.targets = targets[key.kept]
        noisy = torch.full((key.size,), -1)
        noisy[key.rows] = torch.arange(len(key.rows))
        self._tables = [OnDevice(table) for table in (key.kept, self.targets, noisy[key.kept])]
        self._noise = None if key.noise is None else OnDevice(key.noise)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """A label stays what it was, a tensor or a number."""
        row = torch.tensor([index if index >= 0 else index + len(self)])
        if not 0 <= int(row) < len(self):
            raise IndexError(index)
        *_, label = self.dataset[int(self.key.kept[row])]
        inputs, *between, target = self.batch_of(row)
        return inputs[0], *(part[0] for part in between), target[0] if isinstance(label, Tensor) else int(target)

    def batch_of(self, rows: Tensor) -> tuple[Tensor, ...]:
        kept, targets, noisy = (table.at(rows)[rows] for table in self._tables)
        inputs, *between, label = self._read(kept)
        if self._noise is not None:
            noise = self._noise.at(rows)[noisy.clamp(min=0)].to(inputs)
            inputs = inputs + noise * (noisy >= 0).reshape(-1, *[1] * (noise.dim() - 1)).to(inputs)
        return inputs, *between, targets.to(label)

    @cached_property
    def _read(self) -> Callable[[Tensor], Any]:
        return row_reader(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        # Sent to a loader's worker process: a reader is made of closures, which cannot be sent.
        return {name: value for name, value in self.__dict__.items() if name != "_read"}

    def forget(self) -> Subset[Any]:
        """The planted samples, to be unlearned."""
        return Subset(self, self.key.places.tolist())


def swap_labels(dataset: Any, first: int, second: int, share: float = 1.0, seed: int = 0) -> tuple[Planted, Key]:
    """Give a `share` of the samples of two classes each other's label (interclass confusion, Goel et al., 2022)."""
    dataset, labels = _labelled(dataset)
    check_number("share", share, 0, 1, ends="(]")
    rows, numbers = [], generator(seed)
    for argument, label in (("first", first), ("second", second)):
        own = (labels == label).nonzero().flatten()
        if first == second or not len(own):
            raise InputError(argument, "must be another class of the dataset than the other one", label)
        rows.append(_drawn(own, max(1, round(share * len(own))), numbers))
    chosen = torch.cat(rows).sort().values
    swapped = torch.where(labels[chosen] == first, second, first)
    return _planted(dataset, labels, Key("swapped", chosen, swapped, labels[chosen], torch.ones(len(chosen)).bool(), len(labels)))


def add_noise(dataset: Any, share: float, deviation: float, seed: int = 0) -> tuple[Planted, Key]:
    """Add Gaussian noise of a standard deviation, in units of the inputs, to a `share` of the samples (Pawelczyk et al., 2024)."""
    dataset, labels = _labelled(dataset)
    check_number("share", share, 0, 1, ends="(]")
    check_positive("deviation", deviation)
    numbers = generator(seed)
    rows = _drawn(torch.arange(len(labels)), max(1, round(share * len(labels))), numbers)
    inputs = row_reader(dataset)(rows[:1])[0]
    if not inputs.is_floating_point():
        raise InputError("dataset", "inputs must be floating-point numbers to add noise to", inputs.dtype)
    noise = deviation * torch.randn(len(rows), *inputs.shape[1:], generator=numbers)
    everywhere = torch.ones(len(rows)).bool()
    return _planted(dataset, labels, Key("noise", rows, labels[rows], labels[rows], everywhere, len(labels), noise, float(deviation)))


def flip_coins(dataset: Any, canaries: int | Any, seed: int = 0, wrong_labels: bool = False) -> tuple[Planted, Key]:
    """Put each canary into the data or leave it out by a coin flip of its own; `canaries` are rows, or how many are to be drawn.

    `wrong_labels` gives canaries the label of another class, drawn, so that to know it a network must have been trained on it.
    """
    dataset, labels = _labelled(dataset)
    numbers = generator(seed)
    if is_whole(canaries):
        check_whole("canaries", canaries, minimum=2, maximum=len(labels))
        rows = _drawn(torch.arange(len(labels)), int(canaries), numbers)
    else:
        rows = torch.unique(rows_of(canaries, len(labels), "canaries") % len(labels))
        check_whole("canaries", len(rows), minimum=2)
    included = torch.rand(len(rows), generator=numbers) < 0.5
    classes = labels.unique()
    if wrong_labels and len(classes) < 2:
        raise InputError("dataset", "must have two classes or more for canaries with wrong labels", len(classes))
    places = torch.searchsorted(classes, labels[rows])
    shifts = torch.randint(1, max(2, len(classes)), places.shape, generator=numbers)
    given = classes[(places + shifts) % len(classes)] if wrong_labels else labels[rows]
    return _planted(dataset, labels, Key("coins", rows, given, labels[rows], included, len(labels)))


def _planted(dataset: Any, labels: Tensor, key: Key) -> tuple[Planted, Key]:
    targets = labels.clone()
    targets[key.rows] = key.labels
    return Planted(dataset, key, targets), key


def _labelled(dataset: Any) -> tuple[Any, Tensor]:
    """The dataset, and its labels, int64."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError("dataset", "must have a length and items", type(dataset).__name__)
    dataset = resolved(dataset, "dataset")
    labels = []
    for batch in as_batches(dataset, "dataset", 1000):
        label = batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
        if not isinstance(label, Tensor) or label.dim() != 1 or label.is_floating_point():
            raise InputError("dataset", "samples must be (input, ..., label), one whole number as label", type(batch).__name__)
        labels.append(label)
    return dataset, torch.cat(labels).long().cpu()


def _drawn(rows: Tensor, number: int, numbers: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=numbers)[:number]].sort().values
