"""The digits inside the package are scikit-learn's, and their parts share no image."""

import subprocess
import sys

import pytest
import torch
from torch.utils.data import Dataset, Subset

from expunge.errors import InputError
from expunge.vision.datasets.digits import digits, raw
from expunge.vision.scenarios import category, labels_of


def test_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    source = datasets.load_digits()
    images, labels = raw()
    assert (images.numpy() == source.images).all() and (labels.numpy() == source.target).all()


def test_parts_are_disjoint_complete_and_stratified():
    parts = digits(seed=3)
    assert [len(part) for part in parts] == [1078, 269, 450]
    together = torch.cat([part.tensors[0].flatten(1) for part in parts])
    images, labels = raw()
    assert len(torch.unique(together, dim=0)) == len(torch.unique(images.flatten(1), dim=0))
    for part in parts:
        shares = torch.bincount(part.tensors[1], minlength=10) / len(part)
        assert (shares - torch.bincount(labels, minlength=10) / len(labels)).abs().max() < 0.01


def test_images_are_normalised_by_the_train_part():
    images, labels = digits().train.tensors
    assert images.shape[1:] == (1, 8, 8) and images.dtype == torch.float32 and labels.dtype == torch.int64
    assert abs(float(images.mean())) < 1e-5 and abs(float(images.std()) - 1) < 1e-5


def test_the_seed_decides_the_split():
    assert torch.equal(digits(1).train.tensors[0], digits(1).train.tensors[0])
    assert not torch.equal(digits(1).train.tensors[1], digits(2).train.tensors[1]) or not torch.equal(
        digits(1).train.tensors[0], digits(2).train.tensors[0]
    )


def test_the_digits_need_no_scikit_learn():
    program = (
        "import sys; sys.modules['sklearn'] = None; from expunge.vision.datasets.digits import digits; assert len(digits().train) == 1078"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


class Pairs(Dataset):
    """Any indexable dataset with labels."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(2), index % 3


@pytest.mark.parametrize(
    "dataset", [digits().train, Subset(digits().train, range(0, 1000, 2)), Pairs()], ids=["tensors", "subset", "pairs"]
)
def test_category_splits_without_a_copy(dataset):
    scenario = category(dataset, 1)
    assert scenario.forget.dataset is scenario.remain.dataset is dataset
    assert sorted([*scenario.forget.indices, *scenario.remain.indices]) == list(range(len(dataset)))
    assert (labels_of(scenario.forget) == 1).all() and (labels_of(scenario.remain) != 1).all()


def test_an_absent_label_is_named():
    with pytest.raises(InputError, match="label: must occur in the dataset; found 11"):
        category(digits().train, 11)
    with pytest.raises(InputError, match="label: must leave other classes"):
        category(Subset(Pairs(), [0, 3]), 0)
