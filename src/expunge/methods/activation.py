"""Zero the channels that the forget data activate, chosen by mean activation or by its TF-IDF over classes, then fine-tune."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from torch import nn

from expunge.data.batches import Data
from expunge.data.objective import Batch
from expunge.editing import masks, scores
from expunge.editing.masks import Rounding, Scope
from expunge.editing.patches import Patch
from expunge.errors import InputError
from expunge.methods.context import OR_NO_TUNING, Run, check_tuning, needs_remain
from expunge.model import activations, channels
from expunge.model.activations import Activations
from expunge.training.tuning import Tuning
from expunge.validate import check_choice, check_flag, check_number, check_seed, check_whole, make_plain


@dataclass(frozen=True)
class ActivationMask:
    """Zero the share `ratio` of channels that the forget data activate more than the remain data do, then fine-tune.

    score_j = A_f,j − A_r,j, A_f,j and A_r,j the means over each set of A_ij, the mean over positions of ReLU(BN(conv)). The weight rows
    and the bias of a chosen channel are set to zero (section Masking with Activation Values). Whole channels are masked (output units of
    a Linear), so there is no `granularity`, and `ratio` counts channels. Without remain data, `tuning` must be None and the score is A_f.

    Departures: the released program divides sums by the number of batches, also zeroes BatchNorm, and rounds the number of channels down:
    `as_released()`.
    """

    ratio: float = 0.02
    scope: Scope = "global"
    average: Literal["samples", "batches"] = "samples"
    with_norm: bool = False
    include_head: bool = False
    tuning: Tuning | None = Tuning()
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, 0, 1)
        check_choice("scope", self.scope, Scope)
        check_choice("rounding", self.rounding, Rounding)
        check_choice("average", self.average, ("samples", "batches"))
        check_flag("with_norm", self.with_norm)
        check_flag("include_head", self.include_head)
        check_tuning(self.tuning)
        make_plain(self)

    @classmethod
    def as_released(cls, ratio: float = 0.02, tuning: Tuning | None = Tuning(), rounding: Rounding = "down") -> ActivationMask:
        """The settings of the authors' released program: γ, β, running mean and variance are set to zero with the channel."""
        return cls(ratio, average="batches", with_norm=True, tuning=tuning, rounding=rounding)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        if self.tuning is not None:
            needs_remain(remain, "ActivationMask with tuning", OR_NO_TUNING)
        layers = run.layers_of(model, forget, self.include_head)

        def measure(data: Data, argument: str) -> Activations:
            return activations.measure(model, run.batches(data, argument), layers, run.objective, progress=run.progress)

        remain_sums = None if remain is None else measure(remain, "remain")
        score = scores.activation_difference(measure(forget, "forget"), remain_sums, self.average)
        chosen = masks.select(score, self.ratio, "element", self.scope, rounding=self.rounding)
        mask = channels.mask(model, layers, chosen, self.with_norm)
        statistics = channels.cleared_statistics(model, layers, chosen) if self.with_norm else {}
        patch = run.edit(model, {**mask, **statistics})
        run.train(model, remain, self.tuning, mask=mask)
        return patch


@dataclass(frozen=True)
class TfIdfMask:
    """Zero the channels that the forgotten classes activate and few others do, then fine-tune: classes are documents, channels words.

    a[c, u] = mean over class c of the mean over positions of ReLU(conv), before BatchNorm.
    score_u = TF·IDF, TF = a[c, u] / Σ_u' a[c, u'] over the layer's channels u', averaged over the forgotten classes c,
    IDF = log((1 + K) / (1 + #{c' : a[c', u] ≥ mean over the layer's channels of a[c', ·]})).
    The share `ratio` of channels with the highest scores is set to zero, weight and bias; BatchNorm stays (section Masking with Activation
    Values, after Wang et al. 2022). For whole classes only: no label may be in both sets. `batches` limits each set to that many batches,
    drawn with `seed`.

    Departures: the released programs, the paper's and Wang's, have another IDF, zero the lowest scores and read few samples:
    `as_released()`.
    """

    ratio: float = 0.02
    scope: Scope = "global"
    reading: Literal["text", "released"] = "text"
    batches: int | None = None
    seed: int = 0
    include_head: bool = False
    tuning: Tuning | None = Tuning()

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, 0, 1)
        check_choice("scope", self.scope, Scope)
        check_choice("reading", self.reading, ("text", "released"))
        if self.batches is not None:
            check_whole("batches", self.batches, minimum=1)
        check_seed("seed", self.seed)
        check_flag("include_head", self.include_head)
        check_tuning(self.tuning)
        make_plain(self)

    @classmethod
    def as_released(cls, ratio: float = 0.02, tuning: Tuning | None = Tuning()) -> TfIdfMask:
        """The rule of the authors' released program, from one batch of each set, where the program has one batch of all training data.

        IDF[u] = log(K / (1 + #{c' : a[c', u] ≥ mean over the classes of a[·, u]})); channels at or below the ⌊n·(1 − ratio)⌋-th largest of
        all n scores go to zero, one more than the ratio says.
        """
        return cls(ratio, reading="released", batches=1, tuning=tuning)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        needs_remain(remain, "TfIdfMask")
        forget_labels, remain_labels = (
            activations.labels(run.batches(data, argument), argument, run.objective)
            for data, argument in ((forget, "forget"), (remain, "remain"))
        )
        if shared := sorted({*forget_labels} & {*remain_labels}):
            raise InputError("forget", "TF-IDF forgets whole classes: no label may be in the remain data too", shared)
        layers = run.layers_of(model, forget, self.include_head)

        def measure(data: Data, argument: str, labels: list[int]) -> Activations:
            batches: Iterable[Batch] = run.batches(data, argument)
            if self.batches is not None:
                batches = islice(run.batches(data, argument).shuffled(self.seed), self.batches)
            return activations.measure(model, batches, layers, run.objective, classes=labels, before_norm=True, progress=run.progress)

        score = scores.tf_idf(measure(forget, "forget", forget_labels), measure(remain, "remain", remain_labels), self.reading)
        if self.reading == "text":
            chosen = masks.select(score, self.ratio, "element", self.scope)
        else:
            chosen = masks.below_threshold(score, self.ratio, self.scope)
        mask = channels.mask(model, layers, chosen)
        patch = run.edit(model, mask)
        run.train(model, remain, self.tuning, mask=mask)
        return patch
