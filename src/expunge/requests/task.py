"""Load a task file: a user's own model and data, as functions of a Python file."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.data import DataLoader, IterableDataset

from expunge.data.batches import Data, as_batches
from expunge.data.columns import as_dataset
from expunge.data.digest import data_digest
from expunge.data.indices import size_of
from expunge.data.objective import Objective
from expunge.data.parting import Cuttable, cuttable
from expunge.data.row_digests import is_of_rows, row_digest
from expunge.errors import InputError
from expunge.requests.sources import import_anew, imported_files
from expunge.requests.user_code import ARGUMENT, user_code
from expunge.requests.weights import frozen_digest
from expunge.runtime.modes import seeded
from expunge.training.tuning import Tuning
from expunge.validate import shown

NEEDED = ("model", "train", "test")
OPTIONAL = ("objective", "validation", "recipe", "keys")
BATCH_SIZE = 128
QUICK = 5.0  # seconds: a train(), or model() with frozen weights, that takes no longer is called twice, at the first request


@dataclass(frozen=True)
class Task:
    """The functions of a task file; each is called once, when it is first needed.

    model()       the network, with any weights: those of the request are loaded into it
    train()       the data it was trained on, in a fixed order: a sample's id is its row. A dataset, (x, y), or a loader of a dataset, whose
                  batch size and collator are kept
    test()        data to measure on; nothing is chosen by them
    objective()   the `Objective`, where the loss is not the cross-entropy of class logits
    validation()  data that the network was never trained on, by which a method may be chosen
    recipe()      the `Tuning` that the network was trained by
    keys()        whose every training sample is, or what it is called: customer numbers, file names; an entry per row
    """

    path: Path
    digest: str  # SHA-256 of the file
    module: ModuleType
    sources: Mapping[str, str]  # SHA-256 of the files that it imports from its folder
    _seconds: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)  # that its functions took

    @cached_property
    def model(self) -> nn.Module:
        model = self._called("model")
        if not isinstance(model, nn.Module):
            raise InputError(ARGUMENT, f"model() of {self.path} must return a torch.nn.Module", shown(model))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_meta or isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                rule = f"model() of {self.path} must return a network with weights, which those of the file replace"
                raise InputError(ARGUMENT, rule, f"{name} {'on the meta device' if tensor.is_meta else 'without a shape (lazy)'}")
        return model

    def fresh(self) -> nn.Module:
        """Another network of model(), with weights of its own where model() draws them."""
        return Task(self.path, self.digest, self.module, self.sources).model

    @cached_property
    def train(self) -> Data:
        return self._data("train")

    @cached_property
    def test(self) -> Data:
        return self._data("test")

    @cached_property
    def validation(self) -> Data | None:
        return self._data("validation") if hasattr(self.module, "validation") else None

    @cached_property
    def objective(self) -> Objective:
        return self._settings("objective", Objective) or Objective()

    @cached_property
    def recipe(self) -> Tuning | None:
        return self._settings("recipe", Tuning)

    @cached_property
    def keys(self) -> list[str]:
        """The key of every training sample, as `plain_key` has it."""
        if not hasattr(self.module, "keys"):
            raise InputError("forget", f"key= needs a function keys() in {self.path}, which returns the key of every training sample")
        keys = self._called("keys")
        try:
            listed = [plain_key(str(key)) for key in (keys.tolist() if hasattr(keys, "tolist") else keys)]
        except TypeError as error:
            raise InputError(
                ARGUMENT, f"keys() of {self.path} must return a list with an entry per training sample", shown(keys)
            ) from error
        if isinstance(keys, str) or len(listed) != self.rows.samples:
            rule = f"keys() of {self.path} must return a list with an entry per training sample, {self.rows.samples}"
            raise InputError(ARGUMENT, rule, len(listed))
        return listed

    @cached_property
    def rows(self) -> Cuttable:
        """The training data by row."""
        data = self.train
        with self._naming("train"):
            rows = cuttable(data, "train", BATCH_SIZE)
        rule = f"train() of {self.path} must return a dataset of at least 2 samples, (x, y), or a loader that reads every row of one once"
        if rows is None or rows.samples != size_of(self.dataset) or rows.samples < 2:
            raise InputError(ARGUMENT, rule, shown(self.train))
        return rows

    @cached_property
    def data(self) -> str | None:
        """The training data by a digest, of their tensors or else of some samples; None where reading them twice gives other targets."""
        with self._naming("train"):
            return data_digest(as_dataset(self.train, "train")) or self._row_digest

    @cached_property
    def _row_digest(self) -> str | None:
        return row_digest(self.rows, self.objective.targets, "train")

    def is_data(self, known: str | None) -> bool:
        """Whether a digest that was noted before is of these data; that of (x, y) was by some samples in earlier versions."""
        return known == self.data or (known is not None and is_of_rows(known) and known == self._row_digest)

    @cached_property
    def test_data(self) -> str | None:
        """The test data by a digest of their tensors; None where they show none."""
        return data_digest(as_dataset(self.test, "test"))

    def check_order(self) -> None:
        """Raise where train() returns other samples, or another order, when it is called again. Not where that takes long."""
        again = Task(self.path, self.digest, self.module, self.sources)
        if self.data is None or self._seconds["train"] > QUICK or again.data in (self.data, None):
            return
        rule = f"train() of {self.path} must return the same samples in the same order each time, since a sample's id is its row"
        raise InputError(ARGUMENT, f"{rule}: sort what is listed, and seed generators of your own", "another order in a second call")

    def check_frozen(self, stored: Collection[str]) -> None:
        """Raise where model() gives other values, when it is called again, to what a file leaves out. Not where that takes long."""
        known = frozen_digest(self.model, stored)
        if known is None or self._seconds["model"] > QUICK or frozen_digest(self.fresh(), stored) == known:
            return
        rule = f"model() of {self.path} must give what the file of weights leaves out, as it is frozen, the same values each time"
        raise InputError(ARGUMENT, f"{rule}: read them from a file, or seed what it draws", "other values in a second call")

    @property
    def dataset(self) -> Any:
        """What the training samples are read from, one by one."""
        source = as_batches(self.train, "train").source
        return source.dataset if isinstance(source, DataLoader) else source

    def predicate(self, name: str) -> Callable[[Any], Any]:
        """A function of the file that takes a sample."""
        function = getattr(self.module, name, None)
        if not callable(function) or isinstance(function, type):
            raise InputError(
                "forget", f"predicate={name}: {self.path} must have a function of this name, which takes a sample", shown(function)
            )
        return function

    def _data(self, name: str) -> Data:
        data = self._called(name)
        rule = f"{name}() of {self.path} must return a dataset, a loader of one, or all samples at once as (x, y)"
        dataset = data.dataset if isinstance(data, DataLoader) else as_dataset(data, name)
        if isinstance(data, (str, bytes, Tensor, Iterator)) or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise InputError(ARGUMENT, rule, shown(data))
        if not size_of(dataset):
            raise InputError(ARGUMENT, f"{rule}, with a length of at least 1", shown(data))
        with self._naming(name):
            as_batches(data, name, BATCH_SIZE)
        return data

    def _settings(self, name: str, kind: type) -> Any:
        if not hasattr(self.module, name):
            return None
        value = self._called(name)
        if not isinstance(value, kind):
            raise InputError(ARGUMENT, f"{name}() of {self.path} must return an expunge.{kind.__name__}", shown(value))
        return value

    def _called(self, name: str) -> Any:
        """What a function of the file returns. All but model() draw the same random numbers in every process, at every call."""
        drawing = nullcontext() if name == "model" else seeded(0, torch.device("cpu"))
        began = time.monotonic()
        with user_code(f"{name}() of {self.path}", self.path), drawing:
            value = getattr(self.module, name)()
        self._seconds[name] = time.monotonic() - began
        return value

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """An error about data names the function that they come from."""
        try:
            yield
        except InputError as error:
            raise InputError(ARGUMENT, f"{name}() of {self.path}: {error.rule}", error.found) from error


def plain_key(key: str) -> str:
    """Without blanks around it, and with accents as one character (NFC): two spellings that nobody can tell apart are one person's."""
    return unicodedata.normalize("NFC", key.strip())


