"""Set how an audit measures: how much is kept of the inner outputs, and how a copy re-learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expunge.errors import InputError
from expunge.validate import check_positive, check_seed, check_whole, make_plain, shown


@dataclass(frozen=True)
class Settings:
    """`sample`: of every set, so many samples' features and logits are kept for probes and comparisons. `bits`: rounding.

    Re-learning is `rounds` of `steps` batches of all training data at a small `rate`, with momentum 0.9: so little that a network which
    never saw a class does not learn it, and one that hides it shows it. 0 rounds switch it off.
    """

    sample: int = 4000
    batch_size: int = 128
    bits: tuple[int, ...] = (8, 4)
    rounds: int = 4
    steps: int = 8
    rate: float = 0.003
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("settings.sample", self.sample, minimum=20)
        check_whole("settings.batch_size", self.batch_size, minimum=1)
        if not isinstance(self.bits, Sequence) or isinstance(self.bits, str):
            raise InputError("settings.bits", "must be whole numbers, such as (8, 4)", shown(self.bits))
        object.__setattr__(self, "bits", tuple(self.bits))
        for bits in self.bits:
            check_whole("settings.bits", bits, minimum=2, maximum=16)
        check_whole("settings.rounds", self.rounds, minimum=0, maximum=10**4)
        check_whole("settings.steps", self.steps, minimum=1)
        check_positive("settings.rate", self.rate)
        check_seed("settings.seed", self.seed)
        make_plain(self)
