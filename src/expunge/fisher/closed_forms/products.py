"""Square and add up the per-sample products of sequences, the gradients of a linear map."""

from __future__ import annotations

from torch import Tensor

from expunge.fisher.closed_forms import cuda, tf32
from expunge.fisher.closed_forms.scratch import Scratch, add_squared_products, summed_products, wide


def squared_products(a: Tensor, g: Tensor, scratch: Scratch, name: str) -> Tensor:
    """The running total of Σ_n (g_nᵀ a_n)² for (N, T, I) and (N, T, O) as (O, I)."""
    if a.shape[1] == 1:
        total = scratch.total(name, (g.shape[2], a.shape[2]), a)
        return total.add_(summed_products(wide(g[:, 0]).square(), wide(a[:, 0]).square()))
    if cuda.takes(a, tf32.in_matmuls(), 1, a.shape[1], a.shape[2], g.shape[2]):  # a row of positions under a kernel of one tap
        total = scratch.total(name, (a.shape[2], g.shape[2]), a)
        return total.add_(cuda.squares(a.contiguous()[:, None], g.contiguous()[:, None], (1, 1), (1, 1), (0, 0), (1, 1))[0]).t()
    turned = a.device.type == "cpu" and a.shape[2] > g.shape[2]  # MKL is faster with the longer side first
    first, second = (a, g) if turned else (g, a)
    total = scratch.total(name, (first.shape[2], second.shape[2]), a)
    add_squared_products(total[None], first.transpose(1, 2)[:, None], second[:, None], scratch)
    return total.t() if turned else total
