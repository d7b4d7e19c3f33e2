"""Tests work on tensors so small that a second thread only costs; `--method` puts a method of one's own through the conformance suite."""

import pytest
import torch

from expunge.training import keeping

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def every_state(monkeypatch):
    """A training with a file of its own writes a state after every epoch, also where the machine is so busy that it takes long."""
    monkeypatch.setattr(keeping, "LITTLE", float("inf"))


def pytest_addoption(parser):
    what = "package.module:Class or path/to/file.py:Class: tests/methods/test_conformance.py of this method alone"
    parser.addoption("--method", metavar="PATH", help=what)


def pytest_configure(config):
    if config.getoption("--method"):
        from tests.methods import cases

        cases.OWN |= cases.own(config.getoption("--method"))
