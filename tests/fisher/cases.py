"""Models whose Fisher information is checked against the definition: name -> (model, inputs) builders, small and in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 4


def images(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(7, *shape)


def tokens(length: int, words: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, words, (7, length))


def flat(layer: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(features, CLASSES))


class Pooled(nn.Module):
    """A sequence layer, its mean over positions, and a head."""

    def __init__(self, layer: nn.Module, features: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return self.head((out[0] if isinstance(out, tuple) else out).mean(1))


class Residual(nn.Module):
    """Convolution, frozen statistics, in-place ReLU, a sum, a view after the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.second, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6 * 25, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        x = F.relu(x + self.second(x), inplace=True)
        return self.head(x.view(x.size(0), -1))


class Sliced(nn.Module):
    """Slices of an image, one of them changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, stride=2, padding=1), nn.Linear(54, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = self.second(x) + x[:, :, ::2, ::2]
        y[:, :2].mul_(2)
        return self.head(y.flatten(1))


class Concatenation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(5, 4, 3, padding=1)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, F.relu(self.one(x))], 1)
        return self.head(torch.cat([x, F.relu(self.two(x))], 1).mean((2, 3)))


class Transformer(nn.Module):
    """Class token, positions, layer scale, attention written with Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(1, 8, 6))
        self.scale, self.norm, self.joint = nn.Parameter(torch.randn(6)), nn.LayerNorm(6), nn.Linear(6, 18)
        self.out, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.positions[:, : x.shape[1]]
        query, key, value = self.joint(self.norm(x)).chunk(3, -1)
        x = x + self.scale * self.out(F.scaled_dot_product_attention(query, key, value))
        return self.head(x[:, 0])


class Twice(nn.Module):
    """One module called twice: the sum comes before the square."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Shared(nn.Module):
    """One parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Tied(nn.Module):
    """An embedding whose table is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.table(x).mean(1)), self.table.weight)


class Positions(nn.Module):
    """A position table looked up without a sample dimension, a segment table with one row in front."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.segments = nn.Embedding(9, 6, padding_idx=0), nn.Embedding(5, 6), nn.Embedding(2, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        x = self.words(x) + self.places(places) + self.segments(places[None] % 2)
        return self.head(torch.tanh(x).mean(1))


class Functional(nn.Module):
    """Parameters that no module owns the use of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kernel = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(3, 1, 3))
        self.temperature, self.matrix = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(12, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv1d(torch.tanh(F.linear(x, self.weight))[:, None], self.kernel)
        return torch.tanh(x.flatten(1)) @ self.matrix * self.temperature


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.inside(x.transpose(0, 1)))).mean(0))


class Folded(nn.Module):
    """Frames folded into the batch, sample by sample, then frame by frame."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one, self.two, self.head = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(12, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        x = torch.tanh(self.one(torch.relu(self.conv(x.flatten(0, 1))).flatten(1)))
        x = x.reshape(n, t, 5).transpose(0, 1).reshape(t * n, 5)
        return self.head(torch.tanh(self.two(x)).reshape(t, n, 5).mean(0))


class DataDependent(nn.Module):
    """Tokens routed to experts by their content: no batching rule exists."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = (x[..., 0] > 0) == bool(index)
            if chosen.any():
                out[chosen] = torch.tanh(expert(x[chosen]))
        return self.head(out.mean(1))


class RareUse(nn.Module):
    """A weight used once more when a sample is large: what the first samples do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.layer(x))
        large = x.abs().amax(1) > 50
        if large.any():
            out = out.index_put((large,), torch.tanh(self.layer(out[large])))
        return self.head(out)


