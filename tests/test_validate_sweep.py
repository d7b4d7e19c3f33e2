"""Every setting of every method, schedule, solver and function with values that somebody gives: they work, or are named before any work."""

import dataclasses
import math

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from expunge import METHODS, fisher, metrics
from expunge.curvature.solvers import ConjugateGradients, LiSSA
from expunge.editing import masks, scores
from expunge.errors import DivergedError, ExpungeError, InputError
from expunge.methods import Choose, Finetune, FisherMask, Influence
from expunge.metrics import Relearning, relearn_time
from expunge.training.schedules import Constant, Replay, Steps
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from expunge.vision import scenarios
from expunge.vision.datasets.digits import parts
from tests.methods import cases

VALUES = [math.nan, math.inf, -math.inf, -1, 0, 1.5, "a", None, True, [], 2**70, -(2**70), 10**400, torch.tensor(0.5)]


def unlearnt(method) -> None:
    unlearn(cases.model(), cases.forget(), cases.remain(), method, watch={})


# name: (settings, how they are used)
SETTINGS = {
    **{name: (cases.CASES[name](), unlearnt) for name in METHODS},
    "Choose": (Choose(epochs=1, seconds=60), unlearnt),
    "Tuning": (cases.QUICK, lambda tuning: unlearnt(Finetune(tuning))),
    "Constant": (Constant(0.01, 1), lambda schedule: unlearnt(Finetune(Tuning(schedule)))),
    "Steps": (Steps(epochs=2, decays=(1,)), lambda schedule: unlearnt(Finetune(Tuning(schedule)))),
    "Replay": (Replay(Steps(), 2), lambda schedule: unlearnt(Finetune(Tuning(schedule)))),
    "ConjugateGradients": (cases.SHORT, lambda solver: unlearnt(Influence(solver=solver))),
    "LiSSA": (LiSSA(passes=1), lambda solver: unlearnt(Influence(solver=solver))),
    "Relearning": (
        Relearning(cases.QUICK),
        lambda relearning: relearn_time(cases.model(), cases.model(), cases.forget(), cases.remain(), relearning),
    ),
}


