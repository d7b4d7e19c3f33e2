"""Networks that only the benchmark needs: a small ViT for 32x32 images, and ImageNet's ResNet-50."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from expunge.vision.networks import densenet100, resnet20, vgg16


class Attention(nn.Module):
    """softmax(q kᵀ / √d) v, with q, k and v from one Linear."""

    def __init__(self, dimension: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dimension, 3 * dimension)
        self.proj = nn.Linear(dimension, dimension)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, dimension = x.shape
        query, key, value = self.qkv(x).reshape(samples, tokens, 3, self.heads, dimension // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        # written out: the fused kernel has no batching rule on the CPU, which would slow every peer built on vmap
        weights = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(-1)
        return self.proj((weights @ value).transpose(1, 2).reshape(samples, tokens, dimension))


class TransformerBlock(nn.Module):
    """x ← x + attention(norm(x)); x ← x + mlp(norm(x))"""

    def __init__(self, dimension: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dimension)
        self.attn = Attention(dimension, heads)
        self.norm2 = nn.LayerNorm(dimension)
        self.fc1 = nn.Linear(dimension, 4 * dimension)
        self.fc2 = nn.Linear(4 * dimension, dimension)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Patches, a class token and learned positions, laid out as in timm."""

    def __init__(self, image: int = 32, patch: int = 4, dimension: int = 192, depth: int = 6, heads: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dimension, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dimension) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, dimension) * 0.02)
        self.blocks = nn.Sequential(*[TransformerBlock(dimension, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dimension)
        self.head = nn.Linear(dimension, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class Bottleneck(nn.Module):
    """y = relu(shortcut(x) + conv1x1(relu(conv3x3(relu(conv1x1(x)))))), each convolution normalised; four times wider at the end."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        projection = [nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)]
        self.shortcut = nn.Sequential(*projection) if inputs != 4 * width or stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        inner = functional.relu(self.norm2(self.conv2(inner)))
        return functional.relu(self.shortcut(x) + self.norm3(self.conv3(inner)))


class ImageNetResNet(nn.Module):
    """He et al. 2016, table 1: a 7x7 stem and four stages of bottlenecks."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, depth in enumerate(depths):
            for block in range(depth):
                blocks.append(Bottleneck(inputs, 64 << stage, 2 if stage and not block else 1))
                inputs = 4 * (64 << stage)
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.conv(x))), 3, 2, 1)
        return self.classifier(self.blocks(x).mean((2, 3)))


@dataclass(frozen=True)
class Case:
    """A network and the batches it is measured on; `batch` is (cpu, cuda)."""

    build: Callable[[], nn.Module]
    batch: tuple[int, int]
    batches: int = 16
    image: int = 32
    classes: int = 10


CASES = {
    "resnet20": Case(resnet20, (64, 1024)),
    "vgg16": Case(vgg16, (64, 512)),
    "densenet": Case(densenet100, (32, 256)),
    "vit": Case(VisionTransformer, (64, 512)),
    "resnet50": Case(ImageNetResNet, (8, 64), image=224, classes=1000),
}
CPU_DEFAULT = ("resnet20", "vgg16", "densenet", "vit")
CUDA_DEFAULT = ("resnet20", "vgg16", "densenet", "vit", "resnet50")
