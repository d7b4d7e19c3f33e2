"""Hold what `unlearn` returns: show it in a few lines, save it to a folder, load it again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from expunge.editing.patches import Patch, own_tensors
from expunge.errors import InputError, MismatchError
from expunge.methods import Choice, Method
from expunge.model.checks import check_module
from expunge.model.copying import copied
from expunge.runtime.display import counted, first_rows, html_table, shortened, text_table
from expunge.storage.codec import Amount, Count, Share, decode, encode
from expunge.storage.documents import excerpt, read_json
from expunge.storage.files import write_json
from expunge.storage.folders import RESULT, reserved, signature
from expunge.storage.tensors import load_tensors, save_tensors, weights_digest

COMMAND = "unlearn"  # in result.json: what made the folder
WEIGHTS = "weights.safetensors"
KEPT_OUT = "not in state_dict/"  # begins the names of buffers that are not persistent


@dataclass(frozen=True)
class Record:
    """The model after an epoch (None: the caller's, before anything; 0: after the edit, before any training); accuracies are fractions.

    Plain types: `json.dumps(dataclasses.asdict(record))` writes it.
    """

    epoch: Count | None
    accuracies: Mapping[str, Share]
    unlearn_score: Share | None
    seconds: Amount  # of work so far, without measuring accuracies


@dataclass(frozen=True)
class Outcome:
    """The new model, everything that was changed in it, and the records of every epoch.

    `history` begins with the record of the caller's model; `epochs` skips it. `patch.revert(outcome.model)` restores the original weights
    and buffers, bit for bit, after every method. `patch` is None only where a method replaced the model's parameters by others. `edit` is
    what the method set before any training (masked weights, noise, a Newton step), None where it only trains. `choice` tells which method
    was chosen and why, None where the caller named one.
    """

    model: nn.Module
    patch: Patch | None
    history: list[Record]
    seconds: float
    method: Method | str  # its repr where the outcome was loaded
    edit: Patch | None = None
    choice: Choice | None = None

    @property
    def epochs(self) -> list[Record]:
        """The records from epoch 0 on."""
        return [record for record in self.history if record.epoch is not None]

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the weights, the patches and the records into a folder, whole or not at all; an earlier outcome there is replaced.

        `weights.safetensors`, `patch.safetensors`, `edit.safetensors` (those that are not None) and `result.json`, with the method's repr.
        """
        patches = {f"{name}.safetensors": patch for name, patch in (("patch", self.patch), ("edit", self.edit)) if patch is not None}
        result = signature(COMMAND, [WEIGHTS, *patches]) | {
            "method": self.method if isinstance(self.method, str) else repr(self.method),
            "seconds": self.seconds,
            "watched": list(self.history[0].accuracies) if self.history else [],
            "history": [asdict(record) for record in self.history],
            "weights": weights_digest(self.model),
            "choice": encode(self.choice),
        }

        def write(new: Path) -> None:
            save_weights(new / WEIGHTS, self.model)
            for name, patch in patches.items():
                patch.save(new / name)
            write_json(new / RESULT, result)

        with reserved("folder", folder, COMMAND) as place:
            return place.save(write)

    def __repr__(self) -> str:
        watched = ", ".join(f"{name} {' → '.join(accuracies)}" for name, *accuracies in self._rows()[1:])
        return f"Outcome({self._title()}, {watched or 'nothing watched'})"

    def __str__(self) -> str:
        table = text_table(self._title(), self._rows())
        return table if self.choice is None else "\n".join([table, *self.choice.lines()])

    def _repr_html_(self) -> str:
        title = self._title() if self.choice is None else " ".join([f"{self._title()};", *self.choice.lines()])
        return html_table(title, self._rows())

    def _title(self) -> str:
        name = self.method.partition("(")[0] if isinstance(self.method, str) else type(self.method).__name__
        epochs = counted(self.history[-1].epoch or 0 if self.history else 0, "epoch")
        seconds = f"{self.seconds:.2f} s" if self.seconds < 100 else f"{self.seconds:,.0f} s"
        return f"{shortened(name)}: {epochs}, {seconds}, {self._changed()}"

    def _changed(self) -> str:
        if self.patch is None:
            return "other parameters than before"
        parameters = dict(self.model.named_parameters())
        number = sum(len(edit.indices) for name, edit in self.patch.edits.items() if name in parameters)
        return f"{number:,} of {counted(sum(parameter.numel() for parameter in parameters.values()), 'weight')} changed"

    def _rows(self) -> list[Sequence[str]]:
        """The watched accuracies: before, after the edit, and at the end."""
        if not self.history or not self.history[0].accuracies:
            return []
        ends = [*(record for record in self.history if not record.epoch), self.history[-1]]
        records = {record.epoch: record for record in ends}.values()
        head = ("accuracy", *("before" if record.epoch is None else f"epoch {record.epoch}" for record in records))
        return first_rows([head, *((name, *(_percent(record, name) for record in records)) for name in self.history[0].accuracies)])


def load_outcome(folder: str | os.PathLike[str], model: nn.Module) -> Outcome:
    """The outcome that `Outcome.save` wrote, with a copy of `model` that has its weights.

    `model` is the original, or any network of the same form; it stays as it is. `method` is the repr of the saved one. Raises where a file
    was cut, changed or is something else.
    """
    check_module(model)
    path = Path(folder)
    try:
        saved = decode(_Saved, read_json(path / RESULT), "the content")
        history = saved.records()
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            "folder", f"must hold the result.json of an outcome that was saved ({excerpt(error)})", os.fspath(folder)
        ) from error
    changed = copied(model)
    if load_weights(path / WEIGHTS, changed) != saved.weights:
        raise MismatchError(f"{path / WEIGHTS} does not hold the weights that its {RESULT} tells of")
    patches = {name: Patch.load(path / f"{name}.safetensors") for name in ("patch", "edit") if f"{name}.safetensors" in saved.files}
    for patch in patches.values():
        patch.mask(changed)  # refused where it is for a model of another form
    return Outcome(changed, patches.get("patch"), history, saved.seconds, saved.method, patches.get("edit"), saved.choice)


