"""The Triton kernel gives what one weight gradient a sample gives: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from expunge.fisher import cuda
from expunge.fisher.convolution import Geometry, by_columns, by_tiles, choose
from expunge.fisher.scratch import Scratch

CASES = {  # samples, input channels, output channels, image, geometry
    "small channels": (3, 3, 20, (7, 8), Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)),
    "several tiles": (2, 70, 130, (4, 4), Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)),
    "many positions": (2, 5, 6, (13, 12), Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)),
    "oblong": (3, 17, 9, (9, 10), Geometry((3, 2), (2, 1), (2, 0), (1, 2), 1)),
    "mostly outside": (3, 4, 4, (5, 5), Geometry((3, 3), (4, 4), (7, 7), (6, 6), 1)),
    "one tap": (300, 6, 5, (3, 3), Geometry((1, 1), (2, 2), (0, 0), (1, 1), 1)),
}
ERRORS = {torch.float32: 5e-7, torch.float16: 5e-7}  # half precision is multiplied exactly and summed in float32


def error(name: str, dtype: torch.dtype, device: str) -> float:
    """‖found − expected‖ / ‖expected‖, the expected in float64 from the same operands."""
    samples, wide, out, image, geometry = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, wide, *image, generator=generator).to(dtype)
    weight = torch.zeros(out, wide, *geometry.kernel)
    shape = torch.conv2d(inputs.float(), weight, None, geometry.stride, geometry.padding, geometry.dilation).shape
    gradients = torch.randn(shape, generator=generator).to(dtype)
    expected = by_columns(inputs.double(), gradients.double(), geometry, Scratch(), "weight")
    assert expected.any()
    found = by_tiles(inputs.to(device), gradients.to(device), geometry, Scratch(), "weight")
    return float((found.double().cpu() - expected).norm() / expected.norm())


def main() -> None:
    for name in CASES:
        for dtype, bound in ERRORS.items():
            found = error(name, dtype, "cpu")
            assert found <= bound, (name, dtype, found)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux; make test installs it there")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_the_kernel_is_exact_in_the_interpreter():
    run = subprocess.run([sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_the_same(name):
    assert cuda.works(torch.device("cuda", 0))
    assert error(name, torch.float16, "cuda") <= ERRORS[torch.float16]
    assert error(name, torch.float32, "cuda") <= 5e-3  # TF32


def test_the_kernel_is_left_out_where_it_is_slower_or_rounds_too_much():
    float32, float64 = torch.empty(0, device="meta"), torch.empty(0, device="meta", dtype=torch.float64)
    assert cuda.faster(taps=9, positions=1024, wide=64, out=64)
    assert cuda.faster(taps=1, positions=1024, wide=100, out=48)
    assert cuda.faster(taps=1, positions=16, wide=256, out=1024)
    assert not cuda.faster(taps=1, positions=196, wide=256, out=1024)
    assert not cuda.faster(taps=9, positions=1024, wide=3, out=64)
    assert not cuda.faster(taps=9, positions=1, wide=512, out=512)
    for tensor, tf32 in ((float32, True), (float32, False), (float64, True)):
        assert not cuda.takes(tensor, tf32, 9, 1024, 64, 64)


def test_the_cpu_never_takes_it():
    assert choose(torch.zeros(2, 16, 8, 8), torch.zeros(2, 16, 8, 8), CASES["small channels"][4]) is not by_tiles


if __name__ == "__main__":
    main()
