"""Zero weights chosen by Fisher information, at random, or as the classifier's row of a class, then fine-tune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from expunge import fisher
from expunge.data.batches import Data
from expunge.data.classes import no_labels
from expunge.data.labels import has_label
from expunge.editing import masks, scores
from expunge.editing.masks import Granularity, Mask, Rounding, Scope, Which
from expunge.editing.patches import Patch
from expunge.errors import InputError
from expunge.fisher import FisherSums
from expunge.methods.context import OR_NO_TUNING, Run, check_tuning, needs_remain
from expunge.model import channels, heads
from expunge.training.tuning import Tuning
from expunge.validate import check_choice, check_flag, check_number, check_seed, check_whole, make_plain


@dataclass(frozen=True)
class FisherMask:
    """Zero the share `ratio` of weights that matter most to the forget data and least to the remain data, then fine-tune.

    score_j = F_f,j − F_r,j with F_j = Σ_i (∂ log p(y_i|x_i, w) / ∂w_j)²; M = the top R of the scores (section Masking with Fisher
    Information). `remain_weight` λ weighs means instead of sums: F̄_f − λ·F̄_r. Without remain data, `tuning`
    must be None and the score is the forget term, whatever λ.

    Departures: the released program squares batch gradients, masks whole kernels and the classifier too, and rounds their number down:
    `as_released()`.
    """

    ratio: float = 0.02
    kind: Literal["empirical", "expected", "sampled", "batch"] = "empirical"
    remain_weight: float | None = None
    granularity: Granularity = "element"
    scope: Scope = "global"
    which: Which = "all"
    include_head: bool = False
    tuning: Tuning | None = Tuning()
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, 0, 1)
        check_choice("rounding", self.rounding, Rounding)
        if self.remain_weight is not None:
            check_number("remain_weight", self.remain_weight, 0, rule="must be a finite number of at least 0, or None")
        check_choice("kind", self.kind, fisher.KINDS)
        _check_units(self.granularity, self.scope, self.which)
        check_flag("include_head", self.include_head)
        check_tuning(self.tuning)
        make_plain(self)

    @classmethod
    def as_released(cls, ratio: float = 0.02, tuning: Tuning | None = Tuning(), rounding: Rounding = "down") -> FisherMask:
        """The settings of the authors' released program."""
        return cls(ratio, "batch", 1, "kernel", which="weights", include_head=True, tuning=tuning, rounding=rounding)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        if self.tuning is not None:
            needs_remain(remain, "FisherMask with tuning", OR_NO_TUNING)
        allowed = _allowed(model, forget, run, self.include_head, self.which)

        def measure(data: Data, argument: str) -> FisherSums:
            return fisher.diagonal(
                model, run.batches(data, argument), kind=self.kind, objective=run.objective, parameters=allowed, progress=run.progress
            )

        remain_sums = None if remain is None else measure(remain, "remain")
        return self._masked(model, remain, run, allowed, measure(forget, "forget"), remain_sums)

    def by_sums(
        self, model: nn.Module, forget: Data, remain: Data | None, run: Run, forget_sums: FisherSums, remain_sums: FisherSums
    ) -> Patch:
        """The same by sums that are there already, of these parameters at least: no pass is made for the score."""
        return self._masked(model, remain, run, _allowed(model, forget, run, self.include_head, self.which), forget_sums, remain_sums)

    def _masked(
        self,
        model: nn.Module,
        remain: Data | None,
        run: Run,
        allowed: tuple[str, ...],
        forget_sums: FisherSums,
        remain_sums: FisherSums | None,
    ) -> Patch:
        score = scores.fisher_difference(forget_sums, remain_sums, None if remain_sums is None else self.remain_weight)
        mask = masks.select(score, self.ratio, self.granularity, self.scope, allowed, self.rounding)
        patch = run.edit(model, mask)
        run.train(model, remain, self.tuning, mask=mask)
        return patch


