"""Parameters used out of torch.func's sight: equal to the loop over samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from expunge.fisher import plan
from tests.fisher.patterns import K, check, labels

pytestmark = pytest.mark.filterwarnings("ignore::expunge.errors.SlowFisherWarning")
SAMPLES = 96


class OtherReference(nn.Module):
    """A weight without a closed form, which a gate multiplies once more, by a reference that is no module's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.head = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5)), nn.Linear(5, K)
        self.again = [self.weight]

    def forward(self, x):
        y = torch.tanh(x @ (0.1 * self.weight.exp()) + self.bias)
        return self.head(y + (x[:, :1] > 1.2) * torch.tanh(x @ self.again[0].T.exp()))


def test_a_use_that_torch_func_cannot_see_and_few_samples_show():
    for seed in range(4):
        torch.manual_seed(seed)
        model, x = OtherReference(), torch.randn(SAMPLES, 5).double().clamp(-2, 1)
        x[[21, 22, 45, 46], 0] = 1.5
        batches = list(zip(x.split(8), labels(SAMPLES).split(8), strict=True))
        for kind in ("empirical", "expected"):
            check(model, batches, kind)
        assert plan(model, batches[0]).named("loop") == ["weight"]
