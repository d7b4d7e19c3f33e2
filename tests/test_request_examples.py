"""The task files among the examples: each trains something small and serves a request on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import expunge
from expunge.requests.folder import misfits

EXAMPLES = Path(__file__).parents[1] / "examples" / "requests"
NAMES = ("pictures", "vit", "bert", "lora")


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_the_example_serves_a_request(name, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(expunge.__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("forget ")
    assert list(misfits(tmp_path / "requests")) == [] and (tmp_path / "requests" / "receipt.json").exists()