def load_task(path: str | os.PathLike[str]) -> Task:
    """Run a task file and check the names it has; its functions are called later. Files beside it can be imported by it."""
    file = Path(os.path.realpath(path))
    if file.suffix != ".py" or not file.is_file():
        rule = f"must be a Python file{'' if file.exists() else '; there is no such file'}"
        raise InputError(ARGUMENT, rule, os.fspath(path))
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    sources = imported_files(file)
    import_anew(file.parent, sources)
    name = f"expunge_task_{hashlib.sha256(os.fsencode(file) + content + repr(sources).encode()).hexdigest()[:16]}"
    module = sys.modules.get(name) or _executed(name, file, Path(path))
    functions = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    if missing := [key for key in NEEDED if key not in functions]:
        alike = [key for key in functions if inspect.isfunction(functions[key]) and functions[key].__module__ == name]
        needed, optional = (", ".join(f"{key}()" for key in keys) for keys in (NEEDED, OPTIONAL))
        rule = f"{path} must have the functions {needed}, and may have {optional}"
        raise InputError(ARGUMENT, f"{rule}; there is no {missing[0]}()", f"the functions {', '.join(alike) or 'none'}")
    for key in (*NEEDED, *OPTIONAL):
        if key in functions:
            _check_function(key, functions[key], Path(path))
    return Task(Path(path), digest, module, sources)


def _executed(name: str, file: Path, shown_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # a name that ends with .py has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses, and the workers of loaders, look it up
    if os.fspath(file.parent) not in sys.path:
        sys.path.insert(0, os.fspath(file.parent))
    try:
        with user_code(f"importing {shown_path}", shown_path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_function(key: str, function: Any, path: Path) -> None:
    if not callable(function) or isinstance(function, nn.Module):
        raise InputError(ARGUMENT, f"{key} of {path} must be a function without arguments", shown(function))
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(ARGUMENT, f"{key}() of {path} must be callable without arguments", str(error)) from error
    except ValueError:  # a builtin that does not tell
        return
