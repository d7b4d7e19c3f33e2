"""Train networks of the zoo by a recipe: several side by side, their state kept after every epoch, their curves on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from expunge.data.batches import measuring_size
from expunge.errors import InputError, MismatchError
from expunge.metrics import accuracy
from expunge.runtime.modes import seeded
from expunge.storage.documents import excerpt, named_number, read_json
from expunge.storage.files import write_json
from expunge.storage.tensors import content_digest, load_tensors, save_tensors, weights_digest
from expunge.training.side_by_side import Training, train_together
from expunge.training.tuning import Precision
from expunge.vision.augmentation import Augmentation
from expunge.vision.datasets import Images, ImageSet
from expunge.vision.networks import NETWORKS
from expunge.vision.recipes import Recipe
from expunge.vision.scenarios import category

KIND = "model"


@dataclass(frozen=True)
class Job:
    """One network to train: its data, and the seed of its weights and of the order of its samples.

    `data_digest` is a fingerprint of all data, those that are only measured on too: a curve does not go on with other data than it began
    with. (The state has a fingerprint of the training data as well: `contents`.)
    """

    name: str
    data: Dataset[Any]
    seed: int
    data_digest: str | None = None


class Point(NamedTuple):
    """After an epoch: the accuracies on the watched data, and the mean loss of the epoch's steps."""

    epoch: int
    accuracies: dict[str, float]
    loss: float | None


@dataclass
class Trained:
    """A network, at the end of its training or on the way there."""

    job: Job
    model: nn.Module
    curve: list[Point] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return weights_digest(self.model)


class Augmented(Dataset[Any]):
    """Images that are cropped and mirrored anew whenever a batch of them is read."""

    def __init__(self, images: Images, augmentation: Augmentation) -> None:
        self.images, self.augmentation = images, augmentation

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.batch_of(torch.tensor([index]))
        return image[0], label[0]

    def batch_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        chosen = rows.to(self.images.labels.device)
        pixels = self.augmentation(self.images.pixels[chosen])
        return self.images.normalised(pixels), self.images.labels[chosen]

    @property
    def targets(self) -> Tensor:
        return self.images.targets

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.images.tensors


def build(network: str, classes: int, channels: int, seed: int, device: torch.device) -> nn.Module:
    """A network of the zoo with fresh weights by the seed; channels last on CUDA, where convolutions are faster that way."""
    _check_network(network)
    with seeded(seed, torch.device("cpu")):
        model = NETWORKS[network](classes, channels).to(device)
    return model.to(memory_format=torch.channels_last) if device.type == "cuda" else model  # type: ignore[call-overload]


def _check_network(name: str) -> None:
    if name not in NETWORKS:
        raise InputError("network", f"must be one of {', '.join(NETWORKS)}", name)


