"""Importing needs torch and numpy alone, and every module imports only from its own layer or those below."""

import ast
import subprocess
import sys
from pathlib import Path

import expunge

SOURCE = Path(expunge.__file__).parent

LAYERS = [
    {"errors", "objective", "classes", "artifacts", "outputs", "batches", "contents", "progress", "modes", "schedules", "replays"}
    | {"checkpoints", "lone", "copies", "settings", "endings", "documents", "optimizer_states", "locks", "folders"}
    | {"indices", "samplers", "promises", "fingerprints", "calling", "labels", "columns"},
    {"activations", "channels", "checks", "fisher", "scores", "curvature", "heads", "masks", "patches", "tuning", "together", "metrics"}
    | {"overlap", "records", "stored"},
    {"methods"},
    {"unlearning"},
    {"vision"},
    {"demo", "comparison", "bench"},
    {"demo_report", "comparison_report", "training_report", "report"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# torch, what it depends on, and what it may look for by itself
ALLOWED = (
    "expunge torch torchgen functorch numpy typing_extensions sympy mpmath networkx jinja2 markupsafe fsspec filelock "
    "setuptools nvidia triton"
)

ALONE = f"""
import importlib, importlib.abc, pkgutil, sys
allowed = set("{ALLOWED}".split()) | set(sys.stdlib_module_names)

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"{{name}} is blocked by the test", name=name)

sys.meta_path.insert(0, Blocked())
import expunge
for name in expunge.__all__:
    getattr(expunge, name)
for module in pkgutil.walk_packages(expunge.__path__, "expunge."):
    if not module.name.startswith("expunge.fisher.cuda."):  # they need Triton, and are imported on CUDA alone
        importlib.import_module(module.name)
assert not [name for name in sys.modules if name.startswith("expunge.fisher.cuda.")]
strangers = {{name.partition(".")[0] for name in sys.modules}} - allowed
assert not strangers & {{"rich", "tyro", "matplotlib", "safetensors", "sklearn", "scipy"}}, strangers
"""


def imported(file: Path) -> set[str]:
    """The modules of expunge, by their first name, that a file imports anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("expunge.")}
        elif isinstance(node, ast.ImportFrom) and node.module == "expunge":
            found |= {alias.name for alias in node.names if not alias.name.startswith("__")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("expunge."):
            found.add(str(node.module).split(".")[1])
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{file}: imports are absolute"
    return found


def test_every_module_has_a_layer():
    modules = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__"} == LEVEL.keys()


def test_imports_go_down():
    for file in SOURCE.rglob("*.py"):
        own = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for other in imported(file):
            assert LEVEL[other] <= LEVEL[own], f"{own} must not import {other}"


def test_public_names_are_the_ones_promised():
    assert set(expunge.__all__) == {*expunge._MODULES, *expunge._HOMES}
    assert all(hasattr(expunge, name) for name in expunge.__all__)
    assert set(expunge.__all__) <= set(dir(expunge))
    assert not hasattr(expunge, "nonsense")


def test_everything_is_imported_with_torch_and_numpy_alone():
    finished = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
