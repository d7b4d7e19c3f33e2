"""Split training data into forget and remain data, with the data to measure on, for every kind of forgetting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from expunge.errors import InputError
from expunge.runtime.display import counted
from expunge.runtime.modes import generator
from expunge.validate import LARGEST, check_seed, is_whole, shown
from expunge.vision.scenarios.altered import Altered, Corner, Trigger
from expunge.vision.scenarios.rows import checked, drawn, label_of, labels_of, length, readable, share, split

Images = Dataset[Any]  # of (image, label), with a length and items


@dataclass(frozen=True, eq=False)
class Scenario:
    """`forget, remain = scenario`; both are parts of `train`, views without a copy, and share no sample.

    `train` is what the original network is trained on, `retrain` what the reference is trained on, and `reference` says what to expect of
    it. `remain` is what unlearning may use; None: nothing. `tests` and `validation` map names to data, always with "remain" and "forget",
    and are empty where no such data were passed. Samples with corrected labels are in no `train`.
    """

    name: str
    train: Images
    forget: Subset[Any]
    remain: Subset[Any] | None
    retrain: Subset[Any]
    reference: str
    tests: Mapping[str, Images] = field(default_factory=dict)
    validation: Mapping[str, Images] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.forget, self.remain))

    @property
    def watch(self) -> dict[str, Images]:
        """For `unlearn(watch=...)`: the tests by their names, and the validation data as "validation remain" and so on."""
        return {**self.tests, **{f"validation {name}": data for name, data in self.validation.items()}}


def category(dataset: Images, label: int | Iterable[int], test: Images | None = None, validation: Images | None = None) -> Scenario:
    """Forget every sample of one class, or of several (section Remove A Full Category).

    Test and validation data are split alike: "forget" is the class, "remain" the others.
    """
    dataset, test, validation = all_readable(dataset, test, validation)
    labels = _whole(label, "label")
    forget, remain = _by_label(dataset, labels, "dataset")
    parts = {}
    for argument, data in (("test", test), ("validation", validation)):
        if data is not None:
            forgotten, kept = _by_label(data, labels, argument)
            parts[argument] = {"remain": kept, "forget": forgotten}
    classes = f"class {labels[0]}" if len(labels) == 1 else f"classes {', '.join(map(str, labels))}"
    return Scenario(
        name=f"without {classes}",
        train=dataset,
        forget=forget,
        remain=remain,
        retrain=remain,
        reference=f"A network trained without {classes}: its forget accuracy is 0.",
        tests=parts.get("test", {}),
        validation=parts.get("validation", {}),
    )


def poisoned(
    dataset: Images,
    n: int = 200,
    trigger: int = 4,
    corner: Corner = "lower right",
    value: float | tuple[float, ...] = 0.0,
    target: int = 0,
    how: Literal["add", "replace"] = "add",
    sources: Sequence[int] | None = None,
    margin: int = 0,
    test: Images | None = None,
    validation: Images | None = None,
    seed: int = 0,
) -> Scenario:
    """Forget `n` samples that carry a trigger and the attacker's label `target` (section Remove Poisoned Samples).

    "remain" is the test set as it is, "forget" the poisoned training samples, "attack" the test images of all other classes with the
    trigger, labelled `target`: accuracy on it is the attack success rate. `value` is in the units of the images as the dataset gives them.

    Departures: the text "adds" samples with a patch "to 0" and says no more. Added, the clean originals stay (`how="replace"`: they go);
    zero is that of normalised images where they are (`value`: black is −mean/deviation of each channel); samples of the target class are
    no `sources`, else forget accuracy could not become zero.
    """
    dataset, test, validation = all_readable(dataset, test, validation)
    color = plain(value)
    stamp = Trigger(trigger, corner, tuple(map(plain, color)) if isinstance(color, Sequence) else color, margin)
    if how not in ("add", "replace"):
        raise InputError("how", "must be 'add' or 'replace'", how)
    check_seed("seed", seed)
    labels = labels_of(dataset)
    (target,) = _whole([target], "target")
    _check_occurs(labels, [target], "target", "dataset")
    if sources is not None and not isinstance(sources, Iterable):
        raise InputError("sources", "must be labels, one or several in a sequence", shown(sources))
    allowed = labels != target if sources is None else torch.isin(labels, torch.tensor(_whole(sources, "sources")))
    available = torch.nonzero(allowed).flatten()
    if not is_whole(n) or not 1 <= n <= len(available):
        raise InputError("n", f"must be a whole number between 1 and the {len(available)} samples of the source classes", shown(n))
    n = int(n)
    rows = drawn(available, n, generator(seed))
    clean = dataset if how == "add" else split(dataset, rows)[1]
    train: ConcatDataset[Any] = ConcatDataset([clean, _triggered(dataset, rows, stamp, target)])
    start = len(train) - n
    forget, remain = Subset(train, range(start, len(train))), Subset(train, range(start))

    def parts(data: Images | None) -> dict[str, Images]:
        if data is None:
            return {}
        others = torch.nonzero(labels_of(data) != target).flatten()
        return {"remain": data, "forget": forget, "attack": _triggered(data, others, stamp, target)}

    reference = "A network trained on the clean data: a trigger means nothing to it, so few triggered images get the attacker's label."
    return Scenario(f"without {counted(n, 'poisoned sample')}", train, forget, remain, remain, reference, parts(test), parts(validation))


def subset(
    dataset: Images,
    indices: Sequence[int] | Sequence[bool] | Tensor | None = None,
    *,
    fraction: float | None = None,
    test: Images | None = None,
    validation: Images | None = None,
    seed: int = 0,
) -> Scenario:
    """Forget the samples at `indices`, row numbers or a boolean mask, or a `fraction` drawn at random.

    "remain" is the test set, "forget" the samples themselves.
    """
    dataset, test, validation = all_readable(dataset, test, validation)
    check_seed("seed", seed)
    size = length(dataset)
    if indices is not None and fraction is None:
        rows = checked(indices, size)
    elif fraction is not None and indices is None:
        rows = drawn(torch.arange(size), share(fraction, size), generator(seed))
    else:
        raise InputError("indices", "give either indices or a fraction", "neither" if indices is None else "both")
    forget, remain = split(dataset, rows)
    reference = "A network trained on the rest: to it the samples are like any unseen ones, so its forget accuracy is not 0."
    return of_samples(f"without {counted(len(rows), 'sample')}", dataset, forget, remain, reference, test, validation)


def limited(scenario: Scenario, *, fraction: float | None = None, count: int | None = None, seed: int = 0) -> Scenario:
    """The same scenario with only `count` remain samples for scoring and fine-tuning; 0: none (section With Limited Remain Data).

    `fraction` is of the whole training data: the paper's 0.1 % are 50 of 50,000. Without any, score by the forget data alone and do not
    fine-tune. The reference stays the network trained on all remain data.
    """
    if scenario.remain is None:
        raise InputError("scenario", "must have remain data to take a part of", "none")
    if fraction is not None and count is None:
        count = share(fraction, length(scenario.train))
    elif count is None or fraction is not None:
        raise InputError("count", "give either a count or a fraction", "neither" if count is None else "both")
    if not is_whole(count) or not 0 <= count <= len(scenario.remain):
        raise InputError("count", f"must be a whole number between 0 and the {len(scenario.remain)} remain samples", shown(count))
    rows = drawn(torch.arange(len(scenario.remain)), int(count), generator(seed)).tolist()
    remain = Subset(scenario.remain, rows) if rows else None
    return replace(
        scenario, name=f"{scenario.name}, {counted(int(count), 'remain sample') if count else 'no remain samples'}", remain=remain
    )


def all_readable(dataset: Images, test: Images | None, validation: Images | None) -> tuple[Any, Any, Any]:
    """The datasets with masks as rows, which every reader understands."""
    others = (None if data is None else readable(data, argument) for data, argument in ((test, "test"), (validation, "validation")))
    return readable(dataset), *others


def _whole(label: Any, argument: str) -> list[int]:
    """One label or several as plain numbers, each once; they may come as numbers of NumPy or in tensors."""
    values = plain(label)
    labels = [plain(value) for value in values] if isinstance(values, Iterable) else [values]
    if any(not is_whole(value) or abs(value) > LARGEST for value in labels):
        raise InputError(argument, "must be whole numbers", shown(label))
    return list(dict.fromkeys(labels))


def plain(value: Any) -> Any:
    """NumPy numbers and tensors as Python's own numbers, in lists where there are several."""
    return value.tolist() if isinstance(value, (Tensor, numpy.ndarray, numpy.generic)) else value


