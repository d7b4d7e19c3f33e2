"""A task file for an image classifier of Hugging Face, built from a configuration; as a program it trains one and serves a request."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import ViTConfig, ViTForImageClassification

import expunge


class Patterns(Dataset):
    """Dicts, as an image processor makes them: noise with a bright row whose place is the label."""

    def __init__(self, samples: int, seed: int) -> None:
        self.targets = torch.arange(samples) % 4
        self.pixels = 0.5 * torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        self.pixels[torch.arange(samples), 0, 2 * self.targets] += 2

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"pixel_values": self.pixels[row], "labels": self.targets[row]}


def model() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=4, **sizes))


def train() -> Dataset:
    return Patterns(160, 0)


def test() -> Dataset:
    return Patterns(40, 1)


def validation() -> Dataset:
    return Patterns(80, 2)


def adam(parameters):
    return torch.optim.Adam(parameters)


if __name__ == "__main__":
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network = model()
    expunge.train(network, train(), expunge.Tuning(expunge.Constant(0.005, epochs=6), batch_size=16, optimizer=adam))
    save_file(network.state_dict(), "vit.safetensors")
    settings = expunge.requests.Settings(given=("epochs=30",))
    expunge.requests.fulfil(expunge.requests.Request(__file__, "vit.safetensors", "label=2", "requests", settings=settings), print)
