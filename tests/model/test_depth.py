"""The last layers are those the model calls last, whatever the order they were written in."""

import pytest
import torch
from torch import nn

from expunge.data.objective import Objective
from expunge.model.depth import call_order, last_parameters
from expunge.vision.networks import NETWORKS
from tests.methods import cases


class Backwards(nn.Module):
    """Calls its parts in another order than it was given them; the first reads a matrix that no module calls."""

    def __init__(self):
        super().__init__()
        self.head, self.norm, self.body, self.stem = nn.Linear(6, 3), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = self.stem(x)[:, None] * self.scale
        x, _ = self.attention(x, x, x)
        return self.head(self.norm(self.body(x[:, 0])))


TOKENS = Objective(outputs=lambda model, batch: model(batch[0]).transpose(1, 2))
BATCH = torch.randn(2, 4), torch.tensor([0, 1])


def test_parts_are_ordered_by_their_calls():
    order = call_order(Backwards(), BATCH)
    assert sorted(order, key=order.__getitem__) == ["", "stem", "attention", "attention.out_proj", "body", "norm", "head"]
    assert order["attention"] == order["attention.out_proj"]


@pytest.mark.parametrize(
    "share, first",
    [(0.0, None), (0.2, "head"), (0.4, "body"), (0.6, "attention"), (0.8, "attention"), (0.99, "stem"), (1.0, "")],
)
def test_the_last_share_of_the_layers(share, first):
    model = Backwards()
    order = call_order(model, BATCH)
    names = last_parameters(model, BATCH, share)
    assert [*names] == [
        name for name, _ in model.named_parameters() if first is not None and order[name.rpartition(".")[0]] >= order[first]
    ]


def test_a_third_of_a_resnet20_is_its_last_stage():
    model = NETWORKS["resnet20"](10, 3)
    names = last_parameters(model, (torch.randn(2, 3, 32, 32), torch.tensor([0, 1])), 0.35)
    assert {*names} == {name for name, _ in model.named_parameters() if name.startswith(("stage3", "classifier"))}


def test_transformers_are_seen_through():
    """In eval mode without gradients torch calls none of a layer's modules."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Embedding(5, 8), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(24, 3)).eval()
    with torch.no_grad():
        names = last_parameters(model, (torch.randint(0, 5, (2, 3)), torch.tensor([0, 1])), 0.4)
    assert names[-2:] == ("3.weight", "3.bias") and "1.layers.1.linear1.weight" in names and not any("layers.0" in name for name in names)


def test_a_shared_matrix_lies_where_it_is_read_last():
    """Else of a classifier tied to the embedding the bias alone would be reset."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    model[2].weight = model[0].weight
    assert last_parameters(model, (torch.tensor([[0, 1]]), torch.tensor([[0, 1]])), 0.3, TOKENS) == ("0.weight", "2.bias")


def test_the_model_is_left_as_it_is():
    model = cases.model()
    before, modes = {name: value.clone() for name, value in model.state_dict().items()}, [module.training for module in model.modules()]
    call_order(model, cases.dataset()[:4])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())
