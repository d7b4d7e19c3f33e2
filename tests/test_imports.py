"""Importing needs torch and numpy alone; public names are the ones promised."""

import subprocess
import sys

import pytest

import expunge

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
kernels = "expunge.fisher.closed_forms.cuda.", "expunge.training.fused."  # they need Triton, and are imported on CUDA alone
for name in expunge.__all__:
    getattr(expunge, name)
for module in pkgutil.walk_packages(expunge.__path__, "expunge."):
    if not module.name.startswith(kernels):
        importlib.import_module(module.name)
assert not [name for name in sys.modules if name.startswith(kernels)]
strangers = {{name.partition(".")[0] for name in sys.modules}} - allowed
assert not strangers & {{"rich", "tyro", "matplotlib", "safetensors", "sklearn", "scipy"}}, strangers
"""


def test_public_names_are_the_ones_promised():
    assert set(expunge.__all__) == {*expunge._MODULES, *expunge._HOMES}
    assert all(hasattr(expunge, name) for name in expunge.__all__)
    assert set(expunge.__all__) <= set(dir(expunge))
    assert not hasattr(expunge, "nonsense")


@pytest.mark.slow
def test_everything_is_imported_with_torch_and_numpy_alone():
    finished = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
