"""The loss attack equals a count over all pairs, and its error what chance does."""

import pytest
import torch

from expunge.errors import InputError
from expunge.metrics.attacks import attack_error, loss_attack


def test_it_is_the_share_of_pairs():
    generator = torch.Generator().manual_seed(0)
    seen, unseen = (torch.randint(0, 9, (size,), generator=generator).double() for size in (17, 23))  # with ties
    pairs = [float(one < other) + float(one == other) / 2 for one in seen for other in unseen]
    assert loss_attack(seen, unseen) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert loss_attack(seen, unseen) + loss_attack(unseen, seen) == pytest.approx(1, abs=1e-12)


def test_known_answers():
    low, high = torch.tensor([0.0, 1.0]), torch.tensor([2.0, torch.inf])
    assert (loss_attack(low, high), loss_attack(high, low), loss_attack(low, low)) == (1, 0, 0.5)
    assert attack_error(1, 1) == pytest.approx(0.5)  # one pair: 0 or 1


def test_the_error_is_that_of_samples_alike():
    generator = torch.Generator().manual_seed(0)
    areas = [loss_attack(torch.randn(20, generator=generator), torch.randn(30, generator=generator)) for _ in range(2000)]
    assert torch.tensor(areas).std().item() == pytest.approx(attack_error(20, 30), rel=0.05)


@pytest.mark.parametrize("losses", [torch.zeros(0), torch.zeros(2, 2), torch.tensor([0.0, torch.nan])])
def test_bad_losses_are_named(losses):
    with pytest.raises(InputError, match="^seen: "):
        loss_attack(losses, torch.zeros(3))
    with pytest.raises(InputError, match="^unseen: "):
        loss_attack(torch.zeros(3), losses)
