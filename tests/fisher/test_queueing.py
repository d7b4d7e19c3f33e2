"""What a GPU confirms without waiting, run on the CPU: the hostile patterns, and how much is compared and read."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from expunge.data.objective import Objective
from expunge.errors import InputError, ModelError
from expunge.fisher import adders, comparing, diagonal, queueing
from expunge.fisher.comparing import Comparison
from expunge.fisher.doubting import BY_PRECISION
from expunge.fisher.planning.definition import PROBE
from expunge.fisher.queueing import QueuedConfirmation
from tests import reference
from tests.fisher import patterns, test_cuda_confirmed
from tests.fisher.test_cuda_confirmed import (  # noqa: F401
    test_a_branch_that_later_samples_take,
    test_black_first_frames,
    test_errors_that_only_replayed_graphs_show,
    test_every_kind_of_model,
    test_false_alarms_of_rounding_do_no_harm,
    test_frozen_encoder_with_a_padding_mask,
    test_gates_shut_for_the_first_samples,
    test_losses_that_depend_on_the_batch,
    test_one_hot_dispatch_to_experts,
    test_samples_of_every_batch_are_compared,
    test_samples_that_depend_on_their_batch,
    test_the_same_call_gives_the_same_bits,
    test_unpadding,
)
from tests.fisher.test_waiting import OWN, Reads

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """The confirmations of all calls."""
    confirmations = []

    def confirmation(place, *given):
        confirmations.append(QueuedConfirmation(*given))
        confirmations[-1]._on_cuda = True
        return confirmations[-1]

    monkeypatch.setattr(test_cuda_confirmed, "DEVICE", "cpu")
    monkeypatch.setattr(adders, "_confirmation", confirmation)
    return confirmations


def network():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 36, patterns.K)).eval()


def data(count: int, size: int = 32):
    torch.manual_seed(1)
    return [(torch.randn(size, 4, 6, 6), patterns.labels(size)) for _ in range(count)]


@pytest.fixture
def comparisons(monkeypatch):
    """The numbers of samples of all comparisons, and of those with rows."""
    sizes, begun = [], Comparison.begun

    def counted(self, *given, **settings):
        sizes.append((len(self.logits), self._of_parts))
        return begun(self, *given, **settings)

    monkeypatch.setattr(Comparison, "begun", counted)
    return sizes


def reads(batches) -> int:
    with Reads() as counted:
        diagonal(network(), batches, objective=OWN)
    return counted.count


def test_batches_are_not_waited_for(comparisons, monkeypatch):
    monkeypatch.setattr("expunge.fisher.reading.check_batch", lambda *_: None)  # looks at batches before they go to the device
    few = reads(data(16))
    assert comparisons == [(16, 16)]  # one sample of every batch, in one pass
    comparisons.clear()
    assert reads(data(40)) == few and comparisons == [(40, 40)]


def test_batches_of_a_call_with_few_are_drawn_from_more(comparisons):
    for count, drawn in ((1, 4), (3, 6), (6, 6), (16, 16)):
        comparisons.clear()
        diagonal(network(), data(count))
        assert sum(samples for samples, _ in comparisons) == drawn


def test_where_memory_is_short_rows_of_some_batches_are_kept(comparisons, monkeypatch):
    monkeypatch.setattr(queueing, "HELD_BYTES", 1)
    batches = data(24, 128)
    found = diagonal(network(), batches).sums
    assert comparisons == [(16, 8), (8, 8)]
    assert reference.worst_error(found, patterns.looped(network(), batches)) <= 1e-4


def by_length(logits, targets):
    losses = nn.functional.cross_entropy(logits, targets, reduction="none")
    return torch.where(targets == 0, losses / len(losses), losses)


def doubled_in_company(logits, targets):
    losses = nn.functional.cross_entropy(logits, targets, reduction="none")
    return torch.where(targets == 0, (1 + (len(losses) > 1)) * losses, losses)


def doubled_where_even(logits, targets):
    losses = nn.functional.cross_entropy(logits, targets, reduction="none")
    return torch.where(targets == 0, (1 + (len(losses) % 2 == 0)) * losses, losses)


@pytest.mark.parametrize("losses", [by_length, doubled_in_company, doubled_where_even])
@pytest.mark.parametrize(("size", "count"), [(32, 32), (32, 20), (24, 60), (33, 33), (128, 4)])
def test_losses_that_depend_on_how_many_they_are(losses, size, count):
    torch.manual_seed(0)
    batches = [(torch.randn(size, 5), torch.randint(2, (size,))) for _ in range(count)]
    if losses is doubled_where_even and size % 2:  # as it is alone
        return
    with pytest.raises(InputError, match="must give each sample its own loss"):
        diagonal(nn.Linear(5, 2), batches, objective=Objective(losses=losses))


class LateCoupling(nn.Linear):
    """Mixes the samples of a batch that holds a large one."""

    def forward(self, x):
        out = super().forward(x)
        return out - (x.amax() > 50) * out.mean(0)


@pytest.mark.parametrize("place", range(0, 12, 2))
def test_a_coupling_in_one_batch_without_rows_is_refused(place, monkeypatch):
    monkeypatch.setattr(queueing, "HELD_BYTES", 1)
    torch.manual_seed(0)
    batches = [(torch.randn(40, 5).double(), patterns.labels(40)) for _ in range(12)]
    batches[place][0][7, 0] = 100
    with pytest.raises(ModelError, match="changes with the rest of its batch"):
        diagonal(LateCoupling(5, patterns.K).double(), batches)


def test_a_parameter_that_no_drawn_sample_shows_is_confirmed_or_looped(made):
    """The branch is taken by a sample that is hardly drawn: the data are read again, and each comparison waited for."""
    torch.manual_seed(0)
    x = torch.randn(320, 3, 5).double()
    x[:, 0, 0] = -x[:, 0, 0].abs() - 0.1
    x[37, 0, 0] = 1.0
    model = patterns.Gated(patterns.Transposed(5, 5)).double().eval()
    batches = list(zip(x.split(32), patterns.labels(320).split(32), strict=True))
    found = diagonal(model, batches).sums
    assert reference.worst_error(found, patterns.looped(model, batches)) <= 1e-9 and made[0]._patient


def test_a_doubt_of_rounding_is_settled_without_reading_the_data_again(made, monkeypatch):
    monkeypatch.setattr(QueuedConfirmation, "tolerated", lambda self, tensor: 1e-2 if tensor.shape[1:] == (patterns.K,) else 1e-9)
    monkeypatch.setitem(comparing.NOISE, torch.float32, 0.0)
    diagonal(network(), data(6))
    assert not made[0]._patient and sum(made[0].doubts.settled.values()) >= 1


@pytest.fixture
def coarse(monkeypatch):
    """Tolerances as where products are rounded to TF32."""
    monkeypatch.setattr(queueing, "allowed", lambda tensor: 0.15)


def test_errors_show_through_coarse_tolerances(coarse):
    torch.manual_seed(0)
    model, batches = test_cuda_confirmed.Late().eval(), test_cuda_confirmed.late(8, 32, 5, torch.float32)
    assert reference.worst_error(diagonal(model, batches).sums, patterns.looped(model, batches)) <= 1e-4


def test_of_sixteen_samples_one_that_is_another_mostly_stands_out(coarse, comparisons, monkeypatch):
    """In 52 of 60 cases: chance weighs the samples, and may give this one little."""
    doubted, told, kept = [], [], adders.kept_of
    monkeypatch.setattr(QueuedConfirmation, "_compare", lambda self, group, *rest, **settings: doubted.append(len(group)))
    diagonal(network(), data(16))
    assert not doubted
    for place, seed in itertools.product((0, 7, 15), range(5)):
        number = itertools.count()

        def faulty(batch, *given, number=number, place=place):
            one = kept(batch, *given)
            if next(number) != place:
                return one
            wrong = [part._replace(slopes=torch.randn_like(part.slopes) * part.slopes.std()) for part in one.parts]
            return dataclasses.replace(one, parts=wrong)

        monkeypatch.setattr(adders, "kept_of", faulty)
        comparisons.clear()
        doubted.clear()
        diagonal(network(), data(16), seed=seed)
        assert comparisons[0] == (16, 16)
        told += doubted[:1]
    assert len(told) >= 10 and {*told} == {16}


class Rough(nn.Module):
    """Rounds as TF32 does in a deep network: outputs change a little with the company, gradients much."""

    on = True

    def forward(self, x):
        if not Rough.on or len(x) <= PROBE:  # the survey is without TF32
            return x
        wave = torch.sin(1e3 * x.detach() + len(x))
        return x + (0.03 + 0.001 * wave) * x.detach() + 0.08 * wave * (x - x.detach())


@pytest.fixture
def rough(coarse, monkeypatch):
    @contextmanager
    def switched_off():
        Rough.on = False
        try:
            yield
        finally:
            Rough.on = True

    monkeypatch.setattr(queueing.tf32, "switched_off", switched_off)
    monkeypatch.setattr("expunge.fisher.comparing.allowed", lambda tensor: 0.15)
    monkeypatch.setattr("expunge.fisher.confirming.allowed", lambda tensor: 0.15)
    return nn.Sequential(*network()[:-1], Rough(), network()[-1])


def test_where_tf32_hides_everything_the_plan_is_confirmed_without(rough, made, comparisons, monkeypatch):
    """The data are read once, no batch is computed in float64, and later comparisons are without TF32."""
    monkeypatch.setattr(QueuedConfirmation, "_compare", lambda *given, **settings: pytest.fail("settled as on the CPU"))
    diagonal(rough, data(64))
    assert not made[0]._patient and made[0]._precise and made[0].doubts.settled == {BY_PRECISION: 2}
    again = [(16, 16), (1, 1)]  # of the first; of the second, which was begun when that was read, but the first of these
    precisely = [(32, 8), (8, 8)]  # outputs and losses of the others, gradients of eight
    assert comparisons == [(16, 16)] * 2 + again + precisely + again[:1]
    comparisons.clear()
    diagonal(rough, data(64))
    assert made[1]._precise and comparisons == precisely * 2  # from the first batch on


def test_what_is_known_of_a_model_is_of_its_weights(rough, made, comparisons):
    diagonal(rough, data(40))
    with torch.no_grad():
        rough[0].weight.mul_(1.0)
    comparisons.clear()
    diagonal(rough, data(40))
    assert comparisons[0] == (16, 16)  # as in a first call


def test_a_comparison_without_tf32_is_no_larger_than_half_a_batch_where_rows_are_large(rough, made, comparisons, monkeypatch):
    diagonal(rough, data(40, 24))
    monkeypatch.setattr(queueing, "HELD_BYTES", 1)
    comparisons.clear()
    diagonal(rough, data(40, 24))
    assert made[1]._precise and max(samples for samples, _ in comparisons) == 12


@pytest.mark.parametrize("wrong", [False, True])
def test_rows_of_others_show_where_a_process_knows_that_tf32_hides_much(wrong, rough, made, monkeypatch):
    diagonal(rough, data(40))
    kept, doubted = adders.kept_of, []
    monkeypatch.setattr(QueuedConfirmation, "_compare", lambda self, group, *rest, **settings: doubted.append(len(group)))

    def faulty(batch, *given):
        one = kept(batch, *given)
        parts = [part._replace(slopes=torch.randn_like(part.slopes) * part.slopes.std()) for part in one.parts]
        return dataclasses.replace(one, parts=parts if wrong else one.parts)

    monkeypatch.setattr(adders, "kept_of", faulty)
    diagonal(rough, data(16))
    assert made[1]._precise and doubted[:1] == [8] * wrong


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("late", [0, 20])
def test_errors_show_where_tf32_hides_much(rough, made, late, known, monkeypatch):
    """Frames folded frame by frame, black until then."""
    model = test_cuda_confirmed.Late()
    model.image = nn.Sequential(*model.image, Rough())
    if known:
        monkeypatch.setattr(QueuedConfirmation, "_state", lambda self, plan: 0)
        queueing._noisy[model] = 0
    batches = test_cuda_confirmed.late(40, 32, late, torch.float32)
    found = diagonal(model.eval(), batches).sums
    assert made[0]._patient == bool(late)
    expected = patterns.looped(model, batches)
    assert reference.worst_error({"w": found["video.layer.weight"]}, {"w": expected["video.layer.weight"]}) <= 0.1


def test_a_model_that_does_not_take_channels_last(made):
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Conv2d(4, 4, 3), nn.Linear(4 * 16, patterns.K)

        def forward(self, x):
            return self.head(torch.tanh(self.layer(x)).view(len(x), -1))

    torch.manual_seed(0)
    model, batches = Viewing().double(), [(x.double(), y) for x, y in data(3)]
    assert reference.worst_error(diagonal(model, batches).sums, patterns.looped(model, batches)) <= 1e-10 and not made[0]._patient


def test_what_runs_out_of_memory_is_compared_all_the_same(comparisons, monkeypatch):
    begun, short = Comparison.begun, iter([True])

    def failing(self, *given, **settings):
        if next(short, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return begun(self, *given, **settings)

    monkeypatch.setattr(queueing, "HELD", 4)
    monkeypatch.setattr(Comparison, "begun", failing)
    batches = data(16)
    found = diagonal(network(), batches).sums
    assert reference.worst_error(found, patterns.looped(network(), batches)) <= 1e-4
    assert sum(samples for samples, _ in comparisons) >= 16 + 1  # the batch that came when it failed is drawn from again, in halves
