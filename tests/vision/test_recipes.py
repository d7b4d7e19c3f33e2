"""The recipes hold the paper's numbers, and nothing can be changed into nonsense."""

import pytest

from expunge.errors import InputError
from expunge.vision.recipes import MNIST, MNIST_BY_TABLE, PAPER, RECIPES, Recipe, changed, recipe_for

# Table "Detailed experiment setups" and section Hyperparameters: epochs, batch size, rate, decays, warm-up epochs, R.
PRINTED = {
    "cifar10": (160, 128, 0.1, (80, 120), 0, 0.02),
    "cifar100": (160, 128, 0.1, (80, 120), 0, 0.02),
    "mnist": (30, 128, 0.01, (), 0, 0.04),
    "tiny-imagenet": (160, 32, 0.1, (80, 120), 20, 0.02),
}


@pytest.mark.parametrize("dataset", PRINTED)
def test_the_numbers_are_the_paper_s(dataset):
    epochs, batch_size, rate, decays, warmup, ratio = PRINTED[dataset]
    recipe, tuning = RECIPES[dataset], RECIPES[dataset].tuning(seed=7)
    assert (recipe.epochs, recipe.batch_size, recipe.rate, recipe.mask_ratio) == (epochs, batch_size, rate, ratio)
    assert (recipe.augment, tuning.momentum, tuning.weight_decay) == (False, 0.9, 1e-4)
    assert (tuning.batch_size, tuning.seed, tuning.schedule.epochs) == (batch_size, 7, epochs)
    rates = [tuning.schedule.rate(epoch) for epoch in range(epochs)]
    expected = [
        rate * 0.1 ** sum(epoch >= decay for decay in decays) * min(1, epoch / (warmup or 1) if warmup else 1) for epoch in range(epochs)
    ]
    assert rates == pytest.approx(expected)


def test_mnist_has_two_readings():
    assert recipe_for("mnist") is MNIST and MNIST_BY_TABLE.rate == 0.1
    assert {MNIST.schedule.rate(time) for time in (0, 15, 29.9)} == {0.01}
    assert {MNIST_BY_TABLE.schedule.rate(time) for time in (0, 15, 29.9)} == {0.1}


def test_a_folder_of_pictures_is_trained_like_cifar10():
    assert recipe_for("some/folder") is RECIPES["cifar10"] is PAPER


def test_the_schedule_replayed_in_five_epochs():
    tuning = PAPER.replayed(5, seed=3)
    assert (tuning.schedule.epochs, tuning.seed, tuning.batch_size) == (5, 3, 128)
    assert [tuning.schedule.rate(time) for time in (0, 2.49, 2.5, 3.75)] == pytest.approx([0.1, 0.1, 0.01, 0.001])


def test_decays_and_warm_up_move_with_the_epochs():
    recipe = changed(RECIPES["tiny-imagenet"], epochs=16)
    assert [recipe.schedule.rate(time) for time in (0, 1, 2, 7.9, 8, 12)] == pytest.approx([0, 0.05, 0.1, 0.1, 0.01, 0.001])


def test_some_numbers_can_be_changed():
    recipe = changed(PAPER, epochs=3, rate=None, weight_decay=0.0, augment=True)
    assert recipe == Recipe(epochs=3, weight_decay=0.0, augment=True) and changed(PAPER, epochs=None) == PAPER
    assert PAPER.tuning(precision="bfloat16").precision == "bfloat16"


@pytest.mark.parametrize("number", [{"epochs": 0}, {"rate": -0.1}, {"rate": float("nan")}, {"weight_decay": -1e-4}, {"batch_size": 0}])
def test_nonsense_is_refused(number):
    with pytest.raises(InputError, match=f"^{next(iter(number))}: must be (zero or )?positive"):
        changed(PAPER, **number)


def test_tiny_imagenet_is_fine_tuned_at_its_own_rate_without_warm_up():
    """The released program's; other datasets replay the schedule they were trained by."""
    tiny = RECIPES["tiny-imagenet"].replayed(5).schedule
    assert [tiny.rate(time) for time in (0, 0.1, 2.4, 2.5, 3.75)] == pytest.approx([0.005, 0.005, 0.005, 0.0005, 0.00005])
    assert RECIPES["tiny-imagenet"].schedule.rate(20) == 0.1 and RECIPES["tiny-imagenet"].schedule.rate(10) == pytest.approx(0.05)
    assert RECIPES["cifar10"].replayed(5).schedule.rate(0) == 0.1
