"""A task file for a network of one's own on a folder of pictures; run as a program it makes both and serves a request.

From the shell, where the pictures and the weights are there:
expunge unlearn --task pictures.py --weights pictures.safetensors --forget label=1 --out requests/
"""

import os
from pathlib import Path

import torch
from torch import nn

import expunge
from expunge.vision.datasets import folder

PICTURES = Path(os.environ.get("PICTURES", "pictures"))


def model() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 3))


def train():
    return folder.read(PICTURES).train


def test():
    return folder.read(PICTURES).test


def recipe() -> expunge.Tuning:
    return expunge.Tuning(expunge.Constant(0.02, epochs=15), batch_size=16)


def make_pictures() -> None:
    """Squares of three colours."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for label, name in enumerate(("red", "green", "blue")):
        for part, number in (("train", 40), ("test", 10)):
            (PICTURES / part / name).mkdir(parents=True, exist_ok=True)
            for place in range(number):
                pixels = torch.randint(0, 120, (12, 12, 3), generator=generator)
                pixels[..., label] += 100
                Image.fromarray(pixels.byte().numpy()).save(PICTURES / part / name / f"{place:02}.png")


if __name__ == "__main__":
    from safetensors.torch import save_file

    make_pictures()
    torch.manual_seed(0)
    network = model()
    expunge.train(network, train(), recipe())
    save_file(network.state_dict(), "pictures.safetensors")
    expunge.requests.fulfil(expunge.requests.Request(__file__, "pictures.safetensors", "label=1", "requests"), print)
