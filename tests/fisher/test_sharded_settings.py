"""Models sharded in other ways than by `fully_shard` alone: the right sums, or one error on all processes."""

from __future__ import annotations

import pytest

from tests import processes

SCRIPT = """
import torch, torch.distributed as distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset
from expunge import fisher
from expunge.editing.sharded_patches import ShardedPatch
from expunge.storage.sharded import whole
from tests.reference import worst_error

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)
inputs, labels = 1e-3 * torch.randn(7, 6), torch.randint(0, 3, (7,))
model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
model[2].weight.data *= 0.01
kept, mesh = model.state_dict(), init_device_mesh("cpu", (2,))
expected = fisher.diagonal(model, TensorDataset(inputs, labels)).sums


def attempt(case, mesh=mesh, dtype=torch.float32, change=lambda model: None, **settings):
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model.load_state_dict(kept)
    model.to(dtype)
    fully_shard(model, mesh=mesh, **settings)
    change(model)
    try:
        sums = fisher.sharded_diagonal(model, TensorDataset(inputs.to(dtype), labels)).sums
        worst = worst_error({name: whole(value) for name, value in sums.items()}, expected)
        print(f"{case}: {'same' if worst <= 1e-5 else 'near' if worst <= 0.01 else worst}", flush=True)
    except Exception as error:
        print(f"{case}: {type(error).__name__}: {error}", flush=True)
    return model


def stepping(model):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.data.add_(1))


def pending(model):
    model.set_requires_gradient_sync(False)
    model(inputs).sum().backward()
    model.set_requires_gradient_sync(True)


def trained(model):
    model[1].register_buffer("mean", torch.tensor(float(rank)))


attempt("part", mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "rows"))["rows"])
attempt("order", mesh=DeviceMesh("cpu", [1, 0]))
attempt("half", mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
attempt("float16", dtype=torch.float16)
attempt("bfloat16", dtype=torch.bfloat16)
attempt("unadded", change=lambda model: model.set_requires_gradient_sync(False))
attempt("pending", change=pending)
attempt("buffers", change=trained)
model = attempt("stepping", change=stepping)
assert all(parameter._post_accumulate_grad_hooks and parameter.grad is None for parameter in model.parameters())
with torch.inference_mode():
    attempt("inference")
try:
    ShardedPatch.zeroing(model, {})
except Exception as error:
    print(f"mask: {type(error).__name__}: {error}")
"""


@pytest.mark.slow
def test_the_right_sums_or_one_error_on_all_processes(tmp_path):
    for output in processes.printed(processes.start(SCRIPT, tmp_path, 2)):
        told = dict(line.split(": ", 1) for line in output.splitlines() if not line.startswith("["))
        assert told["part"].startswith("ModelError: 0.weight must be sharded over all processes, in the order of their ranks; found")
        assert told["order"].endswith("must be sharded over all processes, in the order of their ranks; found ranks [1, 0]")
        assert told["half"] == told["bfloat16"] == "near"  # the squares of float16 were 0
        assert told["float16"].startswith("ModelError: 0.weight must not be float16")
        for name in ("unadded", "pending"):
            assert told[name].startswith("ModelError: the model must not be accumulating gradients"), told
        assert told["buffers"].startswith("MismatchError: all processes must have the same parameters and buffers (training leaves")
        assert told["stepping"] == told["inference"] == "same"
        assert told["mask"] == "InputError: mask: must name at least one parameter; found none"
