"""Processes that agree: whoever serves the store may end right afterwards."""

import pytest

from expunge.errors import MismatchError
from expunge.runtime.processes import _compare
from tests import processes


def test_what_differs_is_shown_whole_or_around_the_difference():
    digests, long = ("a" * 64, "b" * 64), "parameter, " * 20
    with pytest.raises(MismatchError, match="same data; found fingerprint a{12} on rank 0 and fingerprint b{12} on rank 1$"):
        _compare([{"data": digest} for digest in digests])
    with pytest.raises(MismatchError, match=r"found \.\.\..{20}first on rank 0 and \.\.\..{20}second on rank 1$"):
        _compare([{"names": long + name} for name in ("first", "second")])
    with pytest.raises(MismatchError, match=r"found none on rank 0 and (parameter, ){9}p\.\.\. on rank 1$"):
        _compare([{}, {"names": long}])


ENDING = """
import os, sys, time
import torch.distributed as distributed
from expunge.runtime import processes

distributed.init_process_group("gloo")
if processes.rank():
    processes.MOMENT = 1.0  # it looks seldom, as on a busy machine
else:
    time.sleep(0.5)
if sys.argv[1] == "agree":
    print(processes.agree(lambda: {"same": "here"}), flush=True)
else:
    print(processes.told_by_first("here" if processes.rank() == 0 else None), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("call, told", [("agree", "{'same': 'here'}"), ("tell", "here")])
def test_the_first_process_may_end_at_once(tmp_path, call, told):
    assert processes.printed(processes.start(ENDING, tmp_path, 2, call)) == [f"{told}\n"] * 2


LATE = """
import sys, time
import torch.distributed as distributed
from expunge.runtime import processes

distributed.init_process_group("gloo")
processes.LINGER = 0.5
if processes.rank():
    time.sleep(4)
for call in ("first", "second"):
    try:
        print(processes.agree(lambda: {"call": call}, 2.0 if call == "first" else 30.0), flush=True)
    except processes.MissingProcessError as error:
        print(error, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_comes_too_late_is_told_and_meets_the_others_at_the_next_call(tmp_path):
    """It took them for processes that go on, and every later call of theirs for another one of its own."""
    first, late = processes.printed(processes.start(LATE, tmp_path, 2))
    told = "rank 1 of 2 processes did not come within 2 seconds"
    assert first == f"{told}\n{{'call': 'second'}}\n"
    assert late == f"rank 0 failed: MissingProcessError: {told}\n{{'call': 'second'}}\n"
