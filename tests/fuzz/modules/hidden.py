"""List operations in which a weight is used once more, or rows are moved, where it hardly shows; in the form of leaves.py."""
# ruff: noqa: E501

from __future__ import annotations

from tests.fuzz.modules.leaves import LAST, MATRIX, VECTOR_OF_D, Leaf

GATE = "gate = (x.flatten(1)[:, 0] > «0|0.5|1.5|-9»).view(-1, *[1] * (x.dim() - 1)).to(x.dtype)"
FAINT = "«0.5|1e-2|1e-4»"

LAST_DIMENSION: dict[str, Leaf] = {
    "bare, again in another order": (VECTOR_OF_D, f"{GATE}\nx = x * self.$m + {FAINT} * gate * back(moved(x, «0|1|2|3|4») * self.$m, «0|1|2|3|4»)"),
    "bare and as a weight": (VECTOR_OF_D, f"{GATE}\nx = x * self.$m + {FAINT} * gate * F.linear(x, self.$m[None].expand($D, $D))"),
    "scripted and by hand": ("self.$m = torch.jit.script(nn.Linear($D, $D).double())", f"{GATE}\nx = F.linear(x, self.$m.weight, self.$m.bias) + {FAINT} * gate * self.$m(x)"),
    "traced, again in another order": ("self.$m = scripted(nn.Linear($D, $D))", f"{GATE}\nx = self.$m(x) + {FAINT} * gate * back(self.$m(moved(x, «0|1|2|3|4»)), 0)"),
    "functional call": (f"self.$m = {LAST}", "x = torch.func.functional_call(self.$m, «{'weight': self.$m.weight * 2}|{'weight': self.$m.weight.T}|dict(self.$m.named_parameters())|{'weight': torch.tanh(self.$m.weight)}», (x,))"),
    "functional call, again": (f"self.$m = {LAST}", f"{GATE}\nx = self.$m(x) + {FAINT} * gate * torch.func.functional_call(self.$m, dict(self.$m.named_parameters()), (x,))"),
    "vmapped": (f"self.$m = {LAST}", "x = torch.vmap(self.$m)(x)"),
    "weight without a gradient again": (f"self.$m = {LAST}", "x = self.$m(x) + F.linear(x, self.$m.weight«.detach()|.data|.clone().detach()»)"),
    "weight copied": (MATRIX, "x = F.linear(x, «self.$m.clone()|self.$m.to(x.dtype)|self.$m.contiguous()|torch.stack([self.$m, self.$m]).mean(0)|torch.where(self.$m > 0, self.$m, 0.1 * self.$m)|F.normalize(self.$m, dim=1)»)"),
    "spectral norm": ("self.$m = nn.utils.parametrizations.«spectral_norm|orthogonal»(nn.Linear($D, $D))", "x = self.$m(x)"),
    "inner": (MATRIX, "x = «torch.inner(x, self.$m)|torch.linalg.multi_dot([x.reshape(-1, $D), self.$m, self.$m]).view(x.shape)|torch.baddbmm(x.reshape(1, -1, $D), x.reshape(1, -1, $D), self.$m[None]).view(x.shape)|torch.cdist(x.reshape(1, -1, $D), self.$m[None])[0].view(x.shape)»"),
    "cosine to prototypes": (MATRIX, "x = F.cosine_similarity(x[..., None, :], self.$m, -1)"),
    "filter of frequencies": ("self.$m = nn.Parameter(torch.randn($D // 2 + 1, 2))", "x = torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.$m), n=$D)"),
    "hook on a gradient": (f"self.$m = {LAST}", "x = self.$m(x)\nif x.requires_grad:\n    x.register_hook(lambda g: «g.flip(-1)|g * 2|g - g.mean(-1, keepdim=True)»)"),
    "straight through": (f"self.$m = {LAST}", "x = self.$m(x)\nx = x + («x.round()|x.sign()|(x > 0).to(x.dtype)» - x).detach()"),
    "checkpointed, the older way": (f"self.$m = {LAST}", "x = torch.utils.checkpoint.checkpoint(self.$m, x, use_reentrant=True)"),
    "table with padding": ("self.$m = nn.Embedding(5, $D, padding_idx=«0|2|-1», sparse=«False|False|True»)", "x = x + self.$m((x[..., 0] * 2).detach().long().clamp(0, 4))"),
    "table scaled by frequency": ("self.$m = nn.Embedding(5, $D, scale_grad_by_freq=True)", "x = x + self.$m((x[..., 0] * 2).detach().long().clamp(0, 4))"),
    "table and its transpose": ("self.$m = nn.Embedding(5, $D)", f"{GATE}\nx = x + self.$m((x[..., 0] * 2).detach().long().clamp(0, 4)) + {FAINT} * gate * (x @ self.$m.weight.T).softmax(-1) @ self.$m.weight"),
    "bag of rows": ("self.$m = nn.EmbeddingBag(5, $D, mode='«sum|mean|max»', padding_idx=«None|None|1»)", "x = x + self.$m((x * 2).detach().long().clamp(0, 4).flatten(1)).view(-1, *[1] * (x.dim() - 2), $D)"),
    "bag of rows, end to end": ("self.$m = nn.Parameter(torch.randn(5, $D))", "index = (x * 2).detach().long().clamp(0, 4).flatten(1)\nx = x + F.embedding_bag(index.flatten(), self.$m, torch.arange(len(x)) * index.shape[1], mode='«sum|mean»').view(-1, *[1] * (x.dim() - 2), $D)"),
    "bag of weighted rows": ("self.$m = nn.Parameter(torch.randn(5, $D))", "index = (x * 2).detach().long().clamp(0, 4).flatten(1)\nx = x + F.embedding_bag(index, self.$m, per_sample_weights=x.flatten(1), mode='sum').view(-1, *[1] * (x.dim() - 2), $D)"),
    "written in place, all": (f"self.$m = {LAST}", "before, x = x, torch.empty_like(x)\n«x.copy_(self.$m(before))|x[:] = self.$m(before)|x[...] = self.$m(before)|x.zero_().add_(self.$m(before))|x.zero_().index_add_(0, torch.arange(len(x)), self.$m(before))|x.zero_().index_copy_(0, torch.arange(len(x)), self.$m(before))»"),
    "written row by row": (f"self.$m = {LAST}", "before, x = x, torch.zeros_like(x)\nfor i in range(len(x)):\n    x[i] «=|+=» self.$m(before[«i|i : i + 1»]).view(x[i].shape)"),
}  # fmt: skip

