"""Noise equals its formula, given the draws; the released reading redraws what it should and nothing else."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from expunge.curvature.solvers import ConjugateGradients
from expunge.data.objective import Objective
from expunge.errors import InputError
from expunge.methods.noise import FLOOR, FisherNoise, NewtonNoise, standard_normal
from expunge.unlearning import unlearn
from expunge.vision.networks import DenseNet, resnet8
from tests import reference
from tests.methods import cases, properties

CLASSES = 3
NETWORKS = {
    "residual": (lambda: resnet8(CLASSES, channels=1, width=4), ("classifier.weight", "classifier.bias")),
    "concatenation": (lambda: DenseNet([1, 1], growth=2, classes=CLASSES, channels=1), ("classifier.weight", "classifier.bias")),
    "no BatchNorm": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, CLASSES)), ("3.weight", "3.bias")),
}
every_network = pytest.mark.parametrize("name", NETWORKS)
QUIET = {"watch": {}}


def network(name: str) -> nn.Module:
    return built(NETWORKS[name][0])


def built(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        return build().double()


def data() -> tuple[TensorDataset, TensorDataset]:
    forget, remain = (TensorDataset(*part.dataset[torch.tensor(part.indices)]) for part in (cases.forget(), cases.remain()))
    return (TensorDataset(forget.tensors[0].double(), forget.tensors[1]), TensorDataset(remain.tensors[0].double(), remain.tensors[1]))


def information(model: nn.Module, remain: TensorDataset) -> dict[str, torch.Tensor]:
    return {name: total / len(remain) for name, total in reference.fisher(model, remain.tensors, "expected").items()}


def assert_weights(found: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in found.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-9, atol=1e-12, msg=name)


@every_network
def test_the_text_is_its_formula(name):
    model, (forget, remain) = network(name), data()
    outcome = unlearn(model, forget, remain, FisherNoise(1e-9, seed=5, tuning=None), **QUIET)
    held, noise = information(model, remain), standard_normal(dict(model.named_parameters()), seed=5)
    expected = {
        name: value.detach() + 1e-9**0.25 * torch.clamp(held[name], min=1e-8) ** -0.25 * noise[name]
        for name, value in model.named_parameters()
    }
    assert_weights(outcome.model, expected)
    outcome.patch.revert(outcome.model)
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())


def batch_information(model: nn.Module, remain: TensorDataset, size: int) -> dict[str, torch.Tensor]:
    """mean over batches of Σ_y p̄(y)·(∂ mean_n −log p(y|x_n))², p̄ the batch's mean probability."""
    parts = list(zip(*(tensor.split(size) for tensor in remain.tensors), strict=True))
    found = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for images, _ in parts:
        for label in range(CLASSES):
            model.zero_grad()
            logarithms = model.eval()(images).log_softmax(1)
            (-logarithms[:, label].mean()).backward()
            for name, value in model.named_parameters():
                found[name] += float(logarithms[:, label].detach().exp().mean()) * value.grad**2 / len(parts)
    model.zero_grad(set_to_none=True)
    return found


@every_network
@pytest.mark.parametrize(
    ("build", "expect"),
    [
        (FisherNoise.as_golatkar, information),
        (FisherNoise.as_released, lambda model, remain: batch_information(model, remain, 12)),
    ],
    ids=["golatkar", "released"],
)
def test_golatkars_rule_and_what_each_program_feeds_it(name, build, expect):
    model, (forget, remain), head = network(name), data(), NETWORKS[name][1]
    outcome = unlearn(model, forget, remain, build(seed=7), batch_size=12, **QUIET)
    held, noise, expected = expect(model, remain), standard_normal(dict(model.named_parameters()), seed=7), {}
    for name, value in model.named_parameters():
        mean = value.detach().clone()
        if name in head:
            mean[0] = 0
        expected[name] = mean + reference.released_noise(held[name], 1e-6, name in head, row=0).sqrt() * noise[name]
    assert_weights(outcome.model, expected)


def test_draws_are_normal_and_follow_the_seed():
    shapes = {"a": torch.zeros(200, 50), "b": torch.zeros(5000)}
    first, second = (standard_normal(shapes, seed)["a"] for seed in (0, 1))
    assert not torch.equal(first, second) and torch.equal(first, standard_normal(shapes, 0)["a"])
    together = torch.cat([part.flatten() for part in standard_normal(shapes, 0).values()])
    assert abs(together.mean()) < 0.03 and abs(together.std() - 1) < 0.03 and together.unique().numel() == together.numel()


def test_dead_weights_get_bounded_noise_and_frozen_ones_none():
    model, (forget, remain) = network("no BatchNorm"), data()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0, -1.0  # a ReLU that never fires
    model[0].bias.requires_grad_(False)
    outcome = unlearn(model, forget, remain, FisherNoise(1e-8, tuning=None), **QUIET)
    added = outcome.model[0].weight[1] - model[0].weight[1]
    assert 0 < added.abs().max() <= 5 * (1e-8 / FLOOR) ** 0.25
    assert torch.equal(outcome.model[0].bias, model[0].bias)


