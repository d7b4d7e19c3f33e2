"""The browser, started once; a page with something in every part."""

import os
from pathlib import Path

import pytest

from tests.report import made
from tests.report.browser import Browser, find


@pytest.fixture(scope="session")
def browser():
    if os.environ.get("EXPUNGE_BROWSER") == "none":
        pytest.skip("EXPUNGE_BROWSER is none")
    path = find()
    if path is None:
        pytest.fail("no browser: run tests/browser/install, name one in EXPUNGE_BROWSER, or leave these tests out by EXPUNGE_BROWSER=none")
    with Browser(path) as started:
        yield started


@pytest.fixture(scope="session")
def address(tmp_path_factory) -> str:
    """Of the page, on disk."""
    from expunge.report import write

    folder = made.write(tmp_path_factory.mktemp("results"), made.many())
    return Path(write(folder, folder / "report.html")).as_uri()