ON_VECTORS: dict[str, Leaf] = {
    "LSTM cell of its own": ("self.$m = nn.LSTMCell($D, $D)", "x, state = self.$m(x)\nx, state = self.$m(x, (x, state))"),
    "cell again in another order": ("self.$m = nn.GRUCell($D, $D)", f"{GATE}\nx = self.$m(x, x.tanh()) + {FAINT} * gate * back(self.$m(moved(x, «0|1|2|3|4»), moved(x, 0)), 0)"),
    "outer products": (MATRIX, "x = «torch.einsum('ni,nj,ij->ni', x, x.tanh(), self.$m)|(x[:, :, None] * x[:, None] * self.$m).sum(2)|torch.stack([torch.outer(row, row) for row in x]).mul(self.$m).sum(2)»"),
    "one vector each": (MATRIX, "x = torch.stack([torch.addmv(row, self.$m, row) for row in x])"),
}  # fmt: skip

ON_SEQUENCES: dict[str, Leaf] = {
    "relative positions": ("self.$m = nn.Linear($D, 3 * $D)\nself.$m_r = nn.«Embedding(79, 1)|Parameter(torch.randn(79, 1))»", "q, k, v = self.$m(x).chunk(3, -1)\nplace = torch.arange(x.shape[1])\ntable = self.$m_r.weight if isinstance(self.$m_r, nn.Embedding) else self.$m_r\nbias = table[place[:, None] - place + 39][..., 0]\nx = «(q @ k.transpose(1, 2) + bias).softmax(-1) @ v|F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(len(x), -1, -1))|F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])»"),
    "slopes of distance": ("self.$m = nn.Linear($D, 3 * $D)\nself.$m_s = nn.Parameter(torch.randn(()))", "q, k, v = self.$m(x).chunk(3, -1)\nplace = torch.arange(x.shape[1]).to(x.dtype)\nx = (q @ k.transpose(1, 2) - F.softplus(self.$m_s) * (place[:, None] - place).abs()).softmax(-1) @ v"),
    "heads": ("self.$m = nn.Linear($D, 3 * $D)", "q, k, v = self.$m(x).view(len(x), -1, 3, 2, $D // 2).permute(2, 0, 3, 1, 4)\nx = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None]).transpose(1, 2).flatten(2)"),
    "one key for all heads": ("self.$m_q, self.$m = nn.Linear($D, $D), nn.Linear($D, $D)", "q = self.$m_q(x).view(len(x), -1, 2, $D // 2).transpose(1, 2)\nk, v = (part[:, None].expand_as(q) for part in self.$m(x).chunk(2, -1))\nx = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)"),
    "attention, a mask per head": ("self.$m = nn.MultiheadAttention($D, 2, batch_first=True)", "x = self.$m(x, x, x, attn_mask=(~mask).repeat_interleave(2, 0)[:, None].expand(-1, x.shape[1], -1))[0]"),
    "attention, causal and padded": ("self.$m = nn.MultiheadAttention($D, 2, batch_first=True)", "x = self.$m(x, x, x, key_padding_mask=~mask, attn_mask=torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), need_weights=False)[0]"),
    "attention to one another's ends": ("self.$m = nn.MultiheadAttention($D, 2, batch_first=True)", "x = x + self.$m(x[:, :1], x, x, key_padding_mask=~mask)[0]"),
    "attention twice": ("self.$m = nn.MultiheadAttention($D, 2, batch_first=True)", f"{GATE}\nx = self.$m(x, x, x)[0] + {FAINT} * gate * self.$m(x, x.tanh(), x.flip(1))[0]"),
    "positions by number": (f"self.$m = {LAST}", "x = x + self.$m(x.index_select(1, «(torch.arange(x.shape[1]) * 2) % x.shape[1]|torch.arange(x.shape[1]).flip(0)|torch.tensor([0] * x.shape[1])»))"),
    "windows": ("self.$m = nn.Linear(2 * $D, $D)", "x = self.$m(F.pad(x, (0, 0, 1, 0)).unfold(1, 2, 1).transpose(2, 3).flatten(2))"),
    "running mean over time": (f"self.$m = {LAST}", "x = self.$m(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])"),
    "masked mean beside": (f"self.$m = {LAST}", "x = x + self.$m((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))[:, None]"),
    "frames again in another order": (f"self.$m = {LAST}", f"{GATE}\nflat = x.transpose(0, 1).flatten(0, 1)\nx = self.$m(x.flatten(0, 1)).view(x.shape) + {FAINT} * gate * self.$m(flat).view(x.shape[1], len(x), $D).transpose(0, 1)"),
    "one written token": (f"self.$m = {LAST}", "before, x = x, x.clone()\n«x[:, 0] = self.$m(before[:, 0])|x[:, -1] += self.$m(before[:, 0])|x.select(1, 0).copy_(self.$m(before[:, -1]))|x = x.index_copy(1, torch.tensor([0]), self.$m(before[:, :1]))|x = x.index_add(1, torch.tensor([0, 0]), self.$m(before[:, [0, -1]]))»"),
    "scattered tokens": (f"self.$m = {LAST}", "place = (mask.sum(1) - 1)[:, None, None].expand(-1, 1, $D)\nx = x.«scatter|scatter_add»(1, place, self.$m(x[:, :1]))"),
    "transposed conv with more": ("self.$m = nn.ConvTranspose1d($D, $D, 3, 2, 1, output_padding=1, groups=«1|2|$D», dilation=«1|2»)", "x = self.$m(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)"),
    "GRU again": ("self.$m = nn.GRU($D, $D, batch_first=True)", f"{GATE}\nx = self.$m(x)[0] + {FAINT} * gate * self.$m(x.flip(1))[0]"),
}  # fmt: skip

