"""What is fuzzed: good files of every kind that expunge reads, how they are changed, and who reads them."""

from __future__ import annotations

import io
import json
import random as python_random
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from torch import nn

from expunge.editing.masks import select
from expunge.editing.patches import Patch
from expunge.errors import ExpungeError
from expunge.experiments import results
from expunge.experiments.cells import Cell
from expunge.experiments.runner import Task
from expunge.experiments.worker import Work, read_work
from expunge.fisher import FisherSums
from expunge.outcome import Outcome, Record, load_outcome
from expunge.report.page import page, read_notes
from expunge.runtime.modes import Generators
from expunge.storage.codec import decode, encode
from expunge.storage.tensors import weights_digest
from expunge.training import checkpoints
from expunge.vision.datasets import folder, load
from expunge.vision.datasets.downloads import unpack
from expunge.vision.zoo import _read_log, build, load_network, save_network
from tests.fuzz import mutations
from tests.fuzz.mutations import BYTES, Mutation
from tests.report import made
from tests.vision.datasets import files

Reader = Callable[[Path, Random], None]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Target:
    """Good files by their names, those of them that are changed with their mutations, and the reader of the folder they lie in.

    `name_of` gives the name for a changed content, where files are named by what they hold.
    """

    good: Callable[[], dict[str, bytes]]
    mutations: Mapping[str, list[Mutation]]
    read: Reader
    name_of: Callable[[str, bytes], str] = lambda name, content: name
    weight: int = 1


def written(write: Callable[[Path], Any]) -> dict[str, bytes]:
    """The files a function writes into a folder."""
    with TemporaryDirectory() as place:
        write(Path(place))
        return {path.relative_to(place).as_posix(): path.read_bytes() for path in Path(place).rglob("*") if path.is_file()}


# --- results


def good_result() -> dict[str, bytes]:
    """Of two seeds: of one alone there is no spread."""
    first, second = (made.result("fisher-mask", seed, cell_relearn={"rate": 0.1, "limit": 20}) for seed in (0, 1))
    return {"result.json": json.dumps(first).encode(), f"cells/{second['digest']}.json": json.dumps(second).encode()}


def digest_made_right(random: Random, content: bytes) -> bytes:
    tree = mutations.edited(random, json.loads(content))
    try:
        tree["digest"] = decode(Cell, tree["cell"]).digest
    except Exception:
        pass
    return mutations.written(random, tree).encode()


def digest_in(name: str, content: bytes) -> str:
    try:
        return f"cells/{json.loads(content)['digest']}.json" if len(json.loads(content)["digest"]) < 50 else "cells/x.json"
    except Exception:
        return "cells/x.json"


def read_results(place: Path, random: Random) -> None:
    found = results.load(place)
    for result in found:
        for part in (result.before, result.best, result.last, result.masked, *result.history):
            assert part is None or (0 <= part.remain <= 1 and 0 <= part.forget <= 1)
    page(found, str(place)).encode()


def good_cells() -> dict[str, bytes]:
    tasks = [Task(decode(Cell, made.result(method)["cell"]), ("table1",)) for method in made.METHODS[:2]]
    return {"cells.json": json.dumps(encode(Work(tuple(tasks), "out", "models"))).encode()}


def good_log() -> dict[str, bytes]:
    points = [[epoch, {"test": 0.5, "forget": 0.1}, 1.5] for epoch in range(4)]
    return {"log.json": json.dumps({"curve": points, "data": "digest", "dataset": "digits", "seed": 1}).encode()}


def good_notes() -> dict[str, bytes]:
    return {"notes.json": json.dumps({"table1": ["one", "two"], "table2": []}).encode()}


# --- tensors


def network() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


SETTINGS = {"steps": "4", "seed": "0"}
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
]


