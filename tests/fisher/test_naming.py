"""The names of losses, by which sums are told apart."""

from dataclasses import replace
from functools import partial

import numpy
import pytest
import torch
from torch import nn

from expunge.data.objective import Objective
from expunge.errors import MismatchError
from expunge.fisher import FisherSums, diagonal


def test_sums_of_different_losses_do_not_add_up(tmp_path):
    model, batch = nn.Linear(3, 4), (torch.randn(5, 3), torch.randint(0, 4, (5,)))

    def smoothed(smoothing):
        return Objective(losses=lambda z, y: nn.functional.cross_entropy(z, y, reduction="none", label_smoothing=smoothing))

    def sums(objective=None, **options):
        return diagonal(model, [batch], objective=objective, **options)

    plain = sums()
    assert plain.objective == "cross_entropy"
    assert (sums(smoothed(0.1)) + sums(smoothed(0.1))).count == 10  # made twice, but the same
    weighted = [
        nn.CrossEntropyLoss(reduction="none", weight=torch.tensor(weights)) for weights in ([1.0, 1, 1, 1], [1.0, 2, 1, 1], [1.0, 2, 1, 1])
    ]
    different = [plain, sums(smoothed(0.1)), sums(smoothed(0.2)), *(sums(Objective(losses=loss)) for loss in weighted[:2])]
    for first in range(len(different)):
        for second in range(first):
            with pytest.raises(MismatchError, match="sums of different losses: "):
                different[first] + different[second]
    assert (different[-1] + sums(Objective(losses=weighted[2]))).count == 10
    doubled = partial(lambda z, y, scale: scale * nn.functional.cross_entropy(z, y, reduction="none"), scale=2.0)
    with pytest.raises(MismatchError, match="scale=2.0"):
        plain - sums(Objective(losses=doubled))
    # The model's own distribution does not ask the loss.
    assert (sums(kind="expected") + sums(Objective(losses=weighted[1], classes=True), kind="expected")).count == 10
    loaded = FisherSums.load(different[2].save(tmp_path / "sums.safetensors"))
    assert loaded.objective == different[2].objective
    old = replace(plain, objective="")  # as earlier versions have saved them
    assert FisherSums.load(old.save(tmp_path / "old.safetensors")).objective == ""
    assert (old + different[1]).objective == (different[1] + old).objective == different[1].objective


class Scaled:
    """A loss that is a method, with its settings in lists and mappings."""

    def __init__(self, scales) -> None:
        self.scales, self.own = scales, self.losses

    def losses(self, logits, targets):
        return self.scales[1] * nn.functional.cross_entropy(logits, targets, reduction="none")


def by_default(scale, keyword):
    if keyword:
        return lambda z, y, *, scale=scale: scale * nn.functional.cross_entropy(z, y, reduction="none")
    return lambda z, y, scale=scale: scale * nn.functional.cross_entropy(z, y, reduction="none")


@pytest.mark.parametrize(
    "loss",
    [
        lambda scale: Scaled([1.0, scale]).losses,
        lambda scale: Scaled({1: scale}).losses,
        lambda scale: Scaled(numpy.array([1.0, scale])).losses,
        lambda scale: Scaled([1.0, scale, *range(99)]).losses,
        lambda scale: by_default(scale, keyword=False),
        lambda scale: by_default(scale, keyword=True),
    ],
)
def test_settings_of_losses_in_other_places(loss):
    model, batch = nn.Linear(3, 4), (torch.randn(5, 3), torch.randint(0, 4, (5,)))
    once, again, other = (diagonal(model, [batch], objective=Objective(losses=loss(scale))) for scale in (1.0, 1.0, 2.0))
    assert (once + again).count == 10
    with pytest.raises(MismatchError, match="sums of different losses: "):
        once + other


def again_and_again(scale):
    def losses(logits, targets, depth=2):
        return losses(logits, targets, depth - 1) if depth else scale * nn.functional.cross_entropy(logits, targets, reduction="none")

    return losses


def with_a_list_in_itself(scale):
    scales = [scale]
    scales.append(scales)
    return lambda z, y: scales[0] * nn.functional.cross_entropy(z, y, reduction="none")


def beside_unreadable(scale):
    escaped = []
    torch.func.vmap(lambda row: escaped.append(row) or row)(torch.ones(2, 3))
    unreadable = [escaped, torch.ones(3, device="meta"), torch.eye(3).to_sparse(), numpy.array([scale, None])]
    return lambda z, y: (scale if unreadable else 0.0) * nn.functional.cross_entropy(z, y, reduction="none")


@pytest.mark.parametrize("loss", [again_and_again, with_a_list_in_itself, beside_unreadable])
def test_losses_that_refer_to_themselves_or_to_what_cannot_be_read(loss):
    test_settings_of_losses_in_other_places(loss)


def test_a_loss_that_notes_its_calls_is_one_loss():
    calls, count = [], 0

    def losses(logits, targets):
        nonlocal count
        count += 1
        calls.append(len(targets))
        return torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    objective = Objective(losses=losses, classes=True)
    model, batches = nn.Linear(3, 2), [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))]
    first, second = (diagonal(model, batches, objective=objective) for _ in range(2))
    assert calls and count and (first + second).count == 8
