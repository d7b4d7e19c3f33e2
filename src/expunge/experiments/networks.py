"""Train the networks that cells need and keep them on disk, by the digest of all that makes them, for all cells that need the same."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expunge.errors import InputError
from expunge.experiments.cells import LIMITS, REFERENCE, Cell, digest_of
from expunge.experiments.construction import parts, recipe_of, scenario_of
from expunge.storage.documents import read_json
from expunge.storage.files import write_bytes, write_json
from expunge.storage.locks import try_lock
from expunge.storage.tensors import load_tensors, weights_digest
from expunge.training.tuning import Precision
from expunge.vision.zoo import KIND, Job, load_network, train_networks


@dataclass(frozen=True)
class Spec:
    """What makes a network: its data, {"kind": "all"} or a scenario with "part" "train" or "retrain", its recipe and its seed."""

    dataset: str
    network: str
    data: Mapping[str, Any]
    seed: int
    recipe: Mapping[str, Any]
    validation: float
    precision: Precision

    @property
    def digest(self) -> str:
        return digest_of(asdict(self))


def original(cell: Cell) -> Spec:
    """The network that has to forget. A class or a subset to forget is in the data as they are."""
    whole = cell.scenario["kind"] in ("category", "subset")
    return _spec(cell, {"kind": "all"} if whole else _data(cell, "train"))


def retrained(cell: Cell) -> Spec:
    """The network it is compared with. Where poisoned samples were added, that is the network of the clean data."""
    clean = cell.scenario["kind"] == "poisoned" and cell.scenario.get("how", "add") == "add"
    return _spec(cell, {"kind": "all"} if clean else _data(cell, "retrain"))


def _data(cell: Cell, part: str) -> dict[str, Any]:
    return {**{name: value for name, value in cell.scenario.items() if name not in LIMITS}, "part": part}


def _spec(cell: Cell, data: Mapping[str, Any]) -> Spec:
    recipe = {name: value for name, value in cell.recipe.items() if name not in ("mask_ratio", "tuning_rate")}
    return Spec(cell.dataset, cell.network, data, cell.seed, recipe, cell.validation, cell.precision)


@dataclass(frozen=True)
class Store:
    """A folder of networks, `DIGEST.safetensors`, each with its spec and seconds in `DIGEST.spec.json`; `data` is the folder of the
    datasets. `together`: how many networks are trained at once where they share a GPU. `compiled`: all through torch.compile. `retrained`:
    whether networks to compare with are trained for cells that can do without; if not, those that exist are used.
    """

    folder: Path
    data: str | None
    device: torch.device
    together: int = 9
    compiled: bool = False
    retrained: bool = True

    def needed(self, cell: Cell) -> list[Spec]:
        """The networks that must be there before the cell can be run."""
        reference = self.retrained or cell.method["name"] == REFERENCE
        return [original(cell), *([retrained(cell)] if reference else [])]

    def __post_init__(self) -> None:
        if self.together < 1:
            raise InputError("together", "must be at least 1", self.together)

    def path(self, spec: Spec) -> Path:
        return self.folder / f"{spec.digest}.safetensors"

    def _state(self, spec: Spec) -> Path:
        return self.folder / f"{spec.digest}.training.safetensors"

    def _note(self, spec: Spec) -> Path:
        return self.folder / f"{spec.digest}.spec.json"

    def _lock(self, spec: Spec) -> Path:
        return self.folder / "locks" / f"{spec.digest}.lock"

    def holds(self, spec: Spec) -> bool:
        """Whether the network and all that belongs to it exist: the state of its training is removed last."""
        return self.path(spec).exists() and not self._state(spec).exists()

    def load(self, spec: Spec) -> nn.Module:
        return load_network(self.path(spec), self.device)

    def seconds(self, spec: Spec) -> float | None:
        """How long the training took, where that is known."""
        try:
            return float(read_json(self._note(spec))["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def train(self, specs: Iterable[Spec]) -> tuple[list[Spec], dict[str, Exception]]:
        """Train what is missing and what no other runner is training: the first, and on CUDA its like beside it.

        Returns those trained, and by digest why others could not be. An OSError, such as a full disk, is raised: it holds for all.
        """
        with ExitStack() as stack:
            chosen: list[Spec] = []
            for spec in specs:
                if self.holds(spec) or (chosen and _shared(spec) != _shared(chosen[0])):
                    continue
                if not stack.enter_context(try_lock(self._lock(spec))) or self.holds(spec):
                    continue
                chosen.append(spec)
                if len(chosen) == (self.together if self.device.type == "cuda" else 1):
                    break
            failed: dict[str, Exception] = {}
            if chosen:
                self._train(chosen, failed)
            return [spec for spec in chosen if spec.digest not in failed], failed

    def _train(self, specs: Sequence[Spec], failed: dict[str, Exception]) -> None:
        first, started = specs[0], time.perf_counter()
        try:
            images = parts(first.dataset, first.validation, self.data, self.device)
            jobs = [Job(spec.digest, _training_data(spec, images), spec.seed) for spec in specs]
            train_networks(
                first.network,
                images.classes,
                images.channels,
                jobs,
                recipe_of(first.recipe),
                device=self.device,
                precision=first.precision,
                compiled=self.compiled,
                out=self.folder,
            )
        except OSError:
            raise
        except Exception as error:  # a defect in one training must not cost the others
            if len(specs) > 1:
                for spec in specs:  # one by one, so that it is known which: each goes on from its kept state
                    self._train([spec], failed)
            else:
                failed |= {spec.digest: error for spec in specs}
            return
        seconds = (time.perf_counter() - started) / len(specs)
        for spec in specs:
            write_json(self._note(spec), {"spec": asdict(spec), "seconds": seconds, "device": self.device.type})
            self._state(spec).unlink(missing_ok=True)

    def adopt(self, file: str | os.PathLike[str], spec: Spec) -> Path:
        """Take a network that was trained elsewhere (`vision.training.save_network`) as the one of this spec; the file is linked.

        One that is in the store already stays, with its note; another network in its place raises InputError.
        """
        if not Path(file).is_file():
            raise InputError("file", "must be that of a network", f"no file {os.fspath(file)}")
        adopted = load_network(file)
        _, metadata = load_tensors(file, KIND)
        if metadata["network"] != spec.network:
            raise InputError("file", f"must hold a {spec.network}", metadata["network"])
        target = self.path(spec)
        with try_lock(self._lock(spec)) as free:
            if not free:
                raise InputError("file", f"must not be a network that is being trained for the store, {target}", os.fspath(file))
            if target.exists():
                if weights_digest(load_network(target)) != weights_digest(adopted):
                    raise InputError("file", f"must not be another network than the one in the store, {target}", os.fspath(file))
                return target
            # First the note: one without a network means nothing, a network without a note looks trained here.
            write_json(self._note(spec), {"spec": asdict(spec), "adopted": Path(file).name})
            self._state(spec).unlink(missing_ok=True)
            try:
                os.link(file, target)
            except OSError:
                write_bytes(target, Path(file).read_bytes())
        return target


def _shared(spec: Spec) -> dict[str, Any]:
    """What networks that are trained together have in common."""
    return {name: value for name, value in asdict(spec).items() if name not in ("data", "seed")}


def _training_data(spec: Spec, images: Any) -> Any:
    if spec.data["kind"] == "all":
        return images.train
    scenario = {name: value for name, value in spec.data.items() if name != "part"}
    return getattr(scenario_of(scenario, images, spec.seed), spec.data["part"])


NAMED = re.compile(r"(?P<model>.+?)(-(?P<which>original|retrained|without0))?-seed(?P<seed>\d+)\.safetensors")


def named(file: str | os.PathLike[str], cells: Iterable[Cell]) -> Spec:
    """What a file stands for among these cells: DATASET-NETWORK-seed666.safetensors, or with -without0 the one retrained without class 0.

    The names -original and -retrained are understood too.
    """
    match = NAMED.fullmatch(Path(file).name)
    if match is None:
        raise InputError("file", "must be called DATASET-NETWORK-seedN.safetensors, or DATASET-NETWORK-without0-seedN", Path(file).name)
    for cell in cells:
        if (f"{Path(cell.dataset).resolve().name}-{cell.network}", cell.seed) == (match["model"], int(match["seed"])) and cell.scenario[
            "kind"
        ] == "category":
            return original(cell) if match["which"] in (None, "original") else retrained(cell)
    raise InputError("file", "must be a network of the category cells asked for", Path(file).name)