def stepped(kind: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def write_checkpoint(place: Path, kind: int) -> None:
    model, optimizer = stepped(kind)
    checkpoints.save(place / "state", model, optimizer, 2, SETTINGS, CPU)


def read_checkpoint(place: Path, kind: int) -> None:
    """A file that is refused changes nothing; with one that is not, the training can go on."""
    model, optimizer = stepped(kind)
    before, state, generators = weights_digest(model), str(optimizer.state_dict()), Generators.now()
    try:
        checkpoints.load(place / "state", model, optimizer, SETTINGS, CPU, 4)
    except ExpungeError:
        assert weights_digest(model) == before and str(optimizer.state_dict()) == state, "a refused checkpoint changed something"
        assert Generators.now().same_as(generators), "a refused checkpoint changed random numbers"
        raise
    try:
        optimizer.step()
        torch.rand(3), python_random.random(), python_random.gauss(0, 1), __import__("numpy").random.rand(700)
    finally:
        generators.restore()


def checkpoint(kind: int) -> Target:
    changes = {"state": [*BYTES, mutations.header_edited, *[mutations.tensors_edited] * 6]}
    return Target(lambda: written(lambda place: write_checkpoint(place, kind)), changes, lambda place, _: read_checkpoint(place, kind))


def write_patch(place: Path) -> None:
    model = network()
    score = {"0.weight": torch.rand(4, 3), "3.weight": torch.rand(2, 4)}
    Patch.zeroing(model, select(score, ratio=0.5)).save(place / "patch")


def read_patch(place: Path, random: Random) -> None:
    patch, model = Patch.load(place / "patch"), network()
    patch.apply(model)
    patch.mask(model)
    patch.revert(model)


def outcome_network() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def write_outcome(place: Path) -> None:
    before, after = outcome_network(), outcome_network()
    with torch.no_grad():
        after[0].weight.neg_()
    patch = Patch.between(before, after)
    Outcome(after, patch, [Record(0, {"remain": 0.5}, None, 0.1)], 0.2, "FisherMask()", patch).save(place)


def read_outcome(place: Path, random: Random) -> None:
    model = outcome_network()
    before = weights_digest(model)
    try:
        outcome = load_outcome(place, model)
        assert all(0 <= value <= 1 for record in outcome.history for value in record.accuracies.values())
        print(outcome, file=io.StringIO())
    finally:
        assert weights_digest(model) == before


def write_sums(place: Path) -> None:
    FisherSums({"a": torch.rand(3, 2, dtype=torch.float64), "b": torch.rand(2, dtype=torch.float64)}, 7, "empirical", "ab" * 32).save(
        place / "sums"
    )


def read_sums(place: Path, random: Random) -> None:
    sums = FisherSums.load(place / "sums")
    (sums + sums).mean()
    sums - sums


TENSORS = [*BYTES, mutations.header_edited, *[mutations.tensors_edited] * 4]


# --- datasets


def read_dataset(name: str) -> Reader:
    def read(place: Path, random: Random) -> None:
        load(name, place, verify=random.random() < 0.1)

    return read


def good_tiny() -> dict[str, bytes]:
    return {f"tiny-imagenet-200/{name}": content for name, content in files.tiny_imagenet(64).items()}


def good_zip() -> dict[str, bytes]:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in good_tiny().items():
            archive.writestr(name, content)
    return {"tiny-imagenet-200.zip": out.getvalue()}


FORMS = {"png": "PNG", "jpg": "JPEG", "gif": "GIF", "bmp": "BMP", "webp": "WEBP", "tif": "TIFF", "ppm": "PPM"}


def good_pictures() -> dict[str, bytes]:
    held = {}
    for place, (suffix, form) in enumerate(FORMS.items()):
        out = io.BytesIO()
        Image.effect_noise((16, 16), 50).convert("RGB" if place % 2 else "L").save(out, form)
        held |= {f"class{number}/{suffix}.{suffix}": out.getvalue() for number in range(2)}
    return held


def good_tar() -> dict[str, bytes]:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name in ("set/a", "set/b", "set/deep/c"):
            info = tarfile.TarInfo(name)
            info.size = 600
            tar.addfile(info, io.BytesIO(b"x" * 600))
    return {"a.tar.gz": out.getvalue()}


def read_tar(place: Path, random: Random) -> None:
    with TemporaryDirectory() as clean:
        archive = Path(clean) / "in" / "a.tar.gz"
        archive.parent.mkdir()
        archive.write_bytes((place / "a.tar.gz").read_bytes())
        unpack(archive, "set")
        assert {path.name for path in Path(clean).iterdir()} == {"in"}, "something was written outside"


PICKLE = [*BYTES, *[mutations.pickle_edited] * 12]
RAW = [f"MNIST/raw/{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
WNIDS, WORDS, ANNOTATIONS = (f"tiny-imagenet-200/{name}" for name in ("wnids.txt", "words.txt", "val/val_annotations.txt"))

TARGETS: dict[str, Target] = {
    "result": Target(good_result, {"result.json": [*BYTES, *[digest_made_right] * 21]}, read_results, digest_in, weight=4),
    "cells": Target(
        good_cells, {"cells.json": [*BYTES, *[mutations.json_edited] * 7]}, lambda place, _: void(read_work(place / "cells.json"))
    ),
    "log": Target(good_log, {"log.json": [*BYTES, *[mutations.json_edited] * 7]}, lambda place, _: void(_read_log(place / "log.json"))),
    "notes": Target(good_notes, {"notes.json": [*BYTES, mutations.json_edited]}, lambda place, _: void(read_notes(place))),
    "checkpoint": checkpoint(0),
    "checkpoint-adam": checkpoint(1),
    "network": Target(
        lambda: written(lambda place: save_network(place / "net", build("resnet8", 4, 1, 0, CPU), "resnet8", 4, 1)),
        {"net": TENSORS},
        lambda place, _: void(load_network(place / "net")),
    ),
    "patch": Target(lambda: written(write_patch), {"patch": TENSORS}, read_patch),
    "outcome": Target(
        lambda: written(lambda place: write_outcome(place / "outcome")),
        {
            "outcome/result.json": [*BYTES, *[mutations.json_edited] * 7],
            "outcome/weights.safetensors": TENSORS,
            "outcome/patch.safetensors": TENSORS,
        },
        lambda place, random: read_outcome(place / "outcome", random),
    ),
    "sums": Target(lambda: written(write_sums), {"sums": TENSORS}, read_sums),
    "cifar10": Target(
        lambda: written(lambda place: files.cifar10(place, rows=2)),
        {f"cifar-10-batches-py/{name}": PICKLE for name in ("data_batch_2", "batches.meta")},
        read_dataset("cifar10"),
        weight=2,
    ),
    "cifar10-python3": Target(
        lambda: written(lambda place: files.cifar10(place, rows=2, dump=files.new_pickle)),
        {f"cifar-10-batches-py/{name}": PICKLE for name in ("data_batch_2", "batches.meta")},
        read_dataset("cifar10"),
    ),
    "mnist": Target(lambda: written(lambda place: files.mnist(place / "MNIST/raw")), {name: BYTES for name in RAW}, read_dataset("mnist")),
    "mnist-gzip": Target(
        lambda: written(lambda place: files.mnist(place / "MNIST/raw", packed=True)),
        {f"{name}.gz": [*BYTES, *[mutations.packed_edited] * 7] for name in RAW},
        read_dataset("mnist"),
    ),
    "tiny-imagenet": Target(
        good_tiny,
        {name: [*BYTES, *[mutations.text_edited] * 7] for name in (WNIDS, WORDS, ANNOTATIONS)}
        | {"tiny-imagenet-200/train/n02/images/n02_1.JPEG": BYTES},
        read_dataset("tiny-imagenet"),
    ),
    "tiny-imagenet-zip": Target(
        good_zip,
        {"tiny-imagenet-200.zip": [*BYTES, *[mutations.zip_edited] * 7, *[mutations.zip_member] * 2]},
        read_dataset("tiny-imagenet"),
    ),
    "pictures": Target(
        good_pictures,
        {f"class0/{suffix}.{suffix}": BYTES for suffix in FORMS},
        lambda place, random: void(folder.read(place, random.choice([None, 8]))),
        weight=2,
    ),
    "archive": Target(good_tar, {"a.tar.gz": [*BYTES, *[mutations.packed_edited] * 7]}, read_tar),
}


def void(value: object) -> None:
    """A reader's result is only made."""
