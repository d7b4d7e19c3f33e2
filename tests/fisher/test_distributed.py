"""Real processes: each takes its share of the batches, and all hold the sums of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from expunge.fisher import FisherSums, diagonal
from tests import processes, reference

SCRIPT = """
import torch
import torch.distributed as distributed
from torch import nn

from expunge.errors import MismatchError
from expunge.fisher import diagonal

torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank, size = distributed.get_rank(), distributed.get_world_size()
weights, batches = torch.load("case.pt", weights_only=True)
for task in ("add", "weights", "order"):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    model.load_state_dict(weights)
    if task == "add":
        diagonal(model, batches[rank::size]).all_reduce().save(f"sums-{rank}.safetensors")
        continue
    if task == "weights" and rank == 1:
        model[0].weight.data += 1
    names = ["0.weight", "0.bias"] if task == "order" and rank == 1 else ["0.bias", "0.weight"]
    try:
        diagonal(model, batches[rank::size], parameters=names).all_reduce()
    except MismatchError as error:
        print(error)
"""


STOPPING = """
import sys, time
import torch
import torch.distributed as distributed
from torch import nn

from expunge.fisher import diagonal
from expunge.runtime.processes import MissingProcessError

distributed.init_process_group("gloo")
torch.manual_seed(0)
sums = diagonal(nn.Linear(4, 3), [(torch.ones(2, 4), torch.tensor([0, 1]))])
if distributed.get_rank():  # it has come, and stops afterwards
    distributed.all_reduce = lambda tensor: time.sleep(4 if sys.argv[1] == "hangs" else 0)
began = time.monotonic()
try:
    sums.all_reduce(patience=1.5)
except MissingProcessError as error:
    print(error, time.monotonic() - began < 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how, told", [("hangs", "another process does not answer"), ("ends", "another process has ended")])
def test_a_process_that_stops_while_sums_are_added_up_is_told(how, told, tmp_path):
    first, second = processes.printed(processes.start(STOPPING, tmp_path, 2, how))
    assert first.startswith(f"{told}; this one cannot go on") and first.endswith(" True\n") and not second


def case(folder: Path) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        batches = [(torch.randn(size, 6, dtype=torch.float64), torch.randint(0, 3, (size,))) for size in (4, 7, 5, 3, 6)]
    torch.save((model.state_dict(), batches), folder / "case.pt")
    return model, batches


@pytest.mark.slow
def test_two_processes_hold_the_sums_of_one_and_refuse_what_does_not_belong_together(tmp_path):
    model, batches = case(tmp_path)
    outputs = processes.printed(processes.start(SCRIPT, tmp_path, 2))
    alone = diagonal(model, batches)
    for rank in (0, 1):
        together = FisherSums.load(tmp_path / f"sums-{rank}.safetensors")
        assert together.count == alone.count == 25 and together.digest == alone.digest
        assert reference.worst_error(together.sums, alone.sums) <= 1e-12
        weights, order = outputs[rank].splitlines()
        assert "all processes must have the same weights; found" in weights and "on rank 1" in weights
        assert "all processes must have the same parameters; found [('0.bias'" in order
