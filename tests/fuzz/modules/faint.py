"""List operations whose gradient is faint beside the others in most samples, and rows in the order of the tokens; in the form of leaves.py.

What shows nothing where a plan is checked may still carry the sums: a branch under a small scale, whose own squares must be right, and one
behind a soft gate or in the logit of an unlikely class, which few samples open.
"""
# ruff: noqa: E501

from __future__ import annotations

from tests.fuzz.modules.leaves import LAST, Leaf

SCALE = "«1|1e-3|1e-5|1e-6»"
GATE = "gate = torch.sigmoid(«20|20|10|-20» * «x.flatten(1)[:, 0]|x.flatten(1)[:, 0].detach()|(x.flatten(1).mean(1) - 1)»).view(-1, *[1] * (x.dim() - 1))"
ROW = "«self.$m[0]|self.$m.mean(0)|self.$m.sum(0)|self.$m.view(-1)|self.$m.squeeze(0)|self.$m.amax(0)»"  # of a parameter (1, D)
LEADING_ONE = "self.$m = nn.Parameter(torch.randn(1, $D))"

LAST_DIMENSION: dict[str, Leaf] = {
    "shift with a leading 1": (f"{LEADING_ONE}\nself.$m_l = {LAST}", f"x = x + {SCALE} * torch.tanh(self.$m_l(x) + {ROW})"),
    "scale with a leading 1": (LEADING_ONE, f"x = x + {SCALE} * torch.tanh(x * {ROW})"),
    "bias with a leading 1": (f"{LEADING_ONE}\nself.$m_w = nn.Parameter(torch.randn($D, $D) / 2)", f"x = x + {SCALE} * torch.tanh(F.linear(x, self.$m_w, {ROW}))"),
    "table of one row": ("self.$m = nn.Embedding(1, $D)", f"x = x + {SCALE} * torch.tanh(x + self.$m.weight«[0]|.mean(0)|.squeeze(0)»)"),
    "faint linear": (f"self.$m = {LAST}", f"x = x + {SCALE} * self.$m(x)"),
    "LayerScale": (f"self.$m = {LAST}\nself.$m_faint = nn.Parameter(torch.full(($D,), 1e-5))", "x = x + self.$m_faint * self.$m(x)"),
}  # fmt: skip

ON_SEQUENCES: dict[str, Leaf] = {
    "attention, sequence first": ("self.$m = nn.MultiheadAttention($D, «1|2», bias=«True|True|False»)", "y = x.transpose(0, 1)\nx = self.$m(y, y, y, need_weights=«True|False»)[0].transpose(0, 1)"),
    "attention, sequence first and masked": ("self.$m = nn.MultiheadAttention($D, 2)", "y = x.transpose(0, 1)\nx = self.$m(y, y, y, key_padding_mask=~mask, need_weights=«True|False»)[0].transpose(0, 1)"),
    "attention of the mean, sequence first": ("self.$m = nn.MultiheadAttention($D, 2)", "y = x.transpose(0, 1)\nx = x + self.$m(y.mean(0, keepdim=True), y, y)[0].transpose(0, 1)"),
    "faint attention": ("self.$m = nn.MultiheadAttention($D, 2, batch_first=True)", f"x = x + {SCALE} * self.$m(x, x, x, need_weights=«True|False»)[0]"),
    "attention behind a soft gate": ("self.$m = nn.MultiheadAttention($D, 2, batch_first=True)", f"{GATE}\nx = x + gate * self.$m(x, x, x)[0]"),
    "encoder layer, sequence first": ("self.$m = nn.TransformerEncoderLayer($D, 2, 5, norm_first=«True|False»)", "x = self.$m(x.transpose(0, 1)).transpose(0, 1)"),
    "decoder layer, sequence first": ("self.$m = nn.TransformerDecoderLayer($D, 2, 5)", "y = x.transpose(0, 1)\nx = self.$m(y, y.tanh()).transpose(0, 1)"),
    "recurrent, sequence first": ("self.$m = nn.«GRU|LSTM»($D, $D)", "x = self.$m(x.transpose(0, 1))[0].transpose(0, 1)"),
    "norm of frames before samples": ("self.$m = nn.«BatchNorm1d|LayerNorm|RMSNorm»($D)", "x = self.$m(x.transpose(0, 1).reshape(-1, $D)).view(x.shape[1], len(x), $D).transpose(0, 1)"),
    "conv of frames before samples": ("self.$m = nn.Conv1d(1, 1, 3, padding=1)", "x = self.$m(x.transpose(0, 1).reshape(-1, 1, $D)).view(x.shape[1], len(x), $D).transpose(0, 1)"),
}  # fmt: skip

ON_IMAGES: dict[str, Leaf] = {
    "lines before samples": ("self.$m = nn.Conv1d($D, $D, «1|3, padding=1»)", "n, c, h, w = x.shape\nx = self.$m(x.permute(2, 0, 1, 3).reshape(h * n, c, w)).view(h, n, c, w).permute(1, 2, 0, 3)"),
    "pixels before samples": (f"self.$m = {LAST}", "n, c, h, w = x.shape\nx = self.$m(x.permute(2, 3, 0, 1).reshape(-1, c)).view(h, w, n, c).permute(2, 3, 0, 1)"),
    "faint conv": ("self.$m = nn.Conv2d($D, $D, 3, padding=1)", f"x = x + {SCALE} * self.$m(x)"),
    "shift of channels with a leading 1": (LEADING_ONE, f"x = x + {SCALE} * torch.tanh(x + {ROW}[:, None, None])"),
}  # fmt: skip

WRAPPERS: dict[str, str] = {
    "faint": "x = x + «1e-5|1e-6|1e-6» * «$m(x)|torch.tanh($m(x))»",
    "under a LayerScale": "x = x + (self.$m_faint[:, None, None] if x.dim() == 4 else self.$m_faint) * $m(x)",
    "behind a soft gate": f"{GATE}\nx = «x + gate * $m(x)|torch.tanh((1 - gate) * x + gate * $m(x))|x + gate * torch.tanh($m(x))»",
    "beside a soft gate": f"{GATE}\nx = «gate * x + (1 - gate) * $m(x)|x + $m(gate * x)|x * (1 + gate * $m(x).tanh())»",
}  # fmt: skip
MADE: dict[str, str] = {"under a LayerScale": "self.$m_faint = nn.Parameter(torch.full(($D,), 1e-5))"}  # in `__init__`

# Around operations on vectors, which the tokens of a sequence are: in the order of the samples, and in that of the tokens.
FOLDS: dict[str, str] = {
    "folded by samples": "x = $m(x.«flatten(0, 1)|reshape(-1, $D)»).view(x.shape)",
    "folded by tokens": "x = $m(x.transpose(0, 1).«flatten(0, 1)|reshape(-1, $D)»).view(x.shape[1], len(x), $D).transpose(0, 1)",
    "folded by tokens, faint": "x = x + «1e-5|1e-6» * $m(x.transpose(0, 1).reshape(-1, $D)).view(x.shape[1], len(x), $D).transpose(0, 1)",
}  # fmt: skip

# The logit of the last class, which the network does not expect: its branch has operations of its own.
UNLIKELY = (
    "self.head, self.head_far = nn.Linear($D, $K - 1), nn.Linear($D, 1)",
    "near, x = x, branch(x)\n$pool\nfar, x = self.head_far(x) - «32|32|20», near\n$pool\nreturn torch.cat([self.head(x), far], 1)",
)