@pytest.mark.filterwarnings("ignore::expunge.errors.NoEffectWarning")  # a ratio of 0 or nearly 0 is among the settings
@pytest.mark.filterwarnings("ignore::expunge.errors.GoalNotMetWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_works_or_is_named_where_it_is_given(name):
    settings, use = SETTINGS[name]
    for field in dataclasses.fields(settings):
        for value in VALUES:
            try:
                changed = dataclasses.replace(settings, **{field.name: value})
            except InputError as error:
                assert str(error).startswith(f"{field.name}: ") and "; found " in str(error) and "\n" not in str(error)
                continue
            try:
                use(changed)
            except DivergedError:
                assert value == 2**70  # a rate or a weight of 1e21 is a number
            except InputError as error:
                assert field.name in ("inputs", "reset")  # which the data or the model alone can tell
                assert str(error).startswith(f"{field.name}: ")


@pytest.mark.filterwarnings("ignore::expunge.errors.GoalNotMetWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_numbers_of_numpy_become_pythons_own(name):
    settings, use = SETTINGS[name]
    kinds = {bool: numpy.bool_, int: numpy.int64, float: numpy.float32}
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    given = {key: kinds[type(value)](value) for key, value in values.items() if type(value) in kinds}
    changed = dataclasses.replace(settings, **given)
    for key in given:
        assert type(getattr(changed, key)) is type(values[key])
    assert "np." not in repr(changed)
    use(changed)


def test_a_negative_weight_is_refused_before_both_passes():
    with pytest.raises(InputError, match="^remain_weight: must be a finite number of at least 0, or None; found -1$"):
        FisherMask(remain_weight=-1)


SCORE = {"w": torch.arange(12.0).reshape(3, 4)}
WHOLE = cases.dataset()
IMAGES = TensorDataset(torch.rand(48, 1, 8, 8), WHOLE.tensors[1])


def sums():
    return fisher.diagonal(cases.model(), cases.forget())


def activations(average):
    from expunge.model.activations import Activations

    return scores.activation_difference(Activations({"a": torch.ones(1, 2)}, torch.ones(1), 1), None, average)


# argument: called with a value; the name of the argument begins the error
FUNCTIONS = {
    "ratio": lambda value: masks.select(SCORE, value),
    "granularity": lambda value: masks.select(SCORE, 0.5, value),
    "scope": lambda value: masks.select(SCORE, 0.5, scope=value),
    "which": lambda value: masks.candidates(cases.model(), which=value),
    "remain_weight": lambda value: scores.fisher_difference(sums(), sums(), value),
    "average": activations,
    "seed": lambda value: scores.random({"w": (3, 4)}, value),
    "seed ": lambda value: fisher.diagonal(cases.model(), cases.forget(), kind="sampled", seed=value),
    "seed  ": lambda value: parts(IMAGES.tensors[1], value),
    "draws": lambda value: fisher.diagonal(cases.model(), cases.forget(), kind="sampled", draws=value),
    "kind": lambda value: fisher.diagonal(cases.model(), cases.forget(), kind=value),
    "parameters": lambda value: fisher.diagonal(cases.model(), cases.forget(), parameters=value),
    "objective": lambda value: fisher.diagonal(cases.model(), cases.forget(), objective=value),
    "objective ": lambda value: metrics.accuracy(cases.model(), cases.forget(), value),
    "batch_size": lambda value: metrics.accuracy(cases.model(), cases.forget(), batch_size=value),
    "batch_size ": lambda value: metrics.logits(cases.model(), cases.forget(), batch_size=value),
    "batch_size  ": lambda value: unlearn(cases.model(), cases.forget(), cases.remain(), Finetune(cases.QUICK), batch_size=value),
    "remain_accuracy": lambda value: metrics.unlearn_score(value, 0),
    "n": lambda value: scenarios.poisoned(IMAGES, value, 2),
    "trigger": lambda value: scenarios.poisoned(IMAGES, 3, value),
    "corner": lambda value: scenarios.poisoned(IMAGES, 3, 2, value),
    "value": lambda value: scenarios.poisoned(IMAGES, 3, 2, value=value),
    "target": lambda value: scenarios.poisoned(IMAGES, 3, 2, target=value),
    "how": lambda value: scenarios.poisoned(IMAGES, 3, 2, how=value),
    "margin": lambda value: scenarios.poisoned(IMAGES, 3, 2, margin=value),
    "seed   ": lambda value: scenarios.poisoned(IMAGES, 3, 2, seed=value),
    "fraction": lambda value: scenarios.mislabelled(IMAGES, value),
    "keep_own": lambda value: scenarios.mislabelled(IMAGES, 0.5, value),
    "seed    ": lambda value: scenarios.mislabelled(IMAGES, 0.5, seed=value),
    "fraction ": lambda value: scenarios.subset(IMAGES, fraction=value),
    "seed     ": lambda value: scenarios.subset(IMAGES, fraction=0.5, seed=value),
    "label": lambda value: scenarios.category(IMAGES, value),
    "count": lambda value: scenarios.limited(scenarios.category(IMAGES, 0), count=value),
    "seed      ": lambda value: scenarios.limited(scenarios.category(IMAGES, 0), count=3, seed=value),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_works_or_is_named(name):
    for value in VALUES:
        try:
            FUNCTIONS[name](value)
        except ExpungeError as error:
            assert isinstance(error, InputError), (value, error)
            # None and True are other ways to ask, of which the argument that is missing is named
            assert str(error).startswith((f"{name.strip()}: ", "trigger: must fit into the images")) or value is None, (value, error)
            assert len(str(error)) < 400, value


class Falling:
    """A schedule of somebody's."""

    def __init__(self, rate, epochs=1) -> None:
        self.value, self.epochs = rate, epochs

    def rate(self, time):
        return self.value


@pytest.mark.parametrize("rate", [-1, math.nan, math.inf, "a", None])
def test_a_schedule_of_ones_own_must_give_rates(rate):
    with pytest.raises(InputError, match="^schedule: must give a finite rate of at least 0 at every time, and so at 0; found "):
        unlearnt(Finetune(Tuning(Falling(rate))))


@pytest.mark.parametrize("rate", [torch.tensor(0.01), numpy.float32(0.01), 0, 1])
def test_rates_may_be_any_number(rate):
    unlearnt(Finetune(Tuning(Falling(rate), optimizer=torch.optim.Adam)))


@pytest.mark.parametrize("epochs", [0, 1.5, "a", None, 2**70, 10**9])
def test_a_schedule_of_ones_own_must_have_epochs(epochs):
    with pytest.raises(InputError, match="^schedule: must be a whole number of at least 1"):
        Tuning(Falling(0.1, epochs))


def test_solvers_are_solvers():
    for solver in (ConjugateGradients, None, "cg"):
        with pytest.raises(InputError, match="^solver: "):
            Influence(solver=solver)
