"""A training that was stopped, in whatever way and at whatever moment, ends as if it never had been."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import Dataset

from expunge.data.objective import Objective
from expunge.errors import InputError, MismatchError
from expunge.runtime.modes import Generators
from expunge.storage import tensors as artifacts
from expunge.storage.tensors import weights_digest
from expunge.training import checkpoints
from expunge.training.loop import train
from expunge.training.schedules import Constant, Steps, replay
from expunge.training.side_by_side import Training, train_together
from expunge.training.tuning import Tuning

EPOCHS = 5


class Noisy(Dataset):
    """Every sample is read with noise of numpy's and of Python's random numbers."""

    def __init__(self, samples: int = 22) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + numpy.random.normal(scale=0.1) + random.gauss(0, 0.1), int(self.y[index])


def network(hidden: int = 8, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, 3))


TUNINGS = {
    "momentum": Tuning(Steps(0.1, EPOCHS, (2.5, 3.5)), batch_size=7, seed=3),
    "no momentum": Tuning(Steps(0.1, EPOCHS, (2.5, 3.5)), batch_size=7, momentum=0, seed=3),
    "Adam": Tuning(Constant(0.01, EPOCHS), batch_size=7, optimizer=lambda parameters: torch.optim.Adam(parameters, amsgrad=True)),
    "warm-up": Tuning(replay(Steps(warmup=40), EPOCHS), batch_size=7),
}


def uninterrupted(tuning: Tuning, after_epoch=None) -> str:
    model = network()
    train(model, Noisy(), tuning, after_epoch=after_epoch)
    return weights_digest(model)


class Stop(Exception):
    pass


def stop_after(epoch: int):
    def after_epoch(done: int) -> None:
        if done == epoch:
            raise Stop

    return after_epoch


@pytest.mark.parametrize("name", TUNINGS)
def test_a_training_stopped_after_any_epoch_ends_with_the_same_weights(name, tmp_path):
    expected = uninterrupted(TUNINGS[name])
    for epoch in range(1, EPOCHS + 1):
        path = tmp_path / f"{epoch}.safetensors"
        with pytest.raises(Stop):
            train(network(), Noisy(), TUNINGS[name], after_epoch=stop_after(epoch), keep=path)
        random.random(), numpy.random.rand(), torch.rand(1)
        seen: list[int] = []
        model = network(seed=9 if epoch > 1 else 0)  # before the end of the first epoch nothing is kept
        train(model, Noisy(), TUNINGS[name], after_epoch=seen.append, keep=path)
        assert weights_digest(model) == expected
        assert seen == list(range(epoch, EPOCHS + 1))


def test_a_training_stopped_again_and_again_ends_with_the_same_weights(tmp_path):
    tuning, path = TUNINGS["momentum"], tmp_path / "state"
    batches = iter(range(1, 100))
    stops = iter([3, 4, 9, 10, 18, 100])  # batches read: in the middle of epochs, of four steps each

    def losses(logits, targets):
        if next(batches) == stop:
            raise Stop
        return nn.functional.cross_entropy(logits, targets, reduction="none")

    for stop in stops:  # noqa: B007 (read by the losses)
        model = network()
        try:
            train(model, Noisy(), tuning, Objective(losses=losses), keep=path)
        except Stop:
            continue
        break
    assert stop == 100 and weights_digest(model) == uninterrupted(tuning)


def test_random_numbers_drawn_after_an_epoch_are_not_lost(tmp_path):
    def draw(epoch: int) -> None:
        torch.rand(epoch), numpy.random.rand(epoch), random.random()

    def draw_and_stop(epoch: int) -> None:
        draw(epoch)
        stop_after(3)(epoch)

    model, path = network(), tmp_path / "state"
    with pytest.raises(Stop):
        train(network(), Noisy(), TUNINGS["momentum"], after_epoch=draw_and_stop, keep=path)
    train(model, Noisy(), TUNINGS["momentum"], after_epoch=draw, keep=path)
    assert weights_digest(model) == uninterrupted(TUNINGS["momentum"], draw) != uninterrupted(TUNINGS["momentum"])


def test_the_caller_s_random_numbers_stay(tmp_path):
    before = Generators.now()
    for _ in range(2):
        train(network(), Noisy(), TUNINGS["momentum"], keep=tmp_path / "state")
        assert before.same_as(Generators.now())


class Slow(Noisy):
    """So that there is time to kill its training."""

    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)


def trained_in_a_process(keep: Path, digest: Path) -> None:
    torch.set_num_threads(1)
    model = network()
    train(model, Slow(), Tuning(Steps(0.1, 12), batch_size=7, seed=3), keep=keep)
    digest.write_text(weights_digest(model))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forkserver")
@pytest.mark.slow
def test_a_training_killed_at_any_moment_ends_with_the_same_weights(tmp_path):
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(
        ["expunge.training.loop", "torch._dynamo", "safetensors.torch", "pytest"]
    )  # else every child would import them for seconds
    keep, digest, moments = tmp_path / "state", tmp_path / "digest", random.Random(0)
    codes = []
    for kill in (True, True, True, False):
        child = processes.Process(target=trained_in_a_process, args=(keep, digest))
        before = keep.stat().st_mtime_ns if keep.exists() else 0
        child.start()
        while kill and child.is_alive() and (keep.stat().st_mtime_ns if keep.exists() else 0) == before:
            time.sleep(0.001)
        if kill:
            time.sleep(moments.uniform(0, 0.05))
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        codes.append(child.exitcode)
    model = network()
    train(model, Noisy(), Tuning(Steps(0.1, 12), batch_size=7, seed=3))
    assert -signal.SIGKILL in codes and codes[-1] == 0 and digest.read_text() == weights_digest(model)


def test_a_finished_training_is_there_at_once(tmp_path):
    first, second, path = network(), network(seed=9), tmp_path / "state"
    train(first, Noisy(), TUNINGS["momentum"], keep=path)
    written = path.stat().st_mtime_ns
    train(second, Noisy(), TUNINGS["momentum"], after_epoch=pytest.fail, keep=path)
    assert weights_digest(second) == weights_digest(first) and path.stat().st_mtime_ns == written


def test_a_training_that_was_ended_stays_so(tmp_path):
    first, second = network(), network(seed=9)
    train(first, Noisy(), TUNINGS["momentum"], after_epoch=lambda epoch: epoch == 2, keep=tmp_path / "state")
    train(second, Noisy(), TUNINGS["momentum"], after_epoch=pytest.fail, keep=tmp_path / "state")
    assert weights_digest(second) == weights_digest(first)


def begun(path: Path) -> None:
    with pytest.raises(Stop):
        train(network(), Noisy(), TUNINGS["momentum"], after_epoch=stop_after(3), keep=path)


OTHERS = {
    "seed": {"tuning": Tuning(Steps(0.1, EPOCHS, (2.5, 3.5)), batch_size=7, seed=4)},
    "rates": {"tuning": Tuning(Steps(0.1, EPOCHS, (2.25, 3.5)), batch_size=7, seed=3)},  # the same at the start of every epoch
    "steps": {"tuning": Tuning(Steps(0.1, EPOCHS, (2.5, 3.5)), batch_size=3, seed=3)},
    "batch_size": {"tuning": Tuning(Steps(0.1, EPOCHS, (2.5, 3.5)), batch_size=6, seed=3)},
    "precision": {"tuning": Tuning(Steps(0.1, EPOCHS, (2.5, 3.5)), batch_size=7, seed=3, precision="bfloat16")},
    "optimizer": {"tuning": Tuning(Steps(0.1, EPOCHS, (2.5, 3.5)), batch_size=7, seed=3, optimizer=torch.optim.Adam)},
    "optimizer SGD": {"tuning": Tuning(Steps(0.1, EPOCHS, (2.5, 3.5)), batch_size=7, momentum=0.5, seed=3)},
    "another network: 0.bias, 0.weight": {"model": network(9)},
    "another network: 0.": {"model": network().double()},
    "other parameters: 0.weight, 0.bias": {"model": network()},
}


@pytest.mark.parametrize("told", OTHERS)
def test_another_training_is_refused_and_nothing_changed(told, tmp_path):
    path = tmp_path / "state"
    begun(path)
    model, tuning = OTHERS[told].get("model", network()), OTHERS[told].get("tuning", TUNINGS["momentum"])
    if "parameters" in told:
        model[0].weight.requires_grad_(False)
    before, content, state = weights_digest(model), path.read_bytes(), torch.get_rng_state()
    with pytest.raises(MismatchError, match=told):
        train(model, Noisy(), tuning, keep=path)
    assert weights_digest(model) == before and path.read_bytes() == content and torch.equal(torch.get_rng_state(), state)


def test_a_file_cut_short_or_changed_is_refused(tmp_path):
    path = tmp_path / "state"
    begun(path)
    content, model = path.read_bytes(), network()
    before = weights_digest(model)
    changed = bytearray(content)
    changed[-5] ^= 1
    for held, rule in ((content[:-7], "whole"), (content[:100], "whole"), (b"", "whole"), (bytes(changed), "content was changed")):
        path.write_bytes(held)
        with pytest.raises(InputError, match=rule):
            train(model, Noisy(), TUNINGS["momentum"], keep=path)
        assert weights_digest(model) == before and path.read_bytes() == held
    save_file({"a": torch.zeros(1)}, path, {"kind": "model"})
    with pytest.raises(InputError, match="keep: must hold 'training'; without it the training begins anew; found .*state: model"):
        train(model, Noisy(), TUNINGS["momentum"], keep=path)


def forged(path: Path, change) -> None:
    """A file whose digest is right and whose content is not."""
    tensors, metadata = artifacts.load_tensors(path, "training")
    change(tensors, metadata)
    artifacts.save_tensors(path, tensors, metadata)


def numbers(part: str, **changes):
    def change(tensors, metadata):
        metadata[part] = json.dumps(json.loads(metadata[part]) | changes)

    return change


FORGED = {
    "no settings": lambda tensors, metadata: metadata.pop("settings"),
    "no epoch": lambda tensors, metadata: metadata.pop("epoch"),
    "no optimizer": lambda tensors, metadata: metadata.pop("optimizer"),
    "no random numbers": lambda tensors, metadata: metadata.pop("random"),
    "no list of what was trained": lambda tensors, metadata: metadata.pop("trained"),
    "settings of another kind": lambda tensors, metadata: metadata.update(settings="[1]"),
    "deep settings": lambda tensors, metadata: metadata.update(settings="[" * 100_000),
    "an epoch that is none": lambda tensors, metadata: metadata.update(epoch="three"),
    "an epoch below zero": lambda tensors, metadata: metadata.update(epoch="-1"),
    "an epoch after the last": lambda tensors, metadata: metadata.update(epoch=str(EPOCHS + 1)),
    "an epoch of many digits": lambda tensors, metadata: metadata.update(epoch="9" * 5000),
    "optimizer numbers of another kind": lambda tensors, metadata: metadata.update(optimizer="[]"),
    "no parameter of that number": lambda tensors, metadata: tensors.update({"optimizer/99/momentum_buffer": torch.zeros(3)}),
    "a parameter without a number": lambda tensors, metadata: tensors.update({"optimizer/x/momentum_buffer": torch.zeros(3)}),
    "no part": lambda tensors, metadata: tensors.update({"optimizer/1": torch.zeros(3)}),
    "momentum of another shape": lambda tensors, metadata: tensors.update({"optimizer/0/momentum_buffer": torch.zeros(2, 2)}),
    "momentum by another name": lambda tensors, metadata: tensors.update({"optimizer/0/more": tensors.pop("optimizer/0/momentum_buffer")}),
    "something else": lambda tensors, metadata: tensors.update({"other": torch.zeros(1)}),
    "no state of torch": lambda tensors, metadata: tensors.pop("random/torch"),
    "no state of Python": lambda tensors, metadata: tensors.pop("random/python"),
    "no state of numpy": lambda tensors, metadata: tensors.pop("random/numpy"),
    "a short state of torch": lambda tensors, metadata: tensors.update({"random/torch": tensors["random/torch"][:100]}),
    "a state of torch that cannot be": lambda tensors, metadata: tensors.update(
        {"random/torch": torch.full_like(tensors["random/torch"], 255)}
    ),
    "a state of torch in floats": lambda tensors, metadata: tensors.update({"random/torch": tensors["random/torch"].float()}),
    "a short state of Python": lambda tensors, metadata: tensors.update({"random/python": tensors["random/python"][:5]}),
    "a state of Python below zero": lambda tensors, metadata: tensors.update({"random/python": -tensors["random/python"]}),
    "a place beyond Python's state": lambda tensors, metadata: tensors["random/python"].__setitem__(-1, 700),
    "a short state of numpy": lambda tensors, metadata: tensors.update({"random/numpy": tensors["random/numpy"][:5]}),
    "a state of numpy beyond 32 bits": lambda tensors, metadata: tensors["random/numpy"].add_(2**40),
    "a place beyond numpy's state": numbers("random", numpy=["MT19937", 1e6, 0.0, 0.0]),
    "a place before numpy's state": numbers("random", numpy=["MT19937", -1.0, 0.0, 0.0]),
    "another generator of numpy": numbers("random", numpy=["PCG64", 3.0, 0.0, 0.0]),
    "text for a number": numbers("random", python=[3, "0.5"]),
    "another version of Python": numbers("random", python=[7, None]),
    "too few numbers": numbers("random", numpy=["MT19937"]),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_is_refused_by_one_line_and_nothing_changed(name, tmp_path):
    path, tuning = tmp_path / "state", TUNINGS["momentum"]
    begun(path)
    forged(path, FORGED[name])
    model, generators, content = network(seed=9), Generators.now(), path.read_bytes()
    before = weights_digest(model)
    with pytest.raises(InputError, match=r"keep: must hold all of a training \(.*\); nothing was changed; .*; found .*state"):
        train(model, Noisy(), tuning, keep=path)
    assert weights_digest(model) == before and Generators.now().same_as(generators) and path.read_bytes() == content


def test_a_refused_file_leaves_the_optimizer_as_it_was(tmp_path):
    def adam(model):
        return torch.optim.Adam(model.parameters(), 0.01)

    def step(model, optimizer):
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()

    first, second = network(), network(seed=9)
    optimizer, other = adam(first), adam(second)
    step(first, optimizer), step(second, other)
    path = checkpoints.save(tmp_path / "state", first, optimizer, 2, {"a": "b"}, torch.device("cpu"))
    forged(path, lambda tensors, metadata: tensors["random/numpy"].neg_())
    before, state = weights_digest(second), str(other.state_dict())
    with pytest.raises(InputError, match="numpy's random state"):
        checkpoints.load(path, second, other, {"a": "b"}, torch.device("cpu"))
    assert weights_digest(second) == before and str(other.state_dict()) == state
    forged_again = checkpoints.save(tmp_path / "state", first, optimizer, 2, {"a": "b"}, torch.device("cpu"))
    forged(forged_again, lambda tensors, metadata: tensors["optimizer/0/step"].fill_(-1))
    with pytest.raises(InputError, match="step must be finite and not negative"):
        checkpoints.load(path, second, other, {"a": "b"}, torch.device("cpu"))
    assert weights_digest(second) == before and str(other.state_dict()) == state


def test_a_write_that_fails_leaves_the_file_before(tmp_path, monkeypatch):
    path = tmp_path / "state"
    begun(path)
    content = path.read_bytes()

    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(artifacts.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        train(network(), Noisy(), TUNINGS["momentum"], keep=path)
    monkeypatch.undo()
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]
    model = network()
    train(model, Noisy(), TUNINGS["momentum"], keep=path)
    assert weights_digest(model) == uninterrupted(TUNINGS["momentum"])


def test_the_state_of_the_optimizer_comes_back_in_the_parameters_order_in_memory(tmp_path):
    held: list[torch.optim.Optimizer] = []

    def spied(parameters):
        held.append(torch.optim.SGD(parameters, lr=1.0, momentum=0.9))
        return held[-1]

    tuning = Tuning(Constant(0.1, 2), batch_size=4, optimizer=spied)
    data = [(torch.randn(4, 3, 6, 6), torch.arange(4))]

    def convolution():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 4)).to(memory_format=torch.channels_last)

    with pytest.raises(Stop):
        train(convolution(), data, tuning, after_epoch=stop_after(2), keep=tmp_path / "state")
    train(convolution(), data, tuning, keep=tmp_path / "state")
    for optimizer in held:
        for parameter, state in optimizer.state.items():
            assert state["momentum_buffer"].stride() == parameter.stride()


def test_a_compiled_network_keeps_its_weights_by_their_own_names(tmp_path):
    path = tmp_path / "state"
    begun(path)
    model = network()
    train(torch.compile(model, backend="eager"), Noisy(), TUNINGS["momentum"], keep=path)
    assert weights_digest(model) == uninterrupted(TUNINGS["momentum"])
    assert {name for name in load_file(path) if name.startswith("model/")} == {f"model/{name}" for name in model.state_dict()}


@pytest.mark.parametrize("epochs", [(2, 2), (1, 4)])
def test_trainings_stopped_together_go_on_together(epochs, tmp_path):
    tunings = [TUNINGS["momentum"], Tuning(Constant(0.1, 4), batch_size=5, seed=8)]

    def trainings(stops):
        models = [network(seed=seed) for seed in (0, 1)]
        held = zip(models, tunings, stops, strict=True)
        return models, [Training(m, Noisy(), t, stop_after(stop), tmp_path / f"{t.seed}") for m, t, stop in held]

    with pytest.raises(Stop):
        train_together(trainings(epochs)[1])
    models, again = trainings((99, 99))
    train_together(again)
    for seed, (model, tuning) in enumerate(zip(models, tunings, strict=True)):
        alone = network(seed=seed)
        train(alone, Noisy(), tuning)
        assert weights_digest(model) == weights_digest(alone)
