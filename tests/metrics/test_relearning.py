"""Re-learn time against a plain loop, on a copy, with an honest end."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from expunge import Constant, DivergedError, InputError, MaskClassifier, ModelError, Tuning, train, unlearn
from expunge.metrics import Relearning, relearn_curve, relearn_time
from expunge.vision.scenarios import category
from tests.methods import cases, properties

QUICK = Relearning(Tuning(Constant(0.05, 30), batch_size=16))


@pytest.fixture(scope="module")
def original() -> nn.Sequential:
    model = cases.model(torch.float64)
    train(model, cases.dataset(torch.float64), Tuning(Constant(0.05, 20), batch_size=16))
    return model


@pytest.fixture(scope="module")
def scenario():
    return category(cases.dataset(torch.float64), 0)


@pytest.fixture(scope="module")
def masked(original, scenario) -> nn.Module:
    return unlearn(original, *scenario, MaskClassifier(), watch={}).model


def loss_on(model: nn.Module, data) -> float:
    images, labels = (torch.stack(column) for column in zip(*data, strict=True))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(copy.deepcopy(model).eval()(images), labels))


def test_a_network_that_forgot_nothing_needs_no_time(original, scenario):
    found = relearn_time(original, original, scenario.forget, scenario.train, QUICK)
    assert found.epochs == 0 and len(found.losses) == 1 and str(found) == "0"
    assert found.goal == pytest.approx(loss_on(original, scenario.forget) + 1e-5, rel=1e-12)


def test_the_time_is_that_of_a_plain_loop(original, masked, scenario):
    """Full epochs in train mode, one optimizer throughout: what `train` does in one go, looked at after every epoch."""
    found = relearn_time(masked, original, scenario.forget, scenario.train, QUICK)
    assert 0 < found.epochs == len(found.losses) - 1 < found.limit == 30
    assert found.losses[-1] <= found.goal and all(loss > found.goal for loss in found.losses[:-1])
    assert found.losses[0] == pytest.approx(loss_on(masked, scenario.forget), rel=1e-10)
    learner = copy.deepcopy(masked)
    train(learner, scenario.train, Tuning(Constant(0.05, found.epochs), batch_size=16))
    assert found.losses[-1] == pytest.approx(loss_on(learner, scenario.forget), rel=1e-10)


def test_not_within_the_limit(original, masked, scenario):
    found = relearn_time(masked, original, scenario.forget, scenario.train, Relearning(Tuning(Constant(1e-6, 3))))
    assert found.epochs is None and len(found.losses) == 4 and str(found) == "not within 3"


@pytest.mark.parametrize("relearning", [QUICK, Relearning.as_first_defined()], ids=["released", "first defined"])
def test_what_is_measured_is_not_changed(original, masked, scenario, relearning):
    before = {name: value.clone() for name, value in original.state_dict().items()}
    forgot = cases.model(torch.float64)
    forgot.load_state_dict(masked.state_dict())
    with properties.assert_untouched(forgot):
        first = relearn_time(forgot, original, scenario.forget, scenario.train, relearning)
        again = relearn_time(forgot, original, scenario.forget, scenario.train, relearning)
    assert first == again
    assert all(torch.equal(value, original.state_dict()[name]) for name, value in before.items())


def test_only_the_named_parameters_move(original, masked, scenario, monkeypatch):
    """The rest is fixed with its statistics; a classifier alone, in eval mode, is plain logistic regression on fixed features."""
    head = ("7.weight", "7.bias")
    settings = Relearning(Tuning(Constant(0.05, 5), batch_size=48, momentum=0, weight_decay=0))
    found = relearn_time(masked, original, scenario.forget, scenario.train, settings, only=head)
    images, labels = scenario.train.tensors
    learner = copy.deepcopy(masked).eval()
    features = learner[:7](images).detach()
    expected = [loss_on(learner, scenario.forget)]
    while expected[-1] > found.goal and len(expected) <= 5:
        gradients = torch.autograd.grad(nn.functional.cross_entropy(learner[7](features), labels), list(learner[7].parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(learner[7].parameters(), gradients, strict=True):
                parameter -= 0.05 * gradient
        expected.append(loss_on(learner, scenario.forget))
    assert found.losses == pytest.approx(expected, rel=1e-9)


def test_the_first_definition_draws_with_replacement(original, masked, scenario):
    seen = []

    class Noted(TensorDataset):
        def batch_of(self, rows):
            seen.append(rows)
            return tuple(column[rows] for column in self.tensors)

    relearning = Relearning.as_first_defined()
    assert (relearning.draws, relearning.tuning.schedule, relearning.margin) == (500, Constant(0.01, 100), 1e-5)
    assert relearning.tuning.eval_mode and relearning.tuning.momentum == relearning.tuning.weight_decay == 0
    found = relearn_time(masked, original, scenario.forget, Noted(*scenario.train.tensors), relearning)
    epochs = len(found.losses) - 1
    assert epochs >= 1 and [len(rows) for rows in seen[:4]] == [128, 128, 128, 116] and len(seen) == 4 * epochs
    rows = torch.cat(seen[:4])
    assert set(rows.tolist()) == set(range(48)) and not torch.equal(rows[:48].sort().values, torch.arange(48))
    assert epochs == 1 or not torch.equal(rows, torch.cat(seen[4:8]))


def test_draws_from_a_list_of_samples(original, masked, scenario):
    settings = Relearning(Tuning(Constant(0.01, 2), batch_size=16), draws=20)
    found = [relearn_time(masked, original, scenario.forget, data, settings) for data in (scenario.train, list(scenario.train))]
    assert found[0] == found[1]


def test_eval_mode_keeps_statistics_and_dropout_off():
    model = cases.model(torch.float64)
    states = {name: value.clone() for name, value in model.state_dict().items() if "running" in name}
    modes = []
    model.register_forward_hook(lambda module, inputs, output: modes.append(module.training))
    train(model, cases.dataset(torch.float64), Tuning(Constant(0.05, 1), eval_mode=True))
    assert modes == [False] and all(torch.equal(value, model.state_dict()[name]) for name, value in states.items())


def test_training_ends_where_it_is_told():
    stopped, whole = cases.model(), cases.model()
    done = []
    train(stopped, cases.dataset(), Tuning(Constant(0.05, 9)), after_epoch=lambda epoch: done.append(epoch) or epoch == 2)
    train(whole, cases.dataset(), Tuning(Constant(0.05, 2)))
    assert done == [1, 2] and all(torch.equal(a, b) for a, b in zip(stopped.parameters(), whole.parameters(), strict=True))


def test_mistakes_are_named(original, masked, scenario):
    forget, data = scenario.forget, scenario.train
    with pytest.raises(ModelError, match="only: must name parameters of the model; found nine"):
        relearn_time(masked, original, forget, data, only=("7.weight", "nine"))
    with pytest.raises(ModelError, match="only: must name parameters of the model; found none"):
        relearn_time(masked, original, forget, data, only=())
    with pytest.raises(InputError, match="data: draws need a dataset; found DataLoader"):
        relearn_time(masked, original, forget, DataLoader(data), Relearning.as_first_defined())
    with pytest.raises(InputError, match="data: must not be empty"):
        relearn_time(masked, original, Subset(data, []), data)
    with pytest.raises(InputError, match="data: draws need a dataset of single samples; found a list of batches"):
        relearn_time(masked, original, forget, list(DataLoader(data, 8)), Relearning.as_first_defined())
    with pytest.raises(InputError, match="data: must not be empty"):
        relearn_time(masked, original, forget, Subset(data, []), Relearning.as_first_defined())
    for draws in (0, 1.5, True):
        with pytest.raises(InputError, match=f"draws: must be a whole number of at least 1; found {draws}"):
            Relearning(draws=draws)
    with pytest.raises(InputError, match="margin: must be a finite number of at least 0; found -1"):
        Relearning(margin=-1)
    with pytest.raises(DivergedError):
        relearn_time(masked, original, forget, data, Relearning(Tuning(Constant(1e200, 3))))


class Keeping(nn.Module):
    """Keeps its last features, with their graph: copy.deepcopy alone refuses them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.features = inner, None

    def forward(self, x):
        self.features = self.inner(x)
        return self.features * 1


