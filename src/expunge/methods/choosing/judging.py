"""Measure whether a network forgot, and whether it kept the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from expunge.data.batches import Data
from expunge.errors import InputError, ModelError, naming
from expunge.methods.choosing.labels import labels_of
from expunge.methods.context import Run
from expunge.metrics.accuracy import check_numbers
from expunge.metrics.membership import attack_error, loss_attack
from expunge.metrics.predictions import Predictions, accuracy_of, logits

Kind = Literal["class", "samples"]
SLACK = 0.01  # of accuracy or of an attack's area, beside what chance does
ERRORS = 1.5  # standard errors that count as chance
BY_HEART, DOUBT = 0.99, 0.2  # accuracy on samples the original learnt that says little of others, and a drop there that may be no harm
UNCOVERED = 0.1  # of the forget samples may be of classes that the unseen ones lack
TELLING = 0.15  # of chance's share in the attack: with more the samples are too few to tell anything


@dataclass(frozen=True)
class Numbers:
    """What a network does: accuracy on the data that guard the rest, on the forget data, on unseen data like them; and the loss attack.

    Where a class goes as a whole beside samples of others, `forget` and the attack are of these, and `gone` is the accuracy on the class.
    """

    accuracy: float | None
    forget: float
    unseen: float | None = None
    attack: float | None = None
    loss: float = 0.0  # mean, on the guard
    gone: float | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether the rest was kept and the forget data look unseen (None: not measured), and in words what was not."""

    kept: bool | None
    forgotten: bool | None
    missing: tuple[str, ...]

    @property
    def met(self) -> bool | None:
        parts = (self.kept, self.forgotten)
        return False if False in parts else None if None in parts else True


