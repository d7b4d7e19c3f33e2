"""Every way to square a convolution's gradients gives what one weight gradient a sample gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from expunge.fisher.closed_forms import native, scratch
from expunge.fisher.closed_forms.convolution import Geometry, by_columns, by_groups, by_strips, by_taps, choose
from expunge.fisher.closed_forms.scratch import Scratch

GEOMETRIES = {
    "padded": Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1),
    "oblong": Geometry((3, 2), (1, 2), (0, 2), (2, 1), 1),
    "strided": Geometry((3, 3), (2, 2), (1, 1), (1, 1), 1),
    "grouped": Geometry((3, 3), (1, 1), (1, 1), (1, 1), 2),
    "one tap": Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1),
}


@pytest.mark.parametrize("small", [True, False], ids=["chunks", "whole"])
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "planes"])
@pytest.mark.parametrize("way", [by_taps, by_columns, by_strips, by_groups])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_way_is_exact(name, way, last, small, monkeypatch):
    geometry = GEOMETRIES[name]
    if way is by_strips and (geometry.stride[0] > 1 or geometry.groups > 1):
        assert choose(torch.zeros(2, 4, 7, 6), torch.zeros(2, 6, 7, 6), geometry) is not by_strips
        return
    if small:  # one sample a chunk, and each product worth a matmul of its own
        monkeypatch.setitem(scratch.CHUNK_BYTES, "cpu", 1)
        monkeypatch.setitem(scratch.LARGE_BYTES, "cpu", 1)
    torch.manual_seed(0)
    inputs = torch.randn(5, 4, 7, 6, dtype=torch.float64)
    weight = torch.randn(6, 4 // geometry.groups, *geometry.kernel, dtype=torch.float64, requires_grad=True)
    settings = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    gradients = torch.randn_like(F.conv2d(inputs, weight, None, *settings)).detach()
    expected = torch.zeros_like(weight, requires_grad=False)
    for one, slope in zip(inputs.split(1), gradients.split(1), strict=True):
        expected += torch.autograd.grad(F.conv2d(one, weight, None, *settings), weight, slope)[0].square()
    if last:
        inputs, gradients = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (inputs, gradients))
    kept = Scratch()
    for times in (1, 2):  # a second call goes on with the same total
        found = way(inputs, gradients, geometry, kept, "weight")
        torch.testing.assert_close(found, times * expected, rtol=1e-12, atol=1e-12)


def test_the_way_follows_from_the_shape(monkeypatch):
    monkeypatch.setattr(native, "vector_bits", lambda: 0)

    def way(channels, size, outputs, kernel=3, stride=1):
        geometry = Geometry((kernel, kernel), (stride, stride), (kernel // 2, kernel // 2), (1, 1), 1)
        shape = (2, outputs, size // stride, size // stride)
        return choose(torch.empty(2, channels, size, size), torch.empty(shape), geometry)

    assert way(16, 32, 16) is by_groups
    assert way(3, 32, 16) is by_strips
    assert way(64, 8, 64) is by_strips
    assert way(32, 16, 64, stride=2) is by_columns
    assert way(512, 4, 512) is by_columns
    assert way(512, 2, 512) is by_taps
    assert way(108, 32, 48, kernel=1) is by_taps
