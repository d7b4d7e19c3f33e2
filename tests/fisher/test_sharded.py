"""Models sharded by FSDP2 over real processes: sums, scores, masks and patches are those of the whole model, and outlive the processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from expunge import fisher, masks, scores
from expunge.editing.patches import Patch
from expunge.errors import ModelError
from tests import processes, reference


def case() -> tuple[nn.Module, TensorDataset, TensorDataset]:
    """Rows that no number of processes divides, and fewer of them than processes: some have an empty shard."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 5, 2), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 7), nn.Tanh(), nn.Linear(7, 3)
        ).double()
        forget, remain = (TensorDataset(torch.randn(n, 2, 3, 3, dtype=torch.float64), torch.randint(0, 3, (n,))) for n in (9, 22))
        return model, forget, remain


def rounded(score: dict) -> dict:
    """Few different values, so that many are equal."""
    return {name: (values * 4).round() for name, values in score.items()}


class Differing(IterableDataset):
    """A stream of which rank 1 gets another sample in the third batch; "raising": an error there."""

    def __init__(self, data: TensorDataset, task: str, rank: int) -> None:
        self.data, self.task, self.rank = data, task, rank

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for number in range(len(self)):
            differs = number == 17 and self.rank == 1
            if differs and self.task == "raising":
                raise OSError("the disk of rank 1 is gone")
            yield self.data[number + differs]


RATIOS = (0.0, 0.1, 0.5)
SETTINGS = [{"kind": "empirical"}, {"kind": "expected"}, {"kind": "sampled", "draws": 2, "seed": 3}]
SCRIPT = """
import sys, time
import torch, torch.distributed as distributed
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard
from expunge import fisher, masks, metrics, scores
from expunge.editing.sharded_patches import ShardedPatch
from expunge.errors import ExpungeError
from expunge.storage.sharded import whole
from tests.fisher.test_sharded import RATIOS, SETTINGS, Differing, case, rounded

distributed.init_process_group("gloo")
mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
model, forget, remain = case()
for layer in (model[0], model[4]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
rank, found = distributed.get_rank(), {}


def gathered(tensors):
    return {name: whole(tensor).clone() for name, tensor in tensors.items()}


before = [(name, value.requires_grad, value.grad, value.to_local().clone()) for name, value in model.named_parameters()]
sums = [fisher.sharded_diagonal(model, remain, **settings) for settings in SETTINGS]
assert all(
    value.grad is None and value.requires_grad and torch.equal(value.to_local(), weights)
    for value, (_, _, _, weights) in zip(model.parameters(), before)
) and model.training
found["sums"] = [gathered(part.sums) for part in sums]
found["about"] = [(part.count, part.kind, part.digest, part.objective) for part in sums]
score = scores.fisher_difference(fisher.sharded_diagonal(model, forget), sums[0])
found["score"] = gathered(score)
found["masks"] = [
    gathered(masks.select(kind, ratio, scope=scope))
    for kind in (score, rounded(score))
    for scope in ("global", "layer")
    for ratio in RATIOS
]
mask = masks.select(score, 0.1, candidates=["0.weight", "4.weight"])
metrics.accuracy(model, remain)  # FSDP2 leaves the parameters of the outermost module whole
assert not hasattr(model[1].weight, "full_tensor")
fisher.sharded_diagonal(model, forget)
metrics.accuracy(model, remain)
patch = ShardedPatch.zeroing(model, mask)
patch.gathered().save(f"patch-{rank}.safetensors")
patch.apply(model)
found["after"] = gathered(dict(model.named_parameters()))
try:
    patch.apply(model)
except ExpungeError as error:
    found["again"] = str(error)
if sys.argv[1] == "write":
    fisher.save_sums(sums[0], "kept-sums")
    patch.save("kept-patch")
    kept = FileSystemWriter.write_data

    def full(*arguments):
        if rank:
            raise OSError(28, "No space left on device", "kept-again")
        return kept(*arguments)

    mine = {"names": {"candidates": ["4.weight"]}, "ratio": {"ratio": 0.2}, "range": {"ratio": 2.0}}  # of rank 1
    actions = {
        "full": lambda: patch.save("kept-again"),
        "lost": lambda: fisher.load_sums("elsewhere" if rank else "kept-sums", model),
        "mask": lambda: ShardedPatch.zeroing(model, {"0.weight": mask["0.weight"]} if rank else mask),
    }
    for task in (*mine, *actions):
        FileSystemWriter.write_data = full if task == "full" else kept
        started = time.monotonic()
        try:
            actions[task]() if task in actions else masks.select(score, **({"ratio": 0.1} | (mine[task] if rank else {})))
        except Exception as error:
            found[task] = f"{type(error).__name__}: {error} [{time.monotonic() - started < 20}]"
    for task in ("shuffled", "raising", "label", "kind", "folder"):
        _, _, bad = case()
        started = time.monotonic()
        if task == "label":
            bad.tensors[1][20] = 5  # in the part of one process
        data = Differing(bad, task, rank) if task in ("shuffled", "raising") else bad
        try:
            if task == "folder":
                fisher.save_sums(sums[0], "kept-sums")
            else:
                kind = "expected" if task == "kind" and rank else "empirical"
                fisher.sharded_diagonal(model, data, kind=kind, batch_size=8, patience=30)
        except Exception as error:
            found[task] = f"{type(error).__name__}: {error} [{time.monotonic() - started < 20}]"
else:  # written by another number of processes
    loaded = fisher.load_sums("kept-sums", model)
    found["loaded"] = gathered(loaded.sums), (loaded.count, loaded.kind, loaded.digest, loaded.objective)
    patch = ShardedPatch.load("kept-patch", model)
    try:
        fisher.load_sums("kept-patch", model)
    except ExpungeError as error:
        found["strange"] = str(error)
patch.revert(model)
found["reverted"] = gathered(dict(model.named_parameters()))
# The model is FSDP2's again: gradients are reduced as ever.
model(remain.tensors[0]).sum().backward()
found["gradients"] = gathered({name: value.grad for name, value in model.named_parameters()})
torch.save(found, f"found-{rank}.pt")
"""


