"""Schedules that mean nothing are refused where they are made."""

import math

import numpy
import pytest

from expunge.errors import InputError
from expunge.schedules import Constant, Replay, Steps, replay

BAD = {
    "base": [lambda value=value: Constant(value, 1) for value in (0, -1, math.nan, math.inf, "a", None, True)],
    "epochs": [lambda value=value: make(epochs=value) for value in (0, True, 2.5, "5", None) for make in (Steps, lambda epochs: replay(Steps(), epochs))],
    "factor": [lambda value=value: Steps(factor=value) for value in (0, math.nan, "a")],
    "decays": [lambda value=value: Steps(decays=value) for value in (80, "80", None, (math.nan,), (math.inf,), (-1,), (80, "120"), (True,))],
    "warmup": [lambda value=value: Steps(warmup=value) for value in (math.nan, math.inf, -1, "a", None, True)],
    "schedule": [lambda value=value: replay(value) for value in (5, None, "Steps", Steps)],
}  # fmt: skip


@pytest.mark.parametrize(("argument", "make"), [(argument, make) for argument, makes in BAD.items() for make in makes])
def test_what_means_nothing_is_refused(argument, make):
    with pytest.raises(InputError, match=f"^{argument}: "):
        make()


def test_numbers_of_any_kind_are_taken():
    assert Steps(numpy.float32(0.5), decays=[numpy.int64(2), 3.5], warmup=0).rate(3) == pytest.approx(0.05)
    assert Steps(decays=()).rate(159) == 0.1


def test_a_schedule_of_ones_own_can_be_replayed():
    class Falling:
        epochs = 10

        def rate(self, time: float) -> float:
            return 1 - time / 10

    assert Replay(Falling(), 5).rate(2.5) == 0.5
