"""Where processes of a test do not end, its error has the stacks of those that hang, and what the one that failed said."""

from __future__ import annotations

import time

import pytest

from tests import processes

ONE_FAILS = """
import os, time
def waiting_for_another():
    time.sleep(100)
if os.environ["RANK"] == "1":
    raise ValueError("no more")
print("begins", flush=True)
waiting_for_another()
"""


@pytest.mark.slow
def test_processes_that_hang_show_where(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "AFTER_FAILURE", 8.0)  # torch is imported before
    started, began = processes.start(ONE_FAILS, tmp_path, 2), time.monotonic()
    with pytest.raises(AssertionError) as raised:
        processes.printed(started)
    told = str(raised.value)
    assert all(part in told for part in ("1 of 2 processes did not end", "begins", "in waiting_for_another", "ValueError: no more")), told
    assert time.monotonic() - began < 60 and all(process.returncode for process in started)
