"""The Triton kernel gives what one weight gradient a sample gives: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

from expunge.fisher import diagonal
from expunge.fisher.closed_forms import cuda
from expunge.fisher.closed_forms.convolution import Geometry, by_columns, by_tiles, choose
from expunge.fisher.closed_forms.scratch import Scratch
from tests import reference
from tests.fisher.cases import build

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


def scaling_errors(shape: tuple[int, ...], centred: bool, device: str) -> list[float]:
    """Of the gradient and of both sums."""
    torch.manual_seed(0)
    inputs, gradient = torch.randn(shape), torch.randn(shape)
    by_channel = torch.randn(shape[-1], 2)
    (mean, scale), there = by_channel.unbind(1), by_channel.to(device).unbind(1)  # slices, with a gap between the numbers
    found = cuda.scaled(inputs.to(device), gradient.to(device), there[0] if centred else None, there[1])
    x, g = inputs.double() - (mean.double() if centred else 0.0), gradient.double()
    positions = tuple(range(1, len(shape) - 1))
    expected = g * scale.double(), g.sum(positions), (g * x).sum(positions)
    assert all(one.shape == other.shape for one, other in zip(found, expected, strict=True))
    tiny = torch.finfo(torch.float64).tiny
    return [float((one.double().cpu() - other).norm() / other.norm().clamp_min(tiny)) for one, other in zip(found, expected, strict=True)]


SCALED = [(2, 0, 8), (3, 5, 10, 20), (2, 300, 64), (5, 1, 7, 200), (2, 40, 25, 16), (1, 1, 3), (2, 9, 12)]


def engine_error(name: str) -> float:
    """Of a whole pass on the CPU in which the kernels do all they can."""
    used = []
    able = {
        "takes": lambda tensor, tf32, taps, positions, wide, out: tensor.dtype == torch.float32 and not used.append("takes"),
        "scales": lambda tensor: tensor.dtype == torch.float32 and not used.append("scales"),
    }
    model, batch = build(name, torch.float32)
    with patch.multiple(cuda, **able):
        found = diagonal(model, [batch]).sums
    assert used
    return reference.worst_error(found, reference.fisher(model, batch))


def main() -> None:
    assert cuda.works(torch.device("cpu"))
    for name in ("residual", "transformer", "batch norm 2d", "layer norm", "layer norm without bias", "conv_transpose2d 1x1"):
        assert engine_error(name) <= 1e-5, name
    for shape in SCALED:
        for centred in (True, False):
            assert max(scaling_errors(shape, centred, "cpu")) <= 1e-6, shape
    for name in CASES:
        for dtype, bound in ERRORS.items():
            found = error(name, dtype, "cpu")
            assert found <= bound, (name, dtype, found)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux; make test installs it there")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.slow
def test_the_kernel_is_exact_in_the_interpreter():
    run = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.getcwd()}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_the_same(name):
    assert cuda.works(torch.device("cuda", 0))
    assert error(name, torch.float16, "cuda") <= ERRORS[torch.float16]
    assert error(name, torch.float32, "cuda") <= 5e-3  # TF32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("shape", SCALED)
def test_a_gpu_scales_alike(shape, centred):
    assert max(scaling_errors(shape, centred, "cuda")) <= 1e-6


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
