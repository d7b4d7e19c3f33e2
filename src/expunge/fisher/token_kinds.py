"""Compute the cotangents of the expected and the sampled Fisher information of models with a distribution at every position.

Given the input, a sample's tokens y_t are independent under the model, y_t ~ p_t, and log p(y) = Σ_t log p_t(y_t) over the scored positions
t, those whose target is not −100. Its Fisher information is that of the joint,

    F = E_y [(Σ_t ∂ log p_t(y_t))²] = Σ_t Σ_k p_tk (∂ log p_tk)²,

since E[∂ log p_t(y_t)] = 0 and the terms of two positions are independent: their products vanish in the mean.

- expected   one pass per position and label, exactly; refused beyond `MAX_PASSES` of them.
- sampled    per draw one pass for all positions: at each a label from q_tk ∝ p_tk‖e_k − p_t‖² and
             c_t = ε_t √(p_tk / (draws·q_tk)) (p_t − e_k) with a random sign ε_t.
             Labels from q alone have E[c_t] ≠ 0; with the signs the products of two positions vanish in the mean.

Both are of the sum over positions, the log-probability of the whole sample, whatever the scale of the losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from expunge.data.labels import has_label
from expunge.errors import InputError

MAX_PASSES = 1024  # positions × labels; each is a backward pass over the batch
ROWS = 1 << 22  # entries of probabilities in float64 at a time


def expected(logits: Tensor, targets: Tensor, noise: Tensor, place: int) -> Sequence[Tensor]:
    """`place`: the dimension of the labels in the logits; every other but the first is of positions."""
    positions, labels = _sizes(logits, place)
    if positions * labels > MAX_PASSES:
        rule = f'"expected" takes a backward pass per position and label, {MAX_PASSES} at most; give kind="sampled"'
        raise InputError("kind", rule, f"{positions} positions of {labels} labels")
    return _EachToken(logits, targets, place)


class _EachToken(Sequence[Tensor]):
    """√p_tk (p_t − e_k) at position t, zeros elsewhere, for each t and k; computed when it is indexed."""

    def __init__(self, logits: Tensor, targets: Tensor, place: int) -> None:
        self.rows, self.logits, self.place = _by_position(logits, place).double().softmax(2), logits, place
        self.scored = _scored(targets, logits, place)

    def __len__(self) -> int:
        return self.rows.shape[1] * self.rows.shape[2]

    @overload
    def __getitem__(self, number: int) -> Tensor: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, number: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        position, label = divmod(number, self.rows.shape[2])
        chances = self.rows[:, position]
        c = chances.clone()
        c[:, label] -= 1
        whole = torch.zeros_like(self.rows)
        whole[:, position] = c * (chances[:, label] * self.scored[:, position]).sqrt()[:, None]
        return _as_logits(whole, self.logits, self.place)


def sampled(logits: Tensor, targets: Tensor, noise: Tensor, place: int) -> Sequence[Tensor]:
    """`noise` holds one uniform number per sample and draw; those of the positions are made of it."""
    positions, labels = _sizes(logits, place)
    rows = _by_position(logits, place).flatten(0, 1)
    scored, draws = _scored(targets, logits, place).flatten(), noise.shape[1]
    uniform = spread(noise, positions).transpose(0, 1).flatten(1)  # (draws, samples · positions)
    found = logits.new_empty(draws, len(rows), labels)
    for part in torch.arange(len(rows), device=rows.device).split(max(1, ROWS // labels)):
        cut = slice(int(part[0]), int(part[-1]) + 1) if not rows.is_cuda else part
        for draw in range(draws):
            found[draw, cut] = (_drawn(rows[cut].double().softmax(1), uniform[draw, cut].to(rows.device), draws) * scored[cut, None]).to(
                logits.dtype
            )
    return [_as_logits(one.view(len(logits), positions, labels), logits, place) for one in found]


def _drawn(probabilities: Tensor, uniform: Tensor, draws: int) -> Tensor:
    """ε √(p_k / (draws·q_k)) (p − e_k) for each row, k and the sign ε by one uniform number."""
    sizes = (1 - 2 * probabilities + probabilities.square().sum(1, keepdim=True)).clamp_(min=0)  # ‖e_k − p‖²
    weights = sizes.mul_(probabilities)
    edges = weights.cumsum(1)
    total = edges[:, -1]
    signs, place = torch.where(uniform < 0.5, -1.0, 1.0), (2 * uniform) % 1
    labels = torch.searchsorted(edges, (place * total)[:, None], right=True).clamp_(max=edges.shape[1] - 1)
    # A row whose weights all vanish has no gradient at any label.
    chosen = torch.where(total > 0, probabilities.gather(1, labels)[:, 0] * total / weights.gather(1, labels)[:, 0], 0.0)
    rows = probabilities.clone()
    rows.scatter_add_(1, labels, rows.new_full(labels.shape, -1.0))
    return rows.mul_((signs * (chosen / draws).sqrt())[:, None])


def spread(noise: Tensor, positions: int) -> Tensor:
    """Uniform numbers (..., positions) from (...), by SplitMix64: so a sample's draws do not depend on its batch."""
    seeds = _mixed((noise.double() * 2**53).long())[..., None]
    steps = torch.arange(1, positions + 1, device=noise.device) * _signed(0x9E3779B97F4A7C15)
    return ((_mixed(seeds + steps) >> 11) & (2**53 - 1)).double() / 2**53


def _mixed(numbers: Tensor) -> Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ ((numbers >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    return numbers ^ ((numbers >> 31) & (2**33 - 1))


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _sizes(logits: Tensor, place: int) -> tuple[int, int]:
    """The number of positions and of labels."""
    if logits.dim() <= place or logits.shape[place] < 2:
        rule = "the model's own distribution needs logits of shape (N, K, ...), or (N, tokens, K) with TOKENS, and K of at least 2"
        raise InputError("kind", rule, tuple(logits.shape))
    labels = logits.shape[place]
    return logits[0].numel() // labels, labels


def _by_position(logits: Tensor, place: int) -> Tensor:
    """(samples, positions, labels)."""
    return logits.detach().movedim(place, -1).flatten(1, -2)


def _scored(targets: Tensor, logits: Tensor, place: int) -> Tensor:
    """Which positions count, (samples, positions): all where the targets are probabilities."""
    positions = logits.shape[:place] + logits.shape[place + 1 :]
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.shape != positions:
        return torch.ones(positions, dtype=torch.bool, device=logits.device).flatten(1)
    return has_label(targets).flatten(1)


def _as_logits(rows: Tensor, logits: Tensor, place: int) -> Tensor:
    """(samples, positions, labels) in the logits' own shape and type."""
    shape = logits.movedim(place, -1).shape
    return rows.reshape(shape).movedim(-1, place).to(logits.dtype)
