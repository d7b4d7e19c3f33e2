"""Build and train the small network of the digits: seconds on a CPU, for demonstrations, documents and tests."""

from __future__ import annotations

import torch
from torch import nn

from expunge.runtime.modes import seeded
from expunge.training.loop import train
from expunge.training.tuning import Tuning
from expunge.vision.datasets.digits import CLASSES
from expunge.vision.networks import resnet8
from expunge.vision.recipes import RECIPES
from expunge.vision.scenarios import Images


def network() -> nn.Module:
    """A small ResNet with fresh weights."""
    return resnet8(CLASSES, channels=1)


def recipe(epochs: int, seed: int = 0) -> Tuning:
    """The paper's schedule in so many epochs, for training, retraining and fine-tuning alike."""
    return RECIPES["digits"].replayed(epochs, seed)


def trained(images: Images, epochs: int, seed: int = 0, progress: bool = False) -> nn.Module:
    """A network trained on these digits."""
    with seeded(seed, torch.device("cpu")):
        model = network()
    train(model, images, recipe(epochs, seed), progress=progress)
    return model
