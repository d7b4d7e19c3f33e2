"""torch's attention with masks, in both orders of batch and sequence, equals the loop over samples in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.fisher.patterns import K, check, labels

pytestmark = pytest.mark.filterwarnings("ignore::expunge.errors.SlowFisherWarning", "ignore:enable_nested_tensor is True")
LENGTHS = ((5, 5, 2, 4, 1, 3), (3, 1, 5, 2, 2, 4))


class Attention(nn.Module):
    def __init__(self, masks: str, batch_first: bool = True, weights: bool = True, width: int | None = None, **settings: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, kdim=width, vdim=width, **settings)
        self.head, self.masks, self.weights, self.width = nn.Linear(8, K), masks, weights, width

    def forward(self, x, padded):
        given = {"key_padding_mask": padded} if "padding" in self.masks else {}
        if "causal" in self.masks:
            given["attn_mask"] = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if "per head" in self.masks:
            given["attn_mask"] = torch.zeros_like(x[:, :1, :1]).masked_fill(padded[:, None], -1e9).repeat_interleave(2, 0).repeat(1, 5, 1)
        query = x if self.attention.batch_first else x.transpose(0, 1)
        key = query if self.width is None else query[..., : self.width]
        out = self.attention(query, key, key, need_weights=self.weights, **given)[0]
        out = out if self.attention.batch_first else out.transpose(0, 1)
        return self.head(out.masked_fill(padded[..., None], 0).sum(1))


class Encoder(nn.Module):
    def __init__(self, batch_first: bool, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=batch_first, norm_first=norm_first)
        self.layers, self.head, self.batch_first = nn.TransformerEncoder(layer, 2), nn.Linear(8, K), batch_first

    def forward(self, x, padded):
        out = self.layers(x if self.batch_first else x.transpose(0, 1), src_key_padding_mask=padded)
        return self.head(out[:, 0] if self.batch_first else out[0])


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Transformer(8, 2, 1, 1, 12, batch_first=True), nn.Linear(8, K)

    def forward(self, x, padded):
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        out = self.layers(x, x.flip(1), src_key_padding_mask=padded, tgt_mask=later, memory_key_padding_mask=padded)
        return self.head(out.mean(1))


MODELS = {
    **{
        f"{masks or 'no mask'}, batch first {first}, weights {weights}": lambda masks=masks, first=first, weights=weights: Attention(
            masks, first, weights
        )
        for masks in ("", "padding", "padding, causal", "per head")
        for first in (True, False)
        for weights in (True, False)
    },
    "a bias of keys and values": lambda: Attention("padding", add_bias_kv=True),
    "zeros to attend to": lambda: Attention("padding", False, add_zero_attn=True),
    "narrow keys": lambda: Attention("padding", False, width=6),
    **{
        f"encoder, batch first {first}, norm first {norm}": lambda first=first, norm=norm: Encoder(first, norm)
        for first in (True, False)
        for norm in (True, False)
    },
    "encoder and decoder": Whole,
}


@pytest.mark.parametrize("name", MODELS)
def test_attention(name):
    torch.manual_seed(0)
    batches = [(torch.randn(6, 5, 8).double(), torch.arange(5)[None] >= torch.tensor(lengths)[:, None], labels(6)) for lengths in LENGTHS]
    model = MODELS[name]()
    for parameter in model.parameters():  # biases begin at zero
        parameter.data += 0.1 * torch.randn_like(parameter)
    check(model, batches, absolute=1e-20)
