"""Readers on small files in the published formats, whole and broken; images in batches, splits and statistics."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import pickle
import zipfile
from functools import partial

import numpy
import pytest
import torch
from torch.utils.data import Subset

import expunge
from expunge.data.batches import as_batches
from expunge.errors import InputError
from expunge.vision import datasets
from expunge.vision.datasets import cifar, idx, load, pickles, split, tiny_imagenet
from expunge.vision.datasets.digits import digits
from expunge.vision.datasets.images import Images
from expunge.vision.scenarios import category, labels_of
from tests.vision.datasets import files

# --- CIFAR


@pytest.mark.parametrize("dump", [files.old_pickle, files.new_pickle], ids=["python 2", "python 3"])
def test_cifar10_is_read_as_written(tmp_path, dump):
    held = files.cifar10(tmp_path, dump=dump)
    data = load("cifar10", tmp_path, verify=False)
    assert (data.classes, data.channels, data.size, len(data.train), len(data.test)) == (10, 3, (32, 32), 100, 20)
    assert data.names == tuple(f"name{label}" for label in range(10))
    expected = numpy.concatenate([held[name] for name in cifar.CIFAR10.train]).reshape(-1, 3, 32, 32)
    assert (data.train.pixels.numpy() == expected).all()
    assert torch.equal(data.test.pixels[:, 0, 0, 0].long(), data.test.labels) and data.test.labels.dtype == torch.int64


def test_cifar100_has_the_fine_labels_and_column_major_arrays_are_heeded(tmp_path):
    files.cifar100(tmp_path)
    data = load("cifar100", tmp_path, verify=False)
    assert data.classes == 100 and data.names[7] == "fine7" and len(data.train) == 200
    assert torch.equal(data.train.pixels[:, 0, 0, 0].long(), data.train.labels)
    assert len(torch.unique(data.train.pixels[:, 0, 0, 1])) == 1


def test_the_folder_comes_from_the_argument_then_the_environment_then_data(tmp_path, monkeypatch):
    files.cifar10(tmp_path / "one")
    files.cifar10(tmp_path / "two", rows=10)
    monkeypatch.setenv("EXPUNGE_DATA", str(tmp_path / "two"))
    assert len(load("cifar10", verify=False).test) == 10
    assert len(load("cifar10", tmp_path / "one", verify=False).test) == 20
    monkeypatch.delenv("EXPUNGE_DATA")
    assert str(datasets.data_folder()) == "data"


def test_a_missing_file_is_named_with_the_command_that_gets_it(tmp_path):
    files.cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py/data_batch_3").unlink()
    with pytest.raises(InputError, match=rf"cifar-10-batches-py/data_batch_3 must be there.*`expunge data get cifar10 --data {tmp_path}`"):
        load("cifar10", tmp_path, verify=False)


def test_files_other_than_the_published_are_refused(tmp_path):
    files.cifar10(tmp_path)
    with pytest.raises(
        InputError, match="data_batch_1: must be the published file, MD5 c99caf.*verify=False.*expunge data get cifar10.*found"
    ):
        load("cifar10", tmp_path)


def test_the_published_checksum_or_the_same_content_in_another_pickle_will_do(tmp_path):
    files.cifar10(tmp_path / "old")
    held = files.cifar10(tmp_path / "new", dump=files.new_pickle)
    folder = tmp_path / "old/cifar-10-batches-py"
    md5 = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in held}
    content = {name: cifar.content_digest(data, torch.arange(20) % 10) for name, data in held.items()}
    which = dataclasses.replace(cifar.CIFAR10, published=md5, content={})
    assert len(cifar.read(tmp_path / "old", which).train) == 100
    with pytest.raises(InputError, match="must be the published file"):
        cifar.read(tmp_path / "new", which)
    which = dataclasses.replace(which, content=content)
    assert len(cifar.read(tmp_path / "new", which).train) == 100
    labels = [(row + (row == 3)) % 10 for row in range(20)]
    changed = files.new_pickle({b"data": held["test_batch"], b"labels": labels})
    (tmp_path / "new/cifar-10-batches-py/test_batch").write_bytes(changed)
    with pytest.raises(InputError, match="test_batch: must be the published file"):
        cifar.read(tmp_path / "new", which)


class Command:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        import os

        return os.system, (f"touch {self.target}",)


IMAGES = numpy.zeros((2, 3072), numpy.uint8)
BROKEN = {
    "truncated": (lambda good: good[:-100], "whole pickle"),
    "empty": (lambda good: b"", "whole pickle"),
    "not a dict": (lambda good: files.old_pickle([1]), "a dict was expected"),
    "label too large": (lambda good: files.old_pickle({b"data": IMAGES, b"labels": [0, 10]}), r"labels must be in \[0, 10\); .*found 10$"),
    "label below zero": (lambda good: files.old_pickle({b"data": IMAGES, b"labels": [0, -1]}), r"labels must be in \[0, 10\); .*found -1$"),
    "too few labels": (lambda good: files.old_pickle({b"data": IMAGES, b"labels": [0]}), "labels must be a list of 2 whole numbers"),
    "labels of text": (lambda good: files.old_pickle({b"data": IMAGES, b"labels": [b"a", b"b"]}), "labels must be a list of 2"),
    "no labels": (lambda good: files.old_pickle({b"data": IMAGES}), "labels must be a list of 2"),
    "narrow": (
        lambda good: files.old_pickle({b"data": IMAGES[:, 1:].copy(), b"labels": [0, 1]}),
        r"rows of 3072 bytes; .*found \(2, 3071\)",
    ),
    "no images": (lambda good: files.old_pickle({b"data": IMAGES[:0], b"labels": []}), "rows of 3072 bytes"),
    "floats": (lambda good: files.new_pickle({b"data": IMAGES.astype(float), b"labels": [0, 1]}), "arrays must hold bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_cifar_file_is_an_error_that_says_so(tmp_path, name):
    files.cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py/data_batch_2"
    change, message = BROKEN[name]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=f"data_batch_2: .*{message}") as caught:
        load("cifar10", tmp_path, verify=False)
    assert "expunge data get cifar10" in str(caught.value)


def test_a_pickle_that_would_run_a_command_does_not(tmp_path):
    files.cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py/data_batch_1").write_bytes(pickle.dumps({b"data": Command(tmp_path / "ran")}, protocol=2))
    with pytest.raises(InputError, match=r"posix.system has no place in a dataset"):
        load("cifar10", tmp_path, verify=False)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Command(tmp_path / "ran")))  # the test can fail: the plain reader runs it
    assert (tmp_path / "ran").exists()


FORBIDDEN = {
    "eval": b"cbuiltins\neval\n(U\x041+1\ntR.",
    "getattr": b"cbuiltins\ngetattr\n.",
    "numpy's file reader": b"cnumpy\nload\n.",
    "attribute of an allowed name": b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
    "another codec": b"c_codecs\nencode\n(X\x01\x00\x00\x00aU\x05rot13tR.",
    "object arrays": b"cnumpy\ndtype\n(U\x02O8I0\nI1\ntR.",
    "an array's class called": b"cnumpy\nndarray\n(tR.",
    "the state of a class": b"cnumpy\nndarray\n}U\x01aI1\nsb.",
    "extension": b"\x82\x01.",
    "persistent": b"P1\n.",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_only_arrays_of_bytes_numbers_and_text_come_out_of_a_pickle(name):
    with pytest.raises(pickle.UnpicklingError):
        pickles.read(FORBIDDEN[name])


def test_what_a_pickle_may_name_cannot_be_changed_by_it():
    before = {key: dict(vars(value)) for key, value in pickles.ALLOWED.items()}
    for module, name in pickles.ALLOWED:
        for state in (b"}U\x08__init__I1\ns", b"(N}U\x08__init__I1\nst"):
            with pytest.raises(pickle.UnpicklingError):
                pickles.read(f"c{module}\n{name}\n".encode() + state + b"b.")
    assert before == {key: dict(vars(value)) for key, value in pickles.ALLOWED.items()}


def test_the_names_of_the_classes_are_checked(tmp_path):
    files.cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py/batches.meta").write_bytes(files.old_pickle({b"label_names": [b"one"]}))
    with pytest.raises(InputError, match="batches.meta: label_names must be 10 names"):
        load("cifar10", tmp_path, verify=False)


# --- MNIST and Fashion-MNIST


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize(("name", "folder", "first"), [("mnist", "MNIST/raw", "0"), ("fashion-mnist", "FashionMNIST/raw", "T-shirt/top")])
def test_idx_files_are_read_as_written(tmp_path, name, folder, first, packed):
    files.mnist(tmp_path / folder, packed)
    data = load(name, tmp_path, verify=False)
    assert (data.classes, data.channels, data.size, len(data.train), len(data.test)) == (10, 1, (28, 28), 30, 10)
    assert data.names[0] == first
    assert torch.equal(data.train.pixels[:, 0, 0, 0].long(), data.train.labels)
    with pytest.raises(InputError, match=f"train-images-idx3-ubyte.*must be the published file.*expunge data get {name}"):
        load(name, tmp_path)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
def test_the_checksum_is_of_the_unpacked_file(tmp_path, packed):
    files.mnist(tmp_path / "plain/MNIST/raw")
    files.mnist(tmp_path / "here/MNIST/raw", packed)
    published = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in (tmp_path / "plain/MNIST/raw").iterdir()}
    assert len(idx.read(tmp_path / "here", dataclasses.replace(idx.MNIST, published=published)).train) == 30


BROKEN_IDX = {
    "truncated": ("images-idx3", lambda good: good[:-1], "must hold 30 × 28 × 28 bytes, as it says"),
    "too long": ("images-idx3", lambda good: good + b"0", "must hold 30 × 28 × 28 bytes, as it says"),
    "no header": ("images-idx3", lambda good: good[:7], "must begin as an idx file of bytes in 3 dimensions"),
    "labels as images": ("images-idx3", lambda good: files.idx(numpy.zeros(30)), "bytes in 3 dimensions"),
    "no images": ("images-idx3", lambda good: files.idx(numpy.zeros((0, 28, 28))), "and not none"),
    "wrong label": ("labels-idx1", lambda good: good[:-1] + b"\x0a", r"labels must be in \[0, 10\)"),
    "a label missing": ("labels-idx1", lambda good: files.idx(numpy.zeros(29)), "a label for each of the 30 images"),
}


@pytest.mark.parametrize("name", BROKEN_IDX)
def test_a_broken_idx_file_is_an_error_that_says_so(tmp_path, name):
    files.mnist(tmp_path / "MNIST/raw")
    kind, change, message = BROKEN_IDX[name]
    path = tmp_path / f"MNIST/raw/train-{kind}-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=message):
        load("mnist", tmp_path, verify=False)


def test_a_cut_gzip_and_a_missing_file_are_errors(tmp_path):
    files.mnist(tmp_path / "MNIST/raw", packed=True)
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="train-images-idx3-ubyte.gz: must be a whole gzip file"):
        load("mnist", tmp_path, verify=False)
    path.write_bytes(gzip.compress(b"something else"))
    with pytest.raises(InputError, match="must begin as an idx file"):
        load("mnist", tmp_path, verify=False)
    path.unlink()
    with pytest.raises(InputError, match="MNIST/raw/train-images-idx3-ubyte must be there.*expunge data get mnist"):
        load("mnist", tmp_path, verify=False)


# --- Tiny-ImageNet and folders


def as_folder(root, held):
    for name, content in held.items():
        path = root / "tiny-imagenet-200" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def as_zip(root, held):
    with zipfile.ZipFile(root / "tiny-imagenet-200.zip", "w") as archive:
        for name, content in held.items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)


FORMS = {"folder": as_folder, "zip": as_zip}
SMALL = tiny_imagenet.TinyImageNet(train=4, validation=2)
read_tiny = partial(tiny_imagenet.read, which=SMALL)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [None, 32])
def test_tiny_imagenet_is_read_from_its_folder_and_its_zip(tmp_path, form, size):
    FORMS[form](tmp_path, files.tiny_imagenet())
    data = load("tiny-imagenet", tmp_path, verify=False, size=size)
    assert (data.classes, data.channels, data.size, len(data.train), len(data.test)) == (3, 3, (size or 64,) * 2, 12, 6)
    assert data.names == ("goldfish, fish", "bear", "n03")
    for part in (data.train, data.test):
        middle = part.pixels[:, :, 16, 16].float()
        expected = torch.tensor([[10, 200, 10], [77, 77, 77], [200, 10, 10]])[part.labels]
        assert (middle - expected).abs().max() <= 3  # JPEG rounds


@pytest.mark.parametrize("form", FORMS)
def test_what_macos_leaves_beside_tiny_imagenets_pictures_is_skipped(tmp_path, form):
    litter = {
        "train/n01/images/._n01_0.JPEG": b"x",
        "train/n01/images/.DS_Store": b"x",
        "val/images/._val_0.JPEG": b"x",
        "train/._n01": b"x",
    }
    FORMS[form](tmp_path, files.tiny_imagenet() | litter)
    assert len(load("tiny-imagenet", tmp_path, verify=False).train) == 12


def test_tiny_imagenet_is_held_against_what_is_published(tmp_path):
    as_folder(tmp_path, files.tiny_imagenet())
    assert len(read_tiny(tmp_path).train) == 12
    (tmp_path / "tiny-imagenet-200/train/n02/images/n02_1.JPEG").unlink()
    with pytest.raises(InputError, match="class n02 must have 4 pictures in train; .*found 3"):
        read_tiny(tmp_path)
    with pytest.raises(InputError, match="must have 500 pictures in train"):
        load("tiny-imagenet", tmp_path)


def test_the_zip_must_be_the_published_one(tmp_path):
    as_zip(tmp_path, files.tiny_imagenet())
    with pytest.raises(InputError, match="tiny-imagenet-200.zip: must be the published file, MD5 90528d"):
        load("tiny-imagenet", tmp_path)
    md5 = hashlib.md5((tmp_path / "tiny-imagenet-200.zip").read_bytes()).hexdigest()
    assert len(tiny_imagenet.read(tmp_path, dataclasses.replace(SMALL, published=md5)).test) == 6


BROKEN_TINY = {
    "no classes": ({"wnids.txt": None}, "wnids.txt must be there"),
    "no annotations": ({"val/val_annotations.txt": None}, "val/val_annotations.txt must be there"),
    "empty annotations": ({"val/val_annotations.txt": b""}, "must name pictures"),
    "unknown class": ({"val/val_annotations.txt": b"val_0.JPEG\tn77\t0\n"}, "every class must be in wnids.txt; .*found n77"),
    "no class": ({"val/val_annotations.txt": b"val_0.JPEG\n"}, "every class must be in wnids.txt"),
    "a picture missing": ({"val/images/val_3.JPEG": None}, "val/images/val_3.JPEG must be there"),
    "unknown folder": ({"train/n55/images/n55_0.JPEG": files.picture(1)}, "every folder of train must be in wnids.txt; .*found n55"),
    "a class without pictures": ({"wnids.txt": b"n01 n02 n03 n04"}, "class n04 must have at least 1 pictures in train"),
    "cut picture": ({"train/n01/images/n01_2.JPEG": files.picture(9)[:200]}, "n01_2.JPEG: must be a whole picture file"),
    "not a picture": ({"train/n01/images/n01_2.JPEG": b"text"}, "n01_2.JPEG: must be a whole picture file"),
    "another size": ({"train/n01/images/n01_2.JPEG": files.picture(9, 32)}, "n01_2.JPEG: pictures must be of one size"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BROKEN_TINY)
def test_a_broken_tiny_imagenet_is_an_error_that_says_so(tmp_path, name, form):
    changes, message = BROKEN_TINY[name]
    held = {path: content for path, content in (files.tiny_imagenet() | changes).items() if content is not None}
    FORMS[form](tmp_path, held)
    with pytest.raises(InputError, match=message):
        load("tiny-imagenet", tmp_path, verify=False)


def test_pictures_that_are_all_of_another_size_are_refused_unless_resized(tmp_path):
    as_folder(tmp_path, files.tiny_imagenet(size=48))
    with pytest.raises(InputError, match=r"pictures must be 64×64; .*found \(48, 48\)"):
        read_tiny(tmp_path)
    assert read_tiny(tmp_path, size=64).size == (64, 64)


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "tiny-imagenet-200/../../outside", "..\\outside", "C:outside"])
def test_a_zip_whose_paths_climb_out_is_refused(tmp_path, name):
    as_zip(tmp_path, files.tiny_imagenet())
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "a") as archive:
        archive.writestr(name, b"x")
    with pytest.raises(InputError, match="that lie inside it"):
        load("tiny-imagenet", tmp_path, verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-imagenet-200.zip"]


def test_a_zip_with_a_huge_member_a_cut_zip_and_no_zip_are_errors(tmp_path, monkeypatch):
    as_zip(tmp_path, files.tiny_imagenet())
    monkeypatch.setattr(tiny_imagenet, "LARGEST", 100)
    with pytest.raises(InputError, match="files of at most 100 bytes"):
        load("tiny-imagenet", tmp_path, verify=False)
    path = tmp_path / "tiny-imagenet-200.zip"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(InputError, match="must be a whole zip file"):
        load("tiny-imagenet", tmp_path, verify=False)
    path.unlink()
    with pytest.raises(InputError, match="tiny-imagenet-200 must be there.*expunge data get tiny-imagenet"):
        load("tiny-imagenet", tmp_path)


def pictures(folder, classes=("a", "b"), count=5, form="PNG", size=12):
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.{form.lower()}").write_bytes(files.picture((number, 10 * label, 0), size, form))


def test_a_folder_with_parts_and_one_without(tmp_path):
    pictures(tmp_path / "parts/train")
    pictures(tmp_path / "parts/val", count=2)
    (tmp_path / "parts/train/a/notes.txt").write_text("no picture")
    for litter in ("._0.png", ".DS_Store", "Thumbs.db", ".hidden.jpg"):  # what macOS and others leave beside pictures
        (tmp_path / "parts/train/a" / litter).write_bytes(b"\0\5\x16\7")
        (tmp_path / "parts/train" / litter).write_bytes(b"\0\5\x16\7")
    data = load(str(tmp_path / "parts"))
    assert (data.names, len(data.train), len(data.test), data.size, data.channels) == (("a", "b"), 10, 4, (12, 12), 3)
    assert torch.equal(data.train.pixels[:, 1, 0, 0], (10 * data.train.labels).byte())
    pictures(tmp_path / "whole", count=10)
    data = load(str(tmp_path / "whole"), size=8)
    assert (len(data.train), len(data.test), data.size) == (16, 4, (8, 8)) and torch.bincount(data.test.labels).tolist() == [2, 2]
    assert len(torch.unique(torch.cat([data.train.pixels, data.test.pixels]), dim=0)) == 20


def test_what_is_wrong_with_a_folder_is_said(tmp_path):
    pictures(tmp_path / "sizes", classes=("a",))
    pictures(tmp_path / "sizes", classes=("b",), size=9)
    with pytest.raises(
        InputError,
        match="pictures must be of one size, the first being 12×12; give size= .`expunge train --size`. to resize them; found 9×9",
    ):
        load(str(tmp_path / "sizes"))
    pictures(tmp_path / "lonely/train")
    with pytest.raises(InputError, match="must have one called test or val"):
        load(str(tmp_path / "lonely"))
    pictures(tmp_path / "lonely/test", classes=("a", "c"))
    with pytest.raises(InputError, match="must be in train too; found c"):
        load(str(tmp_path / "lonely"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="must hold class folders"):
        load(str(tmp_path / "empty"))
    (tmp_path / "empty/class").mkdir()
    with pytest.raises(InputError, match="empty/class must hold pictures"):
        load(str(tmp_path / "empty"))


def test_names_and_sizes_are_checked():
    with pytest.raises(InputError, match="name: must be one of digits, cifar10, .* or a folder .*; found cifar11"):
        load("cifar11")
    with pytest.raises(InputError, match="size: is for pictures alone"):
        load("mnist", size=32)
    with pytest.raises(InputError, match="size: must be at least 1"):
        load("tiny-imagenet", size=0)


# --- what comes back


def random_images(count=60, channels=3, classes=4):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, channels, 8, 6), generator=generator, dtype=torch.uint8)
    return Images(pixels, torch.arange(count) % classes)


def test_batches_are_the_samples_and_normalised_by_the_formula():
    images = random_images()
    rows = torch.tensor([3, 59, 0, 3])
    inputs, labels = images.batch_of(rows)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (images.mean, images.std))
    expected = (images.pixels[rows].double() / 255 - mean) / std
    assert inputs.dtype == torch.float32 and (inputs - expected).abs().max() < 1e-6
    assert torch.equal(labels, images.labels[rows])
    assert all(torch.equal(images[int(row)][0], inputs[place]) for place, row in enumerate(rows))
    assert torch.equal(images.pixels, random_images().pixels)


def test_statistics_are_those_of_the_pixels():
    images = random_images()
    values = images.pixels.double() / 255
    assert torch.allclose(torch.tensor(images.mean).double(), values.mean((0, 2, 3)), atol=1e-7)
    assert torch.allclose(torch.tensor(images.std).double(), values.std((0, 2, 3), correction=0), atol=1e-7)
    assert Images(torch.full((2, 1, 3, 3), 7, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)).std == (1.0,)
    assert Images(images.pixels, images.labels, (0.5, 0.5, 0.5), (1, 1, 1)).mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64)), "pixels: must be uint8"),
        ((torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)), "pixels: must be uint8"),
        ((torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)), r"labels: must be int64 of shape \(2,\)"),
        ((torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2)), "labels: must be int64"),
        ((torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), (0, 0), (1, 1)), "must hold 1 numbers"),
        ((torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), (0,), (0,)), "the second positive"),
    ],
)
def test_images_are_checked(arguments, rule):
    with pytest.raises(InputError, match=rule):
        Images(*arguments)


def test_batches_subsets_and_scenarios_read_whole_batches(monkeypatch):
    images = random_images()
    monkeypatch.setattr(Images, "__getitem__", None)  # no sample is read alone
    forget, remain = category(images, 1)
    assert torch.equal(labels_of(images), images.labels) and (labels_of(forget) == 1).all()
    for data, rows in ((images, range(60)), (forget, forget.indices), (Subset(remain, [5, 2]), [remain.indices[5], remain.indices[2]])):
        held = list(as_batches(data, batch_size=16))
        assert torch.equal(torch.cat([inputs for inputs, _ in held]), images.batch_of(torch.tensor(list(rows)))[0])


def test_a_network_is_trained_and_forgets_on_images():
    data = load("digits")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    expunge.train(model, data.train, expunge.Tuning(expunge.Constant(0.05, epochs=2)))
    test = category(data.test, 0)
    assert expunge.metrics.accuracy(model, data.test) > 0.85
    forget, remain = category(data.train, 0)
    outcome = expunge.unlearn(model, forget, remain, expunge.MaskClassifier(0), watch={})
    assert expunge.metrics.accuracy(outcome.model, test.forget) < 0.2


def test_a_split_is_stratified_disjoint_and_decided_by_the_seed():
    images = random_images(count=62)
    train, validation = split(images, 0.25, seed=1)
    assert torch.bincount(validation.labels).tolist() == [4, 4, 4, 4] and len(train) + len(validation) == 62
    together = torch.cat([train.pixels, validation.pixels])
    assert torch.equal(torch.unique(together, dim=0), torch.unique(images.pixels, dim=0))
    assert train.mean == validation.mean == images.mean and train.std == images.std
    assert torch.equal(split(images, 0.25, seed=1).validation.pixels, validation.pixels)
    assert not torch.equal(split(images, 0.25, seed=2).validation.pixels, validation.pixels)
    for fraction in (0, 1, 0.01):
        with pytest.raises(InputError, match="fraction"):
            split(images, fraction)


def test_test_images_are_normalised_by_the_train_images(tmp_path):
    files.cifar10(tmp_path)
    data = load("cifar10", tmp_path, verify=False).to("cpu")
    assert data.test.mean == data.train.mean == data.mean and data.test.std == data.train.std == data.std
    assert data.mean != Images(data.test.pixels, data.test.labels).mean


def test_the_digits_are_those_of_the_package():
    data, parts = load("digits"), digits(seed=0)
    assert (data.classes, data.channels, data.size) == (10, 1, (8, 8))
    assert torch.equal(data.train.labels, torch.cat([parts.train.tensors[1], parts.validation.tensors[1]]))
    ours, theirs = data.test.batch_of(torch.arange(450))[0].double(), parts.test.tensors[0].double()
    standard = [(images - images.mean()) / images.std() for images in (ours, theirs)]  # each is normalised by a train part of its own
    assert torch.allclose(*standard, atol=1e-5)
