"""On a GPU the check must not wait for the device in every batch, nor settle doubts over whole batches in float64; counted on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from expunge.data.objective import Objective
from expunge.fisher import adders, diagonal
from expunge.fisher.comparing import NOISE
from expunge.fisher.confirming import Confirmation
from expunge.fisher.doubting import BY_BATCH, BY_FORMAT, BY_ROWS, Doubts, in_smaller_company
from tests import reference
from tests.fisher.patterns import K, labels, looped

OWN = Objective(
    losses=lambda logits, targets: F.cross_entropy(logits, targets, reduction="none"), classes=False
)  # labels are not looked at
READING = set("tolist item cpu numpy nonzero __bool__ __float__ __int__ __index__ __array__".split())


class Reads(TorchFunctionMode):
    """Counts the calls that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in READING
        return function(*args, **(kwargs or {}))


@pytest.fixture
def confirmations(monkeypatch):
    """Those of all calls, as they are on a GPU: whole parts of a fixed number of samples, no audit."""
    made, comparisons, compare = [], [], Confirmation._compare

    class OnCuda(Confirmation):
        def __init__(self, *given):
            super().__init__(*given)
            self._on_cuda = True
            made.append(self)

        def _compare(self, *given, **settings):
            comparisons.append(1)
            compare(self, *given, **settings)

    monkeypatch.setattr(adders, "Confirmation", OnCuda)
    monkeypatch.setattr("expunge.fisher.reading.check_batch", lambda *_: None)  # looks at batches before they go to the device
    return made, comparisons


def network():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 36, K)).eval()


def data(count: int, size: int = 32):
    torch.manual_seed(1)
    return [(torch.randn(size, 4, 6, 6), labels(size)) for _ in range(count)]


def reads(batches, confirmations) -> tuple[int, int]:
    confirmations[1].clear()
    with Reads() as counted:
        diagonal(network(), batches, objective=OWN)
    return counted.count, len(confirmations[1])


def test_one_wait_per_comparison_and_none_per_batch(confirmations):
    (few, first), (many, then) = (reads(data(count), confirmations) for count in (4, 12))
    assert then > first and many - few <= then - first  # eight batches more


def test_a_doubt_costs_no_whole_batch(confirmations, monkeypatch):
    """Every comparison is made a doubt: the drawn samples of all batches that wait settle it together."""
    monkeypatch.setattr(Confirmation, "tolerated", lambda self, tensor: 1e-2 if tensor.shape[1:] == (K,) else 1e-9)
    monkeypatch.setitem(NOISE, torch.float32, 0.0)
    monkeypatch.setattr(Doubts, "_alike_in_its_format", lambda *_: False)  # kernels of another batch size round in another way
    batches = data(6)
    found = diagonal(network(), batches).sums
    settled = confirmations[0][0].doubts.settled
    assert settled[BY_ROWS] == len(confirmations[1]) > 1 and not settled[BY_BATCH] and not settled[BY_FORMAT]
    assert reference.worst_error(found, looped(network(), batches)) <= 1e-4


def test_whole_batches_that_do_not_fit_keep_the_drawn_samples():
    batch, rows = (torch.arange(10.0)[:, None], torch.arange(10)), torch.tensor([7, 2])
    smaller, places = in_smaller_company(batch, rows)
    assert smaller[1].tolist() == [7, 2, 0, 1, 3, 4] and places.tolist() == [0, 1]
