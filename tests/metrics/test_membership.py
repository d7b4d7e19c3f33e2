"""The loss attack against a count over all pairs."""

import pytest
import torch

from expunge.errors import DivergedError, InputError
from expunge.metrics import Predictions, attack_error, loss_attack


def predictions(count, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return Predictions(scale * torch.randn(count, 4, generator=generator), torch.randint(0, 4, (count,), generator=generator))


def by_pairs(samples, unseen):
    first, second = (
        [float(torch.nn.functional.cross_entropy(row.double(), label)) for row, label in zip(part.logits, part.targets, strict=True)]
        for part in (samples, unseen)
    )
    return sum((one < other) + 0.5 * (one == other) for one in first for other in second) / (len(first) * len(second))


@pytest.mark.parametrize("sizes", [(30, 20), (1, 7), (5, 1)])
def test_it_is_the_share_of_pairs(sizes):
    samples, unseen = predictions(sizes[0], 0), predictions(sizes[1], 1)
    assert loss_attack(samples, unseen) == pytest.approx(by_pairs(samples, unseen), abs=1e-12)


def test_known_answers():
    right = Predictions(torch.eye(4) * 9, torch.arange(4))
    wrong = Predictions(-torch.eye(4) * 9, torch.arange(4))
    assert loss_attack(right, wrong) == 1 and loss_attack(wrong, right) == 0 and loss_attack(right, right) == 0.5


def test_what_cannot_be_attacked_is_refused():
    with pytest.raises(InputError, match="^unseen: must hold at least one sample"):
        loss_attack(predictions(3, 0), predictions(0, 0))
    with pytest.raises(InputError, match=r"^samples: must be a model's predictions, metrics.logits\(model, data\); found a Linear"):
        loss_attack(torch.nn.Linear(2, 2), predictions(3, 0))
    broken = predictions(3, 0)
    broken.logits[1] = torch.nan
    with pytest.raises(DivergedError):
        loss_attack(broken, predictions(3, 1))


def test_the_error_is_that_of_chance():
    draws = torch.Generator().manual_seed(0)
    for seen, unseen in ((40, 25), (200, 100)):
        targets = torch.zeros(seen + unseen, dtype=torch.int64)
        areas = []
        for _ in range(400):
            logits = torch.randn(seen + unseen, 2, generator=draws)
            areas.append(loss_attack(Predictions(logits[:seen], targets[:seen]), Predictions(logits[seen:], targets[seen:])))
        assert attack_error(seen, unseen) == pytest.approx(float(torch.tensor(areas).std()), rel=0.15)