def _check_occurs(labels: Tensor, wanted: Sequence[int], argument: str, where: str) -> None:
    absent = [label for label in wanted if not (labels == label).any()]
    if absent:
        raise InputError(argument, f"must occur in the {where}", ", ".join(map(str, absent)))


def _by_label(dataset: Images, wanted: list[int], argument: str) -> tuple[Subset[Any], Subset[Any]]:
    labels = labels_of(dataset)
    if not wanted:
        raise InputError("label", "must be one label or several", "none")
    _check_occurs(labels, wanted, "label", "dataset" if argument == "dataset" else f"{argument} data")
    chosen = torch.isin(labels, torch.tensor(wanted))
    if chosen.all():
        raise InputError("label", "must leave other classes to keep", ", ".join(map(str, wanted)))
    return split(dataset, torch.nonzero(chosen).flatten())


def of_samples(
    name: str,
    train: Images,
    forget: Subset[Any],
    remain: Subset[Any],
    reference: str,
    test: Images | None,
    validation: Images | None,
) -> Scenario:
    """A scenario that forgets single samples, not a class: forgetting is measured on the samples themselves."""
    tests, validations = ({} if data is None else {"remain": data, "forget": forget} for data in (test, validation))
    return Scenario(name, train, forget, remain, remain, reference, tests, validations)


def _triggered(dataset: Images, rows: Tensor, stamp: Trigger, target: int) -> Altered:
    if len(rows) == 0:
        raise InputError("target", "test and validation data must hold other classes too", target)
    sample = dataset[int(rows[0])]
    label_of(sample)
    stamp.check(sample[0])
    return Altered(Subset(dataset, rows.tolist()), torch.full((len(rows),), target), stamp)
