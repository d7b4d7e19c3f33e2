"""Replayed steps are the steps themselves. Which are captured and when is tested with a graph that is none; the rest needs CUDA."""

import gc
import random
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from expunge.errors import InputError
from expunge.runtime import cuda_graphs
from expunge.runtime.cuda_graphs import GRAPHS, WARM, GraphedStep
from expunge.runtime.modes import Generators
from expunge.training import loop as tuning
from expunge.training.loop import train
from expunge.training.schedules import Constant, Steps
from expunge.training.side_by_side import Training, train_together
from expunge.training.tuning import Tuning

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class Recorder:
    """A step that notes the rows it was called with, and a stand-in for CUDA's graphs that calls it again."""

    def __init__(self, monkeypatch, draw=lambda: None, fail_in_capture=False, lasting=True, free=1 << 40):
        self.draw, self.fail, self.eager, self.captures, self.replayed, self.cleared, self.emptied = draw, fail_in_capture, [], [], [], 0, 0
        self.capturing = False
        recorder = self

        class Graph:
            rows = torch.empty(0)

            def replay(self):
                recorder.replayed.append(self.rows.tolist())

            def capture_begin(self, capture_error_mode="global"):
                assert not lasting and capture_error_mode == "thread_local"
                recorder.capturing, recorder.graph = True, self

            def capture_end(self):
                recorder.capturing = False

        @contextmanager
        def graph(held, stream=None, capture_error_mode="global"):
            assert lasting and torch.backends.cudnn.benchmark and capture_error_mode == "thread_local"
            recorder.capturing, recorder.graph = True, held
            try:
                yield
            finally:
                recorder.capturing = False

        class Stream:
            def synchronize(self):
                pass

        one = Stream()
        for name, value in {
            "CUDAGraph": Graph,
            "graph": graph,
            "current_stream": lambda device=None: one,
            "default_stream": lambda device=None: one,
            "synchronize": lambda: None,
            "current_device": lambda: 0,
            "stream": lambda stream: nullcontext(),
            "mem_get_info": lambda: (free, 1 << 40),
            "memory_reserved": lambda: 1 << 30,
            "empty_cache": self.empty,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(cuda_graphs, "_side_stream", lambda device: one)
        self.graphed = GraphedStep(self.step, self.clear, lasting=lasting)

    def clear(self):
        self.cleared += 1

    def empty(self):
        self.emptied += 1

    def step(self, rows):
        self.draw()
        if not self.capturing:
            self.eager.append(rows.tolist())
        elif self.fail:
            raise RuntimeError("operation not permitted when stream is capturing")
        else:
            self.graph.rows = rows
            self.captures.append(len(rows))
        return rows.sum()


def test_a_size_is_captured_once_it_is_warm(monkeypatch):
    recorder = Recorder(monkeypatch)
    before = torch.backends.cudnn.benchmark
    rows = [torch.arange(4) + step for step in range(6)]
    for each in rows:
        recorder.graphed(each)
    assert recorder.eager == [each.tolist() for each in rows[:WARM]]
    assert recorder.replayed == [each.tolist() for each in rows[WARM:]]
    assert recorder.captures == [4] and recorder.cleared == 1 and torch.backends.cudnn.benchmark == before


@pytest.mark.parametrize("lasting", [True, False])
def test_a_failed_capture_leaves_nothing_of_its_pass(monkeypatch, lasting):
    """Even where its error is kept for ever, as torch keeps those of CUDA."""
    kept, passes = [], []

    def forward(recorder):
        hidden = torch.ones(2, requires_grad=True) * 2
        passes.append(weakref.ref(hidden))
        if recorder.capturing:
            kept.append(RuntimeError("operation not permitted when stream is capturing"))
            raise kept[0]

    recorder = Recorder(monkeypatch, lambda: forward(recorder), lasting=lasting)
    for _ in range(WARM + 1):
        recorder.graphed(torch.arange(4))
    assert len(kept) == 1 and not recorder.graphed.capturable and [each() for each in passes] == [None] * (WARM + 2)


def test_every_size_has_a_graph_of_its_own_and_a_first_step_without(monkeypatch):
    recorder = Recorder(monkeypatch)
    for _ in range(3):
        for size in (4, 4, 4, 4, 2):
            recorder.graphed(torch.arange(size))
    assert [len(rows) for rows in recorder.eager] == [4, 4, 4, 2] and recorder.captures == [4, 2]
    assert [len(rows) for rows in recorder.replayed] == [4] + [4, 4, 4, 4, 2] * 2


def test_what_cannot_be_captured_stays_as_it_was(monkeypatch):
    recorder = Recorder(monkeypatch, fail_in_capture=True)
    for _ in range(8):
        recorder.graphed(torch.arange(4))
    assert len(recorder.eager) == 8 and recorder.cleared == 1  # tried once


def test_what_is_no_tensor_counts_as_it_is(monkeypatch):
    recorder = Recorder(monkeypatch)
    seen = []
    recorder.graphed.step = lambda batch: seen.append(batch["scale"]) or recorder.step(batch["rows"])
    for scale in (1, 1, 1, 2, 1, 2):
        recorder.graphed({"rows": torch.arange(4), "scale": scale})
    assert seen == [1, 1, 1, 2, 1, 2] and len(recorder.eager) == 4 and len(recorder.replayed) == 2  # one graph each
    for other in ({1}, Changing(), Unhashable([1])):  # cannot be compared, or be another by the next time
        recorder.eager.clear()
        for _ in range(5):
            recorder.graphed({"rows": torch.arange(4), "scale": other})
        assert len(recorder.eager) == 5


class Changing:
    """Equal to itself, whatever it holds by then."""


@dataclass(frozen=True)
class Unhashable:
    held: list[int]


def test_of_many_forms_only_some_are_captured(monkeypatch):
    """As batches have with the names of their samples: read again and again, each would keep a graph and its memory."""
    recorder = Recorder(monkeypatch)
    step = recorder.step
    recorder.graphed.step = lambda batch: step(batch[0])
    for _ in range(3):
        for number in range(GRAPHS + 4):
            recorder.graphed((torch.arange(4), [f"picture {number}"]))
    assert len(recorder.captures) == GRAPHS and len(recorder.eager) == GRAPHS + 3 * 4


def test_no_garbage_is_collected_in_a_capture(monkeypatch):
    enabled = []
    recorder = Recorder(monkeypatch, draw=lambda: enabled.append(gc.isenabled()))
    for _ in range(WARM + 1):
        recorder.graphed(torch.arange(4))
    assert enabled == [True] * WARM + [False] and gc.isenabled()


def test_the_device_of_the_batch_is_the_current_one(monkeypatch):
    recorder, current = Recorder(monkeypatch), []

    @contextmanager
    def device(chosen):
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    found = []
    recorder.graphed.step = lambda rows: found.append(current[:]) or rows
    for _ in range(WARM + 1):
        recorder.graphed(torch.empty(4, device="meta"))
    assert found == [[torch.device("meta")]] * (WARM + 1) and not current


@pytest.mark.parametrize("free", [1 << 30, 1 << 31])
def test_few_steps_are_captured_sooner_and_by_the_kernels_that_are_set(free, monkeypatch):
    """What memory the eager step took is given back before only where there is not as much again."""
    recorder = Recorder(monkeypatch, lasting=False, free=free)
    recorder.graphed.warm = 1
    for _ in range(3):
        recorder.graphed(torch.arange(4))
    assert len(recorder.eager) == 1 and len(recorder.replayed) == 2 and not torch.backends.cudnn.benchmark
    assert recorder.emptied == (free < 1 << 31)


def test_what_few_steps_cannot_capture_stays_as_it_was(monkeypatch):
    recorder = Recorder(monkeypatch, fail_in_capture=True, lasting=False)
    recorder.graphed.warm = 1
    for _ in range(3):
        recorder.graphed(torch.arange(4))
    assert len(recorder.eager) == 3 and not recorder.replayed and not recorder.capturing


@pytest.mark.parametrize("fails", [True, False])
def test_the_devices_random_numbers_go_on_after_a_failed_capture(fails, monkeypatch):
    """Torch leaves its generator in the capture."""
    states = []

    class Generator:
        state = "before"

        def clone_state(self):
            return self.state

        def graphsafe_set_state(self, state):
            states.append(state)

    recorder = Recorder(monkeypatch, fail_in_capture=fails, lasting=False)
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),))
    recorder.graphed.warm = 1
    for _ in range(3):
        recorder.graphed(torch.arange(4))
    assert states == ["before"] * fails


