"""Two halves on two threads give what one thread gives, whatever the model keeps, and leave torch's threads as they were."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from expunge.fisher import diagonal
from expunge.fisher.halves import FEWEST, twin
from tests import reference
from tests.fisher.cases import CLASSES, MODELS, build
from tests.methods.properties import assert_untouched

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def enough(batch, samples=2 * FEWEST + 3):
    """The batch again and again, so that there is something for both halves, and they differ."""
    return tuple(torch.cat([tensor] * (samples // len(tensor) + 1))[:samples] for tensor in batch)


@pytest.mark.parametrize("kind", ["empirical", "sampled"])
@pytest.mark.parametrize("name", MODELS)
def test_halves_give_what_the_whole_gives(name, kind):
    model, batch = build(name)
    batch = enough(batch)
    whole = diagonal(model, [batch], kind=kind)
    torch.set_num_threads(2)
    try:
        halves = diagonal(model, [batch], kind=kind)
    finally:
        torch.set_num_threads(1)
    assert halves.count == whole.count == len(batch[0])
    assert reference.worst_error(halves.sums, whole.sums) <= 1e-11


class Leaving(nn.Module):
    """Leaves its features in `self` for another method to find, slowly enough for the other half to come between."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        self.features = torch.tanh(self.body(x))
        time.sleep(0.02)
        return self.finish()

    def finish(self):
        return self.head(self.features)


def test_what_a_pass_leaves_in_the_module_is_not_shared(two_threads):
    model, batch = Leaving().double(), (torch.randn(40, 5, dtype=torch.float64), torch.randint(0, CLASSES, (40,)))
    expected = reference.fisher(model, batch)  # first: a copy of the model is made for it, and features in `self` cannot be copied
    assert twin(model) is not None
    assert reference.worst_error(diagonal(model, [batch]).sums, expected) <= 1e-10


def test_the_twin_shares_tensors_and_nothing_else(two_threads):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    other = twin(model)
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), other.buffers(), strict=True))
    assert all(a is not b for a, b in zip(model.modules(), other.modules(), strict=True))


def test_hooks_and_single_threads_keep_the_batch_whole(two_threads):
    model = nn.Linear(2, 2)
    handle = model.register_forward_pre_hook(lambda module, inputs: None)
    assert twin(model) is None
    handle.remove()
    assert twin(model) is not None
    torch.set_num_threads(1)
    assert twin(model) is None


def test_threads_are_as_before_here_and_for_threads_to_come(two_threads):
    diagonal(*simple())
    seen = [torch.get_num_threads()]
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [2, 2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


def test_autocast_reaches_both_halves(two_threads):
    seen = []

    class Seeing(nn.Linear):
        def forward(self, x):
            found = super().forward(x)
            seen.append(found.dtype)
            return found

    model, batches = Seeing(5, CLASSES), simple()[1]
    with torch.autocast("cpu", torch.bfloat16):
        diagonal(model, batches)
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_half_reaches_the_caller_and_changes_nothing(two_threads, error):
    class Failing(nn.Linear):
        def forward(self, x):
            if len(x) >= FEWEST:
                raise error("no")
            return super().forward(x)

    model, batches = Failing(5, CLASSES), simple()[1]
    with assert_untouched(model), pytest.raises(error, match="no"):
        diagonal(model, batches)


def simple():
    return nn.Linear(5, CLASSES), [(torch.randn(2 * FEWEST, 5), torch.randint(0, CLASSES, (2 * FEWEST,)))]
