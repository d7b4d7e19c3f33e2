"""Real processes under torchrun: each takes its share of the batches, and all hold the sums of the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import expunge
from expunge.fisher import FisherSums, diagonal
from tests import reference

SCRIPT = """
import sys
import torch
import torch.distributed as distributed
from torch import nn

from expunge.errors import MismatchError
from expunge.fisher import diagonal

folder, task = sys.argv[1:]
torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank, size = distributed.get_rank(), distributed.get_world_size()
weights, batches = torch.load(f"{folder}/case.pt", weights_only=True)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
model.load_state_dict(weights)
if task == "add":
    diagonal(model, batches[rank::size]).all_reduce().save(f"{folder}/sums-{rank}.safetensors")
else:
    if task == "weights" and rank == 1:
        model[0].weight.data += 1
    names = ["0.weight", "0.bias"] if task == "order" and rank == 1 else ["0.bias", "0.weight"]
    try:
        diagonal(model, batches[rank::size], parameters=names).all_reduce()
    except MismatchError as error:
        open(f"{folder}/refused-{task}-{rank}", "w").write(str(error))
distributed.destroy_process_group()
"""


def launched(folder: Path, *tasks: str) -> None:
    (folder / "share.py").write_text(SCRIPT)
    # The processes find the package where this one found it, installed or not.
    path = os.pathsep.join([str(Path(expunge.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for task in tasks:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "share.py", str(folder), task]
        finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        assert finished.returncode == 0, finished.stderr


def case(folder: Path) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        batches = [(torch.randn(size, 6, dtype=torch.float64), torch.randint(0, 3, (size,))) for size in (4, 7, 5, 3, 6)]
    torch.save((model.state_dict(), batches), folder / "case.pt")
    return model, batches


@pytest.mark.slow
def test_two_processes_hold_the_sums_of_one(tmp_path):
    model, batches = case(tmp_path)
    launched(tmp_path, "add")
    alone = diagonal(model, batches)
    for rank in (0, 1):
        together = FisherSums.load(tmp_path / f"sums-{rank}.safetensors")
        assert together.count == alone.count == 25 and together.digest == alone.digest
        assert reference.worst_error(together.sums, alone.sums) <= 1e-12


@pytest.mark.slow
def test_processes_with_different_weights_or_orders_are_refused_everywhere(tmp_path):
    case(tmp_path)
    launched(tmp_path, "weights", "order")
    for name in ("weights-0", "weights-1", "order-0", "order-1"):
        assert "different weights, kinds, losses or parameters" in (tmp_path / f"refused-{name}").read_text()
