"""Products equal whole matrices, solvers equal linear algebra, and what cannot be solved is said."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from expunge import fisher
from expunge.curvature import gauss_newton_product, gradient, hessian_product
from expunge.curvature.solvers import ConjugateGradients, LiSSA
from expunge.data.batches import as_batches
from expunge.data.objective import Objective
from expunge.errors import DivergedError, InputError, ModelError
from expunge.runtime.cuda_graphs import GraphedStep
from expunge.vision.networks import DenseNet, resnet8, vgg11
from tests import reference
from tests.methods import properties

CLASSES, SAMPLES = 3, 11

NETWORKS = {
    "residual": lambda: resnet8(CLASSES, channels=1, width=1),
    "concatenation": lambda: DenseNet([1, 1], growth=1, classes=CLASSES, channels=1),
    "no BatchNorm": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, CLASSES)),
}
PRODUCTS = {"hessian": (hessian_product, reference.hessian), "gauss-newton": (gauss_newton_product, reference.gauss_newton)}

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
every_network = pytest.mark.parametrize("name", NETWORKS)
every_product = pytest.mark.parametrize("kind", PRODUCTS)


def network(name: str) -> nn.Module:
    """In float64, away from a fresh network's zeros and ones."""
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        model = NETWORKS[name]().double()
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.data += 0.3 * torch.rand_like(tensor)
    return model


def linear() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES)).double()


def pictures(samples: int = SAMPLES, size: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(samples) % CLASSES
    return TensorDataset(
        torch.randn(samples, 1, size, size, dtype=torch.float64, generator=generator) + labels.reshape(-1, 1, 1, 1), labels
    )


def vector(model: nn.Module, seed: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, dtype=torch.float64, generator=generator) for name, value in model.named_parameters()}


def flat(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts.values()])


def assert_near(found: torch.Tensor, expected: torch.Tensor, error: float = 1e-10) -> None:
    assert expected.norm() > 0
    assert (found - expected).norm() <= error * expected.norm()


@every_network
def test_gradients_are_means_over_samples(name):
    model, data = network(name), pictures()
    for size in (1, 4, SAMPLES):
        found, count = gradient(model, as_batches(data, batch_size=size))
        assert count == SAMPLES
        assert_near(flat(found), reference.gradient(model, data.tensors) / SAMPLES)


@every_network
@every_product
def test_products_equal_the_whole_matrix_whatever_the_batches(kind, name):
    (product, dense), model, data = PRODUCTS[kind], network(name), pictures()
    v = vector(model)
    expected = dense(model, data.tensors) @ flat(v) / SAMPLES
    for size in (1, 4, SAMPLES):  # the last batch of 4 has 3
        assert_near(flat(product(model, as_batches(data, batch_size=size), v)), expected)


@every_network
def test_the_gauss_newton_matrix_is_the_expected_fisher(name):
    model, data = network(name), pictures()
    diagonal = fisher.diagonal(model, data, kind="expected").sums
    assert_near(reference.gauss_newton(model, data.tensors).diagonal(), flat(diagonal), 1e-8)


@every_product
def test_parameters_that_the_vector_does_not_name_count_as_fixed(kind):
    (product, dense), model, data = PRODUCTS[kind], network("no BatchNorm"), pictures()
    v = {"3.bias": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)}
    found = product(model, as_batches(data), v)
    assert found.keys() == v.keys()
    assert_near(found["3.bias"], dense(model, data.tensors)[-3:, -3:] @ v["3.bias"] / SAMPLES)
    with pytest.raises(InputError, match="vector: must name parameters of the model; found .*nothing"):
        product(model, as_batches(data), {"nothing": v["3.bias"]})


@every_product
def test_products_are_symmetric_on_networks_of_the_zoo(kind):
    product = PRODUCTS[kind][0]
    for build in (lambda: vgg11(10, 1), lambda: resnet8(10, 1), lambda: DenseNet([2, 2], 4, 10, 1), Attentive):
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model = build().double()
        images = TensorDataset(torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(1)).double(), torch.tensor([1, 2]))
        first, second = vector(model, 1), vector(model, 2)
        one = flat(second) @ flat(product(model, as_batches(images), first))
        other = flat(first) @ flat(product(model, as_batches(images), second))
        assert one != 0
        torch.testing.assert_close(one, other, rtol=1e-8, atol=0)


