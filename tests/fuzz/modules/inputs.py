"""Draw data whose first samples mislead (zeros, copies, shut gates, masks) or of which few are not as all others, batches in any order, and objectives."""
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

# What the first samples are: what is seen on them must not be taken for all.
OPENINGS = {
    "any": "",
    "zeros": "x[:3] = 0",
    "copies": "x[1:3] = x[0]",
    "near-copies": "x[1:3] = x[0] + 1e-«4|9» * torch.randn_like(x[1:3])",
    "gates shut": "x[:3] = -x[:3].abs() - 0.1",
    "gates open": "x[:3] = x[:3].abs() + 2\nx[3:] -= 0.5",
    "in order": "x[:4] = x[:4].flatten(1).sort(1).values.view_as(x[:4]) + 10 * torch.arange(4).view(-1, *[1] * (x.dim() - 1))",
    "tiny": "x[:3] *= 1e-6",
    "all zeros but one": "x[:-1] = 0",
    "copies but for few": "others = x[rare]\nx[:] = x[1]\nx[rare] = others",
    "near-copies but for few": "others = x[rare]\nx[:] = x[1] + 1e-6 * x\nx[rare] = others",
    "shut but for few": "x.flatten(1)[:, 0] = -1\nx.flatten(1)[rare, 0] = 1",
    "low but for few": "x -= 1 + x.flatten(1).mean(1).view(-1, *[1] * (x.dim() - 1))\nx[rare] += 3",
}
TOKEN_OPENINGS = {
    "any": "",
    "padding": "x[:3] = 0",
    "copies": "x[1:3] = x[0]",
    "the same token": "x[:3] = 3",
    "copies but for few": "others = x[rare]\nx[:] = x[1]\nx[rare] = others",
    "the same first token but for few": "x[:, 0] = 1\nx[rare, 0] = 2",
}
MASKS = {
    "any": "",
    "full at first": "lengths[:3] = T",
    "one at first": "lengths[:3] = 1",
    "as long at first": "lengths[:3] = 2",
    "all full": "lengths[:] = T",
    "as long but for few": "others = lengths[rare]\nlengths[:] = 2\nlengths[rare] = others",
}

