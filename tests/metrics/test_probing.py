"""Linear probes against scikit-learn, and on networks of which it is known what they hold."""

import copy

import numpy
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import TensorDataset

from expunge.errors import DivergedError, InputError, ModelError
from expunge.metrics import linear_probes
from expunge.metrics.probing import RIDGE, fitted
from expunge.model.stages import stage_ends
from expunge.vision.networks import NETWORKS
from tests.methods import properties


def pictures(count, seed):
    """Four classes: the mean of the first channel says 0 or 1, that of the second 0 or 2."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    images = torch.randn(count, 2, 4, 4, generator=generator)
    images[:, 0] += (labels % 2)[:, None, None]
    images[:, 1] += (labels // 2)[:, None, None]
    return TensorDataset(images, labels)


def network():
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 1), nn.Flatten(), nn.Linear(20, 4))


def test_they_are_those_of_scikit_learn():
    model, data, held_out = network(), pictures(200, 0), pictures(100, 1)
    found = linear_probes(model, ["0", "3"], data, held_out, batch_size=32)
    for probe, depth in zip(found, (1, 4), strict=True):
        features = [model[:depth](part.tensors[0]).mean((2, 3)).detach().numpy() for part in (data, held_out)]
        mean, deviation = features[0].mean(0), features[0].std(0) + 1e-6
        known, asked = ((part - mean) / deviation for part in features)
        # scikit-learn leaves the bias out of the penalty, so it is given a column of its own.
        known, asked = (numpy.c_[part, numpy.ones(len(part))] for part in (known, asked))
        fitted = LogisticRegression(C=1 / (2 * 1e-4 * len(known)), fit_intercept=False, max_iter=10000, tol=1e-8)
        right = fitted.fit(known, data.tensors[1].numpy()).predict(asked) == held_out.tensors[1].numpy()
        assert abs(probe.accuracy - right.mean()) <= 0.011  # a sample on the border may fall to either side
        recall = {label: right[held_out.tensors[1].numpy() == label].mean() for label in range(4)}
        assert all(abs(probe.recall[label] - share) <= 0.041 for label, share in recall.items())


def points(count, width, classes, shift, seed, rare=0.0, twins=0):
    """Standardised features of classes so far apart; a share of all labels is 0, and some features come twice but for a thousandth."""
    numbers = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=numbers)
    labels[torch.rand(count, generator=numbers) < rare] = 0
    features = shift * torch.randn(classes, width, generator=numbers)[labels] + torch.randn(count, width, generator=numbers)
    features = torch.cat([features, features[:, :twins] + 1e-3 * torch.randn(count, twins, generator=numbers)], 1)
    return (features - features.mean(0)) / features.std(0, correction=0), labels, classes


FITTED = {
    "overlapping": lambda: points(400, 8, 4, 0.5, 0),
    "far apart": lambda: points(400, 8, 4, 3, 1),
    "more features than samples": lambda: points(60, 120, 3, 0.5, 2),
    "rare classes": lambda: points(500, 10, 5, 0.7, 3, rare=0.9),
    "features twice": lambda: points(300, 8, 4, 0.5, 4, twins=3),
    "two classes": lambda: points(300, 9, 2, 0.4, 5),
    "as in an audit": lambda: points(1300, 64, 10, 0.6, 6),
}


@pytest.mark.parametrize("case", FITTED)
def test_probabilities_are_those_of_scikit_learn(case):
    features, labels, classes = FITTED[case]()
    weights = fitted(features, labels, classes)
    ours = (features @ weights[:-1] + weights[-1]).double().softmax(1).numpy()
    rows = numpy.c_[features.double().numpy(), numpy.ones(len(features))]
    # Of two classes scikit-learn has one vector, the difference w of ours, ±w/2: ‖w‖² there is twice the sum of squares here.
    strength = 1 / (2 * RIDGE * len(rows)) * (2 if classes == 2 else 1)
    model = LogisticRegression(C=strength, fit_intercept=False, max_iter=20000, tol=1e-10).fit(rows, labels.numpy())
    assert weights.dtype == torch.float32 and abs(ours - model.predict_proba(rows)).max() < 1e-4
    assert (ours.argmax(1) == model.predict(rows)).all()


def test_what_a_layer_drops_no_probe_finds():
    model = network()
    with torch.no_grad():
        model[0].weight[:, 1] = 0  # blind for the second channel, so 0 and 2 look alike, and 1 and 3
    blind, seeing = (linear_probes(one, ["1"], pictures(400, 0), pictures(400, 1))[0] for one in (model, network()))
    assert blind.accuracy < 0.55 < 0.8 < seeing.accuracy


def test_the_model_stays_as_it_is():
    model = network().train()
    with properties.assert_untouched(model):
        linear_probes(model, ["1"], pictures(40, 0), pictures(20, 1))
    assert not model[1]._forward_hooks


def test_sequences_and_flat_outputs_are_probed():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 6), nn.Flatten(), nn.Linear(18, 2))
    words = torch.randint(0, 5, (60, 3), generator=torch.Generator().manual_seed(3))
    data = TensorDataset(words, (words == 4).any(1).long())
    found = linear_probes(model, ["1", "2"], data, data)
    assert linear_probes(model, "1", data, data) == found[:1]
    assert [probe.module for probe in found] == ["1", "2"] and all(probe.accuracy > 0.9 for probe in found)


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = network(), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


BAD = {
    "an unknown module": (
        InputError,
        "^modules: must name modules of the model, such as 0, .*; found stage1$",
        lambda: (network(), ["stage1"]),
    ),
    "no module": (InputError, "^modules: must name at least one", lambda: (network(), [])),
    "a module that is not called": (ModelError, "idle must be called once per batch", lambda: (Idle(), ["idle"])),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_probed_is_refused(case):
    error, message, arguments = BAD[case]
    with pytest.raises(error, match=message):
        linear_probes(*arguments(), pictures(8, 0), pictures(8, 1))


def with_labels(change):
    data = pictures(8, 0)
    return TensorDataset(data.tensors[0], change(data.tensors[1]))


LABELS = {
    "fractions": lambda labels: labels.float(),
    "below 0": lambda labels: labels - 1,
    "of no logit": lambda labels: labels + 4,
    "ignored": lambda labels: labels.where(labels > 0, -100),
}


@pytest.mark.parametrize("change", LABELS)
def test_labels_must_be_outputs_of_the_head(change):
    strange = with_labels(LABELS[change])
    for argument, parts in (("data", (strange, pictures(8, 0))), ("held_out", (pictures(8, 0), strange))):
        with pytest.raises(InputError, match=f"^{argument}: (labels must be in|targets must be)"):
            linear_probes(network(), ["1"], *parts)


def test_outputs_that_are_not_finite_are_named():
    model = network()
    with torch.no_grad():
        model[0].weight.mul_(1e38)
    with pytest.raises(DivergedError, match="^the outputs of 0 on data are not finite"):
        linear_probes(model, ["0"], pictures(8, 0), pictures(8, 1))


def test_names_may_be_one_or_twice_the_same():
    model, data = network(), pictures(40, 0)
    once = linear_probes(model, "1", data, data)
    assert [probe.module for probe in once] == ["1"] and linear_probes(model, ["1", "1"], data, data) == once


def test_it_works_in_inference_mode():
    model, data = network(), pictures(40, 0)
    with torch.inference_mode():
        found = linear_probes(model, ["1"], data, data)
    assert found == linear_probes(model, ["1"], data, data)


STAGES = {
    "resnet20": ("stage1", "stage2", "stage3"),
    "vgg16": ("stages.0", "stages.1", "stages.2", "stages.3", "stages.4"),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_end_where_the_resolution_does(name):
    batch = (torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64))
    model = NETWORKS[name](10, 3)
    before = copy.deepcopy(model.state_dict())
    assert stage_ends(model, batch) == STAGES[name]
    properties.assert_same_weights(before, model.state_dict())


def test_a_model_without_pictures_has_no_stages():
    with pytest.raises(ModelError, match="no module that gives pictures"):
        stage_ends(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), (torch.randn(2, 16), torch.zeros(2, dtype=torch.int64)))