@pytest.mark.slow
def test_shards_of_two_and_four_processes_are_those_of_the_whole(tmp_path):
    model, forget, remain = case()
    whole = [fisher.diagonal(model, remain, **settings) for settings in SETTINGS]
    score = scores.fisher_difference(fisher.diagonal(model, forget), whole[0])
    patch = Patch.zeroing(model, masks.select(score, 0.1, candidates=["0.weight", "4.weight"]))
    alike = {"names": "candidates", "ratio": "number of weights to choose", "mask": "mask"}
    own = {"range": "InputError: ratio", "lost": "InputError: folder", "full": "OSError: [Errno 28] No space left on device"}
    for size, task in ((2, "write"), (4, "read")):
        processes.printed(processes.start(SCRIPT, tmp_path, size, task))
        for rank in range(size):
            found = torch.load(tmp_path / f"found-{rank}.pt", weights_only=True)
            for part, settings in enumerate(SETTINGS):
                assert reference.worst_error(found["sums"][part], whole[part].sums) <= 1e-12, settings
                assert found["about"][part] == (22, whole[part].kind, whole[part].digest, whole[part].objective)
            # The masks of the very scores these processes have: a rounding error may change the order of two.
            assert reference.worst_error(found["score"], score) <= 1e-12
            expected = [
                masks.select(kind, ratio, scope=scope)
                for kind in (found["score"], rounded(found["score"]))
                for scope in ("global", "layer")
                for ratio in RATIOS
            ]
            for ours, theirs in zip(found["masks"], expected, strict=True):
                assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
            gathered = Patch.load(tmp_path / f"patch-{rank}.safetensors")
            assert gathered.digest == patch.digest and gathered.edits.keys() == patch.edits.keys()
            assert all(torch.equal(gathered.edits[name].indices, edit.indices) for name, edit in patch.edits.items())
            changed, *_ = case()
            patch.apply(changed)
            assert all(torch.equal(found["after"][name], value) for name, value in changed.named_parameters())
            assert "nothing was changed" in found["again"]
            assert all(torch.equal(found["reverted"][name], value) for name, value in model.named_parameters())
            trained, *_ = case()
            trained(remain.tensors[0]).sum().backward()
            for name, value in trained.named_parameters():
                assert torch.allclose(found["gradients"][name], value.grad, rtol=1e-10, atol=1e-12)
            if task == "write":
                assert found["shuffled"].startswith("MismatchError: all processes must have the same data (values, order or groups); found")
                assert found["label"].startswith("InputError: data: labels must be in [0, 3)"), found["label"]
                assert found["kind"].startswith(
                    "MismatchError: all processes must have the same kind; found empirical on rank 0 and expected"
                )
                assert found["folder"].startswith("InputError: folder: must be a new one")
                told = "OSError: the disk of rank 1 is gone"
                assert found["raising"].startswith(told if rank else f"MissingProcessError: rank 1 failed: {told}")
                assert all(found[bad].endswith("[True]") for bad in ("shuffled", "label", "kind", "folder", "raising", *alike, *own))
                assert all(found[bad].startswith(f"MismatchError: all processes must have the same {what}") for bad, what in alike.items())
                assert all(
                    found[bad].startswith(what if rank else f"MissingProcessError: rank 1 failed: {what}") for bad, what in own.items()
                )
                assert not [*tmp_path.glob(".*new")]
            if task == "read":
                sums, about = found["loaded"]
                assert about == found["about"][0] and reference.worst_error(sums, whole[0].sums) <= 1e-12
                assert "must hold 'sharded-fisher-sums'" in found["strange"]


ENDING = """
import os, sys, time
import torch, torch.distributed as distributed
from torch.distributed.fsdp import fully_shard
from expunge import fisher
from expunge.errors import ExpungeError
from tests.fisher.test_sharded import case

distributed.init_process_group("gloo")
rank, calls = distributed.get_rank(), 0
mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
model, _, remain = case()
for part in (model[0], model[4], model):
    fully_shard(part, mesh=mesh)


class Ending(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        global calls
        calls += 1
        if rank == 1 and calls == 3:  # the others are on their way to reduce gradients with this process
            os.kill(os.getpid(), int(sys.argv[1]))
        return gradient


model[4].register_forward_hook(lambda module, inputs, output: Ending.apply(output))
started = time.monotonic()
try:
    fisher.sharded_diagonal(model, remain, batch_size=8, patience=5)
except ExpungeError as error:
    print(f"{type(error).__name__}: {error} [{time.monotonic() - started < 20}]", flush=True)
os._exit(0)  # a group of which a process is missing cannot be left
"""


@pytest.mark.slow
@pytest.mark.parametrize("how, told", [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "does not answer")])
def test_a_process_that_ends_or_stops_in_the_collectives_is_told_to_the_others_and_soon(tmp_path, how, told):
    started = processes.start(ENDING, tmp_path, 3, str(int(how)))
    try:
        outputs = [started[rank].communicate(timeout=90)[0] for rank in (0, 2)]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    for output in outputs:
        lines = [line for line in output.splitlines() if line.startswith("MissingProcessError: ")]
        assert len(lines) == 1 and f"another process {told}; this one cannot go on" in lines[0] and lines[0].endswith("[True]"), output


def test_a_model_that_is_not_sharded_is_refused():
    model, _, remain = case()
    with pytest.raises(ModelError, match="must be sharded by fully_shard"):
        fisher.sharded_diagonal(model, remain)
