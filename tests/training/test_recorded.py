"""A schedule as it was read off a training: every rate at its step, straight lines between."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from expunge.errors import InputError
from expunge.training.recorded import POINTS, Recorded, thinned
from expunge.training.schedules import replay

rates = some.lists(some.floats(0, 10), min_size=1, max_size=50)


@given(rates, some.integers(1, 20))
def test_every_rate_is_met_at_its_step(values, epochs):
    schedule = Recorded(tuple(values), epochs)
    steps = len(values)
    assert [schedule.rate(step * epochs / steps) for step in range(steps)] == pytest.approx(values, abs=1e-9)
    assert schedule.rate(epochs) == values[-1]


@given(rates, some.integers(1, 20), some.floats(0, 1))
def test_no_rate_lies_outside_of_its_neighbours(values, epochs, part):
    place = min(int(part * len(values)), len(values) - 1)
    near = values[max(place - 1, 0) : place + 2]
    assert min(near) - 1e-9 <= Recorded(tuple(values), epochs).rate(part * epochs) <= max(near) + 1e-9


def test_a_long_training_is_thinned_evenly():
    line = [step / 12_345 for step in range(12_345)]
    schedule = Recorded(thinned(line), 7)
    assert len(schedule.rates) == POINTS and schedule.rates[0] == 0
    assert [schedule.rate(7 * share) for share in (0.1, 0.5, 0.9)] == pytest.approx([0.1, 0.5, 0.9], abs=2 / POINTS)
    assert thinned([0.1, 0.2]) == (0.1, 0.2)


def test_it_can_be_replayed_and_its_repr_is_short_and_its_own():
    schedule = Recorded((0.0, 0.2, 0.1, 0.0), 4)
    assert replay(schedule, 2).rate(0.5) == schedule.rate(1) == 0.2
    assert repr(schedule).startswith("Recorded(4 rates up to 0.2 (") and repr(schedule) != repr(Recorded((0.1, 0.2, 0.1, 0.0), 4))
    assert schedule == Recorded([0, 0.2, 0.1, 0.0], 4)


@pytest.mark.parametrize("values, epochs, told", [((), 3, "rates"), (0.1, 3, "rates"), ((-0.1,), 3, "rates"), ((0.1,), 0, "epochs")])
def test_bad_settings_are_named(values, epochs, told):
    with pytest.raises(InputError, match=f"{told}: must be"):
        Recorded(values, epochs)
