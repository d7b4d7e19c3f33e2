"""Three small networks in float64 (sums of layers, concatenated layers, no BatchNorm), pictures for them, and how to compare."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.vision.networks import DenseNet, resnet8

CLASSES = 4
FORGET, REMAIN, SIZE = 7, 20, 8  # samples and batch size: three remain batches, one forget batch
TWO_EPOCHS = Tuning(Constant(0.02, 2), batch_size=SIZE, momentum=0.9, weight_decay=0.01, seed=3)

NETWORKS = {
    "residual": lambda: resnet8(CLASSES, channels=1, width=4),
    "concatenation": lambda: DenseNet([1, 1], growth=2, classes=CLASSES, channels=1),
    "no BatchNorm": lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(108, CLASSES)),
}


def network(name: str) -> nn.Module:
    """Trained for a moment, so that BatchNorm has statistics and gradients differ between classes."""
    with torch.random.fork_rng([]):
        torch.manual_seed(11)
        model = NETWORKS[name]().double()
        images, labels = pictures(40, seed=1).tensors
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    model.zero_grad(set_to_none=True)
    return model.eval()


def pictures(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    images = torch.randn(samples, 1, 8, 8, dtype=torch.float64, generator=generator)
    return TensorDataset(images + labels.reshape(-1, 1, 1, 1), labels)


def forget() -> TensorDataset:
    return pictures(FORGET, seed=21)


def remain() -> TensorDataset:
    return pictures(REMAIN, seed=22)


def assert_close(found: nn.Module, expected: nn.Module, before: nn.Module) -> None:
    """Weights and running statistics agree to rounding, and the weights have moved."""
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-9, atol=1e-12, msg=name)
    assert any(not torch.allclose(a, b) for a, b in zip(expected.parameters(), before.parameters(), strict=True))
