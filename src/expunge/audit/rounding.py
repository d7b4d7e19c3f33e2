"""Round the weights of a network to few bits, which brings back what hides in the last ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expunge.model.copying import copied
from expunge.validate import check_whole


def rounded(model: nn.Module, bits: int) -> nn.Module:
    """A copy with every matrix and convolution rounded to `bits` bits: w ← s·round(w/s), s = max|w| / (2^(bits−1) − 1).

    Symmetric and uniform, with one scale s per output channel (the first dimension); vectors (biases, norms) and buffers stay.
    """
    check_whole("bits", bits, minimum=2, maximum=16)
    copy = copied(model)
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.copy_(round_to(parameter, bits))
    return copy


def round_to(weights: Tensor, bits: int) -> Tensor:
    scale = weights.abs().amax(tuple(range(1, weights.dim())), keepdim=True) / (2 ** (bits - 1) - 1)
    return torch.where(scale > 0, (weights / scale).round() * scale, weights)
