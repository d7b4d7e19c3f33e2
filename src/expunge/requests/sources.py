"""Find the files that a task file imports from its own folder, so that a receipt can cover them."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import all_suffixes
from pathlib import Path

from expunge.requests.canonical import digest

INITIAL = "__init__"
_RUN: dict[Path, str] = {}  # files that were imported by a task of this process, with their digests then


def imported_files(file: Path) -> dict[str, str]:
    """SHA-256 of every file that a Python file imports from the folder it is in, itself or through others, by its path there.

    Read from the import statements, wherever they stand, and from `import_module("name")`: the same files whatever has been run. A name
    under which this process has a module from elsewhere is that module, as in Python.
    """
    folder, waiting = file.parent, [file]
    seen: dict[Path, str] = {}
    while waiting:
        source = waiting.pop()
        content = source.read_bytes()
        seen[source] = digest(content)
        if source.suffix == ".py":
            package = source.parent.relative_to(folder).parts
            names = sorted({name for name in _imports(content, package)})
            waiting += [path for name in names for path in _files(name, folder) if path not in seen and path not in waiting]
    return {path.relative_to(folder).as_posix(): seen[path] for path in sorted(seen) if path != file}


def method_file(method: str | None) -> dict[str, str]:
    """The same for a method of one's own that is named by its file, path/to/file.py:Class."""
    path = (method or "").rpartition(":")[0]
    return {str(method): digest(Path(path).read_bytes())} if path.endswith(".py") else {}


def import_anew(folder: Path, sources: Mapping[str, str]) -> None:
    """Where one of these files was changed since a task of this process imported it: have all of them imported anew."""
    files = {Path(os.path.realpath(folder / name)): expected for name, expected in sources.items()}
    if any(_RUN.get(path, expected) != expected for path, expected in files.items()):
        for name, module in list(sys.modules.items()):
            if (file := getattr(module, "__file__", None)) is not None and Path(os.path.realpath(file)) in files:
                del sys.modules[name]
    _RUN.update(files)


def _imports(content: bytes, package: tuple[str, ...]) -> Iterator[str]:
    """The modules that a file may import, by their names from the folder on; `from a import b` may be a module a.b."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # told when it is run
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level > len(package) + 1:
                continue
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            yield from (part.value for part in node.args[:1] if isinstance(part, ast.Constant) and isinstance(part.value, str))


def _files(name: str, folder: Path) -> Iterator[Path]:
    """The files that Python runs for `import name` with this folder first: those of the packages above, and its own."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts) or _is_elsewhere(parts[0], folder):
        return
    for end in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:end])
        initial = _existing(place / INITIAL)
        own = initial or _existing(place)
        if own is not None:
            yield own
        if initial is None and (own is not None or not place.is_dir()):
            return


def _existing(stem: Path) -> Path | None:
    return next((path for suffix in all_suffixes() if (path := stem.with_name(stem.name + suffix)).is_file()), None)


def _is_elsewhere(name: str, folder: Path) -> bool:
    if name == "expunge" or name in sys.builtin_module_names:  # our own is in the receipt as the code
        return True
    module = sys.modules.get(name)
    if module is None:
        return False
    places = [module.__file__] if getattr(module, "__file__", None) else list(getattr(module, "__path__", ()))
    return not any(Path(os.path.realpath(place)).is_relative_to(folder) for place in places if place)