ON_IMAGES: dict[str, Leaf] = {
    "conv again in another order": ("self.$m = nn.Conv2d($D, $D, «1|3, padding=1», groups=«1|2»)", f"{GATE}\nx = self.$m(x) + {FAINT} * gate * back(self.$m(moved(x, «0|1|2|3|4»)), «0|1|2|3|4»)"),
    "norm again in another order": ("self.$m = nn.«BatchNorm2d($D)|GroupNorm(2, $D)»", f"{GATE}\nx = self.$m(x) + {FAINT} * gate * back(self.$m(moved(x, «0|1|2|3|4»)), «0|1|2|3|4»)"),
    "conv as a linear map": ("self.$m = nn.Conv2d($D, $D, 1)", f"{GATE}\nx = self.$m(x) + {FAINT} * gate * F.linear(x.movedim(1, -1), self.$m.weight[:, :, 0, 0]).movedim(-1, 1)"),
    "transposed conv with more, image": ("self.$m = nn.ConvTranspose2d($D, $D, 3, 2, 1, output_padding=«1|(0, 1)», groups=«1|2», bias=«True|False»)", "x = self.$m(x)[..., : x.shape[2], : x.shape[3]]"),
    "transposed and plain": ("self.$m = nn.Parameter(torch.randn($D, $D, 3, 3) / 4)", "x = F.conv_transpose2d(F.conv2d(x, self.$m, padding=1), self.$m, padding=1)"),
    "3-D, strided": ("self.$m = nn.Conv3d(1, 1, (2, 1, 3), (2, 1, 1), (0, 0, 1), groups=1)", "x = x + self.$m(x[:, None])[:, 0].repeat(1, 2, 1, 1)"),
    "3-D, transposed": ("self.$m = nn.ConvTranspose3d(1, «1|2», (2, 1, 1), (1, 1, 1), groups=1)", "x = self.$m(x[:, None]).mean(1)[:, : $D]"),
    "sampled at points": ("self.$m = nn.Linear($D, 2)", "grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, x.shape[2]), torch.linspace(-1, 1, x.shape[3]), indexing='ij')[::-1], -1).to(x.dtype)\nx = F.grid_sample(x, grid + 0.2 * self.$m(x.mean((2, 3)))[:, None, None].tanh(), align_corners=True)"),
    "local response": (VECTOR_OF_D, "x = F.local_response_norm(x, 2) * self.$m[:, None, None]"),
    "images written in place": ("self.$m = nn.Conv2d($D, $D, 1)", "before, x = x, x.clone()\n«x[:, :1] = self.$m(before)[:, :1]|x[:, :, 0] += self.$m(before)[:, :, 0]|x.copy_(self.$m(before))|x.select(1, 0).mul_(self.$m(before)[:, 0])»"),
}  # fmt: skip

