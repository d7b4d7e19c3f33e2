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
