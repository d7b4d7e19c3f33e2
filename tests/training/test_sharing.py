"""Trainings shared by real processes: the weights of one process apart from rounding, resumed, and a clear error where they differ."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import expunge
from expunge.data.batches import as_batches
from expunge.errors import InputError
from expunge.training import Phase, shared, train_phases
from expunge.training.same_batches import all_equal, mark
from expunge.training.shared_norms import synchronised
from tests import processes
from tests.training import sharing

SAME = """
import torch, torch.distributed as distributed
from expunge.training import shared
from tests import processes
from tests.training import sharing

for size in processes.groups(".", 2, 3):
    with shared():
        found = {name: sharing.weights(training()) for name, training in sharing.TRAININGS.items()}
    torch.save(found, f"weights-{size}-{distributed.get_rank()}.pt")
"""


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    pairs = [(found[name].double(), value.double()) for name, value in expected.items()]
    return max(float((value - other).abs().max() / other.abs().max().clamp_min(1e-30)) for value, other in pairs)


@pytest.mark.slow
def test_the_weights_of_one_process(tmp_path):
    processes.printed(processes.start(SAME, tmp_path, 3))
    by_size = {size: [torch.load(tmp_path / f"weights-{size}-{rank}.pt", weights_only=True) for rank in range(size)] for size in (2, 3)}
    for name, training in sharing.TRAININGS.items():
        alone = sharing.weights(training())
        for ranks in by_size.values():
            for found in ranks:
                # A BatchNorm divides by the deviation of the last batch, two samples, which may be small: rounding grows.
                assert worst(found[name], alone) <= (1e-9 if name in ("batch norm", "twice") else 1e-12), name
                assert all(torch.equal(found[name][key], ranks[0][name][key]) for key in alone)


STOPPED = """
import os, signal, time
import torch, torch.distributed as distributed
from torch.utils.data import DataLoader
from expunge.training import shared, train
from tests.training import sharing

distributed.init_process_group("gloo")
rank = distributed.get_rank()


def interrupted(epoch):
    if epoch == 2:
        raise KeyboardInterrupt


def killed(epoch):
    if epoch == 2 and rank == 0:  # the harder: it serves the store
        os.kill(os.getpid(), signal.SIGKILL)


def attempt(task, function):
    started = time.monotonic()
    try:
        with shared(patience=60):
            function()
        print(f"{task}: no error", flush=True)
    except (Exception, KeyboardInterrupt) as error:
        print(f"{task}: {type(error).__name__}: {error} [{time.monotonic() - started < 30}]", flush=True)


def bad(task):
    model, data = sharing.case(sharing.plain)
    settings = sharing.tuning()
    if task == "weights" and rank == 1:
        model[0].bias.data += 1
    if task == "data" and rank == 1:
        data.tensors[0][3] += 1
    if task == "frozen" and rank == 1:  # gloo would end the process
        model[0].bias.requires_grad_(False)
    if task == "label":
        data.tensors[1][9] = 7  # in the part of one of the processes
    if task == "size":
        settings = sharing.Tuning(sharing.Constant(0.05, epochs=4), batch_size=1)
    if task == "loader":
        data = DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(rank))
    if task == "raising":
        data = Failing(data, rank == 1)
    if task == "forward":  # while the others add up what their BatchNorms found
        model, _ = sharing.case(sharing.normed)
        model[1].register_forward_pre_hook(failing if rank == 1 else lambda *_: None)
    train(model, data, settings)


def failing(module, inputs):
    raise OSError("rank 1 fails before the norm")


class Failing(torch.utils.data.Dataset):
    def __init__(self, data, fails):
        self.data, self.fails, self.batches = data, fails, 0

    def __len__(self):
        return len(self.data)

    def batch_of(self, rows):
        self.batches += len(rows) > 1
        if self.fails and self.batches == 6:
            raise OSError("the disk of rank 1 is gone")
        return self.data[rows]


for task in ("weights", "data", "frozen", "label", "size", "loader", "raising", "forward"):
    attempt(task, lambda: bad(task))