class Unknown(nn.Module):
    """A weight that goes through operations without a rule (a weight-normed convolution)."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.length = nn.Parameter(torch.randn(3, 2, 3)), nn.Parameter(torch.rand(3, 1, 1))
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.length * self.direction / self.direction.norm(dim=(1, 2), keepdim=True)
        return self.head(torch.tanh(F.conv1d(x, weight)).mean(2))


def attention(**settings: Any) -> nn.Module:
    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(6, 2, **settings)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=False)[0]

    return Self()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES, bias=False)), images(5)),
    "linear on sequences": (lambda: Pooled(nn.Linear(5, 6), 6), images(3, 5)),
    "linear on grids": (lambda: Pooled(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Flatten(1, 2)), 6), images(2, 3, 5)),
    "sliced": (Sliced, images(3, 5, 5)),
    "conv1d": (lambda: flat(nn.Conv1d(2, 3, 3, stride=2, padding=1), 12), images(2, 8)),
    "conv2d": (lambda: flat(nn.Conv2d(3, 4, 3, padding=1), 100), images(3, 5, 5)),
    "conv2d large": (lambda: flat(nn.Conv2d(16, 16, 3, padding=1), 1296), images(16, 9, 9)),
    "conv2d large, odd channels": (lambda: flat(nn.Conv2d(9, 4, 3, padding=1), 400), images(9, 10, 10)),
    "conv2d large, groups": (lambda: flat(nn.Conv2d(32, 32, 3, groups=2), 2592), images(32, 11, 11)),
    "conv2d large, few channels": (lambda: flat(nn.Conv2d(2, 4, 3, stride=1, padding=1), 400), images(2, 10, 10)),
    "conv2d 1x1": (lambda: flat(nn.Conv2d(3, 4, 1), 100), images(3, 5, 5)),
    "conv2d 1x1, strided": (lambda: flat(nn.Conv2d(3, 4, 1, stride=2), 36), images(3, 5, 5)),
    "conv_transpose2d 1x1": (lambda: flat(nn.ConvTranspose2d(3, 4, 1), 100), images(3, 5, 5)),
    "conv2d tiny": (lambda: flat(nn.Conv2d(3, 4, 3, padding=1), 16), images(3, 2, 2)),
    "conv2d row stride": (lambda: flat(nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(1, 2), dilation=(2, 1)), 48), images(2, 6, 5)),
    "conv2d stride, dilation": (lambda: flat(nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), 63), images(2, 6, 5)),
    "conv2d strided, large": (lambda: flat(nn.Conv2d(2, 3, 3, stride=2, padding=1, dilation=2), 243), images(2, 19, 19)),
    "conv2d kernel past the edge": (lambda: flat(nn.Conv2d(2, 3, 5, padding=4, stride=3), 12), images(2, 2, 2)),
    "conv2d groups": (lambda: flat(nn.Conv2d(4, 6, 3, groups=2), 54), images(4, 5, 5)),
    "conv2d groups, large": (lambda: flat(nn.Conv2d(4, 6, 3, groups=2), 384), images(4, 10, 10)),
    "conv2d depthwise": (lambda: flat(nn.Conv2d(4, 8, 3, groups=4, padding=1), 200), images(4, 5, 5)),
    "conv2d same": (lambda: flat(nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), 75), images(2, 5, 5)),
    "conv2d valid": (lambda: flat(nn.Conv2d(2, 3, 3, padding="valid"), 27), images(2, 5, 5)),
    "conv2d reflect": (lambda: flat(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), 75), images(2, 5, 5)),
    "conv2d circular": (lambda: flat(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), 75), images(2, 5, 5)),
    "conv3d": (lambda: flat(nn.Conv3d(2, 3, 2, padding=1, stride=(1, 2, 1)), 180), images(2, 3, 5, 4)),
    "conv_transpose1d": (lambda: flat(nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), 24), images(2, 4)),
    "conv_transpose2d": (lambda: flat(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2), 486), images(4, 3, 3)),
    "conv_transpose3d": (lambda: flat(nn.ConvTranspose3d(2, 2, 2), 54), images(2, 2, 2, 2)),
    "batch norm 1d": (lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)), images(5)),
    "batch norm sequence": (lambda: flat(nn.BatchNorm1d(3), 15), images(3, 5)),
    "batch norm 2d": (lambda: flat(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), 27), images(2, 5, 5)),
    "batch norm without weights": (lambda: flat(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False)), 27), images(2, 5, 5)),
    "batch norm 3d": (lambda: flat(nn.BatchNorm3d(2), 54), images(2, 3, 3, 3)),
    "layer norm": (lambda: Pooled(nn.Sequential(nn.LayerNorm(5), nn.Tanh()), 5), images(3, 5)),
    "layer norm without bias": (lambda: Pooled(nn.Sequential(nn.LayerNorm(5, bias=False), nn.Tanh()), 5), images(3, 5)),
    "layer norm over two": (lambda: flat(nn.LayerNorm([3, 5]), 30), images(2, 3, 5)),
    "group norm": (lambda: flat(nn.GroupNorm(2, 4), 36), images(4, 3, 3)),
    "instance norm": (lambda: flat(nn.InstanceNorm2d(3, affine=True), 27), images(3, 3, 3)),
    "instance norm, tracked": (lambda: flat(nn.InstanceNorm2d(3, affine=True, track_running_stats=True), 27), images(3, 3, 3)),
    "rms norm": (lambda: Pooled(nn.Sequential(nn.RMSNorm(5), nn.Tanh()), 5), images(3, 5)),
    "embedding": (lambda: Pooled(nn.Sequential(nn.Embedding(6, 5), nn.Tanh()), 5), tokens(4, 6)),
    "embedding positions": (Positions, tokens(4, 9)),
    "prelu": (lambda: nn.Sequential(nn.Linear(5, 6), nn.PReLU(6), nn.Linear(6, CLASSES)), images(5)),
    "bilinear": (lambda: Bilinear(), images(5)),
    "lstm": (lambda: Pooled(nn.LSTM(5, 6, batch_first=True), 6), images(3, 5)),
    "gru": (lambda: Pooled(nn.GRU(5, 4, batch_first=True, bidirectional=True), 8), images(3, 5)),
    "residual": (Residual, images(3, 5, 5)),
    "concatenation": (Concatenation, images(2, 5, 5)),
    "transformer": (Transformer, images(5, 6)),
    "attention module": (lambda: Pooled(attention(batch_first=True), 6), images(5, 6)),
    "attention module, sequence first": (lambda: SequenceFirstAttention(), images(5, 6)),
    "encoder layer": (lambda: Pooled(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 6), images(5, 6)),
    "called twice": (Twice, images(5)),
    "shared parameter": (Shared, images(5)),
    "tied embedding": (Tied, tokens(3, CLASSES)),
    "functional": (Functional, images(5)),
    "sequence first": (SequenceFirst, images(3, 4)),
    "frames in the batch": (Folded, images(3, 2, 2, 2)),
    "weight norm": (Unknown, images(2, 6)),
    "data-dependent": (DataDependent, images(3, 4)),
    "rare use": (RareUse, lambda: torch.cat([torch.randn(4, 5), 100 + torch.randn(3, 5)])),
    "late use": (lambda: LateToken(), lambda: torch.cat([torch.randn(4, 5), 100 + torch.randn(3, 5)])),
    "unused parameter": (lambda: Unused(), images(5)),
    "one class token added": (lambda: TokenOnly(), images(6)),
}


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(5, 5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.tanh(x))


class SequenceFirstAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = attention(), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x.transpose(0, 1)).mean(0))


class LateToken(nn.Module):
    """A bare parameter and a layer that only later samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.extra, self.head = nn.Parameter(torch.randn(1, 5)), nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        large = x.abs().amax(1, keepdim=True) > 50
        if large.any():
            x = torch.where(large, torch.tanh(self.extra(x + self.token)), x)
        return self.head(x)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never, self.head = nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class TokenOnly(nn.Module):
    """A lifted parameter whose first row is taken by index: the lifted reading is wrong and must be found out."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Parameter(torch.randn(1, 6)), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + self.token[0]))


def build(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model with plausible running statistics, in train mode, and seven samples."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make()
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d, nn.RMSNorm)):
            for parameter in module.parameters():
                nn.init.normal_(parameter, 0.5, 1)
    x = inputs()
    return model.to(dtype), (x.to(dtype) if x.is_floating_point() else x, torch.randint(0, CLASSES, (7,)))