def plan(
    dataset: str,
    network: str,
    images: ImageSet,
    seeds: Sequence[int],
    without: int | None = None,
    augment: bool = False,
    size: int | None = None,
) -> tuple[list[Job], dict[str, Any]]:
    """A job for every seed, named by all that makes its data others (such as the `size` pictures were given), and what to watch.

    `without` leaves a class out, and watches the others and the class ("remain" and "forget") instead of the whole test set.
    """
    _check_network(network)
    # A crop may begin anywhere within an eighth of the image: 4 of CIFAR's 32 pixels.
    data: Dataset[Any] = Augmented(images.train, Augmentation(images.size[0] // 8)) if augment else images.train
    name = f"{Path(dataset).resolve().name or 'pictures'}-{network}"  # "." has no name of its own, "/" none at all
    watch: dict[str, Any] = {"test": images.test}
    if without is not None:
        scenario = category(data, without, test=images.test)
        data, watch, name = scenario.retrain, dict(scenario.tests), f"{name}-without{without}"
    name += ("-augmented" if augment else "") + ("" if size is None else f"-size{size}")
    digest = images_digest(images)
    return [Job(f"{name}-seed{seed}", data, seed, digest) for seed in seeds], watch


def images_digest(images: ImageSet) -> str:
    """SHA-256 over the pixels and labels of both parts."""
    parts = {"train": images.train, "test": images.test}
    tensors = {f"{name}/{part}": getattr(split, part) for name, split in parts.items() for part in ("pixels", "labels")}
    return content_digest(tensors, {})


def train_networks(
    network: str,
    classes: int,
    channels: int,
    jobs: Sequence[Job],
    recipe: Recipe,
    *,
    device: torch.device,
    precision: Precision = "float32",
    compiled: bool = False,
    watch: Mapping[str, Any] | None = None,
    every: int = 1,
    out: str | os.PathLike[str] | None = None,
    about: Mapping[str, Any] | None = None,
    noted: Callable[[Trained], None] | None = None,
) -> list[Trained]:
    """Train one network per job, all at once; data on the device make a step one CUDA graph.

    `watch` names data whose accuracies are measured after every `every` epochs and at the end; `noted` is called after each. In the folder
    `out` each job keeps its state in `NAME.training.safetensors`, from which a training that was stopped goes on, its curve, its settings
    and `about` in `NAME.json`, and its weights in `NAME.safetensors` when it is done. `compiled` trains through torch.compile.
    """
    if not jobs or len({job.name for job in jobs}) != len(jobs):
        raise InputError("jobs", "must be one or more, of different names", [job.name for job in jobs])
    settings = {"network": network, "classes": classes, "channels": channels, "recipe": asdict(recipe), "precision": precision}
    settings |= {"compiled": compiled, "torch": torch.__version__, **(about or {})}
    trained = [Trained(job, build(network, classes, channels, job.seed, device)) for job in jobs]
    logs = [_Log(result, watch or {}, every, recipe.epochs, None if out is None else Path(out), settings, noted) for result in trained]
    train_together(
        [
            Training(
                torch.compile(result.model) if compiled else result.model,  # type: ignore[arg-type]
                result.job.data,
                recipe.tuning(result.job.seed, precision),
                log.after_epoch,
                log.state,
                log.note_loss,
            )
            for result, log in zip(trained, logs, strict=True)
        ],
    )
    for result, log in zip(trained, logs, strict=True):
        log.finish()
        if out is not None:
            save_network(Path(out) / f"{result.job.name}.safetensors", result.model, network, classes, channels)
    return trained


class _Log:
    """Records the curve of a training, in a file too where there is a folder for it; there it goes on where it stopped."""

    def __init__(
        self,
        trained: Trained,
        watch: Mapping[str, Any],
        every: int,
        epochs: int,
        folder: Path | None,
        settings: Mapping[str, Any],
        noted: Callable[[Trained], None] | None,
    ) -> None:
        self.trained, self.watch, self.every, self.epochs = trained, watch, every, epochs
        self.settings, self.noted = settings, noted
        self.loss: float | None = None
        self.state = None if folder is None else folder / f"{trained.job.name}.training.safetensors"
        self.file = None if folder is None else folder / f"{trained.job.name}.json"
        if self.state is not None and self.state.exists() and self.file is not None and self.file.exists():
            kept = _read_log(self.file)
            if kept["data"] not in (None, trained.job.data_digest):
                raise MismatchError(f"{self.file} is of a training on other data, {kept['dataset']}; keep this one in another folder")
            trained.curve = kept["curve"]

    def note_loss(self, epoch: int, mean: float) -> None:
        self.loss = mean

    def after_epoch(self, epoch: int) -> None:
        if epoch % self.every and epoch != self.epochs:
            return
        model = self.trained.model
        accuracies = {name: accuracy(model, data, batch_size=measuring_size(model)) for name, data in self.watch.items()}
        # An epoch that was begun again is noted again.
        self.trained.curve[:] = [point for point in self.trained.curve if point.epoch < epoch] + [Point(epoch, accuracies, self.loss)]
        if self.noted is not None:  # before it is written: the disk may be full
            self.noted(self.trained)
        self._write()

    def finish(self) -> None:
        """Add the last point, which is missing where the training was finished already, but not its curve."""
        if not self.trained.curve or self.trained.curve[-1].epoch != self.epochs:
            self.after_epoch(self.epochs)
        self._write({"digest": self.trained.digest})

    def _write(self, more: Mapping[str, Any] | None = None) -> None:
        if self.file is not None:
            job = self.trained.job
            record = {**self.settings, "seed": job.seed, "data": job.data_digest, "curve": self.trained.curve}
            write_json(self.file, {**record, **(more or {})})


def _read_log(file: Path) -> dict[str, Any]:
    """Of a training's file its curve, and what it was trained on where that was noted."""
    try:
        content = read_json(file)
        curve = [_point(*point) for point in content["curve"]]
        return {"curve": curve, "data": content.get("data"), "dataset": content.get("dataset")}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        rule = "must be the curve of a training as it was written; without the file the training goes on from its state"
        raise InputError("out", rule, f"{file} ({excerpt(error)})") from error


def _point(epoch: int, accuracies: Mapping[str, float], loss: float | None) -> Point:
    point = Point(epoch, {name: float(value) for name, value in accuracies.items()}, None if loss is None else float(loss))
    if type(epoch) is not int or epoch < 0 or not all(0 <= value <= 1 for value in point.accuracies.values()):
        raise ValueError(f"a point must have an epoch and accuracies from 0 to 1; found {excerpt(point)}")
    return point


def save_network(path: Path, model: nn.Module, network: str, classes: int, channels: int) -> Path:
    """Save the weights, with what is needed to build the network again."""
    metadata = {"kind": KIND, "network": network, "classes": str(classes), "channels": str(channels), "digest": weights_digest(model)}
    return save_tensors(path, model.state_dict(), metadata)


def load_network(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> nn.Module:
    """Load a network that was saved by `save_network`, in eval mode."""
    tensors, metadata = load_tensors(path, KIND)
    network, classes, channels = _named(metadata, path)
    # Before anything is built: the number of classes in the file may need more memory than there is.
    if _forms(tensors) != _forms_of(network, classes, channels):
        raise InputError("path", f"must hold the weights of a {network} of its classes and channels", os.fspath(path))
    model = build(network, classes, channels, 0, torch.device(device))
    model.load_state_dict(tensors)
    return model.eval()


def network_of(path: str | os.PathLike[str]) -> tuple[str, int, int]:
    """The name, the classes and the channels of a network that was saved by `save_network`."""
    return _named(load_tensors(path, KIND)[1], path)


def _named(metadata: Mapping[str, str], path: str | os.PathLike[str]) -> tuple[str, int, int]:
    network = metadata.get("network", "a model of no name")
    if network not in NETWORKS:
        raise InputError("path", f"must hold one of the networks {', '.join(NETWORKS)}", excerpt(network))
    try:
        classes, channels = (named_number(metadata[name], 2**31, smallest=1) for name in ("classes", "channels"))
    except (KeyError, ValueError) as error:
        raise InputError("path", f"must record the network's classes and channels ({excerpt(error)})", os.fspath(path)) from error
    return network, classes, channels


def _forms_of(network: str, classes: int, channels: int) -> dict[str, tuple[Any, ...]] | None:
    """Of the weights of such a network, which takes no memory for it; None where no tensor can be so large."""
    try:
        with torch.device("meta"):
            return _forms(NETWORKS[network](classes, channels).state_dict())
    except (RuntimeError, TypeError):
        return None


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """Shapes, and whether numbers are fractions: weights may be kept in another precision."""
    return {name: (tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in tensors.items()}
