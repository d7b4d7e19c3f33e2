"""Find the class of a method by name: a key of METHODS, or the import path of your own class.

`package.module:Class` is imported as `python -m` would, with the working directory first; `path/to/file.py:Class` is a file, a relative
path being one from the working directory. The path as written (a file's in its shortest form) is the method's name in cells and results,
so a digest depends neither on the machine nor on the working directory.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import posixpath
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from expunge.errors import InputError
from expunge.methods import METHODS
from expunge.methods.readings import readings
from expunge.training.tuning import Tuning
from expunge.validate import shown

FORMS = "package.module:Class or path/to/file.py:Class"
ARGUMENT = "methods"


def is_path(name: str) -> bool:
    """Whether a name is an import path; keys of METHODS have no colon."""
    return ":" in name and name not in METHODS


def canonical(name: str) -> str:
    """The name as it stands in cells: a file's path in its shortest form, with slashes; anything else as it is."""
    module, _, kind = name.rpartition(":")
    return f"{posixpath.normpath(module.replace(os.sep, '/'))}:{kind}" if is_path(name) and module.endswith(".py") else name


def class_name(name: str) -> str:
    """What a method is called in tables; the class need not be importable."""
    if name in METHODS:
        return METHODS[name].__name__
    kind = name.rpartition(":")[2]
    return name if kind in {known.__name__ for known in METHODS.values()} else kind


def distinct_labels(names: Iterable[str], short: Callable[[str], str] = class_name) -> dict[str, str]:
    """A short label for every name; the name itself where two would share a label."""
    labels = {name: short(name) for name in names}
    taken = list(labels.values())
    return {name: label if not is_path(name) or taken.count(label) == 1 else name for name, label in labels.items()}


def method_class(name: str) -> type:
    """The class of a method. Raises `InputError` where there is none, or where it is not a method."""
    if name in METHODS:
        return METHODS[name]
    module, _, kind = name.rpartition(":")
    if not module or not kind.isidentifier():
        raise InputError(ARGUMENT, f"must be one of {', '.join(METHODS)}, or {FORMS}", name)
    loaded = _file(name, module) if module.endswith(".py") else _module(name, module)
    if not hasattr(loaded, kind):
        raise InputError(ARGUMENT, f"{module} must have a class {kind}", name)
    method = getattr(loaded, kind)
    if not isinstance(method, type):
        raise InputError(ARGUMENT, f"{name} must be a class", shown(method))
    _check(name, method)
    return method


def default_tuning(build: Callable[..., Any]) -> Tuning | None:
    """The default `Tuning` of a reading of a method; None where it has none."""
    parameter = inspect.signature(build).parameters.get("tuning")
    if parameter is None:
        return None
    known = parameter.default is None or isinstance(parameter.default, Tuning)
    return parameter.default if known else build().tuning  # a dataclass's default_factory


def _module(name: str, module: str) -> ModuleType:
    if module == "__main__" or not all(part.isidentifier() for part in module.split(".")):
        rule = f"must be {FORMS}, which other processes can import too"
        raise InputError(ARGUMENT, rule, name)
    _working_directory_first()
    importlib.invalidate_caches()  # the file may be a second old
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            rule = f"there is no module {error.name}: it must be installed, or in the working directory, {os.getcwd()}"
            raise InputError(ARGUMENT, rule, name) from error
        raise _raised(name, error) from error
    except (Exception, SystemExit) as error:
        raise _raised(name, error) from error


def _file(name: str, file: str) -> ModuleType:
    """Load a file once per process, under a name of its own: two files may have the same."""
    path = os.path.realpath(file)
    key = f"expunge_method_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    if key in sys.modules:
        return sys.modules[key]
    if not os.path.isfile(path):
        raise InputError(ARGUMENT, f"there is no file {path}", name)
    _working_directory_first()
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None  # a name that ends with .py has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # where dataclasses look up annotations
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[key]
        if isinstance(error, Exception | SystemExit):
            raise _raised(name, error) from error
        raise
    return module


def _working_directory_first() -> None:
    """As `python -m` has it; the script `expunge` has its own folder there."""
    here = os.getcwd()
    if not {"", here} & {*sys.path}:
        sys.path.insert(0, here)


def _raised(name: str, error: BaseException) -> InputError:
    if isinstance(error, SyntaxError):
        place = f"{error.filename}, line {error.lineno}"
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}, line {last.lineno}"
    return InputError(ARGUMENT, f"importing {name} must not raise", f"{_line(error)} ({place})")


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@lru_cache  # once per class, since every reading is built
def _check(name: str, method: type) -> None:
    """Require a class that experiments can build without arguments and call as `unlearn` does."""
    if not is_dataclass(method) or not method.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise InputError(ARGUMENT, f"{name} must be a frozen dataclass: write @dataclass(frozen=True) above it")
    call = next((vars(base)["__call__"] for base in method.__mro__ if "__call__" in vars(base)), None)
    try:
        inspect.signature(call).bind("self", "model", "forget", "remain", "run")  # type: ignore[arg-type]
    except (TypeError, ValueError):
        rule = f"{name} must be callable as a method is: def __call__(self, model, forget, remain, run)"
        raise InputError(ARGUMENT, rule) from None
    revision = getattr(method, "revision", None)
    if isinstance(revision, bool) or not isinstance(revision, int | str | None):
        raise InputError(ARGUMENT, f"{name}: revision must be a whole number or a text", shown(revision))
    for reading, build in readings(method).items():
        try:
            tuning = getattr(build(), "tuning", None)
        except Exception as error:
            rule = f"{name} must be built without arguments ({reading}): every setting needs a default"
            raise InputError(ARGUMENT, rule, _line(error)) from error
        if tuning is not None and not isinstance(tuning, Tuning):
            raise InputError(ARGUMENT, f"{name}: tuning must be a Tuning, or None for no training", shown(tuning))
