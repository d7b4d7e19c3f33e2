"""Time `fisher.by_chunks` on a ResNet20 with 1, 2 and more processes, and compare the bits of the sums.

Run `PYTHONPATH=src python benchmarks/chunk_scaling.py --processes 1 2`. Of several rounds the fastest counts: other work on the machine
only ever adds. With `--device cuda` all processes share one GPU, which shows the bits and not the speed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time

import torch
import torch.distributed as distributed
from torch.utils.data import TensorDataset

from expunge import fisher
from expunge.vision.networks import resnet20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--samples", type=int, default=2048, help="images of 32×32, in chunks of 128")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def measure(samples: int, rounds: int, device: str) -> None:
    """In each process: the pass, its seconds and the digest of its sums."""
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model, data = resnet20(10).to(device), TensorDataset(torch.randn(samples, 3, 32, 32), torch.randint(0, 10, (samples,)))
    fisher.by_chunks(model, TensorDataset(*data[:256]), batches_per_chunk=1)
    seconds, digests = [], set()
    for _ in range(rounds):
        distributed.barrier()
        started = time.perf_counter()
        sums = fisher.by_chunks(model, data, batches_per_chunk=1)
        seconds.append(time.perf_counter() - started)
        digests.add(hashlib.sha256(b"".join(total.cpu().numpy().tobytes() for total in sums.sums.values())).hexdigest()[:12])
    if distributed.get_rank() == 0:
        speed = f"{min(seconds):.2f} s, {samples / min(seconds):.0f} samples/s"
        print(f"{distributed.get_world_size()} processes on {device}: {speed}, sums {' '.join(sorted(digests))}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    settings = arguments()
    if "RANK" in os.environ:
        measure(settings.samples, settings.rounds, settings.device)
    else:
        for size in settings.processes:
            options = ["--standalone", f"--nproc_per_node={size}", __file__, *sys.argv[1:]]
            subprocess.run([sys.executable, "-m", "torch.distributed.run", *options], check=True)
