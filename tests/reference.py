"""Slow and obvious: what the fast code must equal. Each function is the formula, one sample at a time."""

from __future__ import annotations

import copy
import itertools
import math

import torch
from torch import Tensor, nn


def fisher(model: nn.Module, batch: tuple[Tensor, ...], kind: str = "empirical", dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Σ_n (∂ log p(y_n|x_n))², or Σ_n Σ_y p(y|x_n) (∂ log p(y|x_n))², by one backward pass a sample (and label)."""
    model = copy.deepcopy(model).to(dtype).eval()
    parameters = dict(model.named_parameters())
    totals = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    for *inputs, y in zip(*batch, strict=True):
        scores = model(*((x.to(dtype) if x.is_floating_point() else x)[None] for x in inputs))[0].log_softmax(0)
        labels = [int(y)] if kind == "empirical" else range(len(scores))
        for label in labels:
            weight = 1.0 if kind == "empirical" else float(scores[label].detach().exp())
            gradients = torch.autograd.grad(scores[label], list(parameters.values()), retain_graph=True, allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    totals[name] += weight * gradient.double() ** 2
    return totals


def absolute_gradients(model: nn.Module, inputs: Tensor, power: int) -> dict[str, Tensor]:
    """Σ_n |∂‖z_n‖^power / ∂w|, z_n the outputs, by one backward pass a sample."""
    model = copy.deepcopy(model).double().eval()
    totals = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for sample in inputs.double():
        model.zero_grad()
        (model(sample[None])[0].square().sum() ** (power / 2)).backward()
        for name, value in model.named_parameters():
            if value.grad is not None:
                totals[name] += value.grad.abs()
    return totals


def percentile(values: list[float], percent: float) -> float:
    """Between the two values around the place (n − 1)·percent/100 in ascending order, by the distance from them."""
    ordered, place = sorted(values), (len(values) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (place - math.floor(place)) * (high - low)


def batch_fisher(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The released program's rule on one batch: Σ_y p̄(y) (∂ mean loss to y)²."""
    model = copy.deepcopy(model).eval()
    probabilities = model(batch[0]).softmax(1).mean(0)
    totals = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for label in range(len(probabilities)):
        model.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), torch.full_like(batch[1], label)).backward()
        for name, value in model.named_parameters():
            totals[name] += float(probabilities[label].detach()) * value.grad**2
    return totals


def activations(model: nn.Module, inputs: Tensor, points: dict[str, str]) -> dict[str, Tensor]:
    """A[i, j] = mean over positions of ReLU, by layer: `points` says which module's output (channels first) is the layer's."""
    model, table = copy.deepcopy(model).double().eval(), {layer: [] for layer in points}
    outputs: dict[str, Tensor] = {}
    for point in points.values():
        model.get_submodule(point).register_forward_hook(lambda module, x, output, point=point: outputs.update({point: output[0].clone()}))
    for sample in inputs.double():
        with torch.no_grad():
            model(sample[None])
        for layer, point in points.items():
            table[layer].append([float(channel.clamp(min=0).mean()) for channel in outputs[point]])
    return {layer: torch.tensor(rows, dtype=torch.float64) for layer, rows in table.items()}


def tf_idf(table: Tensor, labels: Tensor, forgotten: set[int], reading: str = "text", absent: int = 0) -> list[float]:
    """TF·IDF of each channel of one layer, averaged over the forgotten classes; `table` is A[i, j], `absent` classes have no sample."""
    classes, channels = sorted(set(labels.tolist())), range(table.shape[1])
    a = {c: [float(table[labels == c][:, u].mean()) for u in channels] for c in classes}
    every = [*a.values(), *([0.0 for _ in channels] for _ in range(absent))]
    scores = []
    for u in channels:
        if reading == "text":
            above = sum(row[u] >= sum(row) / len(row) for row in a.values())
            idf = math.log((1 + len(a)) / (1 + above))
        else:
            above = sum(row[u] >= sum(other[u] for other in every) / len(every) for row in every)
            idf = math.log(len(every) / (1 + above))
        terms = [a[c][u] / sum(a[c]) * idf if sum(a[c]) > 0 else 0.0 for c in classes if c in forgotten]
        scores.append(sum(terms) / len(terms))
    return scores


