"""Models and losses whose first samples do not show what later ones do, and the loop over samples in float64 they are compared with."""

from __future__ import annotations

import numpy
import torch
from torch import nn
from torch.nn import functional as F

from expunge.fisher import diagonal
from tests import reference

K = 4


def labels(count: int) -> torch.Tensor:
    return torch.randint(0, K, (count,))


def looped(model: nn.Module, batches, kind: str = "empirical"):
    parts = [reference.fisher(model, batch, kind) for batch in batches]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def check(model: nn.Module, batches, kind: str = "empirical", like: nn.Module | None = None, absolute: float = 0.0) -> None:
    """`like`: a model of the same weights to loop over, where it cannot be the same one. `absolute`: of the largest entry, what rounding
    leaves of a gradient that is zero (the bias of attention's keys)."""
    model = model.double().eval()
    if like is not None:
        like.double().load_state_dict(model.state_dict())
    found, expected = diagonal(model, batches, kind=kind).sums, looped(like or model, batches, kind)
    if absolute:
        least = absolute * max(float(value.max()) for value in expected.values())
        found, expected = ({name: value.where(value > least, 0) for name, value in part.items()} for part in (found, expected))
    assert reference.worst_error(found, expected) <= 1e-10


def vectors(*large: int, samples: int = 9, width: int = 5):
    """One batch whose samples at these places are large, so that they take another branch."""
    x = torch.randn(samples, width).double().clamp(-2, 2)
    x[list(large), 0] = 100
    return x, labels(samples)


class Branch(nn.Module):
    """A layer that only large samples go through, in several spellings."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.rare, self.head = how, nn.Linear(5, 5), nn.Linear(5, K)
        if how == "scripted":
            self.rare = torch.jit.script(nn.Linear(5, 5).double())

    def forward(self, x):
        return self.head(torch.stack([self.one(row) if bool(row[0] > 50) else row for row in x]))

    def one(self, row):
        row = row / 100
        if self.how == "1-D":
            return torch.tanh(F.linear(row, self.rare.weight, self.rare.bias))
        if self.how == "transposed":
            return torch.tanh(row @ self.rare.weight.T + self.rare.bias)
        if self.how == "einsum":
            return torch.tanh(torch.einsum("i,oi->o", row, self.rare.weight) + self.rare.bias)
        return torch.tanh(self.rare(row[None])[0])


class Video(nn.Module):
    """Frames folded into the batch frame by frame: black first samples do not show the order."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 6, bias=bias), nn.Linear(6, K)

    def forward(self, x):
        out = torch.tanh(self.layer(x.transpose(0, 1).flatten(0, 1)))
        return self.head(out.unflatten(0, (-1, len(x))).mean(0))


class Gated(nn.Module):
    """A branch multiplied by a gate that is shut for the first samples."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(5, K)

    def forward(self, x):
        return self.head(x[:, 0] + (x[:, 0, :1] > 0) * self.inner(x)[:, 0])


class Rolled(nn.Linear):
    """The rows go through the layer in the place of their neighbours: a coupling that the gate hides."""

    def forward(self, x):
        return super().forward(x.flip(0)).flip(0)


class Transposed(nn.Linear):
    def forward(self, x):
        flat = x.transpose(0, 1).flatten(0, 1)
        return super().forward(flat).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


class Dispatched(nn.Module):
    """One-hot dispatch: each sample has a slot in the table of its expert, in the order of arrival."""

    def __init__(self, experts: int = 2, capacity: int | None = None) -> None:
        super().__init__()
        self.experts, self.head, self.capacity = nn.ModuleList(nn.Linear(5, 5) for _ in range(experts)), nn.Linear(5, K), capacity

    def forward(self, x):
        chosen = F.one_hot((x[:, 0] > 0).long(), len(self.experts)).to(x)
        place = (chosen.cumsum(0) - 1) * chosen
        slots = F.one_hot(place.sum(1).long(), len(x)).to(x)[:, : self.capacity]
        dispatch = chosen[:, :, None] * slots[:, None]
        inside = torch.einsum("nec,nd->ecd", dispatch, x)
        outside = torch.stack([torch.tanh(expert(rows)) for expert, rows in zip(self.experts, inside, strict=True)])
        return self.head(torch.einsum("nec,ecd->nd", dispatch, outside))


class Unpadded(nn.Module):
    """Tokens that are there go through the layer, and back, in several spellings."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.head = how, nn.Linear(5, 6), nn.Linear(6, K)

    def forward(self, x, mask):
        lengths = mask.sum(1).tolist()
        if self.how == "cat":
            rows = torch.cat([sample[:length] for sample, length in zip(x, lengths, strict=True)])
        elif self.how == "masked_select":
            rows = x.masked_select(mask[..., None]).reshape(-1, 5)
        elif self.how == "list":
            rows = x.flatten(0, 1)[[n * x.shape[1] + t for n, length in enumerate(lengths) for t in range(length)]]
        elif self.how == "numpy":
            rows = x.flatten(0, 1)[numpy.flatnonzero(mask.numpy())]
        elif self.how == "loop":
            rows = torch.stack([x[n, t] for n, length in enumerate(lengths) for t in range(length)])
        else:
            rows = torch.from_numpy(x.detach().numpy()[mask.numpy()])
        parts = torch.tanh(self.layer(rows)).split(lengths)
        return self.head(torch.stack([part.sum(0) for part in parts]))


class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Scaled(nn.Linear):
    """One quantisation scale per batch."""

    def forward(self, x):
        scale = x.detach().abs().amax().clamp(min=1e-3) / 7
        return super().forward((x / scale).round() * scale)


class Normalised(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, K)

    def forward(self, x):
        return self.head(F.batch_norm(x, None, None, self.norm.weight, self.norm.bias, training=True))


class Dropping(nn.Linear):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.3))


class Path(nn.Linear):
    """Drop path, left on."""

    def forward(self, x):
        return super().forward(x) * (torch.rand(len(x), 1) > 0.2)


class Moving(nn.Linear):
    """A buffer that moves with every call, and the output with it."""

    def __init__(self, *sizes: int, speed: float = 0.1) -> None:
        super().__init__(*sizes)
        self.speed = speed
        self.register_buffer("level", torch.ones(()))

    def forward(self, x):
        self.level += self.speed
        return super().forward(x * self.level)


def token_mean(logits, targets):
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    return losses.sum(1) / (targets != -100).sum()


def class_weighted(logits, targets):
    weights = 1 / torch.bincount(targets, minlength=K)
    return F.cross_entropy(logits, targets, weight=weights.to(logits), reduction="none")


def contrastive(logits, targets):
    return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)), reduction="none")


def standardised(logits, targets):
    return F.cross_entropy((logits - logits.mean(0)) / (logits.std(0, correction=0) + 1e-3), targets, reduction="none")


def noisy(logits, targets):
    return F.cross_entropy(logits + torch.randn_like(logits), targets, reduction="none")


class Encoder(nn.Module):
    """Frozen torch layers: their fast path puts zeros where tokens are padded, the slow one does not."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, K)
        self.encoder.requires_grad_(False)

    def forward(self, x, mask):
        return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))
