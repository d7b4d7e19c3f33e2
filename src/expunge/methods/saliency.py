"""Train on random labels for the forget data, moving only the weights that matter to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from expunge import curvature
from expunge.data.batches import Data
from expunge.editing import masks, scores
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.methods.relabelling import relabelled, relabelled_apart
from expunge.training import holding
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.validate import check_choice, check_flag, check_number, make_plain


@dataclass(frozen=True)
class SalUn:
    """`RandomLabels` in which only salient weights move: the share `salient` with the largest |∂L_f/∂w_j|.

    w ← m ⊙ w_new + (1 − m) ⊙ w_old, m_j = 1 for the top half of the saliency, over all parameters. Weights that are not salient keep their
    bits, under momentum and weight decay too. BatchNorm's running statistics are not weights and move. Fan et al. 2024, arXiv:2310.12508.

    Defaults: 10 epochs at 0.013, their example for 10 % random data of CIFAR-10; a class needs a rate of its own.
    Departures: the text minimises L_f(ỹ) + α·L_r, a sum of two means, in which the forget term does not shrink with n_f; here, as in their
    program for CIFAR-100 and Tiny-ImageNet, it is the mean over one mixed stream (`passes="mixed"`). For CIFAR-10 and SVHN the program
    makes a pass over the forget data, then one over the remain data: `as_released()`. The two can end far apart (docs/opposing.md). Labels
    are wrong and drawn once, where theirs may be the own (`exclude_own`) and are drawn again each epoch.
    """

    salient: float = 0.5
    exclude_own: bool = True
    passes: Literal["mixed", "apart"] = "mixed"
    tuning: Tuning = Tuning(Constant(0.013, 10), batch_size=256, weight_decay=5e-4)

    def __post_init__(self) -> None:
        check_number("salient", self.salient, 0, 1)
        check_choice("passes", self.passes, ("mixed", "apart"))
        check_flag("exclude_own", self.exclude_own)
        check_tuning(self.tuning, "SalUn")
        make_plain(self)

    @classmethod
    def as_released(cls, salient: float = 0.5, tuning: Tuning = Tuning(Constant(0.013, 10), batch_size=256, weight_decay=5e-4)) -> SalUn:
        """The authors' program for CIFAR-10 and SVHN: in each epoch a pass over the forget data, then one over the remain data.

        Labels of the forget data are drawn anew each time, from all classes. Its saliency sums the mean gradients of batches,
        a last, smaller one like the others; here it is the mean over samples.
        """
        return cls(salient, exclude_own=False, passes="apart", tuning=tuning)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        needs_remain(remain, "SalUn")
        state = None
        if self.passes == "mixed":
            phases = [relabelled(model, forget, remain, self.exclude_own, self.tuning, run)]
        else:
            phases, state = relabelled_apart(model, forget, remain, self.exclude_own, self.tuning, run)
        gradient, _ = curvature.gradient(model, run.batches(forget, "forget"), run.objective, run.progress)
        mask = masks.select(scores.saliency(gradient), self.salient)
        run.train_phases(model, lambda epoch: phases, self.tuning, partial(holding.only, model, mask), state=state)