def test_a_model_that_keeps_activations_is_copied(masked, original, scenario):
    expected = relearn_time(masked, original, scenario.forget, scenario.train, QUICK)
    keeping = Keeping(copy.deepcopy(masked))
    keeping(scenario.train[0][0][None].expand(2, -1, -1, -1))
    features = keeping.features
    with properties.assert_untouched(keeping):
        assert relearn_time(keeping, original, scenario.forget, scenario.train, QUICK) == expected
    assert features.grad_fn is not None


def test_the_parameters_that_may_move_are_named_before_any_work(masked, original, scenario):
    for only in (3, ["7.weight", 3], True):
        with pytest.raises(InputError, match="^only: must be one or more names of the model's parameters"):
            relearn_time(masked, original, scenario.forget, scenario.train, only=only)
    with pytest.raises(ModelError, match="^only: must name parameters"):
        relearn_time(masked, original, [], scenario.train, only="nine")
    with pytest.raises(InputError, match="^original: must be a torch.nn.Module; found NoneType"):
        relearn_time(masked, None, scenario.forget, scenario.train)
    with pytest.raises(InputError, match="^relearning: must be a Relearning"):
        relearn_time(masked, original, scenario.forget, scenario.train, Tuning())
    for tuning in (None, QUICK):
        with pytest.raises(InputError, match="^tuning: must be a Tuning: re-learning trains"):
            relearn_curve(masked, scenario.forget, scenario.forget, scenario.train, tuning)


def test_the_curve_is_that_of_a_plain_training(original, masked, scenario):
    unseen = TensorDataset(*(part[:9] for part in cases.dataset(torch.float64).tensors))
    tuning = Tuning(Constant(0.02, 3), batch_size=16)
    before = copy.deepcopy(masked.state_dict())
    curve = relearn_curve(masked, scenario.forget, unseen, scenario.train, tuning)
    properties.assert_same_weights(before, masked.state_dict())
    for epoch in range(4):
        learner = copy.deepcopy(masked)
        if epoch:
            train(learner, scenario.train, Tuning(Constant(0.02, epoch), batch_size=16))
        assert curve.losses[epoch] == pytest.approx(loss_on(learner, scenario.forget), rel=1e-10)
        for shares, data in ((curve.accuracies, scenario.forget), (curve.unseen, unseen)):
            images, labels = (torch.stack(column) for column in zip(*data, strict=True))
            right = copy.deepcopy(learner).eval()(images).argmax(1) == labels
            assert shares[epoch] == pytest.approx(float(right.double().mean()))
    assert len(curve.losses) == len(curve.accuracies) == len(curve.unseen) == 4
