"""A choice on data of any form: loaders, mappings, labels per position, samples held apart."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from expunge import FisherMask, GoalNotMetWarning, InputError, ResetAndDistil, unlearn
from expunge.errors import UncheckedWarning
from tests.methods import properties
from tests.methods.choosing.small import CLASS, DATA, UNSEEN, Numbered, accuracy, built, trained, watched_training


def test_samples_held_apart_are_never_trained_on():
    data, counts = Numbered(DATA), []
    model = trained(data)
    rows = data.labels == 0
    forget, remain = (Subset(data, torch.nonzero(part).flatten().tolist()) for part in (rows, ~rows))
    outcome = unlearn(model, forget, remain, objective=watched_training(counts), watch={})
    assert "no `validation`: 48 remain samples are held apart to guard the rest" in outcome.choice.reasons
    assert len(torch.cat(counts).unique()) == len(remain) - 48


def as_mappings(data) -> list[dict[str, torch.Tensor]]:
    return [{"input": inputs, "labels": labels} for inputs, labels in DataLoader(data, batch_size=50)]


FORMS = {
    "loader": lambda data: DataLoader(data, batch_size=32, shuffle=True),
    "loader of its own batches": lambda data: DataLoader(
        data, batch_sampler=[list(range(start, start + 30)) for start in range(0, 480, 30)]
    ),
    "mappings": as_mappings,
    "tensors": lambda data: tuple(map(torch.stack, zip(*data, strict=True))),
    "iterator": lambda data: iter(DataLoader(data, batch_size=32)),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_of_any_form(model, form):
    forget = as_mappings(CLASS[0]) if form == "mappings" else CLASS[0]
    outcome = unlearn(model, forget, FORMS[form](CLASS[1]))
    apart = any("48 remain samples are held apart" in reason for reason in outcome.choice.reasons)
    assert apart != (form == "loader of its own batches") and accuracy(outcome.model, CLASS[0]) == 0


class Tagger(nn.Module):
    """A label for every word."""

    def __init__(self, labels: int = 12) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(12, 16), nn.Linear(16, 16), nn.Linear(16, labels)

    def forward(self, words):
        return self.head(self.mix(self.words(words)).relu()).transpose(1, 2)


def tagged(samples: int, seed: int, low: int = 0, high: int = 12) -> TensorDataset:
    words = torch.randint(low, high, (samples, 5), generator=torch.Generator().manual_seed(seed))
    labels = (words + 1) % 12
    labels[:, 4] = -100
    return TensorDataset(words, labels)


@pytest.fixture(scope="module")
def tagger() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = Tagger()
    return trained(tagged(400, 1), model, 60)


def test_samples_with_a_label_per_position(tagger):
    forget, remain = tagged(30, 2), tagged(300, 3)
    with properties.assert_untouched(tagger):
        outcome = unlearn(tagger, forget, remain, epochs=4, validation=tagged(100, 4))
    assert isinstance(outcome.method, ResetAndDistil) and outcome.choice.reasons[0].startswith("the forget data are 30 samples")


def test_classes_with_a_label_per_position(tagger):
    """No kernel is chosen by the sampled Fisher information, which needs one label per sample."""
    forget, remain = tagged(30, 2, high=3), tagged(300, 3, low=3)
    outcome = unlearn(tagger, forget, remain, seconds=60)
    assert outcome.choice.reasons[0].startswith("the forget data are 3 classes (1, 2, 3)") and outcome.choice.goal_met is not False
    assert accuracy(outcome.model, forget) <= 0.01


@pytest.mark.filterwarnings("ignore::expunge.errors.GoalNotMetWarning")
def test_masks_where_labels_are_per_position(tagger):
    """Without remain data, with few, and where nothing can be reset."""
    forget, few = tagged(30, 2, high=3), tagged(6, 3, low=3)
    for remain in (None, few):
        outcome = unlearn(tagger, forget, remain, seconds=60)
        assert isinstance(outcome.method, FisherMask) and outcome.method.kind == "empirical"
        assert "by empirical Fisher" in outcome.choice.label


def test_labels_of_another_length_are_named(tagger):
    ragged = [
        (words[:, :length], labels[:, :length]) for length, (words, labels) in zip((5, 3), DataLoader(tagged(60, 3), 30), strict=True)
    ]
    message = r"must have labels of one shape, for a method to be chosen; pad them with -100, or give a method; found \(3,\) after \(5,\)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncheckedWarning)
        with pytest.raises(InputError, match=f"^remain: {message}"):
            unlearn(tagger, tagged(30, 2), ragged)
        with pytest.raises(InputError, match=f"^validation: {message}"):
            unlearn(tagger, tagged(30, 2), tagged(300, 5), validation=ragged)


def test_one_remain_sample_that_batchnorm_cannot_train_on():
    """As much is done as without any."""
    original = trained(DATA, built("BatchNorm"), 12)
    with pytest.warns(GoalNotMetWarning, match="still get their label"):
        outcome = unlearn(original, CLASS[0], Subset(CLASS[1], [0]), validation=UNSEEN)
    assert isinstance(outcome.method, FisherMask) and outcome.method.tuning is None
