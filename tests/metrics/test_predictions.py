"""What is read off predictions, against loops over single samples in float64."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from expunge import DivergedError, InputError, MismatchError, Objective
from expunge.metrics import (
    Predictions,
    accuracy,
    accuracy_of,
    agreement,
    attack_success,
    class_accuracies,
    divergence,
    logits,
    mean_loss,
    predicted_shares,
)
from tests.methods import cases, properties


def predictions(seed: int, samples: int = 40, classes: int = 5, *positions: int) -> Predictions:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(samples, classes, *positions, generator=generator)
    return Predictions(found, torch.randint(classes, (samples, *positions), generator=torch.Generator().manual_seed(0)))


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in row)
    return [math.exp(value) / total for value in row]


# --- the logits ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 128])
def test_logits_are_those_of_single_samples_in_eval_mode(batch_size):
    model, data = cases.model(torch.float64), cases.dataset(torch.float64)
    with properties.assert_untouched(model):
        found = logits(model, data, batch_size=batch_size)
    model.eval()
    expected = torch.cat([model(image[None]) for image, _ in data])
    torch.testing.assert_close(found.logits, expected.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(found.targets, data.tensors[1]) and not found.logits.requires_grad


def test_half_precision_is_kept_as_float32():
    found = logits(nn.Linear(4, 3).to(torch.bfloat16), TensorDataset(torch.ones(5, 4, dtype=torch.bfloat16), torch.zeros(5).long()))
    assert found.logits.dtype == torch.float32


def test_logits_of_other_models_and_batches():
    model, (images, labels) = cases.model(), cases.dataset()[:]
    rows = [{"picture": images[:30], "digit": labels[:30]}, {"picture": images[30:], "digit": labels[30:]}]
    objective = Objective(outputs=lambda model, batch: model(batch["picture"]), targets=lambda batch: batch["digit"])
    found, expected = logits(model, rows, objective), logits(model, cases.dataset())
    torch.testing.assert_close(found.logits, expected.logits)
    assert accuracy_of(found) == accuracy(model, rows, objective) == accuracy(model, cases.dataset())


def test_no_random_numbers_are_drawn():
    state = torch.get_rng_state()
    logits(cases.model(), DataLoader(cases.dataset(), shuffle=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logits_come_to_the_cpu_unless_told_otherwise():
    model = cases.model().cuda()
    assert logits(model, cases.dataset()).logits.device.type == "cpu"
    held = logits(model, cases.dataset(), device="cuda")
    assert held.logits.is_cuda and accuracy_of(held) == accuracy(model, cases.dataset()) and divergence(held, held) == 0


def test_logits_of_one_shape():
    batches = [(torch.randn(2, 3, length), torch.zeros(2, length).long()) for length in (4, 5)]
    with pytest.raises(InputError, match="data: logits of all samples must have one shape"):
        logits(nn.Identity(), batches)
    with pytest.raises(InputError, match="data: must not be empty"):
        logits(nn.Identity(), [])


# --- read off them ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [(), (3,), (2, 2)])
def test_accuracies_and_shares_equal_a_loop(positions):
    found = predictions(1, 40, 5, *positions)
    if positions:
        found.targets[::3, 0] = -100
    pairs = [
        (int(row.argmax()), int(label))
        for row, label in zip(found.logits.movedim(1, -1).reshape(-1, 5), found.targets.flatten(), strict=True)
        if label != -100
    ]
    assert accuracy_of(found) == sum(said == label for said, label in pairs) / len(pairs)
    for label, value in class_accuracies(found).items():
        own = [said for said, true in pairs if true == label]
        assert value == own.count(label) / len(own)
    assert class_accuracies(found).keys() == {label for _, label in pairs}
    assert predicted_shares(found) == {label: sum(said == label for said, _ in pairs) / len(pairs) for label in range(5)}


def test_classes_without_samples():
    found = Predictions(torch.eye(3)[[0, 0, 2]], torch.tensor([2, 2, 2]))
    assert class_accuracies(found) == {2: 1 / 3} and predicted_shares(found) == {0: 2 / 3, 1: 0, 2: 1 / 3}


def test_attack_success_is_the_share_given_the_attackers_label():
    found = Predictions(torch.eye(3)[[0, 0, 2, 1]], torch.zeros(4).long())
    assert attack_success(found) == 0.5 == predicted_shares(found)[0]
    with pytest.raises(InputError, match=r"predictions: .*all carry the attacker's label; found labels \[0, 1\]"):
        attack_success(replace(found, targets=torch.tensor([0, 1, 0, 0])))


def test_mean_loss_equals_a_loop():
    found = predictions(1)
    expected = -sum(math.log(softmax(row.tolist())[label]) for row, label in zip(found.logits, found.targets, strict=True)) / 40
    assert mean_loss(found) == pytest.approx(expected, rel=1e-12)
    squares = Objective(losses=lambda logits, targets: (logits[:, 0] - targets).square())
    assert mean_loss(found, squares) == pytest.approx(
        sum((float(z[0]) - int(y)) ** 2 for z, y in zip(found.logits, found.targets, strict=True)) / 40
    )


def test_mean_loss_of_positions_leaves_the_ignored_out():
    found = predictions(1, 4, 5, 3)
    found.targets[0] = -100
    expected = 0.0
    for row, label in zip(found.logits.movedim(1, -1).reshape(-1, 5), found.targets.flatten(), strict=True):
        expected -= math.log(softmax(row.tolist())[label]) if label != -100 else 0.0
    assert mean_loss(found) == pytest.approx(expected / 4, rel=1e-12)


def test_nothing_is_not_measured():
    nothing = Predictions(torch.zeros(0, 3), torch.zeros(0).long())
    ignored = Predictions(torch.zeros(2, 3, 2), torch.full((2, 2), -100))
    for measure in (accuracy_of, class_accuracies, predicted_shares, attack_success):
        for found in (nothing, ignored):
            with pytest.raises(InputError, match="at least one label"):
                measure(found)
    with pytest.raises(InputError, match="at least one sample"):
        mean_loss(nothing)
    with pytest.raises(InputError, match="must hold at least one label"):
        accuracy(nn.Identity(), [(ignored.logits, ignored.targets)])
    with pytest.raises(InputError, match="targets: must be as many as the 2 rows of logits; found 3"):
        Predictions(torch.zeros(2, 3), torch.zeros(3).long())
    with pytest.raises(InputError, match=r"labels must be in \[0, 3\)"):
        accuracy_of(Predictions(torch.zeros(2, 3), torch.tensor([0, 3])))


def test_flat_logits_have_no_classes():
    flat = Predictions(torch.zeros(4), torch.zeros(4).long())
    for measure in (
        accuracy_of,
        class_accuracies,
        predicted_shares,
        attack_success,
        mean_loss,
        partial(agreement, flat),
        partial(divergence, flat),
    ):
        with pytest.raises(InputError, match=r"logits: must be \(N, K\).*; found shape \(4,\)"):
            measure(flat)
    assert mean_loss(flat, Objective(losses=lambda logits, targets: (logits - 2).square())) == 4
    with pytest.raises(InputError, match="logits: must have a row for each sample"):
        Predictions(torch.zeros(()), torch.zeros(1).long())


def test_predictions_of_a_model_that_diverged_are_not_measured():
    fine = predictions(1)
    broken = replace(fine, logits=fine.logits.clone())
    broken.logits[7, 2] = torch.nan
    for measure in (accuracy_of, class_accuracies, predicted_shares, partial(agreement, fine), partial(agreement, broken)):
        with pytest.raises(DivergedError, match="the logits are NaN in 1 of 40 rows"):
            measure(broken)
    with pytest.raises(DivergedError, match="the logits are NaN in 1 of 40 rows"):
        attack_success(replace(broken, targets=torch.zeros(40).long()))
    with pytest.raises(DivergedError, match="losses are NaN in 1 of 40 rows"):
        mean_loss(broken)
    with pytest.raises(DivergedError, match="the retrained network's probabilities are NaN in 1 of 40 rows"):
        divergence(fine, broken)
    with pytest.raises(DivergedError, match="the model's probabilities are NaN in 1 of 40 rows"):
        divergence(broken, fine)
    broken.logits[7, 2] = torch.inf  # the largest, but of no probability
    assert 0 <= accuracy_of(replace(broken)) <= 1
    with pytest.raises(DivergedError, match="the model's probabilities are NaN in 1 of 40 rows"):
        divergence(replace(broken), fine)


def test_nan_at_ignored_positions_does_not_matter():
    found = predictions(1, 4, 5, 3)
    found.targets[0, 1] = -100
    expected = [measure(found) for measure in (accuracy_of, class_accuracies, predicted_shares, mean_loss)]
    broken = replace(found, logits=found.logits.clone())
    broken.logits[0, :, 1] = torch.nan
    assert [measure(broken) for measure in (accuracy_of, class_accuracies, predicted_shares, mean_loss)] == expected
    assert agreement(broken, found) == 1 and divergence(broken, found) == 0


# --- beside the retrained -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [(), (3,)])
def test_agreement_and_divergence_equal_a_loop(positions):
    model, retrained = predictions(1, 40, 5, *positions), predictions(2, 40, 5, *positions)
    if positions:
        model.targets[::3, 0] = retrained.targets[::3, 0] = -100
    same, total, counted = 0, 0.0, 0
    flat = (each.logits.movedim(1, -1).reshape(-1, 5) for each in (model, retrained))
    for own, other, label in zip(*flat, model.targets.flatten(), strict=True):
        if label == -100:
            continue
        p, r = softmax(own.tolist()), softmax(other.tolist())
        same += int(own.argmax() == other.argmax())
        total += sum(r[k] * (math.log(r[k]) - math.log(p[k])) for k in range(5))
        counted += 1
    assert agreement(model, retrained) == same / counted
    assert divergence(model, retrained) == pytest.approx(total / counted, rel=1e-12)
    assert divergence(model, retrained) != pytest.approx(divergence(retrained, model))


@given(st.integers(0, 1000), st.floats(-30, 30), st.floats(0.01, 30))
@settings(max_examples=40, deadline=None)
def test_divergence_is_positive_and_blind_to_shifts(seed, shift, scale):
    model = predictions(seed, 6)
    other = Predictions(scale * predictions(seed + 1, 6).logits.double(), model.targets)
    assert divergence(model, other) >= 0
    assert divergence(model, model) == 0 and agreement(model, model) == 1
    assert divergence(Predictions(model.logits.double() + shift, model.targets), other) == pytest.approx(
        divergence(model, other), rel=1e-9, abs=1e-9
    )


def test_certain_predictions_have_a_divergence():
    sure = Predictions(torch.tensor([[0.0, -torch.inf], [1000.0, 0.0]]), torch.zeros(2).long())
    level = Predictions(torch.zeros(2, 2), torch.zeros(2).long())
    assert divergence(level, sure) == pytest.approx(math.log(2))
    assert divergence(sure, level) == math.inf
    assert divergence(sure, sure) == 0


def test_only_predictions_on_the_same_data_are_compared():
    model = predictions(1)
    with pytest.raises(MismatchError, match="same data"):
        agreement(model, predictions(1, 39))
    with pytest.raises(MismatchError, match="same order"):
        divergence(model, Predictions(model.logits, model.targets.flip(0)))


@pytest.mark.parametrize("measure", [accuracy_of, class_accuracies, predicted_shares, attack_success, mean_loss])
def test_a_model_is_not_taken_for_its_predictions(measure):
    with pytest.raises(InputError, match=r"^predictions: must be a model's predictions, metrics.logits\(model, data\); found a Linear"):
        measure(nn.Linear(2, 2))
    for compared in (agreement, divergence):
        with pytest.raises(InputError, match="^retrained: must be a model's predictions"):
            compared(predictions(1), nn.Linear(2, 2))
