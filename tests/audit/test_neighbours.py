"""Where forgotten samples go: the original's next class and CMIA, by plain loops and on cases with a known answer."""

from __future__ import annotations

import numpy
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import expunge
from expunge.audit.measures import CMIA, NEIGHBOURS, Subject
from expunge.audit.neighbours import class_attack, neighbours
from expunge.audit.reading import read
from expunge.model.copying import copied
from tests.audit.small import FORGOTTEN, Filter, clouds, parts, trained

# The clouds have four classes, too few for the audit to ask; tests that do ask switch that off.
pytestmark = pytest.mark.usefixtures("three_are_enough")


@pytest.fixture
def three_are_enough(request, monkeypatch):
    if "few" not in request.node.name:
        monkeypatch.setattr("expunge.audit.neighbours.FEWEST", 3)


QUICK = expunge.audit.Settings(rounds=2, steps=4, rate=0.002, batch_size=64)


def readings(**networks):
    sets = dict(zip(("forget", "remain", "test"), parts(), strict=True))
    read_of = {name: read(network, sets) for name, network in networks.items()}
    first = next(iter(read_of.values()))
    return read_of, Subject.of(first["forget"], first["remain"])


def next_class(network, images):
    """One by one, the largest logit but the forgotten one's."""
    best = []
    for image in images:
        row = network(image[None])[0].tolist()
        best.append(max((value, label) for label, value in enumerate(row) if label != FORGOTTEN)[1])
    return best


def test_the_share_is_that_of_a_loop():
    original, clean = trained(0), trained(21, without=True)
    found, subject = readings(before=original, other=clean)
    images = torch.stack([image for image, _ in parts()[0]])
    ours, theirs = next_class(clean, images), next_class(original, images)
    expected = sum(first == second for first, second in zip(ours, theirs, strict=True)) / len(images)
    assert neighbours(found["other"], subject, found["before"])[NEIGHBOURS].value == pytest.approx(expected)
    assert 0.05 < expected < 0.95


def test_the_original_and_its_filters_agree_with_it_always():
    original = trained(0)
    found, subject = readings(before=original, low=Filter(original), infinite=Filter(original, -torch.inf))
    for reading in found.values():
        assert neighbours(reading, subject, found["before"])[NEIGHBOURS].value == 1


def test_of_samples_of_classes_that_stay_nothing_is_asked():
    data = clouds()
    sets = {"forget": Subset(data, range(40)), "remain": Subset(data, range(40, 400)), "test": clouds(240, seed=1)}
    reading = read(trained(0), sets)
    subject = Subject.of(reading["forget"], reading["remain"])
    assert neighbours(reading, subject, reading) == {}
    assert class_attack({"before": reading, "after": reading}, [reading], subject) == []


def test_where_few_classes_stay_nothing_is_asked():
    found, subject = readings(before=trained(0))
    assert neighbours(found["before"], subject, found["before"]) == {}


@pytest.mark.parametrize("gone", [(FORGOTTEN,), (0, FORGOTTEN)])
def test_cmia_is_scikit_learns_classifier_of_the_nearest_class(gone):
    clean, other = trained(21, without=True), trained(22, without=True)
    (images, labels), test = clouds().tensors, clouds(240, seed=1)
    lost = torch.isin(labels, torch.tensor(gone))
    sets = {"forget": TensorDataset(images[lost], labels[lost]), "remain": TensorDataset(images[~lost], labels[~lost]), "test": test}
    found = {name: read(network, sets) for name, network in {"before": trained(0), "after": other, "first": clean}.items()}
    (measure,) = class_attack(found, [found["first"]], Subject.of(found["before"]["forget"], found["before"]["remain"]))
    stays = [label for label in range(4) if label not in gone]

    def taken(network, label):
        asked = test.tensors[0][test.tensors[1] == label]
        nearest = stays[int(clean(asked)[:, stays].softmax(1).mean(0).argmax())]
        known, unseen = (network(part)[:, stays].log_softmax(1).clamp(min=-30).detach().double().numpy() for part in (images[~lost], asked))
        mean, deviation = known.mean(0), known.std(0)
        rows = [numpy.c_[(part - mean) / deviation, numpy.ones(len(part))] for part in (known, unseen)]
        model = LogisticRegression(C=1 / (1e-4 * len(known)), fit_intercept=False, max_iter=10000, tol=1e-8)  # of ±w/2 each
        return model.fit(rows[0], (labels[~lost] == nearest).numpy()).predict(rows[1])

    assert measure.name == CMIA and measure.n == 60 * len(gone) and measure.before is not None and len(measure.retrained) == 1
    for interval, network in ((measure.after, other), (measure.retrained[0], clean)):
        share = numpy.concatenate([taken(network, label) for label in gone]).mean()
        assert interval.value == pytest.approx(share, abs=0.02)  # a sample on the border may fall to either side
    assert measure.after.value != measure.retrained[0].value


def leaking() -> nn.Module:
    """The original, trained to give forgotten samples to the class it has next."""
    forget, remain, _ = parts()
    images = torch.stack([image for image, _ in forget])
    data = ConcatDataset([TensorDataset(images, torch.tensor(next_class(trained(0), images))), remain])
    model = copied(trained(0))
    expunge.train(model, data, expunge.Tuning(expunge.Constant(0.02, 20), batch_size=32), progress=False)
    return model.eval()


@pytest.mark.parametrize("references", [1, 5])
def test_a_network_that_gives_samples_to_the_originals_neighbours_is_told(references):
    clean = [trained(seed, without=True) for seed in (21, 22, 23, 24, 25)[:references]]
    report = expunge.audit(trained(0), leaking(), *parts(), clean, settings=QUICK)
    row = report[NEIGHBOURS]
    assert row.before.value == 1 and row.after.value > 0.9 and max(value.value for value in row.retrained) < row.after.value
    assert NEIGHBOURS in {reason.measure for reason in report.verdict.reasons} and report.verdict.word in ("partly", "cosmetic")
    assert report[CMIA].after is not None and len(report[CMIA].retrained) == references
