"""The house: every module is in a room, imports go down the order of the rooms, and the picture in docs/index.md shows them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import expunge

SOURCE = Path(expunge.__file__).parent
INDEX = Path(__file__).parents[1] / "docs" / "index.md"

# From the top of the house to its ground: a room imports from rooms below it, and from no other.
ORDER = (
    "cli",
    "report",
    "experiments",
    "integrations",
    "requests",
    "vision",
    "audit",
    "comparing",
    "unlearning",
    "outcome",
    "methods",
    "metrics",
    "training",
    "curvature",
    "editing",
    "fisher",
    "model",
    "data",
    "runtime",
    "storage",
    "validate",
    "errors",
)


def room(module: str) -> str:
    """The first name below the package: "expunge.data.batches" is in data."""
    return module.split(".")[1]


def imported(text: str) -> set[str]:
    """The rooms that a file imports from, anywhere in it, also inside functions."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name.startswith("expunge.")}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            if node.module == "expunge":
                modules |= {f"expunge.{alias.name}" for alias in node.names if not alias.name.startswith("__")}
            elif (node.module or "").startswith("expunge."):
                modules.add(str(node.module))
    return {room(module) for module in modules}


def doors() -> dict[str, set[str]]:
    """The rooms that each room imports from."""
    found: dict[str, set[str]] = {name: set() for name in ORDER}
    for file in SOURCE.rglob("*.py"):
        own = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own not in ("__init__", "__main__"):
            found[own] |= imported(file.read_text()) - {own}
    return found


def test_every_module_is_in_a_room():
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))}
    assert rooms - {"__init__", "__main__", "__pycache__"} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_down(name):
    above = ORDER[: ORDER.index(name)]
    assert not doors()[name] & set(above), f"{name} must not import from rooms above it"


def test_an_import_upwards_would_be_seen():
    text = "from expunge.data.batches import Batches\ndef late():\n    from expunge import methods\n    import expunge.cli.main\n"
    assert imported(text) == {"data", "methods", "cli"}


def test_the_picture_is_of_this_house():
    """A line per room, in order: its name, then what it is for, then the rooms it imports from."""
    picture = re.search(r"<!-- house:begin -->\n```\n(.*?)```\n<!-- house:end -->", INDEX.read_text(), re.DOTALL)
    assert picture is not None
    drawn = [re.fullmatch(r"(\w+)(?:/|\.py)\s.*?(?:→ (.*))?", line) for line in picture[1].splitlines()]
    assert all(drawn), [line for line, match in zip(picture[1].splitlines(), drawn, strict=True) if match is None]
    shown = {match[1]: set(re.findall(r"\w+", match[2] or "")) for match in drawn if match}
    assert tuple(shown) == ORDER
    assert shown == doors()
