"""Write what was done, with the digests that show it, as a receipt in canonical JSON."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from expunge import __version__
from expunge.errors import InputError
from expunge.requests.canonical import canonical, digest
from expunge.requests.ledger import Entry
from expunge.storage.codec import Count, decode, encode
from expunge.storage.documents import excerpt, parse_json

RECEIPT = "receipt.json"
LIMITS = (
    "It proves the procedure: that this code, with these settings, made these weights out of those for these samples. It does not prove "
    "that nothing of the samples is left in the weights; that is what an audit estimates.",
    "It says nothing of other copies of the weights before: backups, checkpoints, deployments.",
    "The patches in its folder (patch.safetensors, edit.safetensors) lead back to the weights before: while they exist, so do those.",
    "It says nothing of models derived from the weights before: fine-tuned, distilled, merged, quantised.",
    "It says nothing of the samples themselves, and of what was made from them: raw data, caches, features, logs, stored Fisher sums.",
    "It does not prove that the ids are all samples of a person, nor that the training data were those the weights were trained on.",
    "Its time is that of the machine's clock, and without a signature anyone may have written it.",
)


@dataclass(frozen=True)
class Code:
    """What ran, and on what."""

    expunge: str
    source: str  # SHA-256 over the package's Python files
    torch: str
    python: str
    machine: str
    device: str
    threads: Count


@dataclass(frozen=True)
class Receipt:
    """A request, from the weights before to the weights after. Digests are SHA-256 in hexadecimal.

    `forget` are the samples that this request adds; `forgotten` counts those of all requests so far, which the weights are without.
    `mask`: the patch of what was set before any training, None where nothing was. `files`: every file of the folder but this one, the
    ledger, and a signature. `sources`: what the task file imports from its folder, and the file of a method of one's own; None in receipts
    from before these were noted. `data`: digests of train() and test(), and of what is `frozen` where the file of weights leaves it out.
    """

    number: Count
    time: str
    weights_before: str
    weights_after: str
    forget: Count
    commitments: str
    forgotten: Count
    samples: Count
    mask: str | None
    settings: str
    method: str
    data: Mapping[str, str | None]
    task: str
    code: Code
    measured: Mapping[str, Any]
    files: Mapping[str, str]
    previous: str  # of the ledger
    kind: Literal["expunge receipt 1"] = "expunge receipt 1"
    does_not_prove: tuple[str, ...] = LIMITS
    sources: Mapping[str, str] | None = None

    def content(self) -> bytes:
        return canonical({name: value for name, value in encode(self).items() if name != "sources" or value is not None})

    def entry(self) -> Entry:
        """Its line in the ledger."""
        return Entry(
            self.number,
            self.time,
            self.forget,
            self.commitments,
            self.weights_before,
            self.weights_after,
            digest(self.content()),
            self.previous,
        )


def read_receipt(content: bytes, argument: str = RECEIPT) -> Receipt:
    try:
        receipt: Receipt = decode(Receipt, parse_json(content), "the receipt")
        if not {"train", "test"} <= receipt.data.keys():
            raise ValueError("its data are train and test")
    except (ValueError, TypeError) as error:
        raise InputError(argument, f"must be a receipt of `expunge unlearn` ({excerpt(error)})") from error
    if receipt.content() != content:
        raise InputError(argument, "must be in canonical form, as it was written")
    return receipt


def this_code(device: torch.device, threads: int) -> Code:
    return Code(__version__, _source(), torch.__version__, platform.python_version(), _machine(device), str(device), threads)


def _machine(device: torch.device) -> str:
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return f"{sys.platform} {platform.machine()} {kind}"


@cache
def _source() -> str:
    """Over the names and contents of the package's files."""
    package, total = Path(__file__).resolve().parents[1], hashlib.sha256()
    for file in sorted(package.rglob("*.py"), key=lambda path: path.relative_to(package).as_posix()):
        total.update(f"{file.relative_to(package).as_posix()}\0{digest(file.read_bytes())}\0".encode())
    return total.hexdigest()