def test_no_scale_is_no_noise():
    model, (forget, remain) = network("residual"), data()
    outcome = unlearn(model, forget, remain, FisherNoise(0, tuning=None), **QUIET)
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())


def redrawn(outcome_model: nn.Module, model: nn.Module) -> list[int]:
    """Rows of the classifier that are near 0 now and were not."""
    before, after = (held.classifier.weight.detach().norm(dim=1) for held in (model, outcome_model))
    return [row for row in range(CLASSES) if after[row] < 0.5 * before[row]]


def test_rows_are_redrawn_for_whole_categories_alone():
    model, (forget, remain) = network("residual"), data()
    with torch.no_grad():
        model.classifier.weight.fill_(3.0)
    first, rest = Subset(remain, range(0, len(remain), 2)), Subset(remain, range(1, len(remain), 2))  # label 1, label 2

    def rows(forget, remain, **settings) -> list[int]:
        return redrawn(unlearn(model, forget, remain, FisherNoise.as_released(**settings), **QUIET).model, model)

    assert rows(forget, remain) == [0]
    assert rows(ConcatDataset([forget, first]), rest) == [0, 1]
    assert rows(Subset(forget, range(8)), ConcatDataset([remain, Subset(forget, range(8, 16))])) == []
    assert rows(Subset(forget, range(8)), ConcatDataset([remain, Subset(forget, range(8, 16))]), label=0) == [0]
    text = unlearn(model, forget, remain, FisherNoise(1e-16, tuning=None), **QUIET).model
    assert redrawn(text, model) == []


def narrow() -> nn.Module:
    """Whole matrices are large."""
    return resnet8(CLASSES, channels=1, width=1)


@every_network
def test_newton_noise_is_its_formula(name):
    model, (forget, remain) = network(name) if name != "residual" else built(narrow), data()
    solver = ConjugateGradients(damping=0.1, iterations=500, tolerance=1e-12)
    outcome = unlearn(model, forget, remain, NewtonNoise(1e-9, solver, seed=5), **QUIET)
    held, noise = information(model, remain), standard_normal(dict(model.named_parameters()), seed=5)
    matrix = reference.gauss_newton(model, remain.tensors) / len(remain)
    matrix.diagonal().add_(0.1)
    step = torch.linalg.solve(matrix, reference.gradient(model, remain.tensors) / len(remain))
    parts = step.split([value.numel() for value in model.parameters()])
    expected = {
        name: value.detach() - part.reshape(value.shape) + 1e-9**0.25 * torch.clamp(held[name], min=1e-8) ** -0.25 * noise[name]
        for (name, value), part in zip(model.named_parameters(), parts, strict=True)
    }
    assert_weights(outcome.model, expected)


def test_the_newton_step_of_a_quadratic_ends_at_the_remain_datas_optimum():
    """Linear least squares: one undamped step is the retrained model."""
    generator = torch.Generator().manual_seed(1)
    inputs, goals = (
        torch.randn(60, 4, dtype=torch.float64, generator=generator),
        torch.randn(60, 1, dtype=torch.float64, generator=generator),
    )
    forget, remain = TensorDataset(inputs[:10], goals[:10]), TensorDataset(inputs[10:], goals[10:])
    squared = Objective(losses=lambda logits, targets: (logits - targets).square().sum(1))
    method = NewtonNoise(0, ConjugateGradients(damping=1e-12, tolerance=1e-12), kind="empirical")
    outcome = unlearn(nn.Linear(4, 1, bias=False).double(), forget, remain, method, objective=squared, **QUIET)
    retrained = torch.linalg.lstsq(inputs[10:], goals[10:]).solution
    torch.testing.assert_close(outcome.model.weight.detach().T, retrained, rtol=1e-9, atol=1e-11)


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="^scale: .* found -1"):
        FisherNoise(-1)
    with pytest.raises(InputError, match="^scale: .* found inf"):
        NewtonNoise(float("inf"))
    with pytest.raises(InputError, match="^reading: "):
        FisherNoise(reading="original")
    with pytest.raises(InputError, match="^label: is for the released reading"):
        FisherNoise(label=0)
    for method in (FisherNoise(tuning=None), FisherNoise.as_released(), NewtonNoise()):
        with pytest.raises(InputError, match="^remain: .*Noise needs the data to keep"):
            unlearn(cases.model(), cases.forget(), None, method)
    with pytest.raises(InputError, match=r"label: must be in \[0, 3\); found 3"):
        unlearn(cases.model(), cases.forget(), cases.remain(), FisherNoise.as_released(label=3))


def test_settings_are_the_texts_and_the_programs():
    released, golatkar = FisherNoise.as_released(), FisherNoise.as_golatkar()
    assert (released.scale, released.kind, released.reading, released.tuning) == (1e-6, "batch", "released", None)
    assert dataclasses.replace(released, kind="expected") == golatkar
    assert dataclasses.replace(golatkar, reading="text", tuning=FisherNoise().tuning, scale=FisherNoise().scale) == FisherNoise()
    with pytest.raises(InputError, match="^kind: "):
        NewtonNoise(kind="batch")
