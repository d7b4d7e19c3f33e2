"""Keep what a request has done so far in a private folder beside its own, so that the same command goes on after a kill."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from expunge import training
from expunge.data.batches import as_batches
from expunge.data.digest import add_batch
from expunge.errors import ExpungeError
from expunge.requests.canonical import canonical, digest
from expunge.requests.prepared import Prepared
from expunge.requests.receipt import this_code
from expunge.requests.settings import CHOOSE, described
from expunge.requests.weights import digest_of, shared_names, weights_of
from expunge.runtime.modes import seeded
from expunge.storage.codec import encode
from expunge.storage.files import write_bytes
from expunge.storage.folders import Reserved, remove

KEY, TRAININGS, AUDIT = "key", "trainings", "audit"
SPREAD = 64  # rows that are compared: not all data have a digest
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function, in the repr of a method; the task file's digest is in the key too


@contextmanager
def working(place: Reserved, key: str) -> Iterator[Path]:
    """The private folder of a request; what another request left there is removed.

    It is removed at the end, and where the request cannot be carried out. It stays where the process ends within, or the machine fails.
    """
    folder = place.work
    if _read(folder / KEY) != key:
        remove(folder)
    ends = False
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        write_bytes(folder / KEY, key.encode())
        yield folder
        ends = True
    except ExpungeError:
        ends = True
        raise
    finally:
        if ends or not is_begun(folder):
            remove(folder)


def kept_trainings(folder: Path, prepared: Prepared, key: str) -> AbstractContextManager[None]:
    """Keep the trainings within; not where a loader draws by a generator of its own, whose state nobody keeps."""
    train = prepared.task.train
    if isinstance(train, DataLoader) and train.generator is not None:
        return nullcontext()
    return training.kept(folder / TRAININGS, of=key)


def is_begun(folder: Path) -> bool:
    return any((folder / part).is_dir() for part in (TRAININGS, AUDIT))


def key_of(prepared: Prepared) -> str:
    """A digest of all that fixes the new weights: weights, samples, settings, task, data, code and machine."""
    settings, device = prepared.settings, prepared.device
    threads = settings.threads or torch.get_num_threads()
    method = described(prepared.method)
    parts = {
        "weights": digest_of(weights_of(prepared.model, prepared.stored), shared_names(prepared.model)),
        "frozen": prepared.frozen,
        "rows": " ".join(map(str, prepared.rows)),
        "settings": encode(settings),
        "method": {name: ADDRESS.sub("", str(value)) for name, value in method.items()},
        "file": _own_method(settings.method or CHOOSE),
        "task": [prepared.task.digest, *sorted(prepared.task.sources.items())],
        "samples": _samples(prepared),
        "code": encode(this_code(device, threads)),
    }
    return digest(canonical(parts))


def _samples(prepared: Prepared) -> str:
    """Of some rows all over the data, as they are read; trainings compare all data that have a digest."""
    count = prepared.task.rows.samples
    rows = torch.linspace(0, count - 1, min(SPREAD, count), dtype=torch.float64).round().long().unique()
    total = hashlib.sha256(str(count).encode())
    with seeded(0, torch.device("cpu")):
        for batch in as_batches(prepared.task.rows.at(rows, True), "train"):
            add_batch(total, batch)
    return total.hexdigest()


def _own_method(name: str) -> str | None:
    """Of the file of a method of one's own."""
    path = Path(name.rpartition(":")[0])
    return digest(path.read_bytes()) if path.is_file() else None


def _read(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return None
