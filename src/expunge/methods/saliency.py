"""Random labels for the forget data, learnt by the weights that matter to them alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from expunge import curvature, masks, scores
from expunge.batches import Data
from expunge.methods.relabelling import relabelled
from expunge.methods.run import Run, check_tuning, needs_remain
from expunge.methods.streams import tune_phases
from expunge.settings import check_flag, check_number, make_plain
from expunge.tuning import Constant, Tuning


@dataclass(frozen=True)
class SalUn:
    """`RandomLabels` in which only salient weights move: the share `salient` with the largest |∂L_f/∂w_j|.

    w ← m ⊙ w_new + (1 − m) ⊙ w_old, m_j = 1 for the top half of the saliency, over all parameters. What is not salient keeps its bits,
    under momentum and weight decay too; BatchNorm's running statistics, which are no weights, move. Fan et al. 2024, arXiv:2310.12508.

    Defaults: 10 epochs at 0.013, the rate of their class removal.
    Departures: the saliency is the gradient at the weights as they are, where their program steps while it sums; labels are wrong and
    drawn once, where theirs may be the own and are drawn again each epoch (`exclude_own`).
    """

    salient: float = 0.5
    exclude_own: bool = True
    tuning: Tuning = Tuning(Constant(0.013, 10), batch_size=256, weight_decay=5e-4)

    def __post_init__(self) -> None:
        check_number("salient", self.salient, 0, 1)
        check_flag("exclude_own", self.exclude_own)
        check_tuning(self.tuning, "SalUn")
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        needs_remain(remain, "SalUn")
        phase = relabelled(model, forget, remain, self.exclude_own, self.tuning, run)
        gradient, _ = curvature.gradient(model, run.batches(forget, "forget"), run.objective, run.progress)
        mask = masks.select(scores.saliency(gradient), self.salient)
        tune_phases(model, lambda epoch: [phase], self.tuning, run, partial(masks.only, model, mask))
