"""Potion: the search against a loop that restarts from the original weights, how it ends, and what it says."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from expunge.errors import InputError, LostAccuracyWarning
from expunge.methods import Potion
from expunge.methods.poison_dampening import START
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, properties
from tests.methods.test_adaptive_dampening import all_ratios, means

KNOWN, POISONED, SAMPLES = 5, 15, 300  # a third of the poison is known


def poisoned() -> TensorDataset:
    """Pictures of three classes; the first, of class 1 or 2 with a bright last row, are called class 0."""
    generator = torch.Generator().manual_seed(8)
    places = torch.arange(SAMPLES)
    shown = torch.where(places < POISONED, 1 + places % 2, places % 3)
    images = 0.3 * torch.randn(SAMPLES, 1, 4, 4, generator=generator, dtype=torch.float64)
    images[:, 0, 0, :3] += 2 * nn.functional.one_hot(shown, 3)
    images[:POISONED, 0, 3] += 2.0
    return TensorDataset(images, torch.where(places < POISONED, 0, shown))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Has learnt the poison: all that carry the trigger are class 0."""
    with torch.random.fork_rng([]):
        torch.manual_seed(9)
        network = nn.Sequential(nn.Flatten(), nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 3)).double()
        images, labels = poisoned().tensors
        optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
    network.zero_grad(set_to_none=True)
    assert right(network, range(SAMPLES)) > 0.98
    return network


FORGET, REMAIN = Subset(poisoned(), range(KNOWN)), Subset(poisoned(), range(KNOWN, SAMPLES))


def right(network, rows) -> float:
    images, labels = poisoned()[list(rows)]
    return float((network(images).argmax(1) == labels).double().mean())


def searched(model, goal, growth):
    """The weights of the first size that reaches the goal, each time from the original, and how many sizes were tried."""
    images = poisoned().tensors[0]
    few, many = (reference.absolute_gradients(model, part, 1) for part in (images[:KNOWN], images[KNOWN:]))
    forgotten, everything = means(few, many, KNOWN, SAMPLES - KNOWN)
    ratios, before, size = all_ratios(forgotten, everything), right(model, range(KNOWN)), KNOWN / SAMPLES / 25
    for step in range(1, 500):
        threshold = reference.percentile(ratios, 100 - math.log(1 + 100 * size))
        changed = copy.deepcopy(model)
        changed.load_state_dict(reference.dampened(model, forgotten, everything, threshold, 1.0))
        if right(changed, range(KNOWN)) <= goal * before:
            return changed, step
        size *= growth
    raise AssertionError("not reached")


@pytest.mark.parametrize("goal, growth", [(0.2, 1.1), (0.0, 1.1), (0.6, 1.1), (0.2, 1.5)])
def test_the_search_is_the_papers(model, goal, growth):
    expected, steps = searched(model, goal, growth)
    assert steps > 3  # or this would be a test of the first size alone
    outcome = unlearn(model, FORGET, REMAIN, Potion(goal, growth), batch_size=7)
    for name, value in outcome.model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-9, atol=0, msg=name)
    unlearn(model, FORGET, REMAIN, Potion(goal, growth, steps))
    with pytest.raises(InputError, match="^goal: no size that was tried brings the forget accuracy down to"):
        unlearn(model, FORGET, REMAIN, Potion(goal, growth, steps - 1))
    outcome.patch.revert(outcome.model)
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())


def test_poison_that_nobody_named_is_gone_too(model):
    changed = unlearn(model, FORGET, REMAIN, Potion(goal=0.0)).model
    assert right(model, range(KNOWN, POISONED)) == 1.0 and right(changed, range(KNOWN, POISONED)) <= 0.5
    assert right(changed, range(POISONED, SAMPLES)) > 0.95


def test_a_single_known_sample_is_enough_to_search(model):
    changed = unlearn(model, Subset(poisoned(), [1]), Subset(poisoned(), [0, *range(2, SAMPLES)]), Potion()).model
    assert right(changed, [1]) == 0.0


def test_sizes_start_at_a_part_of_the_known_share_and_end():
    sizes = list(Potion(growth=2.0, steps=4).sizes(0.1))
    assert sizes == pytest.approx([0.004, 0.008, 0.016, 0.032]) and pytest.approx(1 / 25) == START
    assert len(list(Potion(growth=1e300, steps=20).sizes(0.1))) == 20


def constant() -> nn.Module:
    """Calls everything class 0, by its bias, which no dampening of the other weights changes; dampening it keeps it largest."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    nn.init.zeros_(network[1].weight)
    with torch.no_grad():
        network[1].bias.copy_(torch.tensor([3.0, 0.0, 0.0]))
    return network


@pytest.mark.parametrize("growth", [1.1, 1e300])
def test_a_goal_that_cannot_be_reached_is_an_error_and_changes_nothing(growth):
    network = constant()
    with (
        properties.assert_untouched(network),
        pytest.raises(InputError, match=r"^goal: .* down to 20.0%; give a higher goal.*; found 100.0% at best, 100.0% before"),
    ):
        unlearn(network, FORGET, REMAIN, Potion(growth=growth))


def test_a_model_without_any_gradient_ends_too():
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    nn.init.zeros_(network[1].weight), nn.init.zeros_(network[1].bias)  # all logits 0: the first class is the largest
    with pytest.raises(InputError, match=r"^goal: .*; found 100.0% at best"):
        unlearn(network, FORGET, REMAIN, Potion())


def test_clean_samples_that_are_like_the_rest_are_no_poison(model):
    rows = [row for row in range(POISONED, SAMPLES) if row % 3 == 1][:8]
    with pytest.raises(InputError, match=r"^goal: .*; found 100.0% at best, 100.0% before"):
        unlearn(model, Subset(poisoned(), rows), Subset(poisoned(), sorted({*range(SAMPLES)} - {*rows})), Potion())


def test_what_it_costs_is_said(model):
    """A seventh of the remain data are poison that nobody named, which goes with the rest of it."""
    remain = Subset(poisoned(), range(KNOWN, POISONED + 60))
    with pytest.warns(LostAccuracyWarning, match=r"the accuracy on the remain data fell from 100.0% to \d+\.\d% by the dampening"):
        changed = unlearn(model, FORGET, remain, Potion(goal=0.0)).model
    assert right(changed, range(KNOWN, POISONED + 60)) < 0.95
    short = Tuning(Constant(1e-12, 1))  # the training may bring it back, and has a warning of its own where it does not
    with pytest.warns(LostAccuracyWarning, match="training did not bring back what the edit took"):
        unlearn(model, FORGET, remain, Potion(goal=0.0, tuning=short))


def test_all_data_are_needed():
    with pytest.raises(InputError, match="^remain: Potion needs the data to keep"):
        unlearn(cases.model(), cases.forget(), method=Potion())


@pytest.mark.parametrize(
    "argument, value, rule",
    [("goal", 1.0, r"must be in \[0, 1\)"), ("goal", math.nan, "must be"), ("growth", 1.0, "must be above 1"), ("steps", 0, "must be")],
)
def test_bad_settings_are_named(argument, value, rule):
    with pytest.raises(InputError, match=f"^{argument}: {rule}"):
        Potion(**{argument: value})
