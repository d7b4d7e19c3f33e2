"""The conformance suite takes a method of one's own: the page's own ten lines pass it, and one that does nothing does not."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "write-a-method.md"
GRADIENT_MASK = re.search(r"Here is `gradient_mask.py`:\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
IDLE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Idle:
    def __call__(self, model, forget, remain, run):
        pass
"""


def suite(path: Path, kind: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "tests/methods/test_conformance.py", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run([*command, "--method", f"{path}:{kind}"], cwd=ROOT, capture_output=True, text=True)


def test_the_page_shows_a_method_that_passes(tmp_path):
    (tmp_path / "gradient_mask.py").write_text(GRADIENT_MASK)
    finished = suite(tmp_path / "gradient_mask.py", "GradientMask")
    assert finished.returncode == 0, finished.stdout
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed is not None and int(passed[1]) >= 15 and "fisher-mask" not in finished.stdout


def test_what_does_nothing_fails_and_what_is_no_method_is_named(tmp_path):
    (tmp_path / "idle.py").write_text(IDLE)
    finished = suite(tmp_path / "idle.py", "Idle", "-k", "test_the_callers_model_is_untouched or records or history")
    assert finished.returncode == 1 and "test_the_callers_model_is_untouched[" in finished.stdout
    assert not re.search(r"^FAILED .*history", finished.stdout, re.MULTILINE)
    missing = suite(tmp_path / "idle.py", "Missing")
    assert missing.returncode != 0 and "must have a class Missing" in missing.stdout + missing.stderr