@dataclass(frozen=True)
class Judge:
    """Measures networks, all on the same data.

    `guard` are the data whose accuracy must be kept, None where there are none. `unseen` says that the original was never trained on them
    (`validation`), `trained_on` that the new network is. `forgotten` are the classes that go as a whole, `forget_labels` all in the forget
    data; of its `forget_samples` `gone_samples` are of the former.
    """

    forget: Data
    guard: Data | None
    unseen: bool
    trained_on: bool
    forgotten: frozenset[int]
    forget_labels: frozenset[int]
    forget_samples: int
    gone_samples: int
    max_drop: float
    run: Run

    @property
    def kind(self) -> Kind:
        return "class" if self.forgotten == self.forget_labels else "samples"

    @property
    def single_samples(self) -> int:
        """The forget samples that must look unseen, since others with their labels stay."""
        return self.forget_samples - self.gone_samples

    @property
    def per_sample(self) -> bool:
        """Whether a sample has one label, not one per position: the sampled Fisher information needs that."""
        return self.run.logits is not None and len(self.run.logits) == 2

    def measure(self, model: nn.Module) -> Numbers:
        forget, gone = self._predict(model, self.forget, "forget"), None
        if self.gone_samples and self.kind == "samples":
            stays = self._stays(forget.targets)
            forget, gone = _at(forget, stays), accuracy_of(_at(forget, ~stays))
        right = accuracy_of(forget)
        if self.guard is None:
            return Numbers(None, right)
        assert self.guard_samples  # counted first, which checks them
        guard = self._predict(model, self.guard, self.argument)
        rest = _at(guard, self._stays(guard.targets))
        numbers = Numbers(accuracy_of(rest), right, loss=_finite(float(self._losses(rest).mean())), gone=gone)
        if not self.telling:
            return numbers
        alike = _at(guard, self._is_alike(guard.targets))
        attack = loss_attack(forget, alike, self.run.objective)
        return replace(numbers, unseen=accuracy_of(alike), attack=attack)

    @property
    def argument(self) -> str:
        return "validation" if self.unseen else "remain"

    def verdict(self, numbers: Numbers, before: Numbers, reads_forget: bool, strongest: bool) -> Verdict:
        """`reads_forget`: the method moved away from the forget data, so they may stand out by losses that are too large. `strongest`:
        nothing more can be done, so samples that are still harder than unseen ones are of another kind."""
        kept, fell = self._kept(numbers, before)
        if self.kind == "class":
            went, left = self._class_left(numbers.forget, "forget data")
            return Verdict(kept, went, (*fell, *left))
        unseen, told = self._samples_left(numbers, reads_forget, strongest)
        went, left = (True, ()) if numbers.gone is None else self._class_left(numbers.gone, "classes that go")
        return Verdict(kept, unseen if went else False, (*fell, *told, *left))

    def are_harder(self, numbers: Numbers) -> bool:
        """Whether forget samples are wrong more often than others: so are wrong labels to a network that never saw them."""
        if self.kind == "class" or numbers.accuracy is None:
            return False
        if numbers.attack is not None:
            return numbers.attack < 0.5 - self._tolerance
        return numbers.forget + self._spread(numbers.accuracy, self.guard_samples, 3) < numbers.accuracy / 2

    def told(self, numbers: Numbers, before: Numbers) -> str:
        """What a network came to, in words."""
        parts = [f"forget data {100 * before.forget:.1f} → {_percent(numbers.forget)}"]
        if numbers.accuracy is not None and before.accuracy is not None:
            parts.insert(0, f"right of {self._guarded} {100 * before.accuracy:.1f} → {_percent(numbers.accuracy)}")
        if numbers.gone is not None and before.gone is not None:
            parts.append(f"classes that go {100 * before.gone:.1f} → {_percent(numbers.gone)}")
        if numbers.attack is not None and before.attack is not None:
            parts.append(f"told from unseen by their losses {before.attack:.2f} → {numbers.attack:.2f} (0.50: not at all)")
        text = ", ".join(parts)
        return f"{text}; no more than a network gives of wrong labels that it never saw" if self._as_wrong_labels(numbers) else text

    def _kept(self, numbers: Numbers, before: Numbers) -> tuple[bool | None, tuple[str, ...]]:
        if numbers.accuracy is None or before.accuracy is None:
            return None, ("nothing is there to measure what became of the rest (pass remain data or `validation`)",)
        count, drop = self._counts[0], before.accuracy - numbers.accuracy
        if drop * count <= max(self.max_drop * count, 1) + 1e-6:
            told = "accuracy on the rest was measured on samples that were trained on, which says little (pass `validation`)"
            return (None, (told,)) if self.trained_on else (True, ())
        told = f"accuracy on {self._guarded} fell from {_percent(before.accuracy)} to {_percent(numbers.accuracy)}"
        # A network that knows what it was trained on by heart has no such accuracy on other samples, so there is nothing to keep.
        if not self.unseen and before.accuracy >= BY_HEART and drop <= DOUBT:
            doubt = "whether that is harm cannot be told, for the original had learnt these samples, perhaps by heart (pass `validation`)"
            return None, (f"{told}: {doubt}",)
        doubt = "" if self.unseen else " (the original had learnt these samples, perhaps by heart: `validation` would tell)"
        return False, (f"{told}, by more than max_drop={self.max_drop:g}{doubt}",)

    def _class_left(self, share: float, name: str) -> tuple[bool, tuple[str, ...]]:
        allowed = max(0.01 * self.gone_samples, 1 if self.gone_samples >= 20 else 0)
        if share * self.gone_samples <= allowed + 1e-6:
            return True, ()
        return False, (f"{_percent(share)} of the {name} still get their label",)

    def _samples_left(self, numbers: Numbers, reads_forget: bool, strongest: bool) -> tuple[bool | None, tuple[str, ...]]:
        if not reads_forget and self._as_wrong_labels(numbers):
            return True, ()
        if numbers.attack is None or numbers.unseen is None:
            told = f"{_percent(numbers.forget)} of the forget data still get their label: few for samples, many for poison or wrong labels"
            return None, (*[told] * (self.are_harder(numbers) and not reads_forget), self._why_not_measured())
        missing, attack = [], numbers.attack
        if self.are_harder(numbers) and not reads_forget:
            shares = f"{_percent(numbers.forget)} are right, {_percent(numbers.unseen)} of unseen ones"
            told = f"the forget data are harder than `validation` ({shares}), as with wrong labels in part"
            return None if strongest else False, (f"{told}: these cannot tell whether they look unseen",)
        if abs(attack - 0.5) > self._tolerance:
            also = ", also with all weights fresh: they may differ from `validation` by more than having been seen" if strongest else ""
            missing.append(f"losses tell the forget data from unseen ones: {attack:.2f}, chance is 0.50 ± {self._tolerance:.2f}{also}")
        if numbers.forget > numbers.unseen + SLACK + self._spread(numbers.unseen, self._counts[1]):
            missing.append(f"{_percent(numbers.forget)} of the forget data are right, {_percent(numbers.unseen)} of unseen ones")
        if not missing and (apart := self._uncovered) > UNCOVERED * self.single_samples:
            told = f"`validation` has no samples of the classes of {apart} of the {self.single_samples} forget samples"
            return None, (f"{told}, so whether these look unseen was not measured",)
        return not missing, tuple(missing)

    def _as_wrong_labels(self, numbers: Numbers) -> bool:
        """Whether as few of the forget labels are given as a network gives wrong ones: no more than it errs on other data."""
        right = numbers.accuracy if numbers.unseen is None else numbers.unseen
        if right is None or self.kind == "class":
            return False
        samples = self.guard_samples if numbers.unseen is None else self._counts[1]
        return numbers.forget <= min(1 - right + SLACK + self._spread(right, samples), right / 2) and self.are_harder(numbers)

    def _spread(self, share: float, samples: int, errors: float = ERRORS) -> float:
        """What chance does to the difference of this accuracy and that on the forget data."""
        return float(errors * (share * (1 - share) * (1 / self.single_samples + 1 / max(1, samples))) ** 0.5)

    @property
    def _tolerance(self) -> float:
        return SLACK + ERRORS * self._attack_error

    def _why_not_measured(self) -> str:
        if not self.unseen:
            return "whether the samples look unseen cannot be measured without `validation`, which the original never saw"
        if not self._counts[1]:
            return "`validation` has no samples of their classes, so whether they look unseen cannot be measured"
        return f"too few samples to tell whether they look unseen ({self.single_samples}, and {self._counts[1]} in `validation`)"

    @cached_property
    def _uncovered(self) -> int:
        """Forget samples with whose labels there are none among the unseen ones."""
        assert self.guard is not None
        own, others = (labels_of(data, name, self.run) for data, name in ((self.forget, "forget"), (self.guard, self.argument)))
        return 0 if own.dim() > 1 else int((self._stays(own) & ~torch.isin(own, others)).sum())

    @property
    def _guarded(self) -> str:
        return f"{self._counts[0]:,} {'`validation`' if self.unseen else 'remain'} samples"

    @property
    def telling(self) -> bool:
        """Whether there are enough unseen samples like the forget data to tell these from them."""
        return self.unseen and self.kind == "samples" and self._counts[1] > 0 and ERRORS * self._attack_error <= TELLING

    @property
    def guard_samples(self) -> int:
        return self._counts[0]

    @property
    def _attack_error(self) -> float:
        return attack_error(self.single_samples, self._counts[1])

    @cached_property
    def _counts(self) -> tuple[int, int]:
        """The samples of the guard that are of classes that stay, and those like the forget data."""
        if self.guard is None:
            return 0, 0
        targets = labels_of(self.guard, self.argument, self.run)
        rest, alike = self._stays(targets), self._is_alike(targets)
        if not rest.any():
            raise InputError(self.argument, "must hold samples of classes that stay", f"none but of {sorted(self.forgotten)}")
        return int(rest.sum()), int(alike.sum())

    def _stays(self, targets: Tensor) -> Tensor:
        return ~_among(targets, self.forgotten, otherwise=False)

    def _is_alike(self, targets: Tensor) -> Tensor:
        return _among(targets, self.forget_labels - self.forgotten, otherwise=True)

    def _predict(self, model: nn.Module, data: Data, argument: str) -> Predictions:
        with naming(argument):
            return logits(model, data, self.run.objective, self.run.batch_size)

    def _losses(self, predictions: Predictions) -> Tensor:
        losses = self.run.objective.per_sample(predictions.logits.double(), predictions.targets)
        check_numbers("the losses", int(losses.isnan().sum()), losses.numel())
        return losses.detach()


def check_teacher(numbers: Numbers, samples: int, classes: int) -> None:
    """The original must be better than chance, three standard deviations below which are no accident."""
    chance = 1 / classes
    if numbers.accuracy is not None and numbers.accuracy < chance - 3 * (chance * (1 - chance) / samples) ** 0.5:
        rule = f"must be better than chance, {chance:.3g}, on the data that stay, for nothing can be kept otherwise"
        raise ModelError(f"model: {rule}; found an accuracy of {numbers.accuracy:.3g}")


def _among(targets: Tensor, labels: frozenset[int], otherwise: bool) -> Tensor:
    """Which samples have one of these labels; `otherwise` for all of them where a sample has many, one per position."""
    if targets.dim() > 1:
        return torch.full((len(targets),), otherwise)
    return torch.isin(targets, torch.tensor(sorted(labels), dtype=targets.dtype))


def _at(predictions: Predictions, rows: Tensor) -> Predictions:
    return Predictions(predictions.logits[rows], predictions.targets[rows])


def _finite(loss: float) -> float:
    return min(loss, 1e30)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
