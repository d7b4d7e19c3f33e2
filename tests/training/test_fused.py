"""Training steps by the fused kernels equal those by PyTorch's operations: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from expunge.training import fused
from expunge.training.schedules import Constant
from expunge.training.side_by_side import Training, train_together
from expunge.training.tuning import Tuning
from expunge.vision.datasets import Images
from expunge.vision.networks.densenet import DenseNet
from expunge.vision.networks.googlenet import Inception, Widths
from expunge.vision.networks.resnet import resnet8
from expunge.vision.networks.resnet_imagenet import Bottleneck, ImageNetResNet
from expunge.vision.networks.vgg import VGG

SEED = 3
Step = dict[str, Tensor]


class Pooled(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return fused.max_pool(x, self.stride)


NETWORKS = {  # builder, samples, image, input channels
    "norm": (lambda: fresh_norm(24), (5, 24, 6, 7)),
    "many channels": (lambda: fresh_norm(150), (3, 150, 3, 3)),
    "far from zero": (lambda: fresh_norm(3, 1000.0), (64, 3, 6, 6)),
    "many rows": (lambda: fresh_norm(16), (40, 16, 17, 19)),
    "pool": (lambda: Pooled(1), (2, 20, 7, 5)),
    "pool by two": (lambda: Pooled(2), (3, 65, 8, 9)),
    "residual": (lambda: resnet8(width=4), (4, 3, 8, 8)),
    "bottleneck": (lambda: ImageNetResNet(Bottleneck, (1, 1), width=4), (3, 3, 8, 8)),
    "biased convolutions": (lambda: VGG((1,) * 5), (6, 3, 16, 16)),
    "inception": (lambda: Inception(12, Widths(4, 6, 8, 4, 4, 5)), (2, 12, 6, 6)),
    "dense": (lambda: DenseNet((3, 2), 12), (3, 3, 8, 8)),
    "dense, odd widths": (lambda: DenseNet((2, 2), 5), (4, 3, 6, 10)),
}
BOUNDS = {"far from zero": 5e-5}  # where 1,000 is added in float32; PyTorch's own is off by 1e-2


def fresh_norm(channels: int, shift: float = 0.0) -> nn.Module:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(channels)

        def forward(self, x: Tensor) -> Tensor:
            return fused.relu_of_norm(self.norm, x + shift)

    return Normed()


def built(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(SEED)
    build, shape = NETWORKS[name]
    model = build().train()
    with torch.no_grad():
        for parameter in model.parameters():  # none is zero or one any more
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model, torch.randn(shape)


def step(model: nn.Module, x: Tensor, kernels: bool, precision: torch.dtype | None = None) -> Step:
    """The outputs, the gradients of the parameters and of the input, and the buffers after a step."""
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    torch.manual_seed(SEED)
    with fused.fused(kernels), torch.autocast(x.device.type, precision) if precision else nullcontext():
        out = model(x)
    sent = torch.randn(out.shape).to(out)
    out.backward(sent)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"out": out, "input": x.grad, **gradients, **{f"{name} kept": buffer for name, buffer in model.named_buffers()}}


def errors(found: Step, exact: Step) -> dict[str, float]:
    """‖found − exact‖ / ‖exact‖; the gradient of a bias before a norm, which is rounding, by the largest gradient."""
    assert found.keys() == exact.keys()
    largest = max(float(value.detach().norm()) for name, value in exact.items() if "kept" not in name)
    floor = 1e-3 * largest
    return {
        name: float(
            (value.detach().double().cpu() - exact[name].detach().double()).norm() / exact[name].detach().double().norm().clamp_min(floor)
        )
        for name, value in found.items()
    }


def compared(name: str, device: str, precision: torch.dtype | None = None) -> tuple[dict[str, float], dict[str, float]]:
    """The errors of a step by the kernels, and of one by PyTorch."""
    model, x = built(name)
    exact = step(copy.deepcopy(model).double(), x.double(), kernels=False)
    model, x = model.to(device), x.to(device)
    found, plain = (step(copy.deepcopy(model), x.clone(), kernels, precision) for kernels in (True, False))
    return errors(found, exact), errors(plain, exact)


BLOCKS = {"inception": "inception_unit", "dense": "dense_block", "dense, odd widths": "dense_block"}  # what else must have been taken


@contextmanager
def on_the_cpu() -> Iterator[set[str]]:
    """The kernels take tensors of the CPU; which of them were asked to."""
    used: set[str] = set()

    def takes(x: Tensor) -> bool:
        inside = fused._inside.get() and x.dtype == torch.float32
        used.update({"kernels"} if inside else set())
        return inside

    def noted(name: str) -> Callable[..., Tensor]:
        function = getattr(fused, name)
        return lambda *arguments: (used.add(name), function(*arguments))[1]

    with patch.multiple(fused, _takes=takes, **{name: noted(name) for name in set(BLOCKS.values())}):
        yield used


def main() -> None:
    for name in NETWORKS:
        with on_the_cpu() as used:
            found, plain = compared(name, "cpu")
        assert used == {"kernels", BLOCKS.get(name, "kernels")}, (name, used)
        worst = max(found, key=found.__getitem__)
        print(name, worst, found[worst], max(plain.values()))
        assert found[worst] <= BOUNDS.get(name, 2e-5), (name, worst, found[worst], plain[worst])
    x = torch.randn(1, 3, 6, 6).to(memory_format=torch.channels_last)
    x[0, 1, 2, 2] = torch.nan
    with on_the_cpu(), fused.fused():
        found = fused.max_pool(x, 1).isnan()
    assert found.any() and torch.equal(found, fused.max_pool(x, 1).isnan())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux; make test installs it there")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_a_step_is_pytorchs_in_the_interpreter():
    run = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.getcwd()}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_is_pytorchs_on_a_gpu(name):
    assert fused._works(torch.device("cuda", 0))
    found, plain = compared(name, "cuda")
    assert max(found.values()) <= max(BOUNDS.get(name, 2e-5), 2 * max(plain.values()))
    found, plain = compared(name, "cuda", torch.bfloat16)
    assert max(found.values()) <= max(BOUNDS.get(name, 2e-5), 1.5 * max(plain.values()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_training_loop_takes_the_kernels_and_trains_as_without(monkeypatch):
    def trained(kernels: bool) -> list[float]:
        torch.manual_seed(SEED)
        model, taken, losses = resnet8().to("cuda", memory_format=torch.channels_last), [], []
        takes = fused._takes
        with monkeypatch.context() as patched:
            patched.setattr(fused, "_takes", lambda x: bool(kernels and takes(x) and not taken.append(x.shape)))
            data = Training(model, images, Tuning(Constant(0.05, 4), 32), note_loss=lambda epoch, loss: losses.append(loss))
            train_together([data])
        assert bool(taken) is kernels
        return losses

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (320,), generator=generator)
    pixels = torch.randint(0, 128, (320, 3, 8, 8), generator=generator) + 12 * labels.view(-1, 1, 1, 1)
    images = Images(pixels.to(torch.uint8), labels).to("cuda")
    ours, plain = trained(True), trained(False)
    assert ours[-1] < ours[0] / 2
    assert ours == pytest.approx(plain, rel=0.05)


def changed_blocks() -> Iterator[nn.Module]:
    block = DenseNet((2,), 4).blocks[0]
    yield from (copy.deepcopy(block) for _ in range(5))
    yield Inception(8, Widths(4, 6, 8, 4, 4, 5))


def test_a_block_that_was_changed_is_not_one_operation():
    first, second, third, fourth, fifth, unit = changed_blocks()
    x = torch.randn(2, 8, 4, 4)
    first[0].conv1 = nn.Conv2d(8, 16, 1)  # with a bias
    second[1].conv2 = nn.Conv2d(16, 4, 3, padding=2, dilation=2, bias=False)
    third[0].norm2.eval()
    torch.nn.utils.parametrizations.weight_norm(fourth[0].conv2)
    prune.l1_unstructured(fifth[1].conv1, "weight", 0.5)
    with on_the_cpu() as used, fused.fused():
        assert not any(fused.takes_all(block, x, biased=False) for block in (first, second, third, fourth, fifth, unit))
        assert fused.takes_all(DenseNet((2,), 4).blocks[0], x, biased=False) and fused.takes_all(unit, x, biased=True)
    assert used == {"kernels"}


@pytest.mark.parametrize("name", ["residual", "bottleneck", "biased convolutions", "inception", "dense"])
def test_elsewhere_the_plain_operations_run(name):
    model, x = built(name)
    with fused.fused():
        assert not fused._takes(x)
        inside = model(x)
    assert torch.equal(inside, model(x))


def test_the_kernels_do_not_pass_hooks_by():
    def conv() -> nn.Module:
        return nn.Conv2d(2, 3, 1)

    hooked = conv()
    hooked.register_forward_hook(lambda module, inputs, output: None)
    changed = prune.l1_unstructured(conv(), "weight", 0.5), nn.utils.spectral_norm(conv()), hooked
    assert not any(fused._is_plain(module, nn.Conv2d) for module in changed)
    assert fused._is_plain(conv(), nn.Conv2d)


def test_a_bias_before_a_norm_is_added_where_the_kernels_are_not():
    torch.manual_seed(SEED)
    conv, norm, x = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3).eval(), torch.randn(2, 2, 4, 4)
    assert torch.equal(fused.relu_of_normed(conv, norm, x), functional.relu(norm(conv(x))))
    assert conv.bias is not None and conv.bias.any()


if __name__ == "__main__":
    main()