@dataclass(frozen=True)
class RandomMask:
    """Zero weights drawn at random, the share `ratio` of them, then fine-tune (section Baselines).

    `with_norm`, for channels: those of convolutions and Linears alone are drawn, and bias and BatchNorm (γ, β) of a channel go with it.

    Departures: the released program draws whole output channels with their BatchNorm, and rows of the classifier: `as_released()`.
    """

    ratio: float = 0.02
    granularity: Granularity = "element"
    scope: Scope = "global"
    which: Which = "all"
    include_head: bool = False
    seed: int = 0
    with_norm: bool = False
    tuning: Tuning | None = Tuning()
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, 0, 1)
        check_choice("rounding", self.rounding, Rounding)
        _check_units(self.granularity, self.scope, self.which)
        check_flag("include_head", self.include_head)
        check_seed("seed", self.seed)
        check_flag("with_norm", self.with_norm)
        check_tuning(self.tuning)
        make_plain(self)
        if self.with_norm and self.granularity != "channel":
            raise InputError("with_norm", 'needs granularity="channel"', repr(self.granularity))

    @classmethod
    def as_released(cls, ratio: float = 0.02, tuning: Tuning | None = Tuning(), seed: int = 0, rounding: Rounding = "down") -> RandomMask:
        """The settings of the authors' released program."""
        return cls(ratio, "channel", which="weights", include_head=True, seed=seed, with_norm=True, tuning=tuning, rounding=rounding)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        if self.tuning is not None:
            needs_remain(remain, "RandomMask with tuning", OR_NO_TUNING)
        mask = self._mask(model, forget, run)
        patch = run.edit(model, mask)
        run.train(model, remain, self.tuning, mask=mask)
        return patch

    def _mask(self, model: nn.Module, forget: Data, run: Run) -> Mask:
        if self.with_norm:
            layers = run.layers_of(model, forget, self.include_head)
            score = scores.random({layer.name: (layer.channels,) for layer in layers}, self.seed)
            chosen = masks.select(score, self.ratio, "element", self.scope, rounding=self.rounding)
            return channels.mask(model, layers, chosen, with_norm=True)
        allowed = _allowed(model, forget, run, self.include_head, self.which)
        return masks.select(scores.random(model, self.seed), self.ratio, self.granularity, self.scope, allowed, self.rounding)


@dataclass(frozen=True)
class MaskClassifier:
    """Zero the classifier's row of one class: forget accuracy falls, and nothing inside the network has been forgotten.

    A control, not a method: forget accuracy cannot tell it from unlearning. The class's logit is then 0, which is seldom the largest but
    can be. `label` None: the single label of the forget set.
    """

    label: int | None = None
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        if self.label is not None:
            check_whole("label", self.label, minimum=0)
        check_tuning(self.tuning)
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        if self.tuning is not None:
            needs_remain(remain, "MaskClassifier with tuning", OR_NO_TUNING)
        label = self.label
        if label is None:
            label = _single_label(forget, run)
        mask = heads.class_rows(model, run.head_of(model, forget), label)
        patch = run.edit(model, mask)
        run.train(model, remain, self.tuning, mask=mask)
        return patch


def _check_units(granularity: Granularity, scope: Scope, which: Which) -> None:
    for argument, value, choices in (("granularity", granularity, Granularity), ("scope", scope, Scope), ("which", which, Which)):
        check_choice(argument, value, choices)


def _allowed(model: nn.Module, forget: Data, run: Run, include_head: bool, which: Which) -> tuple[str, ...]:
    head = () if include_head else run.head_of(model, forget)
    return masks.candidates(model, head, include_head, which)


def _single_label(forget: Data, run: Run) -> int:
    parts: list[Tensor] = []
    for batch in run.batches(forget, "forget"):
        targets = run.objective.targets(batch)
        if no_labels(run.objective, run.logits, targets):
            form = f"{targets.dtype} of shape {tuple(targets.shape)}"
            raise InputError("label", "must be given where the forget set holds no integer labels", form)
        parts.append(targets.detach()[has_label(targets)].cpu())
    labels = torch.unique(torch.cat(parts)).tolist()
    if len(labels) != 1:
        raise InputError("label", "must be given where the forget set holds several labels", labels)
    return int(labels[0])
