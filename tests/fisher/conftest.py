"""Every test is the first in its process: passes that others made are not known."""

import pytest

from expunge.fisher import familiar, queueing


@pytest.fixture(autouse=True)
def unfamiliar():
    familiar.forget()
    queueing.forget()
