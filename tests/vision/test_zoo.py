"""Networks trained by a recipe: their files, their curves, what they are trained on, and going on after a stop."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expunge.data.batches import as_batches
from expunge.errors import InputError, MismatchError
from expunge.metrics import accuracy
from expunge.storage.tensors import save_tensors, weights_digest
from expunge.training.loop import train
from expunge.vision import datasets
from expunge.vision.augmentation import Augmentation
from expunge.vision.recipes import RECIPES
from expunge.vision.scenarios.rows import labels_of
from expunge.vision.zoo import Augmented, Job, Point, build, load_network, plan, save_network, train_networks
from tests.memory import MIB, within

CPU = torch.device("cpu")
RECIPE = replace(RECIPES["digits"], epochs=2, batch_size=64)


@pytest.fixture(scope="module")
def images():
    held = datasets.load("digits")
    return replace(held, train=held.train.take(torch.arange(0, 1348, 6)), test=held.test.take(torch.arange(0, 449, 3)))


def trained(images, jobs, recipe=RECIPE, **more):
    return train_networks("resnet8", 10, 1, jobs, recipe, device=CPU, **more)


def test_a_network_is_built_by_its_seed():
    before = torch.get_rng_state()
    first, second, other = (build("resnet8", 10, 1, seed, CPU) for seed in (1, 1, 2))
    assert weights_digest(first) == weights_digest(second) != weights_digest(other)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(InputError, match="network: must be one of resnet8.*found nonsense"):
        build("nonsense", 10, 1, 0, CPU)


def test_jobs_share_the_device_and_each_ends_as_by_train(images, tmp_path):
    jobs = [Job("first", images.train, 1), Job("second", images.train, 2)]
    seen: list[tuple[str, int]] = []
    found = trained(
        images,
        jobs,
        watch={"test": images.test},
        out=tmp_path,
        about={"dataset": "digits"},
        noted=lambda each: seen.append((each.job.name, each.curve[-1].epoch)),
    )
    assert seen == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]
    for each in found:
        alone = build("resnet8", 10, 1, each.job.seed, CPU)
        train(alone, images.train, RECIPE.tuning(each.job.seed))
        assert each.digest == weights_digest(alone)
        assert each.curve[-1].accuracies == {"test": accuracy(alone, images.test)} and each.curve[-1].loss < each.curve[0].loss
        told = json.loads((tmp_path / f"{each.job.name}.json").read_text())
        assert told["digest"] == each.digest and told["seed"] == each.job.seed and told["dataset"] == "digits"
        assert told["recipe"]["epochs"] == 2 and [Point(*point) for point in told["curve"]] == each.curve
        assert weights_digest(load_network(tmp_path / f"{each.job.name}.safetensors")) == each.digest


class Stop(Exception):
    pass


@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_stopped_jobs_go_on_with_their_curves(images, tmp_path, moment):
    data = Augmented(images.train, Augmentation(1))
    jobs, count = [Job("first", data, 1), Job("second", data, 2)], iter(range(1, 99))

    def stop(each):
        if next(count) == moment:
            raise Stop

    with pytest.raises(Stop):
        trained(images, jobs, watch={"test": images.test}, out=tmp_path, noted=stop)
    found = trained(images, jobs, watch={"test": images.test}, out=tmp_path)
    whole = trained(images, jobs, watch={"test": images.test})
    assert [(each.digest, each.curve) for each in found] == [(each.digest, each.curve) for each in whole]
    again = trained(images, jobs, watch={"test": images.test}, out=tmp_path, noted=pytest.fail)
    assert [(each.digest, each.curve) for each in again] == [(each.digest, each.curve) for each in whole]


def test_a_finished_training_without_its_curve_is_measured_again(images, tmp_path):
    jobs = [Job("one", images.train, 1)]
    first = trained(images, jobs, watch={"test": images.test}, out=tmp_path)[0]
    (tmp_path / "one.json").unlink()
    again = trained(images, jobs, watch={"test": images.test}, out=tmp_path)[0]
    assert again.digest == first.digest and again.curve == [Point(2, first.curve[-1].accuracies, None)]


def test_other_settings_are_refused(images, tmp_path):
    jobs = [Job("one", images.train, 1)]
    trained(images, jobs, out=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(MismatchError, match="one.training.safetensors is of a training with other settings: .*rates"):
        trained(images, jobs, replace(RECIPE, rate=0.2), out=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_curves_have_a_point_every_so_many_epochs_and_at_the_end(images):
    found = trained(images, [Job("one", images.train, 1)], replace(RECIPE, epochs=5, batch_size=113), every=2)
    assert [point.epoch for point in found[0].curve] == [2, 4, 5]


@pytest.mark.parametrize("names", [[], ["same", "same"]])
def test_jobs_need_names_of_their_own(images, names):
    with pytest.raises(InputError, match="jobs: must be one or more, of different names"):
        trained(images, [Job(name, images.train, seed) for seed, name in enumerate(names)])


def test_a_plan_names_what_it_trains_on(images):
    jobs, watch = plan("digits", "resnet8", images, [4, 5])
    assert [job.name for job in jobs] == ["digits-resnet8-seed4", "digits-resnet8-seed5"] and [job.seed for job in jobs] == [4, 5]
    assert jobs[0].data is images.train and watch == {"test": images.test}
    assert plan("some/folder", "vgg11", images, [4], size=32)[0][0].name == "folder-vgg11-size32-seed4"
    jobs, watch = plan("some/folder", "vgg11", images, [4], without=3, augment=True)
    assert jobs[0].name == "folder-vgg11-without3-augmented-seed4"
    assert 3 not in labels_of(jobs[0].data) and len(jobs[0].data) == int((images.train.labels != 3).sum())
    assert {*labels_of(watch["forget"]).tolist()} == {3} and len(watch["remain"]) + len(watch["forget"]) == len(images.test)


def test_augmented_images_differ_from_reading_to_reading_and_keep_their_labels(images):
    data = Augmented(images.train, Augmentation(1))
    first, second = (next(iter(as_batches(data))) for _ in range(2))
    assert not torch.equal(first[0], second[0]) and torch.equal(first[1], images.train.labels[:128])
    assert data[3][0].shape == images.train[3][0].shape and data[3][1] == images.train.labels[3] and len(data) == len(images.train)
    still = Augmented(images.train, Augmentation(0, flip=False))
    assert torch.equal(still[5][0], images.train[5][0])


def test_a_network_is_saved_and_loaded(tmp_path):
    model = build("vgg11", 7, 3, 1, CPU)
    loaded = load_network(save_network(tmp_path / "model", model, "vgg11", 7, 3))
    assert weights_digest(loaded) == weights_digest(model) and not loaded.training
    assert loaded(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


def test_files_that_are_no_network_of_ours_are_refused(tmp_path):
    save_network(tmp_path / "unknown", build("resnet8", 10, 1, 0, CPU), "alexnet", 10, 1)
    save_tensors(tmp_path / "nameless", {"a": torch.zeros(1)}, {"kind": "model"})
    save_tensors(tmp_path / "sizeless", {"a": torch.zeros(1)}, {"kind": "model", "network": "resnet8", "classes": "10"})
    save_network(tmp_path / "smaller", build("resnet8", 5, 1, 0, CPU), "resnet8", 10, 1)
    save_tensors(tmp_path / "patch", {"a": torch.zeros(1)}, {"kind": "patch"})
    for name, rule in (
        ("unknown", "one of the networks .*found alexnet"),
        ("nameless", "a model of no name"),
        ("patch", "must hold 'model'"),
        ("sizeless", "must record the network's classes and channels .*sizeless"),
        ("smaller", "must hold the weights of a resnet8 of its classes and channels; .*smaller"),
    ):
        with pytest.raises(InputError, match=rule):
            load_network(tmp_path / name)
    with pytest.raises(InputError, match="must be a safetensors file.*a folder"):
        load_network(tmp_path)
    with pytest.raises(FileNotFoundError) as raised:
        load_network(tmp_path / "nothere")
    assert Path(raised.value.filename) == tmp_path / "nothere"


def test_what_a_file_says_of_its_classes_is_not_built(tmp_path):
    model = build("resnet8", 5, 1, 0, CPU)
    for classes, channels, rule in (
        ("20000000", "1", "must hold the weights of a resnet8"),
        ("5", "50000000", "must hold the weights of a resnet8"),
        ("2147483648", "2147483648", "must hold the weights of a resnet8"),
        ("9" * 19, "1", "must record the network's classes"),
        ("9" * 5000, "1", "must record the network's classes"),
        ("0", "1", "must record the network's classes"),
        ("-5", "1", "must record the network's classes"),
    ):
        metadata = {"kind": "model", "network": "resnet8", "classes": classes, "channels": channels}
        save_tensors(tmp_path / "forged", model.state_dict(), metadata)

        def read(rule: str = rule) -> None:
            with pytest.raises(InputError, match=rule):
                load_network(tmp_path / "forged")

        assert within(50 * MIB, read)


def test_weights_of_another_kind_are_refused_and_of_another_precision_taken(tmp_path):
    model = build("resnet8", 5, 1, 0, CPU)
    metadata = {"kind": "model", "network": "resnet8", "classes": "5", "channels": "1"}
    weights = model.state_dict()
    save_tensors(
        tmp_path / "double", {name: value.double() if value.is_floating_point() else value for name, value in weights.items()}, metadata
    )
    assert weights_digest(load_network(tmp_path / "double")) == weights_digest(model)
    name = "classifier.bias"
    for tensor in (weights[name].long(), weights[name].bool(), weights[name].to(torch.complex64), weights[name][:3], weights[name][None]):
        save_tensors(tmp_path / "forged", weights | {name: tensor}, metadata)
        with pytest.raises(InputError, match="must hold the weights of a resnet8"):
            load_network(tmp_path / "forged")


RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("name", sorted(path.stem for path in (RESULTS / "models").glob("cifar10-*.safetensors")))
def test_the_published_networks_are_the_ones_measured(name):
    told = json.loads((RESULTS / "cifar10-resnet20.json").read_text())["networks"][name]
    assert weights_digest(load_network(RESULTS / "models" / f"{name}.safetensors")) == told["digest"]


def test_a_training_does_not_go_on_with_other_data_of_the_same_name(images, tmp_path):
    jobs, _ = plan("a/pics", "resnet8", images, [1])
    trained(images, jobs, out=tmp_path, about={"dataset": "a/pics"})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    pixels = images.train.pixels.clone()
    pixels[7, 0, 3, 3] += 1
    other = replace(images, train=datasets.Images(pixels, images.train.labels, images.train.mean, images.train.std))
    jobs, _ = plan("b/pics", "resnet8", other, [1])
    with pytest.raises(MismatchError, match=r"pics-resnet8-seed1.json is of a training on other data, a/pics; keep this one in another"):
        trained(other, jobs, out=tmp_path, about={"dataset": "b/pics"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("augment", [False, True])
def test_the_state_tells_its_data_without_the_curve_too(images, tmp_path, augment):
    jobs, _ = plan("pics", "resnet8", images, [1], without=3, augment=augment)
    first = trained(images, jobs, out=tmp_path)[0]
    (tmp_path / f"{jobs[0].name}.json").unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    labels = images.train.labels.clone()
    labels[labels == 4] = 5
    other = replace(images, train=datasets.Images(images.train.pixels, labels, images.train.mean, images.train.std))
    with pytest.raises(MismatchError, match="seed1.training.safetensors is of a training on other data; keep this one in another file"):
        trained(other, plan("pics", "resnet8", other, [1], without=3, augment=augment)[0], out=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert trained(images, jobs, out=tmp_path)[0].digest == first.digest


def test_a_folder_without_a_name_gets_one(images, tmp_path, monkeypatch):
    (tmp_path / "pics").mkdir()
    monkeypatch.chdir(tmp_path / "pics")
    assert [plan(name, "resnet8", images, [1])[0][0].name for name in (".", "/")] == ["pics-resnet8-seed1", "pictures-resnet8-seed1"]


@pytest.mark.parametrize(
    "content",
    [
        '{"curve": [[1, {"te',
        "[]",
        "{}",
        '{"curve": 3}',
        '{"curve": [[1, 2, 3]]}',
        '{"curve": [[1, {"test": "a"}, 1]]}',
        '{"curve": [[1, {"test": 5.0}, 1]]}',
        '{"curve": [[1, {"test": NaN}, 1]]}',
        '{"curve": [[1.5, {"test": 0.5}, 1]]}',
        '{"curve": [[1, {"test": 0.5}]]}',
        '{"curve": ' + "[" * 100_000,
    ],
    ids=range(11),
)
def test_a_damaged_curve_is_refused_and_nothing_lost(images, tmp_path, content):
    jobs = [Job("one", images.train, 1)]
    first = trained(images, jobs, out=tmp_path)[0]
    (tmp_path / "one.json").write_text(content)
    with pytest.raises(InputError, match="out: must be the curve of a training as it was written; .*one.json"):
        trained(images, jobs, out=tmp_path)
    assert (tmp_path / "one.json").read_text() == content
    (tmp_path / "one.json").unlink()
    assert trained(images, jobs, out=tmp_path)[0].digest == first.digest
