"""Check the documents: every block of Python runs and prints what the page shows, every example runs, every link leads somewhere."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

import expunge

ROOT = Path(__file__).parents[1]
STARTS = ("README.md", "docs/how-to.md", "docs/losses.md", "docs/comparing.md", "docs/write-a-method.md", "docs/fisher.md")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)  # code, and the output shown below it
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def named(paths: list[Path]) -> dict[str, Path]:
    return {str(path.relative_to(ROOT)): path for path in paths}


@pytest.mark.parametrize("page", [name for name, path in named(PAGES).items() if BLOCK.search(path.read_text())])
def test_blocks_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text()
    namespace: dict[str, object] = {"__name__": page}
    with torch.random.fork_rng([]):
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start(1))
            printed = io.StringIO()
            with redirect_stdout(printed):
                # Empty lines in front, so that an error shows the line of the page.
                exec(compile("\n" * line + block[1], str(ROOT / page), "exec", dont_inherit=True), namespace)
            if block[2] is not None:
                assert_same_output(printed.getvalue(), block[2])


def assert_same_output(printed: str, shown: str) -> None:
    """The same words; percentages within 5 points and whole numbers within 0.1 %, as rounding moves them; seconds and scores are free."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), printed
    for ours, theirs in zip(NUMBER.finditer(printed), NUMBER.finditer(shown), strict=True):
        number, expected = (float(match[0].replace(",", "")) for match in (ours, theirs))
        if printed[ours.end() :].startswith(" %"):
            assert abs(number - expected) <= 5, printed
        elif "." not in theirs[0]:
            assert abs(number - expected) <= 0.001 * expected, printed


def test_outputs_that_differ_are_noticed():
    shown = "1,000 weights, 0.10 s, remain  97.5 %"
    assert_same_output("1,001 weights, 7.31 s, remain 98.0 %", shown)
    for printed in (
        "1,002 weights, 0.10 s, remain 97.5 %",
        "1,000 weights, 0.10 s, remain 57.5 %",
        "1,000 weights, 0.10 s, forget 97.5 %",
        "",
    ):
        with pytest.raises(AssertionError):
            assert_same_output(printed, shown)


@pytest.mark.parametrize("page", STARTS)
def test_pages_that_people_start_from_show_what_is_printed(page):
    assert next(block for block in BLOCK.finditer((ROOT / page).read_text()) if "print(" in block[1])[2], "show the output below the code"


def test_the_readmes_example_can_be_undone():
    namespace: dict = {}
    with torch.random.fork_rng([]):
        exec(next(match[1] for match in BLOCK.finditer((ROOT / "README.md").read_text()) if "unlearn" in match[1]), namespace)
    namespace["patch"].revert(namespace["new_model"])
    before, after = (namespace[name].state_dict() for name in ("model", "new_model"))
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("example", named(EXAMPLES))
@pytest.mark.slow
def test_examples_run(example, tmp_path):
    path = os.pathsep.join([str(Path(expunge.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(ROOT / example)]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", named(PAGES))
def test_links_resolve(page):
    for target in LINK.findall((ROOT / page).read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_every_method_and_every_page_can_be_found():
    methods, index = ((ROOT / "docs" / name).read_text() for name in ("methods.md", "index.md"))
    assert all(f"`{method.__name__}`" in methods for method in expunge.METHODS.values())
    assert all(f"({path.name})" in index for path in (ROOT / "docs").glob("*.md") if path.name != "index.md")
    assert "docs/index.md" in (ROOT / "README.md").read_text()


def test_the_readme_is_for_two_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
