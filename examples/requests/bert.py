"""A task file for a text classifier of Hugging Face with padded batches; run as a program it trains one and serves a request."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

import expunge

WORDS, PADDING = 40, 0


class Sentences(Dataset):
    """Lists of word numbers of any length; most words of a sentence belong to its label."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.arange(samples) % 3
        self.sentences = []
        for label in self.targets.tolist():
            length = int(torch.randint(3, 9, (), generator=generator))
            own = 1 + 13 * label + torch.randint(0, 13, (length,), generator=generator)
            any_word = torch.randint(1, WORDS, (length,), generator=generator)
            self.sentences.append(torch.where(torch.rand(length, generator=generator) < 0.7, own, any_word).tolist())

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, row: int) -> tuple[list[int], int]:
        return self.sentences[row], int(self.targets[row])


def padded(samples: list[tuple[list[int], int]]) -> dict[str, Tensor]:
    """What DataCollatorWithPadding does: up to the longest sentence, with a mask of what is there."""
    longest = max(len(words) for words, _ in samples)
    words = torch.tensor([words + [PADDING] * (longest - len(words)) for words, _ in samples])
    return {"input_ids": words, "attention_mask": (words != PADDING).long(), "labels": torch.tensor([label for _, label in samples])}


def loader(samples: int, seed: int, shuffle: bool = False) -> DataLoader:
    return DataLoader(Sentences(samples, seed), 16, shuffle=shuffle, collate_fn=padded)


def model() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=16, num_labels=3, **sizes))


def train() -> DataLoader:
    return loader(150, 0, shuffle=True)


def test() -> DataLoader:
    return loader(48, 1)


def validation() -> DataLoader:
    return loader(60, 2)


def adam(parameters):
    return torch.optim.Adam(parameters)


if __name__ == "__main__":
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network = model()
    expunge.train(network, train(), expunge.Tuning(expunge.Constant(0.005, epochs=6), optimizer=adam))
    save_file(network.state_dict(), "bert.safetensors")
    settings = expunge.requests.Settings(given=("epochs=30",))
    expunge.requests.fulfil(expunge.requests.Request(__file__, "bert.safetensors", "0-9", "requests", settings=settings), print)
