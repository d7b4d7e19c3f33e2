"""The Newton step equals its formula with whole matrices, in both readings."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from expunge import curvature
from expunge.curvature.solvers import ConjugateGradients, LiSSA
from expunge.data.batches import as_batches
from expunge.data.objective import Objective
from expunge.errors import DivergedError, InputError
from expunge.methods.influence import Influence, together
from expunge.unlearning import unlearn
from expunge.vision.networks import DenseNet, resnet8
from tests import reference
from tests.methods import cases, properties

CLASSES = 3
NETWORKS = {
    "residual": lambda: resnet8(CLASSES, channels=1, width=1),
    "concatenation": lambda: DenseNet([1, 1], growth=1, classes=CLASSES, channels=1),
    "no BatchNorm": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, CLASSES)),
}
EXACT = ConjugateGradients(damping=0.1, iterations=500, tolerance=1e-12)
QUIET = {"watch": {}}


def network(name: str) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        return NETWORKS[name]().double()


def data() -> tuple[TensorDataset, TensorDataset]:
    images, labels = cases.dataset(torch.float64).tensors
    return TensorDataset(images[labels == 0], labels[labels == 0]), TensorDataset(images[labels != 0], labels[labels != 0])


def whole(forget: TensorDataset, remain: TensorDataset) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([forget.tensors[0], remain.tensors[0]]), torch.cat([forget.tensors[1], remain.tensors[1]])


def moved(outcome_model: nn.Module, model: nn.Module) -> torch.Tensor:
    pairs = zip(outcome_model.parameters(), model.parameters(), strict=True)
    return torch.cat([(after - before).detach().flatten() for after, before in pairs])


@pytest.mark.parametrize("gradient", ["mean", "sum"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_step_is_its_formula(name, gradient):
    model, (forget, remain) = network(name), data()
    outcome = unlearn(model, forget, remain, Influence(gradient, 1.0, EXACT), batch_size=10, **QUIET)
    matrix = reference.gauss_newton(model, whole(forget, remain))  # of the sum of losses, as in the text
    matrix.diagonal().add_(0.1 * 48)
    step = torch.linalg.solve(matrix, reference.gradient(model, forget.tensors))
    if gradient == "mean":
        step = step / len(forget)
    torch.testing.assert_close(moved(outcome.model, model), step, rtol=1e-8, atol=1e-11 * float(step.norm()))
    outcome.patch.revert(outcome.model)
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())


def test_as_released_is_lissa_with_the_sum_over_all_samples():
    model, (forget, remain) = nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES)).double(), data()
    method = Influence.as_released()
    assert method == Influence("sum", 1.0, LiSSA(damping=0.01, scale=20, passes=30)) and method.tuning is None
    outcome = unlearn(model, forget, remain, method, batch_size=10, **QUIET)
    start = d = reference.gradient(model, forget.tensors) / 48
    batches = together(as_batches(forget, batch_size=10), as_batches(remain, batch_size=10))
    assert len(batches) == 6  # of 10 and 6, and of 10, 10, 10 and 2
    for number in range(30):
        for batch in batches.shuffled(number):
            d = start + 0.99 * d - reference.hessian(model, batch) @ d / (48 / 6) / 20
    torch.testing.assert_close(moved(outcome.model, model), d / 20, rtol=1e-8, atol=1e-10)


def test_the_sum_removes_a_few_samples_of_a_quadratic():
    """Linear least squares: the step with the sum is near the retrained model, that with the mean is |D_f| times shorter."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(400, 4, dtype=torch.float64, generator=generator)
    goals = inputs.sum(1, keepdim=True) + torch.randn(400, 1, dtype=torch.float64, generator=generator)
    goals[:10] += 5
    forget, remain = TensorDataset(inputs[:10], goals[:10]), TensorDataset(inputs[10:], goals[10:])
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data = torch.linalg.lstsq(inputs, goals).solution.T
    goal = torch.linalg.lstsq(inputs[10:], goals[10:]).solution.flatten() - model.weight.detach().flatten()
    squared = Objective(losses=lambda logits, targets: (logits - targets).square().sum(1))
    solver = ConjugateGradients(damping=1e-9, tolerance=1e-10)
    one, all_ = (
        moved(unlearn(model, forget, remain, Influence(gradient, solver=solver), objective=squared, **QUIET).model, model)
        for gradient in ("mean", "sum")
    )
    assert (all_ - goal).norm() < 0.1 * goal.norm()
    torch.testing.assert_close(10 * one, all_)


def test_strength_multiplies_the_step():
    model, (forget, remain) = network("concatenation"), data()
    once, thrice, none = (
        moved(unlearn(model, forget, remain, Influence(strength=strength, solver=EXACT), **QUIET).model, model) for strength in (1, 3, 0)
    )
    torch.testing.assert_close(3 * once, thrice, rtol=1e-8, atol=1e-12)
    assert once.any() and not none.any()


def test_a_shuffled_pass_holds_every_batch_once():
    forget, remain = ([(torch.full((2,), row), torch.zeros(2)) for row in rows] for rows in (range(3), range(3, 10)))
    both = together(as_batches(forget), as_batches(remain))
    in_order = [int(batch[0][0]) for batch in both]
    first, second = ([int(batch[0][0]) for batch in both.shuffled(seed)] for seed in (0, 1))
    assert in_order == list(range(10)) == sorted(first) == sorted(second)
    assert first != second and first[:3] != [0, 1, 2]


def test_loaders_and_datasets_give_the_same_step():
    model, (forget, remain) = network("concatenation"), data()
    first = unlearn(model, forget, remain, Influence(solver=EXACT), **QUIET)
    second = unlearn(model, DataLoader(forget, batch_size=5), DataLoader(remain, batch_size=7), Influence(solver=EXACT), **QUIET)
    torch.testing.assert_close(moved(first.model, model), moved(second.model, model), rtol=1e-8, atol=1e-12)


def test_nothing_is_returned_where_lissa_diverges():
    model, (forget, remain) = network("residual"), data()
    with properties.assert_untouched(model), pytest.raises(DivergedError, match="LiSSA .* scale"):
        unlearn(model, forget, remain, Influence(solver=LiSSA(scale=1e-3)), **QUIET)


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="^gradient: must be one of 'mean', 'sum'"):
        Influence("total")
    with pytest.raises(InputError, match="^strength: .* found -1"):
        Influence(strength=-1)
    with pytest.raises(InputError, match="^remain: Influence needs the data to keep"):
        unlearn(cases.model(), cases.forget(), None, Influence())
    assert isinstance(Influence().solver, curvature.ConjugateGradients)
