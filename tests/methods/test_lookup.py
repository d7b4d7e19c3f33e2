"""Methods by name and by import path: what is found, what it is called, and how each mistake is named."""

import os
import sys

import pytest

from expunge.errors import InputError
from expunge.methods import METHODS, FisherMask
from expunge.methods.lookup import canonical, class_name, default_tuning, distinct_labels, method_class
from expunge.methods.readings import readings
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning

HEAD = """
from __future__ import annotations
from dataclasses import dataclass, field
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
"""
GOOD = f"""{HEAD}
@dataclass(frozen=True)
class Own:
    strength: float = 0.5
    tuning: Tuning = field(default_factory=lambda: Tuning(Constant(0.25, 3)))

    @classmethod
    def as_released(cls, strength: float = 1.0) -> Own:
        return cls(strength, None)

    def __call__(self, model, forget, remain, run):
        run.after_epoch(0)
"""
FROZEN = f"{HEAD}\n@dataclass(frozen=True)\nclass Own:\n    "
CALL = "def __call__(self, model, forget, remain, run): run.after_epoch(0)"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory, and modules that are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if not name.startswith(("expunge.", "torch")):
            del sys.modules[name]


def test_a_name_is_that_of_a_known_method():
    assert method_class("fisher-mask") is FisherMask and class_name("fisher-mask") == "FisherMask"


@pytest.mark.parametrize("file", ["lookup_own.py", "lookup_pack/inner/own.py"])
def test_a_module_in_the_working_directory_and_its_file_are_found(file, here):
    (here / file).parent.mkdir(parents=True, exist_ok=True)
    (here / file).write_text(GOOD)
    module = file.removesuffix(".py").replace("/", ".")
    for name in (f"{module}:Own", f"{file}:Own", f"{here / file}:Own"):
        kind = method_class(name)
        assert kind().strength == 0.5 and [*readings(kind)] == ["text", "released"] and class_name(name) == "Own"
        assert default_tuning(kind) == Tuning(Constant(0.25, 3)) and default_tuning(readings(kind)["released"]) is None
        assert method_class(name) is kind


def test_two_files_of_one_name_are_two_modules(here):
    for folder, strength in (("one", 1.0), ("two", 2.0)):
        (here / folder).mkdir()
        (here / folder / "own.py").write_text(GOOD.replace("0.5", str(strength)))
    assert [method_class(f"{folder}/own.py:Own")().strength for folder in ("one", "two")] == [1.0, 2.0]


def test_a_files_path_is_kept_as_written_in_its_shortest_form():
    assert canonical("./own.py:Own") == canonical("own.py:Own") == "own.py:Own"
    assert canonical("/a/../b/own.py:Own") == "/b/own.py:Own" and canonical(os.path.join("a", "own.py") + ":Own") == "a/own.py:Own"
    assert canonical("package.module:Own") == "package.module:Own" and canonical("fisher-mask") == "fisher-mask"


def test_classes_of_one_name_are_told_apart():
    names = ["fisher-mask", "a:Own", "b.py:Other", "c:Other", "d:FisherMask"]
    assert [*distinct_labels(names).values()] == ["FisherMask", "Own", "b.py:Other", "c:Other", "d:FisherMask"]


MISTAKES = {
    "no method": ("nonsense", "", "must be one of fisher-mask"),
    "no module": ("nowhere.at_all:Own", "", "there is no module nowhere: it must be installed, or in the working directory"),
    "no module in a package": ("expunge.nowhere:Own", "", "there is no module expunge.nowhere"),
    "a package of no package": ("json.decoder.nowhere:Own", "", "there is no module json.decoder.nowhere"),
    "no file": ("nowhere.py:Own", "", "there is no file "),
    "no class": ("mistake.py:Missing", GOOD, "mistake.py must have a class Missing"),
    "an empty class": ("mistake.py:", GOOD, "package.module:Class or path/to/file.py:Class"),
    "an empty module": (":Own", GOOD, "package.module:Class or path/to/file.py:Class"),
    "a relative module": (".mistake:Own", GOOD, "package.module:Class or path/to/file.py:Class"),
    "the program": ("__main__:Own", GOOD, "which other processes can import too"),
    "a reading": ("mistake.py:Own-released", GOOD, "package.module:Class or path/to/file.py:Class"),
    "syntax": ("mistake.py:Own", "class Own:\n  def", "importing mistake.py:Own must not raise; found SyntaxError"),
    "an import that raises": ("mistake.py:Own", "\n1 / 0", "found ZeroDivisionError: division by zero ("),
    "a module that raises": ("lookup_raising:Own", "\n1 / 0", "lookup_raising.py, line 2)"),
    "an import of what is missing": ("mistake.py:Own", "import nowhere", "found ModuleNotFoundError: No module named 'nowhere'"),
    "a long story": ("mistake.py:Own", "raise ValueError('one\\ntwo')", "found ValueError: one two ("),
    "a program that ends": ("mistake.py:Own", "raise SystemExit(0)", "found SystemExit: 0"),
    "a function": ("mistake.py:Own", "def Own(model, forget, remain, run): pass", "mistake.py:Own must be a class; found <function Own"),
    "no dataclass": ("mistake.py:Own", f"class Own:\n    {CALL}", "must be a frozen dataclass"),
    "not frozen": ("mistake.py:Own", f"{HEAD}\n@dataclass\nclass Own:\n    {CALL}", "must be a frozen dataclass"),
    "no call": ("mistake.py:Own", f"{FROZEN}pass", "def __call__(self, model, forget, remain, run)"),
    "another call": (
        "mistake.py:Own",
        f"{FROZEN}def __call__(self, model): pass",
        "def __call__(self, model, forget, remain, run)",
    ),
    "no default": ("mistake.py:Own", f"{FROZEN}rate: float\n    {CALL}", "every setting needs a default"),
    "no default of a reading": ("mistake.py:Own", GOOD.replace("strength: float = 1.0", "strength: float"), "(released): every setting"),
    "another tuning": ("mistake.py:Own", f"{FROZEN}tuning: int = 3\n    {CALL}", "must be a Tuning"),
    "another revision": ("mistake.py:Own", f"{GOOD}\n    revision = [1]", "revision must be a whole number or a text; found [1]"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_on_one_line(mistake, here):
    name, text, rule = MISTAKES[mistake]
    (here / ("lookup_raising.py" if "raising" in name else "mistake.py")).write_text(text)
    for _ in range(2):  # nothing is left of the first
        with pytest.raises(InputError) as refused:
            method_class(name)
        assert rule in str(refused.value) and "\n" not in str(refused.value) and refused.value.argument == "methods"


def test_a_mistake_that_is_mended_is_found(here):
    (here / "mended.py").write_text("1 / 0")
    with pytest.raises(InputError):
        method_class("mended.py:Own")
    (here / "mended.py").write_text(GOOD)
    assert method_class("mended.py:Own").__name__ == "Own"


def test_known_methods_have_no_colon():
    assert not any(":" in name for name in METHODS)