def worst_error(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest relative error of a tensor: ‖found − reference‖ / ‖reference‖."""
    assert found.keys() == reference.keys()
    worst = 0.0
    for name, value in reference.items():
        difference, size = float((found[name] - value).norm()), float(value.norm())
        if difference:
            worst = max(worst, difference / size if size else float("inf"))
    return worst


def descended(
    model: nn.Module, losses: list, rate: float, momentum: float = 0.9, decay: float = 0.0, moving: dict | None = None
) -> nn.Module:
    """v ← μ·v + ∇loss + decay·w, w ← w − rate·v for each loss in turn, in train mode; with `moving`, only where it is true."""
    model = copy.deepcopy(model).train()
    velocity = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for loss in losses:
        model.zero_grad()
        loss(model).backward()
        for name, value in model.named_parameters():
            velocity[name] = momentum * velocity[name] + value.grad + decay * value.detach()
            step = rate * velocity[name]
            value.data -= step if moving is None else torch.where(moving[name], step, 0.0)
    return model


def cut(samples: int, size: int, seed: int) -> list[Tensor]:
    """The rows of each batch of an epoch shuffled by `seed`."""
    return list(torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).split(size))


def shares(samples: int, steps: int, seed: int) -> list[Tensor]:
    """Shuffled rows in as many parts as there are steps, as even as whole numbers allow."""
    rows = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    return [rows[step * samples // steps : (step + 1) * samples // steps] for step in range(steps)]


def divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """mean_n Σ_k t_nk · (log t_nk − log s_nk), t and s at this temperature."""
    total = torch.zeros((), dtype=student.dtype)
    for before, after in zip(teacher, student, strict=True):
        goal, found = (before / temperature).softmax(0), (after / temperature).softmax(0)
        total = total + sum(goal[k] * (goal[k].log() - found[k].log()) for k in range(len(goal)))
    return total / len(teacher)


def dampened(model: nn.Module, forget: dict[str, Tensor], everything: dict[str, Tensor], threshold: float, dampening: float) -> dict:
    """w_j · min(λ·F_D,j / F_f,j, 1) where F_f,j > α·F_D,j, else w_j; one weight at a time."""
    found = {}
    for name, value in model.named_parameters():
        weights = value.detach().double().flatten().clone()
        for j, (few, all_) in enumerate(zip(forget[name].flatten().tolist(), everything[name].flatten().tolist(), strict=True)):
            if few > threshold * all_:
                weights[j] *= min(dampening * all_ / few, 1)
        found[name] = weights.reshape(value.shape)
    return found


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Σ_n ∇ℓ_n, all parameters end to end."""
    model = copy.deepcopy(model).double().eval()
    loss = nn.functional.cross_entropy(model(batch[0].double()), batch[1], reduction="sum")
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


def hessian(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Σ_n ∇²ℓ_n, the whole matrix, all parameters end to end."""
    model = copy.deepcopy(model).double().eval()
    names, values = zip(*model.named_parameters(), strict=True)

    def loss(*values: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (batch[0].double(),))
        return nn.functional.cross_entropy(logits, batch[1], reduction="sum")

    blocks = torch.autograd.functional.hessian(loss, tuple(value.detach() for value in values))
    rows = [
        [block.reshape(a.numel(), b.numel()) for block, b in zip(row, values, strict=True)] for row, a in zip(blocks, values, strict=True)
    ]
    return torch.cat([torch.cat(row, 1) for row in rows])


def gauss_newton(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Σ_n J_nᵀ (diag p_n − p_n p_nᵀ) J_n, the whole matrix, one sample and one logit at a time."""
    model = copy.deepcopy(model).double().eval()
    parameters, total = list(model.parameters()), torch.zeros(())
    for x in batch[0].double():
        logits = model(x[None])[0]
        rows = [torch.autograd.grad(logit, parameters, retain_graph=True) for logit in logits]
        jacobian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
        p = logits.detach().softmax(0)
        total = total + jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian
    return total


def released_noise(information: Tensor, alpha: float, head: bool, row: int | None) -> Tensor:
    """The variance of Golatkar's noise for one parameter, one entry at a time; `row` is the forgotten class's, in the classifier."""
    found = torch.zeros_like(information)
    for index in itertools.product(*map(range, information.shape)):
        along = [(index[0], other, *index[2:]) for other in range(information.shape[1])] if information.dim() > 1 else [index]
        single = [alpha * min(1 / (float(information[place]) + 1e-8), 1e2 if head else 1e3) for place in along]
        variance = 1e-4 if head and index[0] == row else sum(single) / len(single)
        found[index] = variance * 10 if head or information.dim() == 1 else variance
    return found
