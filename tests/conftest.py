"""Tests work on tensors so small that a second thread only costs; `--method` puts a method of one's own through the conformance suite."""

import torch

torch.set_num_threads(1)


def pytest_addoption(parser):
    what = "package.module:Class or path/to/file.py:Class: tests/methods/test_conformance.py of this method alone"
    parser.addoption("--method", metavar="PATH", help=what)


def pytest_configure(config):
    if config.getoption("--method"):
        from tests.methods import cases

        cases.OWN |= cases.own(config.getoption("--method"))