@on_cuda
def test_random_numbers_can_be_drawn_after_a_failed_capture():
    torch.cuda.manual_seed(3)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(3)
    graphed = GraphedStep(lambda rows: rows.sum() + rows.sum().item(), warm=1, lasting=False)
    for _ in range(3):
        graphed(torch.ones(4, device="cuda"))
    assert not graphed.capturable
    assert torch.equal(torch.rand(3, device="cuda"), expected)


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand, lambda: torch.rand(())], ids=["Python", "numpy", "torch"])
def test_a_step_that_draws_on_the_cpu_is_not_replayed(draw, monkeypatch):
    recorder = Recorder(monkeypatch, draw)
    before = Generators.now()
    for _ in range(8):
        recorder.graphed(torch.arange(4))
    after = Generators.now()
    before.restore()
    for _ in range(8):
        draw()
    assert len(recorder.eager) == 8 and not recorder.replayed
    assert after.same_as(Generators.now())  # the attempt drew nothing


def test_rows_that_cannot_be_read_on_the_device_are_not_replayed():
    class Own:
        def __init__(self, read):
            self.read = read

    device = torch.device("meta")
    assert tuning._on_device(Own(lambda rows: (rows, rows)), device)
    assert not tuning._on_device(Own(lambda rows: (rows, torch.zeros(1))), device)
    assert not tuning._on_device(Own(lambda rows: {}[rows]), device)


