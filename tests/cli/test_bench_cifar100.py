"""The command for the paper's GoogLeNet on CIFAR-100, whose data could not be had: on few made-up samples in files of that form."""

from dataclasses import replace
from functools import partial
from hashlib import md5
from importlib import import_module

import numpy
import pytest

from expunge.cli import commands as cli
from expunge.experiments import construction, profiles
from expunge.vision import datasets
from expunge.vision.datasets import cifar
from tests.vision.datasets.files import old_pickle

googlenet = import_module("expunge.vision.networks.googlenet")  # the package has a function of this name
SAMPLES = 8  # of the classes 0 to 3 of 100


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Files as CIFAR-100 has them, taken for the published ones; `paper` with one epoch, and a GoogLeNet an eighth as wide."""
    folder = tmp_path / "data" / "cifar-100-python"
    folder.mkdir(parents=True)
    labels = [row % 4 for row in range(SAMPLES)]
    for name in ("train", "test"):
        pixels = numpy.random.default_rng(len(name)).integers(0, 256, (SAMPLES, 3072), dtype=numpy.uint8)
        (folder / name).write_bytes(old_pickle({b"fine_labels": labels, b"coarse_labels": [0] * SAMPLES, b"data": pixels}))
    names = {b"fine_label_names": [b"fine%d" % label for label in range(100)], b"coarse_label_names": [b"coarse"] * 20}
    (folder / "meta").write_bytes(old_pickle(names))
    published = {name: md5((folder / name).read_bytes()).hexdigest() for name in ("train", "test")}
    monkeypatch.setitem(datasets.READERS, "cifar100", partial(cifar.read, which=replace(cifar.CIFAR100, published=published)))
    paper = replace(profiles.PAPER, seeds=(666,), training={"epochs": 1}, tuning_epochs=1, precision="float32")
    monkeypatch.setitem(profiles.PROFILES, "paper", paper)
    stages = tuple(tuple(googlenet.Widths(*(width // 8 for width in widths)) for widths in stage) for stage in googlenet.STAGES)
    monkeypatch.setattr(googlenet, "STAGES", stages)
    monkeypatch.setattr(googlenet, "STEM", 24)
    construction.parts.cache_clear()
    yield folder.parent
    construction.parts.cache_clear()


@pytest.mark.slow
def test_googlenet_on_cifar100_is_one_command(data, tmp_path, capfd):
    asked = ["--profile", "paper", "--models", "cifar100/googlenet", "--methods", "finetune", "fisher-mask", "--out", str(tmp_path / "out")]
    assert cli.main(["bench", "run", "table1", *asked, "--data", str(data), "--device", "cpu", "--jobs", "1"]) == 0
    capfd.readouterr()
    assert cli.main(["bench", "table", "table1", *asked, "--format", "csv"]) == 0
    lines = [line.split(",") for line in capfd.readouterr().out.splitlines() if ",cifar100/googlenet,," in line]
    measured = {
        (view, method, reading): (mean, paper)
        for _, view, _, _, method, reading, measure, mean, *_, paper, _, _, _ in lines
        if measure == "remain"
    }
    assert measured["masked", "fisher-mask", "text"][1] == "73.8" and measured["best", "retrain", "text"][1] == "73.7"
    assert all(0 <= float(mean) <= 100 for mean, _ in measured.values())
