"""Accuracy against a loop over samples, and the unlearn score's properties."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from expunge.errors import DivergedError, InputError
from expunge.metrics import Relearning, accuracy, logits, relearn_time, unlearn_score
from expunge.model import activations, channels, heads
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from tests.methods import properties


def network() -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.Linear(8, 4))


def data(samples: int = 37) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(samples, 5, generator=generator), torch.randint(4, (samples,), generator=generator))


@pytest.mark.parametrize("batch_size", [1, 10, 128])
def test_accuracy_equals_a_loop_over_samples(batch_size):
    model, samples = network(), data()
    model.eval()
    right = sum(int(model(x[None]).argmax()) == int(y) for x, y in samples)
    model.train()
    assert accuracy(model, samples, batch_size=batch_size) == right / 37
    assert accuracy(model, DataLoader(samples, batch_size=batch_size, shuffle=True)) == right / 37
    assert all(module.training for module in model.modules())


def test_accuracy_over_positions_leaves_ignored_labels_out():
    class Positions(nn.Module):
        def forward(self, x):
            return nn.functional.one_hot(x, 3).movedim(-1, 1).float()

    inputs = torch.tensor([[0, 1, 2], [2, 2, 0]])
    targets = torch.tensor([[0, 1, -100], [2, 0, 1]])
    assert accuracy(Positions(), [(inputs, targets)]) == 3 / 5


class Diverged(nn.Module):
    """NaN where the input is 9."""

    def forward(self, x):
        return torch.where(x == 9, torch.nan, x)


def test_a_model_that_diverged_has_no_accuracy():
    """The largest of NaN is NaN, at its own place: an accuracy of one where the label is that place."""
    outputs, labels = torch.eye(3).repeat(2, 1), torch.tensor([0, 1, 2, 0, 1, 2])
    outputs[4, 0] = 9
    with pytest.raises(DivergedError, match="the logits are NaN in 1 of 6 rows"):
        accuracy(Diverged(), TensorDataset(outputs, labels), batch_size=2)
    with pytest.raises(DivergedError, match="the logits are NaN in 5 of 5 rows"):
        accuracy(Diverged(), [(torch.full((5, 3), 9.0), torch.zeros(5).long())])
    outputs[4, 0] = torch.nan
    with pytest.raises(InputError, match="data: inputs and targets must be finite; found nan"):
        accuracy(nn.Identity(), TensorDataset(outputs, labels), batch_size=2)
    outputs[4, 0] = -torch.inf  # a class ruled out
    assert accuracy(nn.Identity(), TensorDataset(outputs, labels)) == 1


def test_nan_at_ignored_positions_does_not_matter():
    outputs, targets = torch.eye(3)[None].repeat(2, 1, 1), torch.tensor([[0, 1, -100], [0, 2, 2]])
    outputs[0, :, 2] = torch.nan  # as attention gives for padding alone
    assert accuracy(nn.Identity(), [(outputs, targets)]) == 4 / 5


def test_accuracy_draws_no_random_numbers():
    state = torch.get_rng_state()
    accuracy(network(), DataLoader(data(), shuffle=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_accuracy_needs_labels_of_the_head():
    samples = data()
    samples.tensors[1][3] = 4
    with pytest.raises(InputError, match=r"labels must be in \[0, 4\)"):
        accuracy(network(), samples)
    with pytest.raises(InputError, match="one integer label"):
        accuracy(network(), [(torch.randn(3, 5), torch.randn(3))])
    with pytest.raises(InputError, match=r"logits: must be \(N, K\).*; found shape \(3,\)"):
        accuracy(nn.Flatten(0), [(torch.randn(3), torch.zeros(3).long())])
    with pytest.raises(InputError, match="data: must not be empty"):
        accuracy(network(), [])


def test_the_unlearn_score_is_remain_over_one_plus_forget():
    assert unlearn_score(1, 0) == 1
    assert unlearn_score(0, 0.7) == 0
    assert unlearn_score(0.859, 0.635) == pytest.approx(0.525, abs=5e-4)  # the paper's Finetune row
    assert unlearn_score(0.9, 0.1) > unlearn_score(0.9, 0.2) > unlearn_score(0.8, 0.2)


@pytest.mark.parametrize("remain, forget", [(85.0, 0.0), (0.5, -0.1), (float("nan"), 0.0)])
def test_percent_and_nonsense_are_refused(remain, forget):
    with pytest.raises(InputError, match="fraction"):
        unlearn_score(remain, forget)


class Counting(nn.Module):
    """A table that is renormalised when it is read, and a buffer that counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4, max_norm=0.1), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, words):
        self.calls += 1
        return self.head(self.table(words).mean(1))


MEASURES = {
    "accuracy": lambda model, batch: accuracy(model, [batch]),
    "logits": lambda model, batch: logits(model, [batch]),
    "re-learn time": lambda model, batch: relearn_time(model, model, [batch], [batch], Relearning(Tuning(Constant(0.1, 2)))),
    "head": lambda model, batch: heads.find(model, batch),
    "activations": lambda model, batch: activations.measure(model, [batch], channels.find(model, batch)),
}


@pytest.mark.parametrize("name", MEASURES)
def test_what_a_forward_pass_changes_is_put_back(name):
    model, batch = Counting(), (torch.arange(8).reshape(4, 2), torch.tensor([0, 1, 2, 0]))
    with properties.assert_untouched(model):
        MEASURES[name](model, batch)
