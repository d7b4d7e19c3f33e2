"""Inputs and labels as whole tensors or arrays are data everywhere."""

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from expunge import fisher, metrics
from expunge.data.columns import as_dataset
from expunge.errors import InputError
from expunge.methods import FisherMask
from expunge.metrics import Relearning
from expunge.unlearning import unlearn
from expunge.vision.scenarios import category
from tests.methods import cases, properties

IMAGES, LABELS = cases.dataset().tensors
FEW, MANY = slice(0, 48, 3), [row for row in range(48) if row % 3]
METHOD = FisherMask(0.1, tuning=cases.QUICK)


@pytest.mark.parametrize("change", [lambda tensor: tensor, lambda tensor: tensor.numpy(), lambda tensor: tensor.numpy()[::-1][::-1]])
def test_a_tuple_of_columns_is_a_dataset(change):
    x, y = change(IMAGES), change(LABELS)
    expected = unlearn(cases.model(), cases.forget(), cases.remain(), METHOD)
    outcome = unlearn(cases.model(), (x[FEW], y[FEW]), (x[MANY], y[MANY]), METHOD)
    properties.assert_same_weights(expected.model.state_dict(), outcome.model.state_dict())
    assert metrics.accuracy(cases.model(), (x, y)) == metrics.accuracy(cases.model(), cases.dataset())
    assert fisher.diagonal(cases.model(), (x, y)).count == 48
    assert metrics.relearn_time(cases.model(), cases.model(), (x, y), (x, y), Relearning(cases.QUICK, draws=8)).epochs == 0


def test_nothing_is_copied_of_arrays_that_can_be_shared():
    array = numpy.zeros((4, 2), dtype=numpy.float32)
    array_set = as_dataset((array, numpy.arange(4)), "data")
    array[0, 0] = 5
    assert array_set.tensors[0][0, 0] == 5
    fixed = numpy.broadcast_to(numpy.float32(1), (4, 2))  # may not be written to
    assert as_dataset((fixed, fixed), "data").tensors[0].sum() == 8


@pytest.mark.parametrize(
    "data",
    [
        [IMAGES, LABELS],  # a list is one of batches
        ((IMAGES, LABELS), (IMAGES, LABELS)),
        (IMAGES,),
        (IMAGES, torch.tensor(3)),
        cases.dataset(),
    ],
)
def test_other_data_stay_as_they_are(data):
    assert as_dataset(data, "data") is data


def test_columns_of_several_lengths_are_refused_with_these():
    rule = r"the entries of a tuple \(inputs, labels\) must have one length, that of all samples; give batches as a list; found"
    for data, lengths in {
        (IMAGES, LABELS[:5]): f"{len(IMAGES)}, 5",
        (IMAGES, LABELS, LABELS[:0]): f"{len(IMAGES)}, {len(LABELS)}, 0",
    }.items():
        with pytest.raises(InputError, match=f"^forget: {rule} lengths of {lengths}$"):
            unlearn(cases.model(), data, cases.remain())
    with pytest.raises(InputError, match=f"^batches: {rule}"):
        fisher.diagonal(cases.model(), (IMAGES.numpy(), LABELS[:5].numpy()))


def test_what_is_no_dataset_is_named_with_what_to_do():
    message = r"^forget: a batch must be \(inputs, targets\) or a mapping .*; give all samples at once as a tuple \(inputs, labels\)"
    for data in ([IMAGES, LABELS], IMAGES, IMAGES.numpy(), (IMAGES, torch.tensor(3))):
        with pytest.raises(InputError, match=message):
            unlearn(cases.model(), data, cases.remain())
    for rows in ([5, 17], torch.tensor([5, 17]), numpy.array([5, 17]), torch.ones(8, dtype=torch.bool), range(3)):
        with pytest.raises(InputError, match=r"^forget: a batch must be .*; for rows of a dataset give .*Subset\(dataset, rows\)"):
            unlearn(cases.model(), rows, cases.remain())
    with pytest.raises(InputError, match=r"^forget: a batch must be .*; give one dataset for each .* unlearn\(model, \*scenario\)"):
        unlearn(cases.model(), category(cases.dataset(), 0))
    with pytest.raises(InputError, match="^forget: arrays must hold numbers that torch has; found an array of <U1"):
        unlearn(cases.model(), (IMAGES[:3].numpy(), numpy.array(["a", "b", "c"])), cases.remain())
    with pytest.raises(InputError, match=r"^forget: inputs and targets must be tensors; found a list of str \(encode text first\)"):
        unlearn(cases.model(), [(["a", "b"], LABELS[:2])], cases.remain())
    with pytest.raises(InputError, match="^remain: must be a dataset, .*; found FisherMask"):
        unlearn(cases.model(), cases.forget(), METHOD)


def test_the_same_columns_are_no_remain_data():
    columns = (IMAGES, LABELS)
    with pytest.raises(InputError, match="^remain: must not be the forget set; found the same object"):
        unlearn(cases.model(), columns, columns)


def test_a_dataset_of_columns_is_a_tensor_dataset():
    assert isinstance(as_dataset((IMAGES, LABELS), "data"), TensorDataset)
