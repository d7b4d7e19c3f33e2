"""Forget samples with wrong labels: known ones, or ones made wrong for an experiment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from expunge.errors import InputError
from expunge.runtime.display import counted
from expunge.runtime.modes import generator
from expunge.validate import check_flag, is_whole, shown
from expunge.vision.scenarios.altered import Altered
from expunge.vision.scenarios.kinds import Images, Scenario, all_readable, of_samples, plain
from expunge.vision.scenarios.rows import check_fraction, checked, drawn, label_of, labels_of, length, share, split


def mislabelled(
    dataset: Images,
    fraction: float | None = None,
    keep_own: bool = False,
    test: Images | None = None,
    validation: Images | None = None,
    seed: int = 0,
    *,
    indices: Sequence[int] | Sequence[bool] | Tensor | None = None,
    corrected: Sequence[int] | Tensor | None = None,
) -> Scenario:
    """Forget the samples at `indices`, whose labels are wrong, or a `fraction` whose labels are made wrong for an experiment.

    `indices` are row numbers or a boolean mask, such as cleanlab's `find_label_issues` returns; the samples are forgotten as they are, and
    the others remain. `corrected` are the right labels where they are known: one for each of them in the order of `indices` (of a mask:
    of the dataset), or one for each sample of the dataset. The samples with these labels remain too, and are the test "corrected".

    A `fraction` is drawn at random and its labels too (section Remove Wrongly Labeled Samples). Rows of `train` are those of the dataset,
    so `forget.indices` are the samples meant. "remain" is the test set, the paper's one measure here; "forget" the samples with their
    wrong labels.

    Departures: the text shuffles labels, the released program draws any label, so about one in K keeps its own (`keep_own=True`; it is
    among the samples to forget all the same). By default every label is wrong, each of the others with the same chance.
    """
    dataset, test, validation = all_readable(dataset, test, validation)
    check_flag("keep_own", keep_own)
    if (indices is None) == (fraction is None):
        rule = "give either indices (or a mask) of samples with wrong labels, or a fraction to make wrong"
        raise InputError("indices", rule, "neither" if indices is None else "both")
    if indices is not None:
        if keep_own:
            raise InputError("keep_own", "is for a fraction whose labels are drawn; leave it out where indices say which are wrong", True)
        return _known(dataset, checked(indices, length(dataset)), corrected, test, validation)
    if corrected is not None:
        raise InputError("corrected", "is for samples at indices; labels that are made wrong have the dataset's own as right ones", "both")
    train, rows = _made(dataset, fraction, keep_own, seed)
    forget, remain = split(train, rows)
    return of_samples(_name(rows), train, forget, remain, REFERENCE, test, validation)


REFERENCE = "A network trained on the correctly labelled rest: it answers with the true labels, so few of the wrong ones."


def _name(rows: Tensor) -> str:
    return f"without {counted(len(rows), 'mislabelled sample')}"


def _known(dataset: Any, rows: Tensor, corrected: Any, test: Images | None, validation: Images | None) -> Scenario:
    """Samples as they are in the dataset, which the network was trained on."""
    forget, remain = split(dataset, rows)
    if corrected is None:
        return of_samples(_name(rows), dataset, forget, remain, REFERENCE, test, validation)
    label_of(dataset[0])
    right = Altered(Subset(dataset, rows.tolist()), _right_labels(dataset, rows, corrected))
    # One dataset, so that the remain data are a part of it as in every scenario.
    both: ConcatDataset[Any] = ConcatDataset([dataset, right])
    remain_all = Subset(both, [*remain.indices, *range(len(dataset), len(both))])
    scenario = of_samples(_name(rows), dataset, forget, remain_all, REFERENCE, test, validation)
    tests, validating = ({**parts, "corrected": right} if parts else {} for parts in (scenario.tests, scenario.validation))
    return replace(scenario, tests=tests, validation=validating)


def _right_labels(dataset: Any, rows: Tensor, corrected: Any) -> Tensor:
    """One label per row: not the one in the dataset, but one that occurs there."""
    numbers = plain(corrected)
    if isinstance(numbers, (str, bytes)) or not isinstance(numbers, Iterable):
        raise InputError("corrected", "must be labels, one for each sample with a wrong one", shown(corrected))
    entries = [plain(label) for label in numbers]
    if not all(is_whole(label) for label in entries):
        raise InputError("corrected", "must be labels, whole numbers", shown(next(label for label in entries if not is_whole(label))))
    own = labels_of(dataset)
    if len(entries) == len(own):
        entries = [entries[row] for row in rows.tolist()]
    if len(entries) != len(rows):
        rule = f"must be one label for each of the {len(rows)} samples at indices, or for each of the {len(own)} of the dataset"
        raise InputError("corrected", rule, len(entries))
    known = {*own.tolist()}
    if (strange := next((label for label in entries if label not in known), None)) is not None:
        raise InputError("corrected", "must be labels that occur in the dataset", strange)
    labels = torch.tensor(entries, dtype=torch.int64)
    if (same := torch.nonzero(labels == own[rows]).flatten()).numel():
        row = int(rows[int(same[0])])
        rule = "must be other labels than the dataset has; leave samples whose label is right out of indices"
        raise InputError("corrected", rule, f"{int(own[row])} at row {row}")
    return labels


def _made(dataset: Any, fraction: Any, keep_own: bool, seed: int) -> tuple[Altered, Tensor]:
    """The dataset with wrong labels at a share of its rows, and these."""
    if isinstance(fraction, Sized):
        raise InputError("fraction", "must be a number in (0, 1); rows or a mask are given as indices=...", shown(fraction))
    check_fraction(fraction)
    numbers = generator(seed)
    labels = labels_of(dataset)
    label_of(dataset[0])
    rows = drawn(torch.arange(len(labels)), share(fraction, len(labels)), numbers)
    classes, places = torch.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise InputError("dataset", "must hold at least two classes", classes.tolist())
    # A step of 1 to K − 1 through the classes never comes back to the label's own; a step of 0 does.
    steps = torch.randint(0 if keep_own else 1, len(classes), (len(rows),), generator=numbers)
    wrong = labels.clone()
    wrong[rows] = classes[(places[rows] + steps) % len(classes)]
    return Altered(dataset, wrong), rows
