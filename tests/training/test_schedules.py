"""Schedules that mean nothing are refused where they are made."""

import math

import numpy
import pytest

from expunge.errors import InputError
from expunge.training.schedules import Constant, OneCycle, Replay, Steps, replay

BAD = {
    "base": (lambda value: Constant(value, 1), (0, -1, math.nan, math.inf, "a", None, True)),
    "epochs": (lambda value: Steps(epochs=value), (0, True, 2.5, "5", None)),
    "factor": (lambda value: Steps(factor=value), (0, math.nan, "a")),
    "decays": (lambda value: Steps(decays=value), (80, "80", None, (math.nan,), (math.inf,), (-1,), (80, "120"), (True,))),
    "warmup": (lambda value: Steps(warmup=value), (math.nan, math.inf, -1, "a", None, True)),
    "peak": (lambda value: OneCycle(value), (0, -1, math.nan, "a", None)),
    "rise": (lambda value: OneCycle(rise=value), (-0.1, 1, 1.5, math.nan, "a", None)),
    "schedule": (replay, (5, None, "Steps", Steps)),
}


@pytest.mark.parametrize("argument, value", [(argument, value) for argument, (_, values) in BAD.items() for value in values])
def test_what_means_nothing_is_refused(argument, value):
    with pytest.raises(InputError, match=f"^{argument}: "):
        BAD[argument][0](value)


@pytest.mark.parametrize("epochs", [0, True, 2.5])
def test_a_replay_has_whole_epochs(epochs):
    with pytest.raises(InputError, match="^epochs: "):
        replay(Steps(), epochs)


def test_numbers_of_any_kind_are_taken():
    assert Steps(numpy.float32(0.5), decays=[numpy.int64(2), 3.5], warmup=0).rate(3) == pytest.approx(0.05)
    assert Steps(decays=()).rate(159) == 0.1


def test_a_schedule_of_ones_own_can_be_replayed():
    class Falling:
        epochs = 10

        def rate(self, time: float) -> float:
            return 1 - time / 10

    assert Replay(Falling(), 5).rate(2.5) == 0.5


def test_one_cycle_rises_and_falls():
    cycle = OneCycle(0.2, epochs=10, rise=0.2)
    assert [cycle.rate(time) for time in (0, 1, 2, 6, 10)] == pytest.approx([0, 0.1, 0.2, 0.1, 0])
    assert OneCycle(0.2, epochs=10, rise=0).rate(0) == 0.2
    assert replay(cycle, 5).rate(1) == pytest.approx(0.2)
