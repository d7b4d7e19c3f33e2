"""Every scenario against a plain construction, without a copy of the images, and read by whole batches."""

import pickle

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from expunge import FisherMask, InputError, unlearn
from expunge.data.batches import as_batches
from expunge.data.overlap import check_disjoint
from expunge.vision.datasets.digits import digits
from expunge.vision.scenarios import Scenario, category, labels_of, limited, mislabelled, poisoned, subset
from expunge.vision.scenarios.altered import Altered, Trigger
from tests.methods import cases

images = torch.randn(60, 3, 6, 5, generator=torch.Generator().manual_seed(0))
labels = torch.arange(60) % 4
whole = TensorDataset(images, labels)
tested = TensorDataset(images[:20] + 1, labels[:20])


class Plain(Dataset):
    """Samples one at a time, the label a plain number; counts what is read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 60

    def __getitem__(self, index):
        self.read.append(index)
        return images[index], int(labels[index])


def together(data, batch_size=7):
    return tuple(torch.cat(column) for column in zip(*as_batches(data, batch_size=batch_size), strict=True))


ALL = {
    "category": lambda data: category(data, 1, tested, tested),
    "categories": lambda data: category(data, (1, 3), tested, tested),
    "poisoned, added": lambda data: poisoned(data, 9, 2, test=tested, validation=tested),
    "poisoned, replaced": lambda data: poisoned(data, 9, 2, how="replace", test=tested, validation=tested),
    "mislabelled": lambda data: mislabelled(data, 0.25, test=tested, validation=tested),
    "subset": lambda data: subset(data, [5, 3, 59], test=tested, validation=tested),
    "fraction": lambda data: subset(data, fraction=0.1, test=tested, validation=tested),
    "limited": lambda data: limited(subset(data, [5, 3, 59], test=tested, validation=tested), count=7),
}


@pytest.mark.parametrize("name", ALL)
def test_forget_and_remain_are_parts_of_train_and_share_nothing(name):
    scenario = ALL[name](whole)
    forget, remain = scenario
    assert forget is scenario.forget and remain is scenario.remain
    assert forget.dataset is scenario.train is scenario.retrain.dataset
    assert sorted([*forget.indices, *scenario.retrain.indices]) == list(range(len(scenario.train)))
    check_disjoint(forget, remain)
    check_disjoint(forget, scenario.retrain)
    assert scenario.tests.keys() == scenario.validation.keys() >= {"remain", "forget"}
    assert scenario.watch.keys() == scenario.tests.keys() | {f"validation {part}" for part in scenario.tests}
    assert scenario.reference.startswith("A network trained") and scenario.name.startswith("without ")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("build", [lambda: Subset(whole, range(60)), Plain], ids=["subset", "plain"])
def test_any_dataset_gives_the_same_samples_one_by_one_and_in_batches(name, build):
    expected, scenario = ALL[name](whole), ALL[name](build())
    for part in ("train", "forget", "remain", "retrain"):
        here, there = getattr(scenario, part), getattr(expected, part)
        inputs, targets = together(there)
        assert torch.equal(labels_of(here), targets) and torch.equal(labels_of(there), targets)
        assert all(torch.equal(inputs[row], here[row][0]) and targets[row] == here[row][1] for row in range(len(here)))
        for other in (together(here), together(DataLoader(here, batch_size=7)), together(there, batch_size=100)):
            assert torch.equal(inputs, other[0]) and torch.equal(targets, other[1]) and other[1].dtype == torch.int64
        shuffled = [torch.cat(column) for column in zip(*as_batches(there, batch_size=7).shuffled(1), strict=True)]
        order = torch.randperm(len(there), generator=torch.Generator().manual_seed(1))
        assert torch.equal(shuffled[0], inputs[order]) and torch.equal(shuffled[1], targets[order])


@pytest.mark.parametrize("name", ALL)
def test_no_image_is_read_or_copied_to_build_a_scenario(name):
    data = Plain()
    data.targets = labels
    ALL[name](data)
    assert len(data.read) <= 1


@pytest.mark.parametrize("name", ["poisoned, added", "mislabelled"])
def test_batches_are_read_without_a_loop_over_samples(name, monkeypatch):
    scenario = ALL[name](whole)
    monkeypatch.setattr(Altered, "__getitem__", None)
    for part in (scenario.train, scenario.forget, scenario.remain, *scenario.tests.values()):
        together(part)


@pytest.mark.parametrize("name", ["poisoned, added", "mislabelled", "fraction", "limited"])
def test_the_seed_decides_and_nothing_else_is_drawn(name):
    build = {
        "poisoned, added": lambda seed: poisoned(whole, 9, 2, seed=seed),
        "mislabelled": lambda seed: mislabelled(whole, 0.25, seed=seed),
        "fraction": lambda seed: subset(whole, fraction=0.2, seed=seed),
        "limited": lambda seed: limited(category(whole, 0), count=9, seed=seed),
    }[name]
    state = torch.get_rng_state()
    first, again, other = (together(build(seed).remain if name == "limited" else build(seed).forget)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_view_can_be_sent_to_a_worker():
    view = poisoned(whole, 9, 2).forget
    expected = together(view)  # which makes the view's reader
    assert torch.equal(together(pickle.loads(pickle.dumps(view)))[0], expected[0])


# --- category -----------------------------------------------------------------------------------------------------------------------------


def test_categories():
    scenario = category(whole, [1, 3, 1], tested)
    assert torch.equal(together(scenario.forget)[0], images[(labels == 1) | (labels == 3)])
    assert torch.equal(together(scenario.tests["forget"])[1], labels[:20][(labels[:20] == 1) | (labels[:20] == 3)])
    assert not set(together(scenario.tests["remain"])[1].tolist()) & {1, 3}
    assert scenario.validation == {} and scenario.watch.keys() == {"remain", "forget"} and "classes 1, 3" in scenario.name
    assert category(whole, 1).watch == {}


@pytest.mark.parametrize("several", [torch.tensor([1, 3]), numpy.array([1, 3]), [torch.tensor(1), numpy.int64(3)], iter((1, 3, 1))])
def test_labels_may_come_from_tensors_and_arrays(several):
    found = category(whole, several)
    assert found.forget.indices == category(whole, [1, 3]).forget.indices and found.name == "without classes 1, 3"


@pytest.mark.parametrize("one", [torch.tensor(1), numpy.int64(1), numpy.array(1), torch.tensor([1])])
def test_a_label_may_be_any_whole_number(one):
    found = category(whole, one)
    assert found.forget.indices == category(whole, 1).forget.indices and found.name == "without class 1"


# --- poisoned -----------------------------------------------------------------------------------------------------------------------------


def stamped(image, rows, columns, value):
    out = image.clone()
    for row in rows:
        for column in columns:
            out[:, row, column] = torch.as_tensor(value, dtype=out.dtype)
    return out


CORNERS = {
    "lower right": (range(4, 6), range(3, 5)),
    "lower left": (range(4, 6), range(0, 2)),
    "upper right": (range(0, 2), range(3, 5)),
    "upper left": (range(0, 2), range(0, 2)),
}


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("value", [0.0, (1.0, -2.0, 3.0)])
def test_the_trigger_is_a_square_in_a_corner(corner, value):
    before = images.clone()
    found = Trigger(2, corner, value)(images)
    assert all(torch.equal(one, stamped(image, *CORNERS[corner], value)) for one, image in zip(found, images, strict=True))
    assert torch.equal(Trigger(2, corner, value)(images[0]), found[0]) and torch.equal(images, before)


def test_a_margin_moves_the_trigger_inwards():
    assert torch.equal(Trigger(2, "lower right", 9.0, margin=1)(images[0]), stamped(images[0], range(3, 5), range(2, 4), 9))
    assert torch.equal(Trigger(2, "upper left", 9.0, margin=2)(images[0]), stamped(images[0], range(2, 4), range(2, 4), 9))


def test_bytes_stay_bytes():
    found = Trigger(1, value=7.0)(torch.zeros(1, 2, 2, dtype=torch.uint8))
    assert found.dtype == torch.uint8 and found.flatten().tolist() == [0, 0, 0, 7]


def test_values_and_labels_may_be_tensors():
    black, channels = torch.tensor(-1.5), torch.tensor([1.0, -2.0, 3.0])
    for given, plain in ((black, -1.5), (channels, (1.0, -2.0, 3.0)), (channels.numpy(), (1.0, -2.0, 3.0))):
        found = poisoned(whole, 9, 2, value=given, target=torch.tensor(3), sources=torch.tensor([0, 1]))
        expected = poisoned(whole, 9, 2, value=plain, target=3, sources=[0, 1])
        assert all(torch.equal(*pair) for pair in zip(together(found.forget), together(expected.forget), strict=True))


@pytest.mark.parametrize("how", ["add", "replace"])
def test_poisoned_samples_carry_the_trigger_and_the_target(how):
    scenario = poisoned(whole, 9, 2, target=3, how=how, test=tested, validation=tested)
    inputs, targets = together(scenario.forget)
    clean = Trigger(2)(images)
    sources = [int((clean == image).flatten(1).all(1).nonzero()[0]) for image in inputs]
    assert len(set(sources)) == 9 and (targets == 3).all() and (labels[sources] != 3).all()
    kept, kept_labels = together(scenario.remain)
    left = [row for row in range(60) if how == "add" or row not in sources]
    assert torch.equal(kept, images[left]) and torch.equal(kept_labels, labels[left]) and len(scenario.train) == len(left) + 9
    assert scenario.tests["remain"] is tested and scenario.tests["forget"] is scenario.forget
    attacked, attacked_labels = together(scenario.tests["attack"])
    assert torch.equal(attacked, Trigger(2)(tested.tensors[0][labels[:20] != 3])) and (attacked_labels == 3).all()


def test_sources_can_be_named():
    assert len(poisoned(whole, 30, 2, sources=[0, 1]).forget) == 30  # the target's own class among them
    with pytest.raises(InputError, match="n: .*between 1 and the 15 samples of the source classes; found 16"):
        poisoned(whole, 16, 2, sources=[2])


def test_defaults_are_the_papers():
    big = TensorDataset(torch.ones(400, 1, 6, 6), torch.arange(400) % 10)
    scenario = poisoned(big)
    assert len(scenario.forget) == 200 and len(scenario.train) == 600 and len(scenario.remain) == 400
    image, label = scenario.forget[0]
    assert label == 0 and image.sum() == 36 - 16 and image[0, 2:, 2:].sum() == 0


# --- subset and limited -------------------------------------------------------------------------------------------------------------------


def test_subset_by_indices_and_by_fraction():
    assert torch.equal(together(subset(whole, numpy.array([5, 3, 59])).forget)[0], images[[5, 3, 59]])
    assert len(subset(whole, fraction=0.1).forget) == 6
    assert subset(whole, range(3), test=tested).tests["remain"] is tested


def test_one_sample_is_no_plural():
    assert subset(whole, [3]).name == "without 1 sample" and subset(whole, [3, 4]).name == "without 2 samples"
    assert poisoned(whole, 1, 2).name == "without 1 poisoned sample"
    assert limited(category(whole, 0), count=1).name == "without class 0, 1 remain sample"


def test_limited_remain_data():
    scenario = category(whole, 0, tested)
    few = limited(scenario, fraction=0.1)
    assert len(few.remain) == 6  # of the 60 training samples, as the paper's 50 of 50,000
    assert (few.forget, few.train, few.retrain, few.tests) == (scenario.forget, scenario.train, scenario.retrain, scenario.tests)
    assert "6 remain samples" in few.name and len(limited(scenario, count=45).remain) == 45
    none = limited(scenario, count=0)
    assert none.remain is None and "no remain samples" in none.name


def test_a_scenario_is_what_unlearn_takes():
    data = cases.dataset()
    scenario = category(data, 0, data, data)
    record = unlearn(cases.model(), *scenario, FisherMask(0.1, tuning=cases.QUICK), watch=scenario.watch).history[-1]
    assert record.accuracies.keys() == {"remain", "forget", "validation remain", "validation forget"}
    assert record.unlearn_score is not None
    assert unlearn(cases.model(), *limited(scenario, count=0), FisherMask(0.1, tuning=None), watch={}).edit is not None
    attack = poisoned(data, 4, 2, test=data)
    assert "attack" in unlearn(cases.model(), *attack, FisherMask(0.1, tuning=cases.QUICK), watch=attack.watch).history[-1].accuracies


# --- shared samples -----------------------------------------------------------------------------------------------------------------------


def test_shared_samples_are_seen_through_concatenations():
    other = TensorDataset(images, labels)
    laid = ConcatDataset([other, whole])
    with pytest.raises(InputError, match="1 shared, the first at index 3"):
        check_disjoint(Subset(laid, [63, 70]), Subset(whole, [3, 4]))
    with pytest.raises(InputError, match="60 shared, the first at index 0"):
        check_disjoint(DataLoader(laid), whole)
    with pytest.raises(InputError, match="1 shared, the first at index 3"):  # the other dataset is of the same tensors
        check_disjoint(Subset(laid, [3, 70]), Subset(whole, [3, 4]))
    check_disjoint(Subset(laid, [5, 70]), Subset(whole, [3, 4]))


def test_a_sample_with_another_label_is_another_sample():
    scenario = mislabelled(whole, 0.25)
    check_disjoint(scenario.forget, whole)
    with pytest.raises(InputError, match="15 shared"):
        check_disjoint(scenario.forget, scenario.train)


# --- mistakes -----------------------------------------------------------------------------------------------------------------------------

one_class = TensorDataset(images, torch.zeros(60, dtype=torch.int64))
in_bytes = TensorDataset(torch.zeros(60, 3, 6, 5, dtype=torch.uint8), labels)
BAD = {
    "absent label": (lambda: category(whole, 7), "label: must occur in the dataset; found 7"),
    "absent labels": (lambda: category(whole, [1, 7, -1]), "label: must occur in the dataset; found 7, -1"),
    "absent in the test": (
        lambda: category(whole, 1, test=Subset(whole, [0, 2])),
        "label: must occur in the test data; found 1",
    ),
    "absent in the validation": (lambda: category(whole, 1, whole, Subset(whole, [0])), "label: must occur in the validation data"),
    "all labels": (lambda: category(whole, range(4)), "label: must leave other classes to keep; found 0, 1, 2, 3"),
    "no label": (lambda: category(whole, []), "label: must be one label or several; found none"),
    "a word": (lambda: category(whole, "1"), "label: must be whole numbers; found '1'"),
    "words": (lambda: category(whole, ["1", "2"]), "label: must be whole numbers"),
    "a truth value": (lambda: category(whole, True), "label: must be whole numbers; found True"),
    "a truth value in a tensor": (lambda: category(whole, torch.tensor(True)), "label: must be whole numbers"),
    "truth values in tensors": (lambda: category(whole, [torch.tensor(True)]), "label: must be whole numbers"),
    "half a label": (lambda: category(whole, torch.tensor([1.5])), "label: must be whole numbers"),
    "nothing": (lambda: category(whole, None), "label: must be whole numbers; found None"),
    "half a target": (lambda: poisoned(whole, 1, 1, target=0.5), "target: must be whole numbers"),
    "one source": (lambda: poisoned(whole, 1, 1, sources=1), "sources: must be labels, one or several in a sequence; found 1"),
    "a word as source": (lambda: poisoned(whole, 1, 1, sources="1"), "sources: must be whole numbers; found '1'"),
    "half a pixel": (lambda: poisoned(whole, 1, 2.5), "trigger: .*a whole number; found 2.5"),
    "half a pixel aside": (lambda: poisoned(whole, 1, 2, margin=0.5), "margin: .*a whole number; found 0.5"),
    "a word as value": (lambda: poisoned(whole, 1, 1, value="000"), "value: must be one finite number"),
    "no value": (lambda: poisoned(whole, 1, 1, value=None), "value: must be one finite number"),
    "a value that is no number": (lambda: poisoned(whole, 1, 1, value=float("nan")), "value: must be one finite number.*; found nan"),
    "a picture as value": (lambda: poisoned(whole, 1, 1, value=images[0]), "value: must be one finite number"),
    "below bytes": (lambda: poisoned(in_bytes, 1, 1, value=-1.0), "value: must be what images of torch.uint8 can hold; found -1.0"),
    "above bytes": (lambda: poisoned(in_bytes, 1, 1, value=(0, 256, 0)), "value: must be what images of torch.uint8 can hold"),
    "between bytes": (lambda: poisoned(in_bytes, 1, 1, value=0.5), "value: must be what images of torch.uint8 can hold"),
    "too many poisoned": (lambda: poisoned(whole, 46, 2), "n: must be a whole number between 1 and the 45 samples"),
    "none poisoned": (lambda: poisoned(whole, 0, 2), "n: must be a whole number"),
    "half a sample": (lambda: poisoned(whole, 2.5, 2), "n: must be a whole number"),
    "no such sources": (lambda: poisoned(whole, 1, 2, sources=[9]), "n: .*the 0 samples"),
    "no such target": (lambda: poisoned(whole, 1, 2, target=9), "target: must occur in the dataset; found 9"),
    "a large trigger": (lambda: poisoned(whole, 1, 6), "trigger: must fit into the images, 6 × 5; found 6 with a margin of 0"),
    "a large margin": (lambda: poisoned(whole, 1, 2, margin=4), "trigger: must fit"),
    "no trigger": (lambda: poisoned(whole, 1, 0), "trigger: must be at least one pixel wide, a whole number; found 0"),
    "a negative margin": (lambda: poisoned(whole, 1, 1, margin=-1), "margin: must be 0 or more pixels"),
    "a strange corner": (lambda: poisoned(whole, 1, 1, corner="middle"), "corner: must be one of lower right, .*; found middle"),
    "a strange how": (lambda: poisoned(whole, 1, 1, how="mix"), "how: must be 'add' or 'replace'; found mix"),
    "two channels": (lambda: poisoned(whole, 1, 1, value=[0, 1]), "value: must be one number, or one for each of the 3 channels"),
    "flat images": (
        lambda: poisoned(TensorDataset(images.flatten(1), labels), 1, 1),
        r"dataset: images must be tensors \(channels, height, width\); found shape \(90,\)",
    ),
    "arrays": (lambda: poisoned([(numpy.zeros((1, 4, 4)), n % 2) for n in range(6)], 1, 1), "dataset: images must be .*found ndarray"),
    "a test of the target alone": (
        lambda: poisoned(whole, 1, 1, test=Subset(whole, [0, 4])),
        "target: test and validation data must hold other classes too; found 0",
    ),
    "all replaced": (lambda: poisoned(whole, 60, 1, how="replace", sources=range(4)), "dataset: something must be left to keep"),
    "all mislabelled": (lambda: mislabelled(whole, 1.0), r"fraction: must be in \(0, 1\); found 1.0"),
    "none mislabelled": (lambda: mislabelled(whole, 0), r"fraction: must be in \(0, 1\); found 0"),
    "hardly any": (lambda: mislabelled(whole, 0.001), "fraction: must choose some and not all of 60 samples; found 0.001"),
    "not a fraction": (lambda: subset(whole, fraction=float("nan")), r"fraction: must be in \(0, 1\); found nan"),
    "one class": (lambda: mislabelled(one_class, 0.5), r"dataset: must hold at least two classes; found \[0\]"),
    "indices twice": (lambda: subset(whole, [3, 5, 3]), "indices: must not name a sample twice; found 3"),
    "indices outside": (lambda: subset(whole, [3, 60]), r"indices: must be in \[0, 60\); found 60"),
    "negative indices": (lambda: subset(whole, [3, -1]), r"indices: must be in \[0, 60\); found -1"),
    "no indices": (lambda: subset(whole, []), "indices: must be row numbers, one or more; found none"),
    "all indices": (lambda: subset(whole, range(60)), "dataset: something must be left to keep; found all 60"),
    "a short mask": (lambda: subset(whole, [True, False]), "indices: must be whole numbers, or a boolean mask of 60 entries.*mask of 2$"),
    "an empty mask": (lambda: subset(whole, labels > 9), "indices: must be row numbers, one or more; found none"),
    "a mask of numbers": (lambda: subset(whole, (labels == 0).int()), "indices: .*make the mask boolean; found 0 or 1 for each of the 60"),
    "a mask and rows": (lambda: subset(whole, [True, 3]), "indices: must be whole numbers, or a boolean mask; found both in one list"),
    "a truth value as count": (lambda: limited(category(whole, 0), count=True), "count: .*found True"),
    "a truth value as n": (lambda: poisoned(whole, True, 2), "n: must be a whole number"),
    "real labels one by one": (lambda: category([(images[n], 0.5 * n) for n in range(4)], 0), "dataset: must hold one whole number as lab"),
    "half indices": (lambda: subset(whole, [0.5]), "indices: must be whole numbers"),
    "neither": (lambda: subset(whole), "indices: give either indices or a fraction; found neither"),
    "both": (lambda: subset(whole, [1], fraction=0.5), "indices: give either indices or a fraction; found both"),
    "neither count nor fraction": (lambda: limited(category(whole, 0)), "count: give either a count or a fraction; found neither"),
    "count and fraction": (lambda: limited(category(whole, 0), count=1, fraction=0.1), "found both"),
    "a large count": (lambda: limited(category(whole, 0), count=46), "count: .*between 0 and the 45 remain samples; found 46"),
    "a negative count": (lambda: limited(category(whole, 0), count=-1), "count: .*found -1"),
    "limited twice": (lambda: limited(limited(category(whole, 0), count=0), count=0), "scenario: must have remain data"),
    "empty": (lambda: category(TensorDataset(images[:0], labels[:0]), 0), "dataset: must not be empty"),
    "a stream": (lambda: category(iter([]), 0), "dataset: must have a length and items"),
    "real labels": (lambda: category(TensorDataset(images, labels.float()), 0), "dataset: must hold one whole number as label"),
    "maps as labels": (lambda: category(TensorDataset(images, images.long()), 0), "dataset: must hold one whole number as label"),
    "mappings": (lambda: mislabelled([{"x": 1, "y": 0}] * 3, 0.5), r"dataset: samples must be \(image, label\); found dict"),
    "labels that do not fit": (lambda: Altered(whole, labels[:3]), "targets: must be one label for each of the 60 samples; found 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_named(name):
    build, message = BAD[name]
    with pytest.raises(InputError, match=message):
        build()


# --- labels -------------------------------------------------------------------------------------------------------------------------------


def test_labels_are_those_a_sample_has():
    class Shifted(TensorDataset):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image, label + 1

    class Transformed(Plain):
        targets = labels

        def target_transform(self, label):
            return label + 1

        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image, self.target_transform(label)

    assert torch.equal(labels_of(Shifted(images, labels)), labels + 1)
    assert torch.equal(labels_of(Subset(Transformed(), [3, 1])), (labels + 1)[[3, 1]])
    assert torch.equal(labels_of(ConcatDataset([whole, Plain()])), torch.cat([labels, labels]))


def test_the_digits_can_be_poisoned():
    data = digits()
    scenario = poisoned(data.train, 100, 2, value=2.0, test=data.test)
    assert isinstance(scenario, Scenario) and len(scenario.train) == 1178
    assert len(scenario.tests["attack"]) == int((data.test.tensors[1] != 0).sum())
