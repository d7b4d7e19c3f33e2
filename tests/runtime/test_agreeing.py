"""Processes that agree: whoever serves the store may end right afterwards."""

import pytest

from tests import processes

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
