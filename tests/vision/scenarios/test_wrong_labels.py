"""Samples whose labels are wrong: made so for an experiment, or known to be so in one's own data."""

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import expunge
from expunge.data.batches import as_batches
from expunge.errors import InputError
from expunge.vision.scenarios import labels_of, mislabelled

numbers = torch.Generator().manual_seed(0)
images, labels = torch.randn(60, 1, 4, 4, generator=numbers), torch.arange(60) % 4
whole, tested = TensorDataset(images, labels), TensorDataset(images[:20] + 1, labels[:20])
ROWS = [3, 17, 40]
MASK = numpy.isin(numpy.arange(60), ROWS)  # what cleanlab's find_label_issues returns
RIGHT = (labels[ROWS] + 1) % 4


def together(data):
    return [torch.cat(column) for column in zip(*as_batches(data, batch_size=7), strict=True)]


def test_every_label_is_wrong_unless_it_may_be_kept():
    many = TensorDataset(torch.zeros(4000, 1, 1, 1), torch.arange(4000) % 4 * 2)  # labels 0, 2, 4, 6
    scenario = mislabelled(many, 0.5)
    rows = torch.tensor(scenario.forget.indices)
    wrong, true = labels_of(scenario.forget), labels_of(many)[rows]
    assert len(rows) == 2000 and (wrong != true).all() and set(wrong.tolist()) == {0, 2, 4, 6}
    for label in (0, 2, 4, 6):  # each other label with chance 1/3: 500 draws, five deviations
        assert (torch.bincount(wrong[true == label] // 2, minlength=4) / (true == label).sum() - 1 / 3).abs().sort().values[:3].max() < 0.11
    assert torch.equal(labels_of(scenario.remain), labels_of(Subset(many, scenario.remain.indices)))
    kept = mislabelled(many, 0.5, keep_own=True)
    same = labels_of(kept.forget) == labels_of(many)[torch.tensor(kept.forget.indices)]
    assert abs(float(same.float().mean()) - 0.25) < 0.05


def test_images_of_mislabelled_samples_stay():
    scenario = mislabelled(whole, 0.25, test=tested)
    assert torch.equal(together(scenario.train)[0], images)
    assert scenario.tests["remain"] is tested and scenario.tests["forget"] is scenario.forget


FORMS = {
    "rows": ROWS,
    "rows of NumPy": numpy.array(ROWS),
    "rows of torch": torch.tensor(ROWS),
    "a mask of NumPy": MASK,
    "a mask of torch": torch.from_numpy(MASK),
    "a list of flags": MASK.tolist(),
}


@pytest.mark.parametrize("name", FORMS)
def test_samples_that_are_known_to_be_wrong_are_forgotten_as_they_are(name):
    scenario = mislabelled(whole, indices=FORMS[name], test=tested)
    assert scenario.train is whole is scenario.forget.dataset and scenario.remain is scenario.retrain
    inputs, targets = together(scenario.forget)
    assert torch.equal(inputs, images[ROWS]) and torch.equal(targets, labels[ROWS])
    assert sorted([*scenario.forget.indices, *scenario.remain.indices]) == list(range(60))
    assert scenario.name == "without 3 mislabelled samples" and scenario.tests == {"remain": tested, "forget": scenario.forget}


def test_the_order_of_rows_stays():
    assert mislabelled(whole, indices=[40, 3, 17]).forget.indices == [40, 3, 17]  # such as cleanlab's, the surest first


@pytest.mark.parametrize("corrected", [RIGHT, RIGHT.tolist(), RIGHT.numpy(), (labels + 1) % 4, [numpy.int64(label) for label in RIGHT]])
def test_samples_with_their_right_labels_remain(corrected):
    scenario = mislabelled(whole, indices=MASK, corrected=corrected, test=tested, validation=tested)
    inputs, targets = together(scenario.remain)
    others = torch.from_numpy(~MASK)
    assert torch.equal(inputs, torch.cat([images[others], images[ROWS]])) and torch.equal(targets, torch.cat([labels[others], RIGHT]))
    assert scenario.retrain is scenario.remain and scenario.train is whole
    for parts in (scenario.tests, scenario.validation):
        assert list(parts) == ["remain", "forget", "corrected"]
        assert torch.equal(labels_of(parts["corrected"]), RIGHT) and torch.equal(labels_of(parts["forget"]), labels[ROWS])
    assert mislabelled(whole, indices=MASK, corrected=corrected).watch == {}


def test_right_labels_are_in_the_order_of_the_rows():
    scenario = mislabelled(whole, indices=[40, 3], corrected=[int(RIGHT[2]), int(RIGHT[0])], test=tested)
    inputs, targets = together(scenario.tests["corrected"])
    assert torch.equal(inputs, images[[40, 3]]) and torch.equal(targets, RIGHT[[2, 0]])


class Texts:
    """Samples that are no pictures, with an entry between."""

    def __len__(self):
        return 60

    def __getitem__(self, row):
        return images[row].flatten(), row, int(labels[row])


DATASETS = {
    "vectors": TensorDataset(images.flatten(1), labels),
    "a part": Subset(TensorDataset(images.flatten(1).repeat(2, 1), labels.repeat(2)), range(60, 120)),
    "two parts": ConcatDataset([TensorDataset(images[:20].flatten(1), labels[:20]), TensorDataset(images[20:].flatten(1), labels[20:])]),
    "pairs in a list": [(images[row].flatten(), int(labels[row])) for row in range(60)],
}


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("corrected", [None, RIGHT])
def test_a_network_unlearns_wrong_labels_of_any_dataset(name, corrected):
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    data, tuning = DATASETS[name], expunge.Tuning(expunge.Constant(0.05, 30), batch_size=16)
    expunge.train(model, data, tuning)
    scenario = mislabelled(data, indices=MASK, corrected=corrected, test=data)
    assert expunge.metrics.accuracy(model, scenario.forget) == 1
    outcome = expunge.unlearn(model, *scenario, expunge.Retrain(tuning), watch=scenario.watch)
    accuracies = outcome.history[-1].accuracies
    assert accuracies["forget"] < 1 and (corrected is None or accuracies["corrected"] == 1)


def test_samples_need_no_labels_of_ours():
    rows = [{"input": images[row].flatten(), "label": int(labels[row])} for row in range(60)]
    forget, remain = mislabelled(rows, indices=MASK)
    outcome = expunge.unlearn(nn.Linear(16, 4), forget, remain, expunge.SSD(threshold=1))
    assert len(forget) == 3 and outcome.history[-1].accuracies.keys() == {"remain", "forget"}
    assert len(mislabelled(Texts(), indices=MASK, corrected=RIGHT).remain) == 60


BAD = {
    "a short mask": (dict(indices=MASK[:5]), "indices: must be whole numbers, or a boolean mask of 60 entries.*; found a mask of 5"),
    "outside": (dict(indices=[60]), r"indices: must be in \[0, 60\); found 60"),
    "twice": (dict(indices=[3, 3]), "indices: must not name a sample twice; found 3"),
    "none": (dict(indices=[]), "indices: must be row numbers, one or more; found none"),
    "an empty mask": (dict(indices=~MASK & MASK), "indices: must be row numbers, one or more; found none"),
    "all": (dict(indices=range(60)), "dataset: something must be left to keep; found all 60"),
    "a mask of numbers": (dict(indices=MASK.astype(int)), "indices: .*make the mask boolean"),
    "neither": ({}, "indices: give either indices .* or a fraction to make wrong; found neither"),
    "both": (dict(indices=MASK, fraction=0.1), "indices: give either indices .*; found both"),
    "a mask as fraction": (dict(fraction=MASK), r"fraction: must be a number in \(0, 1\); rows or a mask are given as indices="),
    "own labels of known rows": (dict(indices=MASK, keep_own=True), "keep_own: is for a fraction"),
    "right labels of a fraction": (dict(fraction=0.1, corrected=RIGHT), "corrected: is for samples at indices"),
    "few right labels": (
        dict(indices=MASK, corrected=[1]),
        "corrected: must be one label for each of the 3 samples at indices, or for each of the 60 .*found 1",
    ),
    "the same label": (dict(indices=[5], corrected=[1]), "corrected: must be other labels than the dataset has; .*found 1 at row 5"),
    "an unknown label": (dict(indices=[5], corrected=[9]), "corrected: must be labels that occur in the dataset; found 9"),
    "half a label": (dict(indices=[5], corrected=[0.5]), "corrected: must be labels, whole numbers; found 0.5"),
    "one number": (dict(indices=[5], corrected=3), "corrected: must be labels, one for each sample with a wrong one; found 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_named(name):
    options, message = BAD[name]
    with pytest.raises(InputError, match=f"^{message}"):
        mislabelled(whole, **options)


def test_right_labels_need_samples_with_a_label():
    with pytest.raises(InputError, match=r"^dataset: samples must be \(image, label\); found dict"):
        mislabelled([{"x": 1, "y": 0}] * 3, indices=[1], corrected=[1])
