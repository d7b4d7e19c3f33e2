"""A call of the engine knows nothing of the calls before: the same bits, whatever was summed, or changed in the model, in between."""

import copy

import torch
from torch import nn

from expunge import fisher
from tests import reference


class Tokens(nn.Module):
    """Rows of tokens through one layer, in their order or, by a setting that is read in forward, sorted by content over the whole batch."""

    def __init__(self):
        super().__init__()
        self.layer, self.head, self.settings = nn.Linear(4, 6), nn.Linear(6, 3), {"nested": {"too": {"deep": {"sorts": False}}}}

    def forward(self, x):
        rows = x.flatten(0, 1)
        order = rows[:, 0].argsort(stable=True) if self.settings["nested"]["too"]["deep"]["sorts"] else torch.arange(len(rows))
        return self.head(torch.tanh(self.layer(rows[order])[order.argsort()].unflatten(0, x.shape[:2])).mean(1))


def interleaved(samples=128, tokens=4):
    """Sorted tokens but for two pairs of samples, which have the largest gradients."""
    torch.manual_seed(0)
    x = torch.randn(samples, tokens, 4, dtype=torch.float64)
    x[:, :, 0] = torch.arange(samples * tokens).unflatten(0, (samples, tokens)) / (samples * tokens)
    for first in (40, 90):
        pair = x[first : first + 2]
        pair[:, :, 0] = pair[:, :, 0].flatten()[torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])].unflatten(0, (2, tokens))
        pair[:, :, 1:] *= 8
    return x, torch.randint(0, 3, (samples,))


def test_a_model_that_was_changed_out_of_sight_is_looked_at_anew():
    torch.manual_seed(1)
    model, batch = Tokens().double(), interleaved()
    fisher.diagonal(model, [batch])
    model.settings["nested"]["too"]["deep"]["sorts"] = True
    expected = reference.fisher(model, batch)
    for seed in range(3):
        sums = fisher.diagonal(model, [batch], seed=seed).sums
        for name, value in expected.items():
            torch.testing.assert_close(sums[name], value, rtol=1e-9, atol=0)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.branch, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden, flagged = torch.relu(self.body(x)), (x[:, :1] > 0).to(x.dtype)
        return self.head(hidden + flagged * self.branch(x) if bool(flagged.any()) else hidden)


def test_what_was_summed_before_changes_no_bit():
    torch.manual_seed(0)
    model, x, y = Branch(), torch.randn(64, 6), torch.randint(0, 3, (64,))
    x[:, 0] = torch.cat([-torch.ones(32), torch.ones(32)])
    shut, open_ = [(x[:32], y[:32])], [(x[32:], y[32:])]
    alone = fisher.diagonal(copy.deepcopy(model), open_).sums
    fisher.diagonal(model, shut)
    after = fisher.diagonal(model, open_).sums
    assert all(torch.equal(after[name], value) for name, value in alone.items())
