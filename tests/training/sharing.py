"""What every process of the tests of shared trainings has: networks, data, and the trainings of one process."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import expunge
from expunge.data.objective import Objective
from expunge.methods import FisherMask
from expunge.training import Constant, Distillation, Tuning, train, train_phases
from expunge.training.teaching import distilled, teach

SAMPLES = 50  # batches of 16, 16, 16 and 2: fewer than three processes at the end, which do not divide the others


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def normed() -> nn.Module:
    body = [nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.BatchNorm1d(36, momentum=None), nn.Linear(36, 3))


def case(build) -> tuple[nn.Module, TensorDataset]:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = build().double()
        return model, TensorDataset(torch.randn(SAMPLES, 12, dtype=torch.float64), torch.randint(0, 3, (SAMPLES,)))


def tuning(**more) -> Tuning:
    return Tuning(Constant(0.05, epochs=4), batch_size=16, **more)


def sgd(keep=None, after_epoch=None) -> nn.Module:
    model, data = case(plain)
    train(model, data, tuning(), keep=keep, after_epoch=after_epoch)
    return model


def adam_masked() -> nn.Module:
    model, data = case(plain)
    mask = {"0.weight": torch.zeros(16, 12, dtype=torch.bool)}
    mask["0.weight"][:5] = True
    train(model, data, tuning(optimizer=lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.1)), mask=mask)
    assert not model[0].weight[:5].any()
    return model


def batch_norm() -> nn.Module:
    model, data = case(normed)
    train(model, data, tuning())
    return model


def batches() -> nn.Module:
    """A list of batches keeps its own sizes."""
    model, data = case(plain)
    train(model, [tuple(column[start : start + 7] for column in data.tensors) for start in range(0, SAMPLES, 7)], tuning())
    return model


def taught() -> nn.Module:
    model, data = case(plain)
    teacher, _ = case(plain)
    lessons = teach(data, teacher.requires_grad_(), batch_size=16)
    phase = distilled(lessons, Distillation(), "data", Objective())
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    train_phases(model, lambda epoch: [phase], tuning())
    return model


def twice() -> nn.Module:
    """Nothing of the first training is left on the model: neither in the second, nor in a backward pass of the caller's."""
    model, data = case(normed)
    gc.disable()
    try:
        train(model, data, tuning())
        for parameter in model.parameters():
            parameter.grad = None
        model(data.tensors[0])[0].sum().backward()
        train(model, data, tuning(seed=1))
    finally:
        gc.enable()
    assert not any("forward" in module.__dict__ for module in model.modules())
    return model


def forgotten() -> nn.Module:
    model, data = case(plain)
    train(model, data, tuning())
    forget, remain = (TensorDataset(*(column[rows] for column in data.tensors)) for rows in (slice(0, 10), slice(10, None)))
    method = FisherMask(ratio=0.05, tuning=tuning(distillation=Distillation()))
    return expunge.unlearn(model, forget, remain, method).model


TRAININGS = {
    "unlearn": forgotten,
    "twice": twice,
    "sgd": sgd,
    "adam": adam_masked,
    "batch norm": batch_norm,
    "batches": batches,
    "taught": taught,
}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