SAMPLE_LOSSES = {
    "cross-entropy": ("torch.randint(0, K, (S,))", "Objective()"),
    "cross-entropy, a rare class": ("torch.randint(0, K - 1, (S,)).index_fill(0, torch.tensor(rare), K - 1)", "Objective()"),
    "cross-entropy, one class but for few": ("torch.zeros(S).long().index_fill(0, torch.tensor(rare), K - 1)", "Objective()"),
    "soft labels": ("torch.rand(S, K).softmax(1)", "Objective()"),
    "squares": ("torch.randn(S, K)", "Objective(losses=lambda z, y: ((z - y) ** 2).sum(1), classes=False)"),
    "no first gradient": ("torch.randn(S, K)", "Objective(losses=lambda z, y: F.relu(z - y).sum(1), classes=False)"),
    "binary": ("torch.rand(S, K) > 0.5", "Objective(losses=lambda z, y: F.binary_cross_entropy_with_logits(z, y, reduction='none').mean(1), classes=False)"),
    "in place": ("torch.randn(S, K)", "Objective(losses=lambda z, y: z.sub_(y).square().sum(1), classes=False)"),
    "weighted": ("torch.randint(0, K, (S,))", "Objective(losses=lambda z, y: F.cross_entropy(z, y, weight=torch.arange(1, K + 1).to(z.dtype), reduction='none'), classes=True)"),
    "COUPLED: centred": ("torch.randn(S, K)", "Objective(losses=lambda z, y: ((z - z.mean(0) - y) ** 2).sum(1), classes=False)"),
    "COUPLED: contrastive": ("torch.randint(0, K, (S,))", "Objective(losses=lambda z, y: F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction='none'), classes=False)"),
    "COUPLED: weights of the batch": ("torch.randint(0, K, (S,))", "Objective(losses=lambda z, y: F.cross_entropy(z, y, reduction='none') * (y + 1) / (y + 1).sum(), classes=True)"),
}  # fmt: skip
RARE = ("cross-entropy, a rare class", "cross-entropy, one class but for few")
TOKEN_LABELS = "torch.randint(0, K, (S, T)).masked_fill(~(torch.arange(T) < lengths[:, None]), -100)"
TOKEN_LOSSES = {
    "tokens": (TOKEN_LABELS, "Objective()"),
    "tokens, own": (TOKEN_LABELS, "Objective(losses=lambda z, y: F.cross_entropy(z, y, reduction='none', ignore_index=-100).sum(1), classes=True)"),
    "tokens, mean of a sample": (TOKEN_LABELS, "Objective(losses=lambda z, y: F.cross_entropy(z, y, reduction='none').sum(1) / (y != -100).sum(1), classes=True)"),
    "tokens, shifted": (TOKEN_LABELS, "Objective(losses=lambda z, y: F.cross_entropy(z[..., :-1], y[:, 1:], reduction='none').sum(1), classes=True)"),
    "COUPLED: tokens of the batch": (TOKEN_LABELS, "Objective(losses=lambda z, y: F.cross_entropy(z, y, reduction='none').sum(1) / (y != -100).sum(), classes=True)"),
}  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    form: str  # vector, sequence, image, tokens
    width: int
    length: int
    side: tuple[int, int]
    samples: int
    classes: int
    opening: tuple[str, str]
    mask: tuple[str, str]
    loss: str
    per_token: bool
    batches: tuple[tuple[int, ...], ...]
    trimmed: bool
    by_name: bool
    channels_last: bool
    frozen: bool
    single: bool  # float32
    rare: tuple[int, ...]  # the numbers of the few samples that are not as all others

    def names(self) -> list[str]:
        """What is not ordinary about them."""
        flags = [name for name in ("trimmed", "by_name", "channels_last", "frozen", "single") if getattr(self, name)]
        masks = [f"mask: {self.mask[0]}"] if self.form in ("sequence", "tokens") else []
        return [f"{self.form}: {self.opening[0]}", *masks, f"loss: {self.loss}", *flags]

    def kinds(self) -> tuple[str, ...]:
        return ("empirical", "expected") if self.loss.startswith("cross-entropy") else ("empirical",)

    @property
    def classed(self) -> bool:
        """Whether each sample is of one class."""
        return self.kinds() != ("empirical",)

    def rarely(self) -> Inputs:
        """The same, the last class rare."""
        return self if self.loss in RARE else replace(self, loss=RARE[0])

    def smaller(self) -> Iterator[Inputs]:
        for flag in ("trimmed", "by_name", "channels_last", "frozen", "single"):
            if getattr(self, flag):
                yield replace(self, **{flag: False})  # type: ignore[arg-type]
        if self.loss != "cross-entropy" and not self.per_token:
            yield replace(self, loss="cross-entropy")
        for name in ("opening", "mask"):
            if getattr(self, name)[0] != "any":
                yield replace(self, **{name: ("any", "")})  # type: ignore[arg-type]
        for place, rows in enumerate(self.batches):
            before, after = self.batches[:place], self.batches[place + 1 :]
            if before or after:
                yield replace(self, batches=(*before, *after))
            for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]) if len(rows) > 5 else ():
                yield replace(self, batches=(*before, part, *after))
            for row in reversed(rows):
                if len(rows) > 2:  # one sample alone cannot depend on others
                    yield replace(self, batches=(*before, tuple(other for other in rows if other != row), *after))

    def source(self) -> str:
        shape = {
            "vector": "torch.randn(S, D)",
            "sequence": "torch.randn(S, T, D)",
            "image": f"torch.randn(S, D, {self.side[0]}, {self.side[1]})",
            "tokens": "torch.randint(1, 7, (S, T))",
        }[self.form]
        targets, objective = (TOKEN_LOSSES if self.per_token else SAMPLE_LOSSES)[self.loss]
        masked = self.form in ("sequence", "tokens")
        entries = ["x[rows]", *(["(torch.arange(T) < lengths[:, None])[rows]"] if masked else []), "y[rows]"]
        if masked and self.trimmed:
            entries[:2] = [f"{entry}[:, : lengths[rows].max()]" for entry in entries[:2]]
            if self.per_token:
                entries[2] += "[:, : lengths[rows].max()]"
        names = ["x", "mask", "labels"] if masked else ["x", "labels"]
        batch = ", ".join(f"'{name}': {entry}" for name, entry in zip(names, entries, strict=True)) if self.by_name else ", ".join(entries)
        return DATA.format(
            S=self.samples,
            T=self.length,
            D=self.width,
            K=self.classes,
            draw=shape if self.form == "tokens" else f"{shape}.double()",
            opening=indented(self.opening[1]),
            mask=indented(self.mask[1]),
            real="torch.float32" if self.single else "torch.float64",
            rare=list(self.rare),
            rounded="" if self.form == "tokens" else ".to(REAL).to(real)",
            last="\n    x = x.contiguous(memory_format=torch.channels_last)" if self.channels_last else "",
            model=".to(memory_format=torch.channels_last)" if self.channels_last else "",
            targets=targets if ".long()" in targets or "randint" in targets else f"({targets}).to(REAL).to(real)",
            rows=[list(rows) for rows in self.batches],
            batch=f"{{{batch}}}" if self.by_name else f"({batch})",
            objective=objective,
            frozen="    for value in list(model.parameters())[1::3]:\n        value.requires_grad_(False)\n" if self.frozen else "",
            kinds=self.kinds(),
        )


