"""Square and add up the per-sample products of sequences, the gradients of a linear map."""

from __future__ import annotations

import torch
from torch import Tensor

from expunge.fisher.closed_forms import cuda, native, tf32
from expunge.fisher.closed_forms.padding import Active
from expunge.fisher.closed_forms.scratch import Scratch, add_squared_products, add_squares, chunks, summed_products, wide


def squared_products(a: Tensor, g: Tensor, scratch: Scratch, name: str, active: Active | None = None) -> Tensor:
    """The running total of Σ_n (g_nᵀ a_n)² for (N, T, I) and (N, T, O) as (O, I); `active`: the rows of g that are not zero."""
    if a.shape[1] == 1:
        total = scratch.total(name, (g.shape[2], a.shape[2]), a)
        return total.add_(summed_products(wide(g[:, 0]).square(), wide(a[:, 0]).square()))
    if cuda.takes(a, tf32.in_matmuls(), 1, a.shape[1], a.shape[2], g.shape[2]):  # a row of positions under a kernel of one tap
        total = scratch.total(name, (a.shape[2], g.shape[2]), a)
        return total.add_(cuda.squares(a.contiguous()[:, None], g.contiguous()[:, None], (1, 1), (1, 1), (0, 0), (1, 1))[0]).t()
    if native.takes(a):
        return _by_kernel(a, g, scratch, name, active)
    turned = a.device.type == "cpu" and a.shape[2] > g.shape[2]  # MKL is faster with the longer side first
    first, second = (a, g) if turned else (g, a)
    total = scratch.total(name, (first.shape[2], second.shape[2]), a)
    if active is None:
        add_squared_products(total[None], first.transpose(1, 2)[:, None], second[:, None], scratch)
    else:
        add_unequal_products(total, active.split(active.taken(first)), active.split(active.taken(second)), scratch)
    return total.t() if turned else total


def _by_kernel(a: Tensor, g: Tensor, scratch: Scratch, name: str, active: Active | None) -> Tensor:
    """Our own kernel, with the narrower side as the one that it reads again and again."""
    counts = [a.shape[1]] * len(a) if active is None else active.counts
    turned = a.shape[2] > g.shape[2]
    image, slopes = (
        tensor.contiguous().flatten(0, 1) if active is None else active.taken(tensor) for tensor in ((g, a) if turned else (a, g))
    )
    total = native.products(image, slopes, counts, scratch, name)
    return total if turned else total.t()


def add_unequal_products(total: Tensor, left: list[Tensor], right: list[Tensor], scratch: Scratch) -> None:
    """total += Σ_n (left_nᵀ right_n)² for samples with different numbers of rows, (T_n, I) and (T_n, O)."""
    used = [index for index, part in enumerate(left) if len(part)]
    for some in chunks(len(used), total.numel(), left[0]):
        product = scratch.take("products", (len(some), *total.shape), left[0])
        for place, index in enumerate(used[some.start : some.stop]):
            torch.mm(left[index].t(), right[index], out=product[place])
        if len(some) == 1:
            total.addcmul_(product[0], product[0])
        else:
            add_squares(total, product)
