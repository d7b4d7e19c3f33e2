"""See what there is to unlearn: a class or samples, how many, and which data can guard the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from expunge.data.batches import Data, as_batches
from expunge.data.classes import check_classes
from expunge.data.labels import IGNORED
from expunge.data.parting import cuttable, drawn_apart
from expunge.errors import InputError
from expunge.methods.choosing.judging import Judge
from expunge.methods.choosing.labels import labels_of
from expunge.methods.context import Run
from expunge.runtime.display import counted

HELD, MOST, ENOUGH = 0.1, 1000, 20  # share and number of remain samples that guard the rest, and how few are of no use
FEW, FEW_PER_CLASS = 32, 10  # remain samples below which hardly any weight can be learnt anew
CLASS_SAMPLES = 10  # forget samples per label that are taken for a class where no remain data tell


@dataclass(frozen=True)
class Situation:
    """`remain` are the data to train on, None where there are none; `steps` the batches of a pass over them. `told` is in words."""

    judge: Judge
    remain: Data | None
    remain_samples: int
    few: bool
    batch_size: int
    steps: int
    told: tuple[str, ...]

    @property
    def share(self) -> float:
        """The forget data among all."""
        return self.judge.forget_samples / (self.judge.forget_samples + self.remain_samples)


def seen(forget: Data, remain: Data | None, run: Run, max_drop: float, seed: int) -> Situation:
    """Read all labels once, and hold remain samples apart where no `validation` guards the rest."""
    assert run.logits is not None  # `unlearn` has them
    check_classes(run.objective, run.logits, "to choose a method needs")
    forgotten = labels_of(forget, "forget", run)
    told: list[str] = []
    if remain is None:
        classes = _classes_alone(forgotten, run.logits[1])
        told.append("no remain data: only an edit of weights is possible, and nothing protects the rest")
        told.append(_kind(classes, forgotten, "judged by its labels alone"))
        judge = _judge(forget, forgotten, classes, run.validation, run, max_drop, unseen=run.validation is not None)
        return Situation(judge, None, 0, False, 0, 0, tuple(told))
    kept = labels_of(remain, "remain", run)
    classes = _occurring(forgotten) - _occurring(kept)
    if forgotten.dim() > 1 and classes != _occurring(forgotten):
        classes = set()  # samples, of which none can be told to be of a class: they have a label per position
    told.append(_kind(classes, forgotten, "no remain sample has the label"))
    samples = len(kept)
    size = fitting_batch_size(samples)
    few = int((kept != IGNORED).sum()) < max(FEW, FEW_PER_CLASS * len(_occurring(kept)))
    guard, train, unseen = run.validation, remain, run.validation is not None
    if guard is None:
        guard, train = _held_apart(remain, kept, run, few, seed, size, told)
    judge = _judge(forget, forgotten, classes, guard, run, max_drop, unseen, trained_on=guard is train)
    return Situation(judge, train, samples, few, size, len(as_batches(train, "remain", size)), tuple(told))


def fitting_batch_size(samples: int) -> int:
    return next(size for least, size in ((8192, 128), (2048, 64), (256, 32), (0, 16)) if samples >= least)


def _kind(classes: set[int], labels: Tensor, how: str) -> str:
    named = f"{counted(len(classes), 'class', 'classes')} ({', '.join(map(str, sorted(classes)[:5]))})"
    if classes == _occurring(labels):
        return f"the forget data are {named}: {how}"
    also = f", but none of {named}" if classes else ""
    return f"the forget data are {counted(len(labels), 'sample')}: others with these labels stay{also}"


def _held_apart(remain: Data, labels: Tensor, run: Run, few: bool, seed: int, size: int, told: list[str]) -> tuple[Data, Data]:
    """(the guard, the data to train on)."""
    parts = None if few or len(labels) * HELD < ENOUGH else cuttable(remain, "remain", size)
    if parts is None or parts.samples != len(labels):
        why = "too few" if few or len(labels) * HELD < ENOUGH else "in a form of which none can be held apart"
        told.append(f"the remain data, {why}, are both trained on and used to guard the rest: pass `validation`")
        return remain, remain
    if isinstance(as_batches(remain, "remain", size).source, DataLoader):  # it may shuffle
        labels = labels_of(parts.at(torch.arange(parts.samples), True), "remain", run)
    kept, held = drawn_apart(labels if labels.dim() == 1 else len(labels), HELD, MOST, seed)
    told.append(f"no `validation`: {len(held):,} remain samples are held apart to guard the rest")
    return parts.at(held, True), parts.at(kept, False)


def _judge(
    forget: Data,
    labels: Tensor,
    classes: set[int],
    guard: Data | None,
    run: Run,
    max_drop: float,
    unseen: bool,
    trained_on: bool = False,
) -> Judge:
    gone = len(labels) if classes == _occurring(labels) else int(torch.isin(labels, torch.tensor(sorted(classes))).sum())
    names = frozenset(classes), frozenset(_occurring(labels))
    return Judge(forget, guard, unseen, trained_on, *names, len(labels), gone, max_drop, run)


def _occurring(labels: Tensor) -> set[int]:
    return {*labels.unique().tolist()} - {IGNORED}


def _classes_alone(labels: Tensor, outputs: int) -> set[int]:
    """Labels that are taken for whole classes where no remain data tell: no more than half of all, with ten samples or more each."""
    counts = Counter(labels.reshape(-1).tolist())
    counts.pop(IGNORED, None)
    if len(counts) == outputs:
        raise InputError("forget", "must leave a class to keep where there are no remain data; pass remain data", f"all {outputs} classes")
    return {*counts} if len(counts) <= outputs / 2 and min(counts.values()) >= CLASS_SAMPLES else set()
