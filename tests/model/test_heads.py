"""The classifier is found in graphs of many kinds, and refused where the graph does not tell."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from expunge.data.objective import Objective
from expunge.errors import InputError, ModelError
from expunge.methods import MaskClassifier
from expunge.model import heads
from expunge.unlearning import unlearn
from tests.methods import cases

CLASSES, WIDTH = 5, 6


class Net(nn.Module):
    """Parts by name, and a forward made of them."""

    def __init__(self, forward: Callable[[Net, Tensor], object], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = forward

    def forward(self, inputs: Tensor) -> object:
        return self.run(self, inputs)


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def body() -> nn.Module:
    # The inner layer has as many outputs as there are classes: a guess by size would take it.
    return nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.ReLU(), nn.Linear(CLASSES, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())


def head() -> nn.Linear:
    return nn.Linear(WIDTH, CLASSES)


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(WIDTH, CLASSES, 1), nn.BatchNorm2d(CLASSES), nn.Conv2d(CLASSES, WIDTH, 3, padding=1), nn.ReLU())


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs: Tensor) -> Tensor:
        return inputs * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * 2


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor) -> Tensor:
        return inputs @ weight.T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, None]:
        return None, None


FLAT, SEQUENCE, IMAGE = (3, WIDTH), (3, 4, WIDTH), (3, WIDTH, 4, 4)
LINEAR = {"head.weight", "head.bias"}
FOUND = {
    "linear": (lambda: Net(lambda m, x: m.head(m.body(x)), head=head(), body=body()), FLAT, LINEAR),
    "without bias": (
        lambda: Net(lambda m, x: m.head(m.body(x)), body=body(), head=nn.Linear(WIDTH, CLASSES, False)),
        FLAT,
        {"head.weight"},
    ),
    "one matrix, no body": (lambda: nn.Linear(WIDTH, CLASSES), FLAT, {"weight", "bias"}),
    "log-softmax": (lambda: Net(lambda m, x: F.log_softmax(m.head(m.body(x)), 1), body=body(), head=head()), FLAT, LINEAR),
    "functional": (
        lambda: Net(lambda m, x: F.linear(m.body(x), m.w, m.b), body=body(), w=matrix(CLASSES, WIDTH), b=matrix(CLASSES)),
        FLAT,
        {"w", "b"},
    ),
    "product": (
        lambda: Net(lambda m, x: m.body(x) @ m.w + m.b, body=body(), w=matrix(WIDTH, CLASSES), b=matrix(1, CLASSES)),
        FLAT,
        {"w", "b"},
    ),
    "einsum": (
        lambda: Net(lambda m, x: torch.einsum("ntd,kd->nk", m.body(x), m.w), body=body(), w=matrix(CLASSES, WIDTH)),
        SEQUENCE,
        {"w"},
    ),
    "averaged over time": (lambda: Net(lambda m, x: m.head(m.body(x)).mean(1), body=body(), head=head()), SEQUENCE, LINEAR),
    "first token": (lambda: Net(lambda m, x: m.head(m.body(x))[:, 0], body=body(), head=head()), SEQUENCE, LINEAR),
    "convolution, pooled": (
        lambda: Net(lambda m, x: F.adaptive_avg_pool2d(m.head(m.body(x)), 1).flatten(1), body=images(), head=nn.Conv2d(WIDTH, CLASSES, 1)),
        IMAGE,
        LINEAR,
    ),
    "convolution, max": (
        lambda: Net(lambda m, x: m.head(m.body(x)).amax((2, 3)), body=images(), head=nn.Conv2d(WIDTH, CLASSES, 1)),
        IMAGE,
        LINEAR,
    ),
    "several, averaged": (
        lambda: Net(lambda m, x: (m.head(m.body(x)) + m.twin(m.body(x))) / 2, body=body(), head=head(), twin=head()),
        FLAT,
        LINEAR | {"twin.weight", "twin.bias"},
    ),
    "temperature": (
        lambda: Net(lambda m, x: m.head(m.body(x)) / m.heat, body=body(), head=head(), heat=matrix(1)),
        FLAT,
        LINEAR | {"heat"},
    ),
    "scale by exp": (
        lambda: Net(lambda m, x: m.head(m.body(x)) * m.heat.exp(), body=body(), head=head(), heat=matrix()),
        FLAT,
        LINEAR | {"heat"},
    ),
    "norm after the head": (
        lambda: Net(lambda m, x: m.norm(m.head(m.body(x))), body=body(), head=head(), norm=nn.BatchNorm1d(CLASSES)),
        FLAT,
        LINEAR | {"norm.weight", "norm.bias"},
    ),
    "bias by position": (
        lambda: Net(lambda m, x: (m.head(m.body(x)) + m.b).mean(1), body=body(), head=head(), b=matrix(4, CLASSES)),
        SEQUENCE,
        LINEAR | {"b"},
    ),
    "distance to prototypes": (lambda: Net(lambda m, x: -torch.cdist(m.body(x), m.w), body=body(), w=matrix(CLASSES, WIDTH)), FLAT, {"w"}),
    "low rank beside": (
        lambda: Net(
            lambda m, x: m.head(m.body(x)) + m.up(m.down(m.body(x))),
            body=body(),
            head=head(),
            down=nn.Linear(WIDTH, 2),
            up=nn.Linear(2, CLASSES),
        ),
        FLAT,
        LINEAR | {"up.weight", "up.bias"},
    ),
    "own function without parameters": (lambda: Net(lambda m, x: Double.apply(m.head(m.body(x))), body=body(), head=head()), FLAT, LINEAR),
    "checkpointed body": (
        lambda: Net(lambda m, x: m.head(checkpoint(m.body, x.requires_grad_(), use_reentrant=True)), body=body(), head=head()),
        FLAT,
        LINEAR,
    ),
    "transformer": (
        lambda: Net(
            lambda m, x: m.head(m.body(x)[:, 0]), body=nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1, batch_first=True), head=head()
        ),
        SEQUENCE,
        LINEAR,
    ),
    "one output": (lambda: Net(lambda m, x: m.head(m.body(x)), body=body(), head=nn.Linear(WIDTH, 1)), FLAT, LINEAR),
}
REFUSED = {
    "weight norm": (lambda: Net(lambda m, x: m.head(m.body(x)), body=body(), head=nn.utils.parametrizations.weight_norm(head())), FLAT),
    "normalised matrix": (lambda: Net(lambda m, x: F.linear(m.body(x), F.normalize(m.w)), body=body(), w=matrix(CLASSES, WIDTH)), FLAT),
    "normalised matrix, bias of two dimensions": (
        lambda: Net(
            lambda m, x: torch.addmm(m.b, m.body(x), F.normalize(m.w).T), body=body(), w=matrix(CLASSES, WIDTH), b=matrix(1, CLASSES)
        ),
        FLAT,
    ),
    "attention": (lambda: Net(lambda m, x: m.body(x) @ m.body(x).transpose(1, 2), body=body()), SEQUENCE),
    "fused attention": (lambda: Net(lambda m, x: F.scaled_dot_product_attention(*(m.body(x)[:, None],) * 3)[:, 0], body=body()), SEQUENCE),
    "own function": (lambda: Net(lambda m, x: Opaque.apply(m.body(x), m.w), body=body(), w=matrix(CLASSES, WIDTH)), FLAT),
    "checkpointed head": (lambda: Net(lambda m, x: checkpoint(m.head, m.body(x), use_reentrant=True), body=body(), head=head()), FLAT),
    "product and sum": (lambda: Net(lambda m, x: (m.body(x)[:, None] * m.w).sum(-1), body=body(), w=matrix(CLASSES, WIDTH)), FLAT),
    "part of a matrix": (lambda: Net(lambda m, x: F.linear(m.body(x), m.w[:CLASSES]), body=body(), w=matrix(9, WIDTH)), FLAT),
    "vector": (lambda: Net(lambda m, x: m.body(x) @ m.w, body=body(), w=matrix(WIDTH)), FLAT),
    "no matrix": (lambda: Net(lambda m, x: x * m.w, w=matrix(WIDTH)), FLAT),
    "no graph": (lambda: Net(lambda m, x: m.head(x).detach(), head=head()), FLAT),
}


FOUND_LINEAR = FOUND["linear"][0]()


def batch_of(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape), torch.zeros(shape[0], dtype=torch.int64)


@pytest.mark.parametrize("case", FOUND)
def test_found(case: str) -> None:
    build, shape, expected = FOUND[case]
    model = build()
    found = heads.find(model, batch_of(shape))
    assert set(found) == expected
    assert found == tuple(name for name, _ in model.named_parameters() if name in expected)


@pytest.mark.parametrize("case", FOUND)
def test_found_under_autocast_and_no_grad(case: str) -> None:
    build, shape, expected = FOUND[case]
    model, batch = build(), batch_of(shape)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        if case != "distance to prototypes":  # cdist has no bfloat16
            model(batch[0])  # fills autocast's cache with casts that have no graph
            assert set(heads.find(model, batch)) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    build, shape = REFUSED[case]
    with pytest.raises(ModelError, match="head="):
        heads.find(build(), batch_of(shape))


def test_tied_embedding() -> None:
    table = nn.Embedding(CLASSES, WIDTH)
    model = Net(lambda m, x: F.linear(m.body(m.table(x)).mean(1), m.table.weight), table=table, body=body())
    assert heads.find(model, (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))) == ("table.weight",)


def test_mappings_and_outputs_with_logits() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body(), head()

        def forward(self, pixels: Tensor, scale: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.head(self.body(pixels * scale)), hidden=pixels)

    batch = {"pixels": torch.randn(FLAT), "scale": torch.ones(3, 1), "labels": torch.zeros(3, dtype=torch.int64)}
    assert set(heads.find(Wrapped(), batch)) == LINEAR


def test_own_objective_with_a_batch_that_cannot_be_cut() -> None:
    model = FOUND["linear"][0]()
    objective = Objective(outputs=lambda model, batch: model(batch["nested"]["x"]))
    assert set(heads.find(model, {"nested": {"x": torch.randn(FLAT)}, "number": torch.tensor(1)}, objective)) == LINEAR


def test_inference_mode() -> None:
    with torch.inference_mode():
        assert set(heads.find(FOUND_LINEAR, batch_of(FLAT))) == LINEAR


@pytest.mark.parametrize("case", ["linear", "own function"])
def test_model_is_left_as_it_was(case: str) -> None:
    model = (FOUND[case][0] if case in FOUND else REFUSED[case][0])()
    noisy = model.run
    model.run = lambda m, x: noisy(m, x) + 0 * torch.randn(CLASSES)
    model.body.eval()
    for parameter in model.body.parameters():
        parameter.requires_grad_(False)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    modes, flags = [module.training for module in model.modules()], [parameter.requires_grad for parameter in model.parameters()]
    state, inputs = torch.get_rng_state(), batch_of(FLAT)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.set_rng_state(state)
    if case in FOUND:
        assert set(heads.find(model, inputs)) == LINEAR
    else:
        with pytest.raises(ModelError):
            heads.find(model, inputs)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(first.grad, torch.ones_like(first)) and all(p.grad is None for p in model.parameters() if p is not first)


def test_frozen_head_is_found() -> None:
    model = FOUND["linear"][0]().requires_grad_(False)
    assert set(heads.find(model, batch_of(FLAT))) == LINEAR
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("case", ["linear", "convolution, pooled", "several, averaged", "temperature", "norm after the head", "functional"])
@pytest.mark.parametrize("label", [0, CLASSES - 1])
def test_class_rows_silence_one_label(case: str, label: int) -> None:
    build, shape, _ = FOUND[case]
    model = build().eval()
    batch = batch_of(shape)
    names = heads.find(model, batch)
    rows = heads.class_rows(model, names, label)
    assert tuple(rows) == names and all(rows[name].shape == dict(model.named_parameters())[name].shape for name in names)
    before = model(batch[0]).detach()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in rows:
                parameter[rows[name]] = 0
    after = model(batch[0]).detach()
    others = [other for other in range(CLASSES) if other != label]
    assert (after[:, label] == 0).all() and before[:, label].abs().max() > 0
    torch.testing.assert_close(after[:, others], before[:, others])


@pytest.mark.parametrize("label", [-1, CLASSES, 1.0, True, None])
def test_class_rows_refuse_label(label) -> None:
    with pytest.raises(InputError, match=rf"label: must be in \[0, {CLASSES}\)"):
        heads.class_rows(FOUND_LINEAR, ("head.weight", "head.bias"), label)


def test_class_rows_refuse_names() -> None:
    with pytest.raises(InputError, match="names: must be parameters of the model.*nothing"):
        heads.class_rows(FOUND_LINEAR, ("head.weight", "nothing"), 0)
    with pytest.raises(InputError, match="names"):
        heads.class_rows(FOUND_LINEAR, (), 0)


def test_class_rows_refuse_what_has_no_rows() -> None:
    with pytest.raises(ModelError, match="no matrix"):
        heads.class_rows(FOUND_LINEAR, ("head.bias",), 0)
    turned = FOUND["product"][0]()
    with pytest.raises(ModelError, match="b has shape"):
        heads.class_rows(turned, ("w", "b"), 0)
    transposed = Net(lambda m, x: m.head(x), head=nn.ConvTranspose2d(CLASSES, CLASSES, 1))
    with pytest.raises(ModelError, match="head.weight has shape"):
        heads.class_rows(transposed, ("head.weight", "head.bias"), 0)


def test_a_compiled_model_has_the_head_of_its_original():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(batch[0])
    assert heads.find(compiled, batch) == ("_orig_mod.2.weight", "_orig_mod.2.bias")


def named_model() -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))})


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("head.2", ("head.2.weight", "head.2.bias")),
        ("head", ("head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias")),
        ("head.2.bias", ("head.2.bias",)),
        (["head.2.weight"], ("head.2.weight",)),
        (("head.2.bias", "head.2"), ("head.2.bias", "head.2.weight")),
    ],
)
def test_a_head_may_be_named_by_its_parameters_or_its_module(given, names) -> None:
    assert heads.named(named_model(), given) == names


@pytest.mark.parametrize("given", [3, (), [], b"head", ("head", 3), True, 1.5, torch.tensor(1.0)])
def test_a_head_that_is_no_name_is_refused(given) -> None:
    with pytest.raises(InputError, match="^head: must be one or more names of the model's parameters"):
        heads.named(named_model(), given)


@pytest.mark.parametrize("given", ["nix", "", "head.1", ("head.2.weight", "head.2.weights"), "head."])
def test_a_head_that_holds_no_parameters_is_refused(given) -> None:
    with pytest.raises(InputError, match="^head: must name parameters of the model, or modules that hold some, such as head.2.weight"):
        heads.named(named_model(), given)


def test_unlearn_takes_a_head_by_its_module() -> None:
    by_module, by_names = (
        unlearn(cases.model(), cases.forget(), cases.remain(), MaskClassifier(), head=head, watch={}).edit
        for head in ("7", ["7.weight", "7.bias"])
    )
    assert {*by_module.edits} == {*by_names.edits} == {"7.weight", "7.bias"}
    with pytest.raises(InputError, match="^head: "):
        unlearn(cases.model(), cases.forget(), cases.remain(), MaskClassifier(), head=3)