DATA = """\
S, T, D, K = {S}, {T}, {D}, {K}
REAL = {real}


def batches(real=REAL):
    torch.manual_seed(S + T + D + K)
    rare = {rare}
    x = {draw}{opening}
    x = x{rounded}{last}
    lengths = torch.randint(1, T + 1, (S,)){mask}
    y = {targets}
    return [{batch} for rows in {rows}]


def prepared(real=REAL):
    model = build().to(REAL).to(real){model}
{frozen}    return model


objective = {objective}
kinds = {kinds}
"""


def indented(text: str) -> str:
    return "".join(f"\n    {line}" for line in text.splitlines())


def random_inputs(random: Random, width: int, few: bool = False) -> Inputs:
    """`few`: mostly many samples, of which few are not as all others."""
    form = random.choice(("vector", "sequence", "sequence", "image", "tokens"))
    openings = TOKEN_OPENINGS if form == "tokens" else OPENINGS
    opening, mask = random.choice(list(openings)), random.choice(list(MASKS))
    if few and random.random() < 0.5:
        opening = random.choice([name for name in openings if name.endswith("but for few")])
    many = random.random() < (0.7 if few else 0.15)  # of the first sixteen samples all are compared
    samples, per_token = random.randint(20, 72) if many else random.randint(4, 12), form in ("sequence", "tokens") and random.random() < 0.3
    losses = TOKEN_LOSSES if per_token else SAMPLE_LOSSES
    coupled = random.random() < 0.04
    others = [name for name in losses if coupled == name.startswith("COUPLED")]
    loss = others[0] if random.random() < 0.6 and not coupled else random.choice(others)
    if few and not per_token and random.random() < 0.4:
        loss = random.choice(RARE)
    return Inputs(
        form=form,
        width=width,
        length=random.randint(3, 6),
        side=(random.randint(2, 6), random.randint(2, 6)),
        samples=samples,
        classes=random.randint(2, 4),
        opening=(opening, openings[opening].replace("«4|9»", random.choice("49"))),
        mask=(mask, MASKS[mask]),
        loss=loss,
        per_token=per_token,
        batches=random_batches(random, samples),
        trimmed=form in ("sequence", "tokens") and random.random() < 0.3,
        by_name=random.random() < 0.2,
        channels_last=form == "image" and random.random() < 0.4,
        frozen=random.random() < 0.15,
        single=not coupled and random.random() < (0.4 if few else 0.2),
        rare=random_few(random, samples),
    )


def random_few(random: Random, samples: int) -> tuple[int, ...]:
    """Up to three late samples, and at times the first."""
    late = random.sample(range(samples // 3, samples), random.randint(1, min(3, samples // 3)))
    return (*([0] if random.random() < 0.3 else []), *sorted(late))


def random_batches(random: Random, samples: int) -> tuple[tuple[int, ...], ...]:
    """The first samples at first, or anywhere; in batches of one size, or of any."""
    rows = list(range(samples))
    if random.random() < 0.3:
        random.shuffle(rows)
    size, batches = random.choice((2, 3, 4, 5, samples) if samples <= 16 else (8, 17, 20, 32, samples)), []
    while rows:
        cut = size if random.random() < 0.8 else random.randint(1, 4)
        batches.append(tuple(rows[:cut]))
        rows = rows[cut:]
    return tuple(batches)
