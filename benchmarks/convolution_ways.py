"""Each way to square a convolution's per-sample gradients, by shape, as ratios to the plain weight gradient.

    PYTHONPATH=src python benchmarks/convolution_ways.py [--device cpu|cuda] [--tf32] [--rounds 5]

What `expunge.fisher.closed_forms.convolution.choose` goes by. On the CPU, `OMP_WAIT_POLICY=active` steadies the figures.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from expunge.fisher.closed_forms.convolution import Geometry, by_columns, by_groups, by_kernel, by_strips, by_taps, by_tiles, choose
from expunge.fisher.closed_forms.native import takes
from expunge.fisher.closed_forms.scratch import Scratch

WAYS = {"cpu": (by_taps, by_columns, by_strips, by_groups, by_kernel), "cuda": (by_taps, by_columns, by_tiles)}
SHAPES = [  # channels in, channels out, image, kernel, stride
    *((3, 16, 32, 3, 1), (16, 16, 32, 3, 1), (16, 32, 32, 3, 2), (32, 32, 16, 3, 1), (64, 64, 8, 3, 1)),
    *((64, 64, 32, 3, 1), (128, 128, 16, 3, 1), (256, 256, 8, 3, 1), (512, 512, 4, 3, 1), (512, 512, 2, 3, 1)),
    *((108, 48, 32, 1, 1), (300, 48, 8, 1, 1), (48, 12, 32, 3, 1), (256, 256, 14, 3, 1), (256, 1024, 14, 1, 1)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=WAYS, default="cpu")
    parser.add_argument("--tf32", action="store_true", help="let CUDA round the factors of products")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    for inside, outside, image, kernel, stride in SHAPES:
        geometry = Geometry((kernel,) * 2, (stride,) * 2, (kernel // 2,) * 2, (1, 1), 1)
        inputs = torch.randn(options.batch_size, inside, image, image, device=options.device).contiguous(memory_format=torch.channels_last)
        weight = torch.randn(outside, inside, kernel, kernel, device=options.device)
        gradients = torch.randn_like(torch.conv2d(inputs, weight, None, stride, kernel // 2))
        scratch = Scratch()
        able = {by_strips: stride == 1, by_kernel: takes(inputs)}
        ways = {way.__name__: way for way in WAYS[options.device] if able.get(way, True)}
        times: dict[str, list[float]] = {name: [] for name in ("plain", *ways)}
        for index in range(options.rounds + 1):
            for name, taken in times.items():
                begin = _now(options.device)
                if name == "plain":
                    torch.ops.aten.convolution_backward(
                        gradients, inputs, weight, None, geometry.stride, geometry.padding, (1, 1), False, (0, 0), 1, [False, True, False]
                    )
                else:
                    ways[name](inputs, gradients, geometry, scratch, "weight")
                if index:
                    taken.append(_now(options.device) - begin)
        ratios = {name: statistics.median(a / b for a, b in zip(times[name], times["plain"], strict=True)) for name in ways}
        shape = f"{inside}x{image}x{image} -> {outside}, kernel {kernel}, stride {stride}"
        chosen = choose(inputs, gradients, geometry).__name__
        print(
            f"{shape:40} {1000 * statistics.median(times['plain']):6.3f} ms ",
            "  ".join(f"{name} {ratio:5.2f}{'*' if name == chosen else ' '}" for name, ratio in ratios.items()),
        )


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
