"""Ascend the loss of the forget data, alone or while descending that of the remain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from expunge.data.batches import Data, as_batches, device_of, to_device
from expunge.data.objective import Batch
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.methods.streams import cycled
from expunge.training.carrying import Carried
from expunge.training.loop import Losses
from expunge.training.schedules import Constant
from expunge.training.single_samples import SingleSampleFilter
from expunge.training.tuning import Tuning
from expunge.validate import check_number, make_plain


@dataclass(frozen=True)
class GradientAscent:
    """Maximise the loss on the forget data, and nothing else: w ← w + η·∇L_f(w).

    Needs no remain data. Nothing protects the rest of the network, so take few steps. The network is in train mode, as in the
    programs of the field, so BatchNorm's running statistics move towards the forget data too. Thudi et al. 2022, arXiv:2109.13398.

    Defaults: 5 epochs at 1e-4, batches of 256 and decay 5e-4, the baseline in the program of Jia et al. 2023 (Unlearn-Sparse,
    arXiv:2304.04934); tune the rate for your network.
    """

    tuning: Tuning = Tuning(Constant(1e-4, 5), batch_size=256, weight_decay=5e-4)

    def __post_init__(self) -> None:
        check_tuning(self.tuning, "GradientAscent")

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        def loss(model: nn.Module, batch: Batch, losses: Losses) -> Tensor:
            return -losses(run.objective.outputs(model, batch), run.objective.targets(batch)).mean()

        run.train(model, forget, self.tuning, loss, argument="forget")


@dataclass(frozen=True)
class NegGradPlus:
    """Descend the loss of the remain data and ascend that of the forget data: minimise β·L_r(w) − (1 − β)·L_f(w).

    A step takes a batch of each set; the forget batches are cycled. Kurmanji et al. 2023, arXiv:2302.09880.

    Defaults: β = 0.9999, 10 epochs at 0.01 without momentum and weight decay, as in their program.
    """

    remain_weight: float = 0.9999
    tuning: Tuning = Tuning(Constant(0.01, 10), momentum=0.0, weight_decay=0.0)

    def __post_init__(self) -> None:
        check_number("remain_weight", self.remain_weight, 0, 1, ends="[]")
        check_tuning(self.tuning, "NegGradPlus")
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> None:
        needs_remain(remain, "NegGradPlus")
        device = device_of(model)
        single_samples = SingleSampleFilter(model, run.objective)
        forget_batches = cycled(as_batches(forget, "forget", self.tuning.batch_size), "forget", self.tuning.seed, single_samples)

        drawn = _Counted(forget_batches)

        def loss(model: nn.Module, batch: Batch, losses: Losses) -> Tensor:
            def mean(part: Batch) -> Tensor:
                return losses(run.objective.outputs(model, part), run.objective.targets(part)).mean()

            return self.remain_weight * mean(batch) - (1 - self.remain_weight) * mean(to_device(next(drawn), device))

        run.train(model, remain, self.tuning, loss, state=Carried(lambda: drawn.count, drawn.skip))


class _Counted:
    """Batches that are counted, so that a training that goes on can skip those it had."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.batches, self.count = batches, 0

    def __next__(self) -> Batch:
        self.count += 1
        return next(self.batches)

    def skip(self, count: int) -> None:
        while self.count < count:
            next(self)
