"""The CPU kernel gives what one weight gradient a sample gives, and nothing depends on its being there."""

from __future__ import annotations

import platform
import shutil
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from expunge import fisher
from expunge.fisher.closed_forms import native
from expunge.fisher.closed_forms.convolution import Geometry, by_kernel, choose
from expunge.fisher.closed_forms.scratch import Scratch
from expunge.runtime.modes import one_thread
from expunge.vision.networks import resnet8

GEOMETRIES = {
    "padded": Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1),
    "oblong": Geometry((3, 2), (1, 2), (0, 2), (2, 1), 1),
    "strided": Geometry((5, 5), (3, 2), (2, 2), (1, 1), 1),
    "mostly outside": Geometry((3, 3), (4, 4), (7, 7), (6, 6), 1),
    "one tap": Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1),
}
BITS = [bits for bits in (256, 512) if bits <= native.vector_bits()]
built = pytest.mark.skipif(not BITS, reason="no kernel for this processor, or no compiler to build it with")


def operands(channels: int, out: int, geometry: Geometry, dtype: torch.dtype, samples: int = 5, size: tuple[int, int] = (9, 8)):
    """An input and the gradient of its convolution, and Σ_n (dW_n)² in float64, a sample at a time."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, channels, *size, dtype=torch.float64, generator=generator)
    weight = torch.zeros(out, channels, *geometry.kernel, dtype=torch.float64, requires_grad=True)
    settings = (geometry.stride, geometry.padding, geometry.dilation)
    shape = F.conv2d(inputs, weight, None, *settings).shape
    gradients = torch.randn(shape, dtype=torch.float64, generator=generator)
    inputs, gradients = inputs.to(dtype), gradients.to(dtype)
    expected = torch.zeros_like(weight, requires_grad=False)
    for one, slope in zip(inputs.double().split(1), gradients.double().split(1), strict=True):
        expected += torch.autograd.grad(F.conv2d(one, weight, None, *settings), weight, slope)[0].square()
    return inputs, gradients, expected


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = 1e-14 if found.dtype == torch.float64 else 5e-7
    assert expected.any()
    assert (found - expected).norm() <= error * expected.norm()


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64" or not shutil.which("cc"), reason="it is not built here")
def test_the_kernel_is_built_where_it_can_be():
    assert native.library() is not None


@built
def test_a_library_of_another_version_is_not_used(monkeypatch):
    class Longer(native._Geometry):
        _fields_ = [("more", native.ctypes.c_int64)]

    monkeypatch.setattr(native, "_Geometry", Longer)
    assert native.library.__wrapped__() is None


@built
@pytest.mark.parametrize("dtype", native.KINDS, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("channels", "out"), [(16, 16), (8, 32), (32, 48), (16, 8), (128, 256), (3, 64), (48, 12), (21, 37), (1, 1)])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_kernel_is_exact(name, channels, out, bits, dtype, monkeypatch):
    monkeypatch.setattr(native, "vector_bits", lambda: bits)
    inputs, gradients, expected = operands(channels, out, GEOMETRIES[name], dtype)
    kept = Scratch()
    for times in (1, 2):  # a second call goes on with the same total
        assert_near(by_kernel(inputs, gradients, GEOMETRIES[name], kept, "weight"), times * expected)


@built
def test_many_samples_are_added_up_in_parts(monkeypatch):
    monkeypatch.setattr(native, "SAMPLES", 2)
    inputs, gradients, expected = operands(16, 16, GEOMETRIES["padded"], torch.float64)
    assert_near(by_kernel(inputs, gradients, GEOMETRIES["padded"], Scratch(), "weight"), expected)


@built
@pytest.mark.parametrize("dtype", native.KINDS, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("inner", "out"), [(16, 32), (7, 12), (40, 3), (300, 1100)])
def test_products_of_sequences_of_any_length(inner, out, bits, dtype, monkeypatch):
    monkeypatch.setattr(native, "vector_bits", lambda: bits)
    monkeypatch.setattr(native, "SAMPLES", 3)
    torch.manual_seed(0)
    counts = [5, 0, 1, 300, 128, 0]
    a, g = (torch.randn(sum(counts), size, dtype=torch.float64).to(dtype) for size in (inner, out))
    pairs = zip(a.double().split(counts), g.double().split(counts), strict=True)
    expected = sum((one.t() @ other).square() for one, other in pairs)
    kept = Scratch()
    with torch.device("meta"):  # as the default device, which is not that of the operands
        for times in (1, 2):  # a second call goes on with the same total
            assert_near(native.products(a, g, counts, kept, "weight"), times * expected)


@built
@pytest.mark.parametrize("dtype", native.KINDS, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("channels", [1, 5, 16, 24, 64, 83])
@pytest.mark.parametrize("centred", [True, False])
def test_backward_through_a_scale(centred, channels, bits, dtype, monkeypatch):
    monkeypatch.setattr(native, "vector_bits", lambda: bits)
    torch.manual_seed(0)
    x, g = (torch.randn(3, 15, 11, channels, dtype=dtype) for _ in range(2))
    mean, scale = (torch.randn(2 * channels, dtype=dtype)[::2] for _ in range(2))
    back, plain, product = native.scaled(x, g, mean if centred else None, scale)
    torch.testing.assert_close(back, g * scale, rtol=0, atol=0)
    values = x.double() - (mean.double() if centred else 0)
    for found, expected in ((plain, g.double()), (product, g.double() * values)):
        assert_near(found, expected.sum((1, 2)))


@built
@pytest.mark.parametrize("shape", [(16, 16), (128, 256)], ids=["a total a thread", "one total"])
def test_the_number_of_threads_changes_nothing_but_rounding(shape):
    inputs, gradients, expected = operands(*shape, GEOMETRIES["padded"], torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8, 2):
            torch.set_num_threads(threads)
            found.append(by_kernel(inputs, gradients, GEOMETRIES["padded"], Scratch(), "weight"))
    finally:
        torch.set_num_threads(before)
    for each in found:
        assert_near(each, expected)
    assert torch.equal(found[1], found[4])


@built
def test_a_long_sum_is_as_good_as_the_librarys():
    """65,536 positions: added one to the other they would lose a digit more."""
    inputs, gradients, expected = operands(16, 16, GEOMETRIES["padded"], torch.float32, samples=1, size=(256, 256))
    weight = torch.zeros(16, 16, 3, 3, requires_grad=True)
    theirs = torch.autograd.grad(F.conv2d(inputs, weight, padding=1), weight, gradients)[0].square()
    found = by_kernel(inputs, gradients, GEOMETRIES["padded"], Scratch(), "weight")
    assert (found - expected).norm() <= 2 * (theirs - expected).norm()


def by_our_own(inputs: torch.Tensor, gradients: torch.Tensor) -> bool:
    return choose(inputs, gradients, GEOMETRIES["padded"]) is by_kernel


@built
def test_what_the_kernel_does_not_take_goes_another_way():
    def images(channels, dtype=torch.float32, size=8):
        return torch.empty(2, channels, size, size, dtype=dtype)

    assert by_our_own(images(3), images(12)) and by_our_own(images(16, torch.float64), images(32, torch.float64))
    assert not by_our_own(images(16, torch.bfloat16), images(16, torch.bfloat16))
    assert by_our_own(images(16, size=2), images(16, size=2)) and not by_our_own(images(16, size=1), images(16, size=1))  # a square
    grouped = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 2)
    assert choose(images(32), images(32), grouped) is not by_kernel
    assert choose(torch.empty(2, 16, 8), torch.empty(2, 16, 8), Geometry((3,), (1,), (1,), (1,), 1)) is not by_kernel
    assert choose(images(16), images(16), GEOMETRIES["padded"], frames=2) is not by_kernel
    assert not by_our_own(images(16, size=8).to("meta"), images(16).to("meta"))


def test_without_the_kernel_the_engine_gives_the_same(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model: nn.Module = resnet8(10, 3).eval()
    batch = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    with one_thread():
        found = fisher.diagonal(model, [batch]).sums
        monkeypatch.setattr(native, "LIBRARY", tmp_path / "missing")
        for cached in (native.library, native.vector_bits):
            cached.cache_clear()
        try:
            assert native.vector_bits() == 0 and not native.takes(batch[0])
            others = fisher.diagonal(model, [batch]).sums
        finally:
            monkeypatch.undo()
            for cached in (native.library, native.vector_bits):
                cached.cache_clear()
    for name, each in found.items():
        torch.testing.assert_close(each, others[name], rtol=1e-4, atol=1e-6 * float(each.max()))
