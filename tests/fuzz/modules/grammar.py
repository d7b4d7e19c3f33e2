"""Compose random models, data and objectives from a seed, as the source text of a Python file."""
# ruff: noqa: E501

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from tests.fuzz.modules import faint, hidden, leaves
from tests.fuzz.modules.convolutions import resizing
from tests.fuzz.modules.inputs import RARE, Inputs, random_inputs

# The operations on each form of tensor; one of these groups is drawn, then one of it.
FORMS = {
    "vector": (leaves.ON_VECTORS, leaves.LAST_DIMENSION, hidden.ON_VECTORS, hidden.LAST_DIMENSION, faint.LAST_DIMENSION),
    "sequence": (
        *(leaves.ON_SEQUENCES, leaves.LAST_DIMENSION, hidden.ON_SEQUENCES, hidden.LAST_DIMENSION),
        *(faint.ON_SEQUENCES, faint.LAST_DIMENSION),
    ),
    "image": (leaves.ON_IMAGES, hidden.ON_IMAGES, faint.ON_IMAGES),
}
WRAPPERS, COUPLED = leaves.WRAPPERS | hidden.WRAPPERS | faint.WRAPPERS, leaves.COUPLED | hidden.COUPLED
POOLS = {
    "vector": ("",),
    "sequence": (
        "x = x.mean(1)",
        "x = x.sum(1)",
        "x = x[:, 0]",
        "x = x[:, -1]",
        "x = x.amax(1)",
        "x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)",
        "x = x[torch.arange(len(x)), mask.sum(1) - 1]",
        "x = x.gather(1, (mask.sum(1) - 1)[:, None, None].expand(-1, 1, x.shape[-1])).squeeze(1)",
        "x = torch.stack([x[i, :n].mean(0) for i, n in enumerate(mask.sum(1).tolist())])",
        "x = torch.stack([x[i, n - 1] for i, n in enumerate(mask.sum(1).tolist())])",
    ),
    "image": ("x = x.mean((2, 3))", "x = x.flatten(2).amax(2)", "x = F.adaptive_avg_pool2d(x, 1).flatten(1)", "x = x[:, :, 0, 0]"),
}
HEADS = {
    "linear": ("self.head = nn.Linear($D, $K)", "return self.head(x)"),
    "matmul": ("self.head = nn.Parameter(torch.randn($D, $K))", "return x @ self.head"),
    "transposed": ("self.head = nn.Parameter(torch.randn($K, $D))", "return «x @ self.head.T|F.linear(x, self.head)|torch.einsum('...d,kd->...k', x, self.head)»"),
    "tied": ("self.head = self.table", "return «F.linear(x, self.table.weight[:$K])|x @ self.table.weight[:$K].T|F.linear(x, self.table.weight)[..., :$K]»"),
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """An operation: its lines in `__init__` and in `forward`; a wrapper has operations of its own."""

    name: str
    made: str
    used: str
    inner: tuple[Node, ...] = ()
    label: str = ""  # of a wrapper's function
    keeps: bool = True  # the shape, so that it can be left out

    def names(self) -> Iterator[str]:
        yield self.name
        for node in self.inner:
            yield from node.names()

    def init(self) -> str:
        return "\n".join([self.made, *(node.init() for node in self.inner)])

    def forward(self) -> str:
        if not self.inner:
            return self.used
        body = "\n".join(node.forward() for node in self.inner)
        return f"def {self.label}(x):\n{textwrap.indent(body, '    ')}\n    return x\n{self.used}"


@dataclass(frozen=True)
class Program:
    """A model, its data and its objective."""

    seed: str
    inputs: Inputs
    nodes: tuple[Node, ...]
    tail: Node

    def names(self) -> list[str]:
        return [*sorted({name for node in (*self.nodes, *self.tail.inner) for name in node.names()}), self.tail.name, *self.inputs.names()]

    def source(self) -> str:
        made = "\n".join([*(node.init() for node in self.nodes), self.tail.init()])
        used = "\n".join([*(node.forward() for node in self.nodes), self.tail.forward()])
        lines = [line for line in made.splitlines() if line.strip()]
        text = "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        text += textwrap.indent("\n".join(lines), " " * 8) + "\n\n    def forward(self, x, mask=None):\n"
        text += textwrap.indent("\n".join(line for line in used.splitlines() if line.strip()), " " * 8)
        return f"{HEADER}{hidden.MOVING}\n\n{text}\n\n\n{BUILD.replace('$seed', repr(self.seed))}\n\n{self.inputs.source()}\n"

    def smaller(self) -> Iterator[Program]:
        """The same with one operation less, a wrapper replaced by what is in it, or less data."""
        for place, node in enumerate(self.nodes):
            for instead in _less(node):
                yield replace(self, nodes=(*self.nodes[:place], *instead, *self.nodes[place + 1 :]))
        for instead in _less(self.tail):
            if instead != self.tail.inner:
                yield replace(self, tail=instead[0])
        for inputs in self.inputs.smaller():
            yield replace(self, inputs=inputs)


def _less(node: Node) -> Iterator[tuple[Node, ...]]:
    if node.keeps:
        yield ()
    if node.inner:
        yield node.inner
    for place, part in enumerate(node.inner):
        for instead in _less(part):
            if inner := (*node.inner[:place], *instead, *node.inner[place + 1 :]):
                yield (replace(node, inner=inner),)


HEADER = """\
import numpy
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from expunge.data.objective import Objective

FOREIGN = torch.full((), 1.5, dtype=torch.float64, requires_grad=True)


class OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).reshape(-1, len(weight)).sum(0)


def scripted(module):
    return torch.jit.trace(module.double(), torch.zeros(1, module.in_features).double(), check_trace=False)
"""

BUILD = '''\
def build():
    """In train mode, with statistics and weights away from where they begin."""
    torch.manual_seed(sum(map(ord, $seed)))
    model = Model().double()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value += (1e-5 if name.endswith("_faint") else 0.2) * torch.randn_like(value)
        for name, value in model.named_buffers():
            if name.endswith("running_mean"):
                value.copy_(torch.randn_like(value))
            if name.endswith("running_var"):
                value.copy_(0.5 + torch.rand_like(value))
    return model
'''


class Composer:
    """Draws from the grammar; remembers what was drawn, so that it can be used again."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.width = random.choice((4, 4, 6))
        self.faint = random.random() < 0.3  # branches that hardly show, and many samples of which few are not as all others
        self.count = 0
        self.earlier: dict[str, list[Node]] = {form: [] for form in FORMS}

    def text(self, template: str, label: str) -> str:
        """The template with its choices made."""
        chosen = re.sub("«([^«»]*)»", lambda match: self.random.choice(match[1].split("|")), template)
        return chosen.replace("$m", label).replace("$D", str(self.width))

    def label(self) -> str:
        self.count += 1
        return f"m{self.count}"

    def leaf(self, form: str, masked: bool) -> Node:
        group = self.random.choice(FORMS[form])
        names = [name for name, (_, used) in group.items() if masked or "mask" not in used]
        name, label = self.random.choice(names), self.label()
        made, used = group[name]
        node = Node(name, self.text(made, label), self.text(used, label))
        if made:
            self.earlier[form].append(node)
        return node

    def again(self, form: str, masked: bool) -> Node | None:
        """An operation from before, on the same weights: the same lines, or another module that has them."""
        earlier = [node for node in self.earlier[form] if masked or "mask" not in node.used]
        if not earlier:
            return None
        node, label = self.random.choice(earlier), self.label()
        before = re.findall(r"self\.(m\d+)\b", node.made)[0]
        way = self.random.choice(("again", "a second name", "tied"))
        if way == "again" or "nn.Parameter" in node.made:
            return Node(f"again: {node.name}", "", node.used)
        used = re.sub(rf"self\.{before}\b", f"self.{label}", node.used)
        if way == "a second name":
            return Node(f"second name: {node.name}", f"self.{label} = self.{before}", used)
        own = re.sub(rf"self\.{before}\b", f"self.{label}", "\n".join(node.made.splitlines()[:1]))
        tied = f"for key, value in self.{before}._parameters.items():\n    self.{label}._parameters[key] = value"
        return Node(f"tied: {node.name}", f"{own}\n{tied}", used)

    def node(self, form: str, masked: bool, depth: int = 0) -> Node:
        draw = self.random.random()
        if draw < 0.2 and (node := self.again(form, masked)) is not None:
            return node
        if draw < (0.65 if self.faint else 0.45) and depth < 2:
            wrappers = faint.WRAPPERS if self.faint and self.random.random() < 0.7 else WRAPPERS
            return self.wrapped(form, *self.random.choice(list(wrappers.items())), depth)
        if draw > (0.85 if self.faint else 0.95) and depth < 2 and form == "sequence":
            return self.wrapped("vector", *self.random.choice(list(faint.FOLDS.items())), depth)
        return self.leaf(form, masked)

    def wrapped(self, form: str, name: str, used: str, depth: int) -> Node:
        """Operations on this form of tensor in a wrapper."""
        label = self.label()
        inner = tuple(self.node(form, False, depth + 1) for _ in range(self.random.choice((1, 1, 2))))
        return Node(name, self.text(faint.MADE.get(name, ""), label), self.text(used, label), inner, label)

    def coupled(self) -> Node:
        name, label = self.random.choice(list(COUPLED)), self.label()
        made, used = COUPLED[name]
        return Node(f"COUPLED: {name}", self.text(made, label), self.text(used, label))

    def program(self, seed: str) -> Program:
        inputs, nodes = random_inputs(self.random, self.width, self.faint), []
        form, masked, side = inputs.form, True, inputs.side
        if form == "tokens":
            nodes.append(Node("table", *(self.text(part, "table") for part in self.random.choice(TABLES)), keeps=False))
            form = "sequence"
        for _ in range(self.random.choice((1, 2, 2, 3, 4))):
            if form == "image" and self.random.random() < 0.5:
                made, used, side = resizing(self.random, self.width, side, self.label())
                nodes.append(Node("convolution", made, used, keeps=False))
            nodes.append(self.node(form, masked))
            if form == "image" and self.random.random() < 0.15:
                nodes.append(Node("patches", "", "x = x.flatten(2).transpose(1, 2)", keeps=False))
                form, masked = "sequence", False
        if self.random.random() < 0.06:
            nodes.insert(self.random.randrange(1, len(nodes) + 1), self.coupled())
            inputs = replace(inputs, single=False)  # where couplings of some parts in a thousand are taken for rounding
        if self.random.random() < (0.5 if inputs.loss in RARE else 0.05) and inputs.classed:
            return Program(seed, inputs.rarely(), tuple(nodes), self.unlikely(form, masked, inputs))
        return Program(seed, inputs, tuple(nodes), self.tail(form, masked, inputs))

    def unlikely(self, form: str, masked: bool, inputs: Inputs) -> Node:
        """A head whose last class has a branch of its own."""
        pool = self.random.choice([way for way in POOLS[form] if masked or "mask" not in way])
        made, used = (self.text(part, "head").replace("$K", str(inputs.classes)).replace("$pool", pool) for part in faint.UNLIKELY)
        inner = tuple(self.node(form, False, 1) for _ in range(self.random.choice((1, 2))))
        return Node("head: an unlikely class", made, used, inner, "branch", keeps=False)

    def tail(self, form: str, masked: bool, inputs: Inputs) -> Node:
        heads = [name for name in HEADS if name != "tied" or inputs.form == "tokens"]
        name = self.random.choice(heads)
        made, used = (self.text(part, "head").replace("$K", str(inputs.classes)) for part in HEADS[name])
        if inputs.per_token:
            value = used.removeprefix("return ")
            return Node(f"head: {name}", made, f"return ({value}).transpose(1, 2)", keeps=False)
        pool = self.random.choice([way for way in POOLS[form] if masked or "mask" not in way])
        return Node(f"head: {name}", made, f"{pool}\n{used}", keeps=False)


TABLES = [
    ("self.table = nn.Embedding(7, $D, padding_idx=«0|None|None»)", "x = self.table(x)"),
    ("self.table = nn.Embedding(7, $D)", "x = «F.embedding(x, self.table.weight)|self.table.weight[x]|F.one_hot(x, 7).to(self.table.weight.dtype) @ self.table.weight»"),
    ("self.table = nn.Embedding(7, $D)", "x = «self.table(x.flatten()).view(*x.shape, -1)|self.table(x.T).transpose(0, 1)|self.table(x) * $D**0.5»"),
]  # fmt: skip


def compose(seed: int, number: int) -> Program:
    """The program with this number: always the same for a seed."""
    text = f"{seed} {number}"
    return Composer(Random(text)).program(text)
