"""Networks on padded text, and two on images, built from small configurations; the first needs torch alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SHORTEST, LONGEST = 16, 128  # tokens
VOCABULARY, WIDTH, LAYERS, HEADS, CLASSES = 8192, 256, 4, 4, 10
Batch = dict[str, Tensor]


class PaddedEncoder(nn.Module):
    """A BERT in fifty lines: padding is masked as a key, the first token's state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), nn.Embedding(LONGEST, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        states = self.norm(self.tokens(input_ids) + self.positions(places))
        mask = attention_mask.bool()[:, None, None, :]
        for layer in self.layers:
            states = layer(states, mask)
        return self.head(states[:, 0])


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wider, self.narrower = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        parts = (part(states).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        states = self.first(states + self.out(attended.transpose(1, 2).flatten(2)))
        return self.second(states + self.narrower(functional.gelu(self.wider(states))))


def by_transformers(model: str, configuration: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, configuration)(**settings))

    return build


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    data: Callable[[int, torch.Generator], Batch]
    tokens: bool = False  # a distribution for every token


def text(samples: int, generator: torch.Generator) -> Batch:
    """Token numbers with lengths drawn evenly, padded to the longest, and their mask."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (samples,), generator=generator)
    mask = torch.arange(LONGEST)[None] < lengths[:, None]
    ids = torch.randint(3, VOCABULARY, (samples, LONGEST), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def classified(samples: int, generator: torch.Generator) -> Batch:
    return {**text(samples, generator), "labels": torch.randint(CLASSES, (samples,), generator=generator)}


def continued(samples: int, generator: torch.Generator) -> Batch:
    """The next token at every position that has one."""
    batch = text(samples, generator)
    following = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)[:, 1:]
    return {**batch, "labels": functional.pad(following, (0, 1), value=-100)}


def translated(samples: int, generator: torch.Generator) -> Batch:
    source, target = text(samples, generator), text(samples, generator)
    labels = torch.where(target["attention_mask"].bool(), target["input_ids"], -100)
    begun = functional.pad(target["input_ids"], (1, -1))
    return {**source, "decoder_input_ids": begun, "decoder_attention_mask": target["attention_mask"], "labels": labels}


def images(side: int) -> Callable[[int, torch.Generator], Batch]:
    def data(samples: int, generator: torch.Generator) -> Batch:
        pixels = torch.randn(samples, 3, side, side, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (samples,), generator=generator)}

    return data


SHAPE = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CASES = {
    "encoder": Case(PaddedEncoder, classified),
    "bert": Case(
        by_transformers(
            "BertForSequenceClassification", "BertConfig", **SHAPE, intermediate_size=4 * WIDTH,
            max_position_embeddings=LONGEST, num_labels=CLASSES,
        ),
        classified,
    ),
    "bert-base": Case(by_transformers("BertForSequenceClassification", "BertConfig", num_labels=CLASSES), classified),
    "gpt2": Case(
        by_transformers(
            "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=LONGEST, **ENDS
        ),
        continued,
        tokens=True,
    ),
    "gpt2-small": Case(by_transformers("GPT2LMHeadModel", "GPT2Config"), continued, tokens=True),
    "llama": Case(
        by_transformers(
            "LlamaForCausalLM", "LlamaConfig", **SHAPE, num_key_value_heads=HEADS // 2,
            intermediate_size=3 * WIDTH, max_position_embeddings=LONGEST, **ENDS,
        ),
        continued,
        tokens=True,
    ),
    "t5": Case(
        by_transformers(
            "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=4 * WIDTH,
            num_layers=LAYERS, num_heads=HEADS, decoder_start_token_id=0, pad_token_id=0,
        ),
        translated,
        tokens=True,
    ),
    "swin": Case(
        by_transformers(
            "SwinForImageClassification", "SwinConfig", image_size=64, patch_size=2, embed_dim=48, depths=[2, 2, 2],
            num_heads=[3, 6, 12], window_size=8, num_labels=CLASSES,
        ),
        images(64),
    ),
    "vit": Case(
        by_transformers(
            "ViTForImageClassification", "ViTConfig", image_size=64, patch_size=8, hidden_size=WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, intermediate_size=4 * WIDTH, num_labels=CLASSES,
        ),
        images(64),
    ),
}  # fmt: skip