@dataclass(frozen=True)
class _Saved:
    """The content of result.json."""

    command: Literal["unlearn"]
    files: tuple[str, ...]
    method: str
    seconds: Amount
    watched: tuple[str, ...]
    history: tuple[Record, ...]
    weights: str
    choice: Choice | None = None

    def records(self) -> list[Record]:
        """With the watched data in their order, which JSON does not keep; not all are measured after every epoch."""
        if not all(record.accuracies.keys() <= {*self.watched} for record in self.history):
            raise ValueError("accuracies must be of the data watched")
        return [
            replace(record, accuracies={name: record.accuracies[name] for name in self.watched if name in record.accuracies})
            for record in self.history
        ]


def _percent(record: Record, name: str) -> str:
    return f"{100 * record.accuracies[name]:.1f} %" if name in record.accuracies else ""


def save_weights(path: Path, model: nn.Module) -> Path:
    """Save all parameters and buffers, shared ones once."""
    kept_out, stored = _not_persistent(model), {}
    storages: set[int] = set()
    for name, tensor in own_tensors(model).items():
        storage = tensor.untyped_storage().data_ptr()
        # safetensors takes no two views of one memory.
        stored[KEPT_OUT + name if name in kept_out else name] = tensor.detach().clone() if storage in storages else tensor
        storages.add(storage)
    return save_tensors(path, stored, {"kind": "weights", "digest": weights_digest(model)})


def load_weights(path: Path, model: nn.Module) -> str | None:
    """Load the weights of a file into a model, in place, and return their digest; raise before any change where one does not fit.

    Buffers that are not persistent (caches) are set where the model has them in the same form.
    """
    stored, metadata = load_tensors(path, "weights")
    kept_out, tensors = _not_persistent(model), own_tensors(model)
    caches = {name.removeprefix(KEPT_OUT): stored.pop(name) for name in [*stored] if name.startswith(KEPT_OUT)}
    wanted = tensors.keys() - kept_out
    if strange := sorted(wanted ^ stored.keys()):
        raise MismatchError(f"{path} and the model must have the same weights; only one of them has {excerpt(', '.join(strange))}")
    for name in wanted:
        if _form(stored[name]) != _form(tensors[name]):
            raise MismatchError(f"{path} holds {name} of {_form(stored[name])}; the model has it of {_form(tensors[name])}")
    same = {name: value for name, value in caches.items() if name in kept_out and _form(value) == _form(tensors[name])}
    with torch.no_grad():
        for name, value in (stored | same).items():
            tensors[name].copy_(value)
    return metadata.get("digest")


def _not_persistent(model: nn.Module) -> set[str]:
    """The buffers that are not in a state_dict."""
    modules = model.named_modules()
    return {f"{path}.{name}".lstrip(".") for path, module in modules for name in module._non_persistent_buffers_set}


def _form(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype
