"""The digest that is computed beside other work is the digest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from expunge.storage.digests import digest_beside, digest_of, end_to_end, pieces
from expunge.storage.tensors import heading, weights_digest


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2).half())
    made.register_buffer("flag", torch.tensor(True))
    made.register_buffer("nothing", torch.empty(0))
    made.register_buffer("numbers", torch.randn(2, 2, dtype=torch.complex64))
    made.register_parameter("turned", nn.Parameter(torch.randn(5, 3).t()))
    made[0].to(memory_format=torch.channels_last)
    return made


def test_equals_the_digest_of_single_tensors():
    made = model()
    entries = [*made.named_parameters(), *made.named_buffers()]
    joined, headings = end_to_end([tensor for _, tensor in entries]), [(heading(name, tensor), tensor.nbytes) for name, tensor in entries]
    for size in (1, 7, 100, 10_000):
        assert digest_of(headings, pieces(joined, torch.empty(size, dtype=torch.uint8))) == weights_digest(made)
    assert digest_beside(made)() == weights_digest(made) and digest_beside(nn.Identity())() == weights_digest(nn.Identity())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_is_of_the_weights_when_it_was_asked_for():
    made = model().cuda()
    before, beside = weights_digest(made), digest_beside(made)
    with torch.no_grad():
        made[0].weight.zero_()
    assert beside() == before != weights_digest(made)
