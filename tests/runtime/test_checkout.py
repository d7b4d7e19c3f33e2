"""Results name the commit they were made from."""

import subprocess
from pathlib import Path

import pytest
import torch

from expunge.experiments.measuring import surroundings
from expunge.runtime import checkout


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A package in a checkout of its own."""
    monkeypatch.delenv(checkout.VARIABLE, raising=False)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    return package


def commit_of(source: Path) -> str:
    checkout._from_git.cache_clear()
    return checkout._from_git(source)


def test_the_commit_and_whether_files_differ(source):
    head = subprocess.run(["git", "-C", str(source), "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert commit_of(source) == head[:12]
    (source.parent / "notes.txt").write_text("beside the package")
    assert commit_of(source) == head[:12]
    (source / "__init__.py").write_text("changed = True\n")
    assert commit_of(source) == f"{head[:12]}+"


def test_a_package_installed_within_another_checkout_has_none(source):
    other = source / "environment" / "expunge"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    assert commit_of(other) == ""


def test_without_git_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) == ""


def test_results_carry_it(monkeypatch):
    monkeypatch.setenv(checkout.VARIABLE, "0123456789ab")
    assert surroundings(torch.device("cpu"))["versions"]["commit"] == "0123456789ab"
    monkeypatch.setattr(checkout, "_from_git", lambda source: "")
    monkeypatch.delenv(checkout.VARIABLE)
    assert "commit" not in surroundings(torch.device("cpu"))["versions"]
