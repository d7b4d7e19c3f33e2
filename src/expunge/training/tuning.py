"""Set how to train: schedule, batch size, optimizer, precision, a teacher's part in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from expunge.errors import InputError
from expunge.training.distillation import Distillation
from expunge.training.schedules import Schedule, Steps, check_schedule
from expunge.validate import check_amount, check_builder, check_choice, check_flag, check_seed, check_whole, make_plain, shown

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Tuning:
    """How to train: stochastic gradient descent unless `optimizer` builds another from the trainable parameters.

    The schedule sets the learning rate of any optimizer, in all its groups, so give Adam a schedule that suits it. `momentum` and
    `weight_decay` are for the default optimizer only. `freeze`: methods that mask keep those weights at zero while they fine-tune (`train`
    has `mask` for this). `eval_mode` trains with dropout off and BatchNorm's statistics fixed. `precision` "bfloat16" computes under
    autocast; the weights keep their type. `distillation` adds the original network's answers to the labels, in `unlearn`.

    The default schedule is short and gentle, to spare a pretrained network: up to 0.01 over half an epoch, ×0.1 at 2.5 and 3.75 of 5.
    The paper's, for networks that were trained at 0.1, is `Tuning(replay(Steps(), epochs=5))`.

    Departures: the text gives no weight decay; 1e-4 is the released program's, as are masked weights that may grow back.
    """

    schedule: Schedule = Steps(base=0.01, epochs=5, decays=(2.5, 3.75), warmup=0.5)
    batch_size: int = 128
    momentum: float = 0.9
    weight_decay: float = 1e-4
    freeze: bool = False
    seed: int = 0
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    eval_mode: bool = False
    precision: Precision = "float32"
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        check_builder("optimizer", self.optimizer, "must build an optimizer from parameters, as torch.optim.Adam does")
        check_whole("batch_size", self.batch_size, minimum=1)
        check_amount("momentum", self.momentum)
        check_amount("weight_decay", self.weight_decay)
        check_flag("freeze", self.freeze)
        check_seed("seed", self.seed)
        check_flag("eval_mode", self.eval_mode)
        check_choice("precision", self.precision, Precision)
        if not isinstance(self.distillation, Distillation | None):
            raise InputError(
                "distillation", "must be a Distillation, such as Distillation(temperature=4), or None", shown(self.distillation)
            )
        make_plain(self)
