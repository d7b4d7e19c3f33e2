"""Models that choose their way by shapes or masks: where a later batch takes another one, all of it is confirmed, not a part in turn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.fisher.patterns import K, check, labels


class Switching(nn.Module):
    """One of five layers has its rows in another order for long sequences, or where tokens are padded; the outputs are the same."""

    def __init__(self, by_length: bool) -> None:
        super().__init__()
        self.by_length, self.first, self.folded = by_length, nn.Linear(5, 5), nn.Linear(5, 5)
        self.more, self.head = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, K)

    def forward(self, x, mask):
        n, t, _ = x.shape
        x = torch.tanh(self.first(x))
        if t <= 6 if self.by_length else bool(mask.all()):
            x = torch.tanh(self.folded(x.flatten(0, 1))).view(n, t, 5)
        else:
            x = torch.tanh(self.folded(x.transpose(0, 1).flatten(0, 1))).view(t, n, 5).transpose(0, 1)
        return self.head(self.more(x * mask[..., None]).mean(1))


@pytest.mark.parametrize("by_length", [True, False])
def test_one_batch_that_goes_another_way(by_length):
    for seed in range(6):
        torch.manual_seed(seed)
        lengths = [9 if by_length and number == 5 + seed % 3 else 6 for number in range(9)]
        batches = [(torch.randn(8, length, 5).double(), torch.ones(8, length, dtype=torch.bool), labels(8)) for length in lengths]
        batches[5 + seed % 3][1][3, 4:] = False
        check(Switching(by_length), batches)