def pictures(device, samples=70) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    held = torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(4, (samples,), generator=generator)
    return TensorDataset(*(tensor.to(device) for tensor in held))


def network(seed=0, dropout=0.0) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(288, 4)]
        return nn.Sequential(*parts).cuda()


def replayed(monkeypatch) -> list[int]:
    """The sizes of the graphs that were captured."""
    sizes: list[int] = []
    capture = GraphedStep._capture

    def spied(self, form, rows):
        capture(self, form, rows)
        if form in self._captured:
            sizes.append(len(rows))

    monkeypatch.setattr(GraphedStep, "_capture", spied)
    return sizes


TUNING = Tuning(Steps(0.05, 4, (2.5,)), batch_size=16, seed=2)


def eagerly(model, samples, settings, monkeypatch) -> nn.Module:
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs, "WARM", 10**9)
        train(model, samples, settings)
    return model


@on_cuda
@pytest.mark.parametrize("form", ["whole", "subset", "concatenation"])
def test_replayed_training_is_eager_training(form, monkeypatch):
    whole = pictures("cuda")
    samples = {
        "whole": whole,
        "subset": Subset(whole, range(3, 69)),
        "concatenation": ConcatDataset([Subset(whole, range(30)), Subset(whole, range(30, 70))]),
    }[form]
    sizes, model = replayed(monkeypatch), network()
    train(model, samples, TUNING)
    assert sizes == [16, len(samples) % 16]  # the last batch is smaller
    expected = eagerly(network(), samples, TUNING, monkeypatch)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-4, msg=name)


@on_cuda
def test_data_on_the_cpu_are_trained_on_one_step_after_the_other(monkeypatch):
    sizes, model = replayed(monkeypatch), network()
    train(model, pictures("cpu"), TUNING)
    assert sizes == []
    expected = network()
    train(expected, pictures("cuda"), TUNING)
    torch.testing.assert_close(model[5].weight, expected[5].weight, rtol=1e-3, atol=1e-4)


@on_cuda
def test_a_model_that_looks_at_values_is_trained_all_the_same(monkeypatch):
    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return self.inner(x) if float(x.sum()) < 1e9 else self.inner(-x)

    sizes, model = replayed(monkeypatch), Looking()
    train(model, pictures("cuda"), TUNING)
    assert sizes == []
    expected = network()
    train(expected, pictures("cuda"), TUNING)
    torch.testing.assert_close(model.inner[5].weight, expected[5].weight, rtol=1e-3, atol=1e-4)


@on_cuda
def test_a_label_out_of_range_is_found_before_anything_is_trained():
    samples, model = pictures("cuda"), network()
    samples.tensors[1][69] = 4
    before = model[5].weight.clone()
    with pytest.raises(InputError, match="labels must be in"):
        train(model, samples, TUNING)
    assert torch.equal(model[5].weight, before)


@on_cuda
def test_dropout_is_drawn_anew_at_every_replay():
    model, losses = network(dropout=0.5), []
    noted = Training(
        model, pictures("cuda", 16), Tuning(Constant(1e-30, 12), 16, weight_decay=0), note_loss=lambda *at: losses.append(at[1])
    )
    train_together([noted])
    assert len({round(loss, 6) for loss in losses}) > 6  # the weights stay, so only what was dropped can differ


@on_cuda
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_on_streams_of_their_own_each_ends_as_alone(precision):
    settings = [Tuning(Constant(0.05, epochs), 16, seed=epochs, precision=precision) for epochs in (2, 4, 3)]
    models = [network(each.seed) for each in settings]
    train_together([Training(model, pictures("cuda"), each) for model, each in zip(models, settings, strict=True)])
    for model, each in zip(models, settings, strict=True):
        alone = network(each.seed)
        train(alone, pictures("cuda"), each)
        torch.testing.assert_close(model[5].weight, alone[5].weight, rtol=1e-2, atol=1e-3)


@on_cuda
def test_a_kept_training_goes_on_from_its_file(tmp_path):
    def stop(epoch):
        if epoch == 3:
            raise KeyboardInterrupt

    def channels_last():
        return network().to(memory_format=torch.channels_last)

    with pytest.raises(KeyboardInterrupt):
        train(channels_last(), pictures("cuda"), TUNING, after_epoch=stop, keep=tmp_path / "state")
    model, expected = channels_last(), channels_last()
    train(model, pictures("cuda"), TUNING, keep=tmp_path / "state")
    train(expected, pictures("cuda"), TUNING)
    torch.testing.assert_close(model[5].weight, expected[5].weight, rtol=1e-3, atol=1e-4)