class Attentive(nn.Module):
    """Attention whose fast kernels cannot be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 24), nn.Linear(8, 10)

    def forward(self, x):
        query, key, value = self.into(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value).mean((1, 2)))


@every_product
def test_an_objective_of_ones_own(kind):
    """ℓ = Σ_k (z_k − y_k)² of a linear model: the curvature is 2·x xᵀ for every output, exactly."""
    product = PRODUCTS[kind][0]
    inputs = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    batches = as_batches([{"x": rows, "goal": torch.ones(len(rows), 2, dtype=torch.float64)} for rows in inputs.split(3)])
    model, v = nn.Linear(4, 2, bias=False).double(), {"weight": torch.arange(8, dtype=torch.float64).reshape(2, 4)}
    own = {"outputs": lambda model, batch: model(batch["x"]), "targets": lambda batch: batch["goal"]}
    squared = Objective(**own, losses=lambda logits, targets: (logits - targets).square().sum(1))
    assert_near(product(model, batches, v, squared)["weight"], 2 * v["weight"] @ inputs.T @ inputs / 7)
    straight = Objective(**own, losses=lambda logits, targets: (logits * targets).sum(1))
    assert not product(model, batches, v, straight)["weight"].any()


def test_nothing_of_the_callers_is_touched():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, CLASSES)).double()
    model[4].bias.requires_grad_(False)
    model(pictures().tensors[0]).sum().backward()
    batches = as_batches(pictures())
    with properties.assert_untouched(model), torch.no_grad():
        slope, _ = gradient(model, batches)
        assert "4.bias" not in slope
        again = [solver(model, batches, slope) for solver in (ConjugateGradients(), LiSSA(), ConjugateGradients(), LiSSA())]
    properties.assert_same_weights(again[0], again[2])
    properties.assert_same_weights(again[1], again[3])
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter that requires a gradient"):
        gradient(model, batches)


@every_network
def test_conjugate_gradients_solve_the_damped_system(name):
    model, data = network(name), pictures()
    target = vector(model)
    matrix = reference.gauss_newton(model, data.tensors) / SAMPLES
    expected = torch.linalg.solve(matrix + 0.1 * torch.eye(len(matrix), dtype=torch.float64), flat(target))
    found = ConjugateGradients(damping=0.1, iterations=500, tolerance=1e-12)(model, as_batches(data, batch_size=4), target)
    assert_near(flat(found), expected, 1e-9)


def test_conjugate_gradients_stop_at_the_tolerance_or_the_limit():
    model, data = network("residual"), pictures()
    target, batches = vector(model), as_batches(pictures())
    matrix = reference.gauss_newton(model, data.tensors) / SAMPLES
    matrix.diagonal().add_(0.01)
    residual = [
        float((flat(target) - matrix @ flat(solver(model, batches, target))).norm() / flat(target).norm())
        for solver in (ConjugateGradients(), ConjugateGradients(iterations=2), ConjugateGradients(tolerance=0.5))
    ]
    assert residual[0] <= 1e-3 < residual[1] and 1e-3 < residual[2] <= 0.5
    nothing = {name: torch.zeros_like(part) for name, part in target.items()}
    assert not flat(ConjugateGradients()(model, batches, nothing)).any()


@every_network
def test_lissa_is_the_recursion_with_whole_matrices(name):
    model, batches, target = network(name), as_batches(pictures(), batch_size=4), vector(network(name))
    v = d = flat(target)
    for number in range(2):
        for images, labels in batches.shuffled(9 + number):
            matrix = reference.hessian(model, (images, labels)) / (SAMPLES / 3)  # three batches: of 4, 4 and 3
            d = v + (1 - 0.05) * d - matrix @ d / 40
    found = LiSSA(damping=0.05, scale=40, passes=2, seed=9)(model, batches, target)
    assert_near(flat(found), d / 40)


def test_lissa_ends_at_the_damped_inverse():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES)).double()
    data = pictures()
    matrix = reference.hessian(model, data.tensors) / SAMPLES
    target = vector(model)
    expected = torch.linalg.solve(matrix + 0.1 * 20 * torch.eye(len(matrix), dtype=torch.float64), flat(target))
    assert_near(flat(LiSSA(damping=0.1, scale=20, passes=300)(model, as_batches(data), target)), expected, 1e-8)


def test_divergence_is_noticed():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES)).double()
    data = pictures()
    largest = float(torch.linalg.eigvalsh(reference.hessian(model, data.tensors) / SAMPLES)[-1])
    batches, target = as_batches(data), vector(model)
    LiSSA(scale=largest / 1.9, passes=200)(model, batches, target)
    with pytest.raises(DivergedError, match=r"LiSSA .* iteration \d+; a larger scale \(now .*\) or damping \(now 0.01\)"):
        LiSSA(scale=largest / 2.2, passes=200)(model, batches, target)
    infinite = {name: torch.full_like(part, torch.inf) for name, part in target.items()}
    with pytest.raises(DivergedError, match="LiSSA .* iteration 1;"):
        LiSSA()(model, batches, infinite)
    with pytest.raises(DivergedError, match="conjugate gradients, iteration 1: .* not finite"):
        ConjugateGradients()(model, batches, infinite)
    concave = Objective(losses=lambda logits, targets: -logits.square().sum(1))
    with pytest.raises(DivergedError, match=r"conjugate gradients, iteration 1: the curvature is not positive; .*damping \(now 0.01\)"):
        ConjugateGradients()(model, batches, target, concave)


@pytest.mark.parametrize("damping", [0.01, 0.5, 0.9])
def test_lissa_converges_up_to_two_minus_the_damping_times_the_scale(damping):
    """Every term multiplies the part of d along λ by 1 − damping − λ/scale, which must be above −1."""
    model = linear()
    data = pictures()
    matrix = reference.hessian(model, data.tensors) / SAMPLES
    largest, target = float(torch.linalg.eigvalsh(matrix)[-1]), vector(model)
    scale = largest / (1.95 - damping)
    expected = torch.linalg.solve(matrix + damping * scale * torch.eye(len(matrix), dtype=torch.float64), flat(target))
    assert_near(flat(LiSSA(damping, scale, passes=600)(model, as_batches(data), target)), expected, 1e-2)
    with pytest.raises(DivergedError, match="LiSSA"):
        LiSSA(damping, largest / (2.05 - damping), passes=2000)(model, as_batches(data), target)


@pytest.mark.parametrize("size", [1e-310, 1e-170, 1e200, 1e308])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("solver", [ConjugateGradients(damping=1.0, iterations=5), LiSSA(scale=200, passes=2)])
def test_solvers_are_linear_for_targets_of_any_size(solver, dtype, size):
    model = linear().to(dtype)
    images, labels = pictures().tensors
    batches = as_batches(TensorDataset(images.to(dtype), labels))
    one = {name: part.sign() for name, part in vector(model).items()}  # ± size exactly, also where few digits are left
    expected, found = solver(model, batches, one), solver(model, batches, {name: size * part for name, part in one.items()})
    rounded = 5e-324 / size  # the results are so coarse
    torch.testing.assert_close(flat(found) / size, flat(expected), rtol=1e-5, atol=rounded)
    assert flat(found).any()


def test_targets_in_float32():
    model = linear()
    target = {name: part.sign().float() for name, part in vector(model).items()}
    expected = ConjugateGradients()(model, as_batches(pictures()), target)
    small = {name: torch.tensor(1e-42) * part for name, part in target.items()}
    found = ConjugateGradients()(model, as_batches(pictures()), small)
    torch.testing.assert_close(flat(found) / float(torch.tensor(1e-42)), flat(expected), rtol=1e-4, atol=1e-8)


def test_vectors_that_do_not_fit_are_refused():
    model, batches = linear(), as_batches(pictures())
    calls = {"vector": (hessian_product, gauss_newton_product), "target": (ConjugateGradients(), LiSSA())}
    for argument, call in [(argument, call) for argument, those in calls.items() for call in those]:
        with pytest.raises(InputError, match=rf"^{argument}: 1.weight must have shape \(3, 16\); found \(1,\)"):
            call(model, batches, {"1.weight": torch.ones(1, dtype=torch.float64)})
        with pytest.raises(InputError, match=f"^{argument}: must name parameters of the model; found none"):
            call(model, batches, {})
        with pytest.raises(InputError, match=f"^{argument}: must name parameters of the model; found .*nothing"):
            call(model, batches, {"nothing": torch.ones(1, dtype=torch.float64)})


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        (lambda: ConjugateGradients(damping=0), "damping"),
        (lambda: ConjugateGradients(iterations=0), "iterations"),
        (lambda: ConjugateGradients(iterations=2.5), "iterations"),
        (lambda: ConjugateGradients(iterations=True), "iterations"),
        (lambda: ConjugateGradients(tolerance=-1), "tolerance"),
        (lambda: LiSSA(damping=1), "damping"),
        (lambda: LiSSA(scale=0), "scale"),
        (lambda: LiSSA(passes=0), "passes"),
        (lambda: LiSSA(passes=2.5), "passes"),
        (lambda: LiSSA(passes="2"), "passes"),
    ],
)
def test_settings_without_sense_are_refused(settings, argument):
    with pytest.raises(InputError, match=f"^{argument}: "):
        settings()


@on_cuda
def test_a_gpu_gives_what_the_cpu_gives(monkeypatch):
    captured, capture = [], GraphedStep._capture
    monkeypatch.setattr(
        GraphedStep, "_capture", lambda self, form, batch: (capture(self, form, batch), captured.append(form in self._captured))
    )
    model, batches = network("residual"), as_batches(pictures(), batch_size=4)
    target = vector(model)
    there = {name: part.cuda() for name, part in target.items()}
    # Conjugate gradients make rounding grow from step to step: 2e-6 was seen on an H200.
    for solver, error in ((ConjugateGradients(damping=0.1, iterations=20), 1e-4), (LiSSA(scale=200, passes=4), 1e-8)):
        here = solver(model.cpu(), batches, target)
        assert_near(flat(solver(model.cuda(), batches, there)).cpu(), flat(here), error)
        assert captured == [True, True]  # for batches of 4 and of 3
        captured.clear()
    many = as_batches(pictures(SAMPLES * 3), batch_size=4)
    assert_near(flat(gradient(model, many)[0]).cpu(), flat(gradient(model.cpu(), many)[0]), 1e-10)
    assert captured == [True]


@on_cuda
def test_replayed_steps_do_not_miss_a_label_out_of_range():
    data = pictures(SAMPLES * 3)
    data.tensors[1][-1] = CLASSES
    with pytest.raises(InputError, match="labels must be in"):
        gradient(network("residual").cuda(), as_batches(data, batch_size=1))