COUPLED: dict[str, Leaf] = {
    "faint mean": ("", "x = x + «1e-2|1e-4» * x.mean(0, keepdim=True)"),
    "largest so far": ("", "x = x + 0.1 * x.cummax(0).values"),
    "the one before": ("", "x = torch.cat([x[:1], x[1:] + 0.1 * x[:-1]])"),
    "in order of size": ("", "x = x.sort(0).values"),
    "number of samples": ("", "x = x * (1 + 0.01 * len(x))"),
    "place in the batch": ("", "x = x * (1 + 0.1 * torch.arange(len(x)).view(-1, *[1] * (x.dim() - 1)))"),
    "hook on the gradient of the batch": ("", "x = x * 1.0\nif x.requires_grad:\n    x.register_hook(lambda g: «g * len(g)|g - g.mean(0)|g.flip(0)|g.cumsum(0)»)"),
    "few places": ("", "x = x * ((x.flatten(1)[:, 0] > 0).cumsum(0) <= «2|3|5»).view(-1, *[1] * (x.dim() - 1))"),
    "cut at the largest": ("", "x = x.clamp(max=x.detach().max() - 0.01)"),
    "duplicates dropped": ("", "x = x * (1 + (torch.cdist(x.flatten(1), x.flatten(1)) < 1).sum(1).view(-1, *[1] * (x.dim() - 1)))"),
}  # fmt: skip

WRAPPERS: dict[str, str] = {
    "in another order": "x = back($m(moved(x, «0|1|2|3|4»)), «0|1|2|3|4»)",
    "again in another order": f"{GATE}\nx = $m(x) + {FAINT} * gate * back($m(moved(x, «0|1|2|3|4»)), «0|1|2|3|4»)",
    "again for few": f"{GATE}\nx = $m(x) + {FAINT} * gate * $m(x * 0.5)",
    "summed and differenced": "x = $m(x.cumsum(0).diff(dim=0, prepend=x.new_zeros(1, *x.shape[1:])))",
    "differenced behind": "x = $m(x).cumsum(0).diff(dim=0, prepend=x.new_zeros(1, *x.shape[1:]))",
    "even and odd rows": "out = x.clone()\nout[::2] = $m(x[::2])\nif len(x) > 1:\n    out[1::2] = $m(x[1::2])\nx = out",
    "rows written one by one": "out = torch.empty_like(x)\nfor i in range(len(x)):\n    out[i] = $m(x[i : i + 1])[0]\nx = out",
    "halves exchanged": "half = len(x) // 2\nboth = $m(torch.cat([x[half:], x[:half]]))\nx = torch.cat([both[len(x) - half :], both[: len(x) - half]])",
    "with its neighbour, which is dropped": "both = $m(torch.cat([x, moved(x, 0)]))\nx = both[: len(x)]",
}  # fmt: skip

# In the header of every program: the samples one further on, and back, by several ways.
MOVING = """

def moved(x, how, by=1):
    n, rows = len(x), [(i + by) % len(x) for i in range(len(x))]
    if how == 0:
        return torch.cat([x[by % n :], x[: by % n]])
    if how == 1:
        return x.roll(-by, 0)
    if how == 2:
        return x.index_select(0, (torch.arange(n) + by) % n)
    if how == 3:
        return torch.stack([x[i] for i in rows])
    return (torch.eye(n, dtype=x.dtype)[rows] @ x.flatten(1)).view(x.shape)


def back(x, how):
    return moved(x, how, -1)
"""
