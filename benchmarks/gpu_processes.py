"""Compare what processes compute together on GPUs with one process: sums, trainings and sharded models. Prints a line per check.

torchrun --standalone --nproc_per_node=1 benchmarks/gpu_processes.py --backend nccl                  # one GPU
torchrun --standalone --nproc_per_node=8 benchmarks/gpu_processes.py --backend nccl                  # eight
torchrun --standalone --nproc_per_node=2 benchmarks/gpu_processes.py --backend gloo                  # two processes on one GPU
torchrun --standalone --nproc_per_node=2 benchmarks/gpu_processes.py --backend gloo --device cpu     # the script itself
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import expunge
from expunge import fisher, masks, metrics, scores, training
from expunge.editing.patches import Patch
from expunge.editing.sharded_patches import ShardedPatch
from expunge.methods import FisherMask
from expunge.runtime.processes import told_by_first
from expunge.storage.sharded import whole
from expunge.training import Constant, Tuning, train


def case(device: torch.device) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.Tanh(), nn.Linear(32, 5)]
    inputs, labels = torch.randn(300, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (300,))
    return nn.Sequential(*body).double().to(device), TensorDataset(inputs, labels)


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    pairs = [(whole(ours[name]).detach().double().cpu(), value.detach().double().cpu()) for name, value in theirs.items()]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) for a, b in pairs)


def by_chunks(device: torch.device, folder: Path) -> float:
    model, data = case(device)
    sums = fisher.by_chunks(model, data, batch_size=32, batches_per_chunk=2, keep=folder / "pass")
    assert metrics.by_chunks(model, data).accuracy == metrics.accuracy(model, data)
    return furthest(sums.sums, fisher.diagonal(model, data).sums)


def added(device: torch.device, folder: Path) -> float:
    """Sums on the CPU, which nccl does not take."""
    model, data = case(device)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    own = fisher.diagonal(model, Subset(data, range(rank, len(data), size))).to("cpu").all_reduce()
    return furthest(own.sums, fisher.diagonal(model, data).sums)


def trained(device: torch.device, folder: Path) -> float:
    tuning = Tuning(Constant(0.05, epochs=2), batch_size=32)
    alone, data = case(device)
    together, _ = case(device)
    train(alone, data, tuning, progress=False)
    with training.shared(patience=60):
        train(together, data, tuning, progress=False, keep=folder / "training.safetensors")
    return furthest(together.state_dict(), alone.state_dict())


def unlearned(device: torch.device, folder: Path) -> float:
    model, data = case(device)
    forget, remain = Subset(data, range(30)), Subset(data, range(30, 300))
    method = FisherMask(ratio=0.05, tuning=Tuning(Constant(0.05, epochs=1), batch_size=32))
    alone = expunge.unlearn(model, forget, remain, method, progress=False).model
    with training.shared(patience=60):
        return furthest(expunge.unlearn(model, forget, remain, method, progress=False).model.state_dict(), alone.state_dict())


def sharded(device: torch.device, folder: Path) -> float:
    from torch.distributed.fsdp import fully_shard

    if device.type == "cuda" and distributed.get_backend() == "gloo":
        raise NotImplementedError("gloo cannot gather the shards of a model on GPUs")
    plain, data = case(device)
    model, _ = case(device)
    mesh = distributed.device_mesh.init_device_mesh(device.type, (distributed.get_world_size(),))
    for part in (model[0], model[4], model):
        fully_shard(part, mesh=mesh)
    forget, remain = Subset(data, range(10)), Subset(data, range(10, 40))
    sums, expected = fisher.sharded_diagonal(model, remain, batch_size=16, patience=60), fisher.diagonal(plain, remain)
    mask = masks.select(scores.fisher_difference(fisher.sharded_diagonal(model, forget, patience=60), sums), 0.1)
    Patch.zeroing(plain, {name: whole(value) for name, value in mask.items()}).apply(plain)
    patch = ShardedPatch.zeroing(model, mask)
    patch.apply(model)
    patch.save(folder / "patch")
    fisher.save_sums(sums, folder / "sums")
    edited = furthest(dict(model.named_parameters()), dict(plain.named_parameters()))
    ShardedPatch.load(folder / "patch", model).revert(model)
    reverted = furthest(dict(model.named_parameters()), dict(case(device)[0].named_parameters()))
    read = furthest(fisher.load_sums(folder / "sums", model).sums, {name: whole(value) for name, value in sums.sums.items()})
    assert edited == reverted == read == 0.0, (edited, reverted, read)
    return furthest(sums.sums, expected.sums)


CHECKS: dict[str, tuple[Callable[[torch.device, Path], float], float]] = {
    "fisher.by_chunks, metrics.by_chunks": (by_chunks, 1e-9),
    "FisherSums.all_reduce of CPU sums": (added, 1e-9),
    "train within shared()": (trained, 1e-8),
    "unlearn within shared()": (unlearned, 1e-8),
    "FSDP2: sums, masks, patches, files": (sharded, 1e-9),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    distributed.init_process_group(options.backend)
    rank, failed = distributed.get_rank(), 0
    folder = Path(told_by_first(tempfile.mkdtemp(prefix="expunge-") if rank == 0 else None))
    for name, (check, limit) in CHECKS.items():
        try:
            error = check(device, folder)
            told = f"{'ok' if error <= limit else 'WRONG'}, largest relative difference {error:.1e}"
        except NotImplementedError as raised:
            told = f"ok, not run: {raised}"
        except Exception as raised:
            traceback.print_exc()
            told = f"FAILED, {type(raised).__name__}: {str(raised).splitlines()[0] if str(raised) else ''}"
        failed += not told.startswith("ok")
        print(f"rank {rank} on {device}, {options.backend}: {name}: {told}", flush=True)
    told_by_first("done")
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    distributed.destroy_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