attempt("stopped", lambda: sharing.sgd("stopped.safetensors", interrupted))
distributed.barrier()
attempt("resumed", lambda: torch.save(sharing.weights(sharing.sgd("stopped.safetensors")), f"weights-{rank}.pt"))
attempt("killed", lambda: sharing.sgd("killed.safetensors", killed))
"""


@pytest.mark.slow
def test_stopped_trainings_go_on_and_processes_that_differ_are_told(tmp_path):
    outputs = processes.printed(processes.start(STOPPED, tmp_path, 2), may_fail=True)
    tasks = [dict(line.split(": ", 1) for line in output.splitlines() if "[True]" in line or "no error" in line) for output in outputs]
    for told in tasks:
        assert "MismatchError: all processes must have the same weights" in told["weights"], outputs
        assert "MismatchError: all processes must have the same samples" in told["data"]
        assert "MismatchError: all processes must have the same trained parameters; found 4 " in told["frozen"]
        assert told["size"].startswith("InputError: batch_size: must be at least the number of processes, 2; found 1")
        assert "MismatchError: all processes must have the same batch in step 1, where rank 1 has another than rank 0" in told["loader"]
        assert told["stopped"].startswith("KeyboardInterrupt") and told["resumed"] == "no error"
    assert sorted(told["label"].split(":")[0] for told in tasks) == ["InputError", "MissingProcessError"]
    for task, error in {"raising": "OSError: the disk of rank 1 is gone", "forward": "OSError: rank 1 fails before the norm"}.items():
        assert tasks[0][task].startswith(f"MissingProcessError: rank 1 failed: {error}; this process stops in step"), outputs  # at once
        assert tasks[1][task].startswith(error)  # and lives on
    assert "MissingProcessError: another process has ended in step" in tasks[1]["killed"] and "killed" not in tasks[0]
    alone = sharing.weights(sharing.sgd())
    for rank in (0, 1):
        assert worst(torch.load(tmp_path / f"weights-{rank}.pt", weights_only=True), alone) <= 1e-12
    # What two processes began one can end.
    epochs: list[int] = []
    resumed = sharing.weights(sharing.sgd(tmp_path / "killed.safetensors", epochs.append))
    assert worst(resumed, alone) <= 1e-12 and epochs[0] in (2, 3)


def test_a_loss_that_is_no_mean_is_refused(monkeypatch):
    monkeypatch.setattr("expunge.runtime.processes.world_size", lambda: 2)
    model, data = sharing.case(sharing.plain)
    phase = Phase(as_batches(data), "data", lambda model, batch, losses: losses(model(batch[0]), batch[1]).max())
    with shared(), pytest.raises(InputError, match="mean over the samples"):
        monkeypatch.setattr("expunge.runtime.processes.agree", lambda describe, patience: describe())
        train_phases(model, lambda epoch: [phase], sharing.tuning())


@pytest.mark.parametrize(
    ("norm", "shape"), [(nn.BatchNorm1d(3), (1, 3)), (nn.BatchNorm2d(3), (1, 3, 1, 1)), (nn.BatchNorm1d(3), (1, 3, 2))]
)
def test_one_value_per_channel_is_refused_as_torch_refuses_it(norm, shape):
    """The sums of a single process: those of two, one of which holds no sample, are the same."""
    inputs, values = torch.randn(shape), inputs_per_channel(shape)
    with synchronised(norm, lambda total: total):
        if values > 1:
            return torch.testing.assert_close(norm(inputs), nn.BatchNorm1d(3)(inputs))
        with pytest.raises(ValueError) as ours:
            norm(inputs)
    with pytest.raises(ValueError) as theirs:
        norm(inputs)
    assert str(ours.value) == str(theirs.value)


def inputs_per_channel(shape: tuple[int, ...]) -> int:
    return math.prod(shape) // shape[1]


def test_a_choice_by_the_clock_is_refused(monkeypatch):
    monkeypatch.setattr("expunge.runtime.processes.world_size", lambda: 2)
    model, data = sharing.case(sharing.plain)
    forget, remain = (TensorDataset(*(column[rows] for column in data.tensors)) for rows in (slice(0, 10), slice(10, None)))
    with shared(), pytest.raises(InputError, match="seconds: must be None within training.shared"):
        expunge.unlearn(model, forget, remain, seconds=5)


def test_batches_are_told_apart_by_one_number():
    inputs, labels = torch.randn(16, 3), torch.arange(16)
    device, swapped = torch.device("cpu"), torch.tensor([1, 0, *range(2, 16)])
    same = mark((inputs, labels), device)
    others = [
        (inputs[swapped], labels[swapped]),
        (inputs[:15], labels[:15]),
        (inputs.double(), labels),
        (-inputs, labels),
        (inputs, labels + 1),
    ]
    assert same == mark((inputs.clone(), labels.clone()), device) and same not in [mark(other, device) for other in others]
    for marks in ([5.0, 5.0, 5.0], [4.0, 5.0, 6.0], [2.0**20 - 1] * 4, [0.0, 2.0**20 - 1]):
        values = torch.tensor(marks, dtype=torch.float64)
        assert bool(all_equal(len(marks), values.sum(), values.square().sum())) == (len({*marks}) == 1)


def test_one_process_is_not_changed():
    alone = sharing.weights(sharing.sgd())
    with shared():
        assert all(torch.equal(value, alone[name]) for name, value in sharing.weights(sharing.sgd()).items())
