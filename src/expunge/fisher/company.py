"""Compare samples with what they are in other company: the gradients of their losses in every batch, the logits of some in the first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor, nn

from expunge.data.batches import take
from expunge.data.objective import Batch, Objective
from expunge.errors import InputError
from expunge.fisher.comparing import NOISE, allowed
from expunge.fisher.kinds import Cotangents
from expunge.fisher.samples import unmasked

COMPANY = 8  # samples of the first batch whose logits are compared
LONE = 4  # of a call's first batch whose logits are compared with those that they have alone
ASKED = 16  # where the model's operations may mix samples, or it asks or reads: a yes or no about the batch may be another for one sample
AGAIN = 2  # of later batches, there
LOSSES = 8  # of the first batch whose losses are compared with what they are alone, as those of drawn samples are in every batch, or,
# on a GPU, some of these in every comparison
ENTRIES = 1 << 18  # of logits whose losses are: of many classes or tokens a part of the samples, since all would cost percents


def check_losses(
    cotangents: Cotangents, logits: Tensor, together: Tensor, noise: Tensor, batch: Batch, objective: Objective, groups: Sequence[Tensor]
) -> None:
    """Raise InputError where the gradient of a sample's loss is another one beside its group alone: `groups` holds numbers of samples."""
    for rows in groups:
        rows = rows.to(logits.device)
        (apart,) = cotangents(logits[rows], objective.targets(take(batch, rows)), noise[rows])
        error = worst_of_a_row(together[rows], apart)
        if not error < allowed(apart) / 10:
            rule = "must give each sample its own loss; divisions by a count over the batch, batch statistics and pairs of samples do not"
            raise InputError("objective.losses", rule, f"a gradient that changes by {error:.1%} with the rest of the batch")


def halves(samples: int, entries: int, generator: numpy.random.Generator) -> tuple[Tensor, Tensor]:
    """The numbers of a random half of the samples, and of the others, each in their order: neighbours, counts and statistics are other
    ones there. Where there are many entries of logits, parts of each."""
    size = math.ceil(samples / max(2, math.ceil(entries / ENTRIES)))
    order = torch.from_numpy(generator.permutation(samples))
    return order[:size].sort().values, order[-size:].sort().values


def has_fast_path(model: nn.Module) -> bool:
    """Whether torch may compute a part in another way than the one that is watched: in its own attention, frozen, with zeros as padding."""
    own = (module for module in model.modules() if isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention)))
    return any(not any(value.requires_grad for value in module.parameters()) for module in own)


def in_other_parity(samples: int, batch: int) -> int:
    """The size of parts, at most half of these samples, that are even where the batch is odd and odd where it is even: never as large, so
    that what a loss makes of the number of its samples shows."""
    half = max(1, samples // 2)
    return half if (half - batch) % 2 else max(1, half - 1)


def single(samples: int, count: int, generator: numpy.random.Generator) -> list[Tensor]:
    """The numbers of some samples, each by itself: most groups have what one sample alone may lack, such as a text of full length."""
    return list(torch.from_numpy(generator.choice(samples, min(samples, count), replace=False)).split(1))


def company(samples: int, generator: numpy.random.Generator) -> Tensor:
    """The numbers of some samples, in another order than the batch has: the first and the last, to which some models do something."""
    others = generator.choice(samples - 2, COMPANY - 2, replace=False) + 1
    return torch.from_numpy(numpy.concatenate([others[:2], [samples - 1, 0], others[2:]]))


class Alone:
    """Compares the logits of all samples of a batch with those that they have alone, where these are computed anyway."""

    def __init__(self, together: Tensor) -> None:
        self.together = together
        self._differences: list[Tensor] = []
        self._sizes: list[Tensor] = []
        self._of_one_shape = True

    def note(self, rows: slice, logits: Tensor) -> None:
        together = self.together[rows]
        if together.shape != logits.shape:
            self._of_one_shape = False
        elif logits.numel():
            together, logits = unmasked(together, logits)
            for sizes, part in ((self._differences, together - logits), (self._sizes, logits)):
                sizes.append(_largest_of_a_row(part))

    @property
    def error(self) -> float:
        """The largest relative difference of a sample, as `worst_of_a_row` has it."""
        if not self._of_one_shape:
            return math.inf
        return _worst(torch.cat(self._differences), torch.cat(self._sizes)) if self._sizes else 0.0


def worst_output(values: Tensor, reference: Tensor) -> float:
    """`worst_of_a_row` of outputs, but for masked entries."""
    return worst_of_a_row(*unmasked(values, reference)) if values.shape == reference.shape else math.inf


def worst_of_a_row(values: Tensor, reference: Tensor) -> float:
    """The largest relative difference of a row, max |value − reference| / max |reference|, beyond what rounding leaves of the largest."""
    if values.shape != reference.shape:
        return math.inf
    if not reference.numel():
        return 0.0
    return _worst(*map(_largest_of_a_row, (values - reference, reference)))


def _largest_of_a_row(values: Tensor) -> Tensor:
    """A sample may have one value alone, without a dimension for it."""
    return values.reshape(len(values), -1).abs().amax(1)


def _worst(difference: Tensor, size: Tensor) -> float:
    beyond = (difference - NOISE.get(size.dtype, NOISE[torch.float32]) * size.max()).clamp_min(0)
    error = float(torch.where(beyond > 0, beyond / size, beyond).max())
    return 0.0 if math.isnan(error) else error  # what is not finite shows in the sums
