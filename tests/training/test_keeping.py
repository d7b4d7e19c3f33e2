"""Trainings within `training.kept`: what is read back, what goes on, what begins again, and what it costs."""

import os
from weakref import WeakSet

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import TensorDataset

from expunge import training
from expunge.data.batches import as_batches
from expunge.data.objective import Objective
from expunge.storage.tensors import weights_digest
from expunge.training import Carried, Constant, Phase, Training, Tuning, checkpoints, keeping, train, train_phases, train_together

TUNING = Tuning(Constant(0.05, epochs=3), batch_size=8)


def network(seed=0):
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(40, 5, generator=generator), torch.randint(3, (40,), generator=generator))


class Steps:
    """An objective that counts the passes of the training."""

    def __init__(self):
        self.made = 0
        self.objective = Objective(losses=self.losses)

    def losses(self, logits, targets):
        self.made += 1
        return nn.functional.cross_entropy(logits, targets, reduction="none")


@pytest.fixture
def always(monkeypatch):
    """Every state is written."""
    for name in ("EVERY", "SHARE", "WORTH"):
        monkeypatch.setattr(keeping, name, 0.0)


class Stop(Exception):
    pass


@pytest.fixture
def stopping(always, monkeypatch):
    """Call it to be stopped after the next state but so many."""
    save, left = checkpoints.save, []

    def saved(*arguments):
        save(*arguments)
        if left and not left[0]:
            left.clear()
            raise Stop
        left[:] = [number - 1 for number in left]

    monkeypatch.setattr(checkpoints, "save", saved)
    return lambda after: left.append(after)


def program(folder, of="", first=TUNING, seed=0, own=None):
    """Two trainings in turn; the weights of both, and the steps that were made."""
    one, two, steps = network(seed), network(7), Steps()
    with training.kept(folder, of):
        train(one, own or data(), first, steps.objective)
        train(two, own or data(), TUNING, steps.objective)
    return (weights_digest(one), weights_digest(two)), steps.made


def test_a_finished_program_is_read_back_without_a_step(tmp_path, always):
    expected, made = program(tmp_path / "elsewhere")
    assert made == 30 and program(tmp_path / "elsewhere") == (expected, 0)
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["training-0001.safetensors", "training-0002.safetensors"]


@pytest.mark.parametrize("after, left", [(0, 25), (1, 20), (2, 15), (3, 10), (4, 5), (5, 0)])
def test_a_stopped_program_makes_what_is_left(after, left, tmp_path, stopping):
    expected, _ = program(tmp_path / "whole")
    stopping(after)
    with pytest.raises(Stop):
        program(tmp_path / "kept")
    assert program(tmp_path / "kept") == (expected, left)


@pytest.mark.parametrize(
    "other, left",
    [({"of": "other"}, 30), ({"first": Tuning(Constant(0.04, epochs=3), batch_size=8)}, 15), ({"seed": 1}, 15), ({"own": data(1)}, 30)],
    ids=["of", "settings", "weights", "data"],
)
def test_what_belongs_to_another_program_is_not_used(other, left, tmp_path, always):
    expected, _ = program(tmp_path / "whole", **other)
    program(tmp_path / "kept")
    assert program(tmp_path / "kept", **other) == (expected, left)
    assert program(tmp_path / "kept", **other) == (expected, 0)


def test_a_damaged_file_is_replaced(tmp_path, always):
    expected, _ = program(tmp_path)
    path = tmp_path / "training-0001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes(byte ^ 255 for byte in content[-9:]))
    (tmp_path / "training-0002.safetensors").write_bytes(b"")
    assert program(tmp_path) == (expected, 30) and program(tmp_path) == (expected, 0)


def test_a_short_training_writes_nothing(tmp_path):
    program(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


@pytest.fixture
def written(monkeypatch):
    """Epochs of the states that are written, by a clock of the test's: an epoch takes 2 seconds, to write a state as long as is asked."""
    now, states = [0.0], []
    monkeypatch.setattr(keeping.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(keeping, "_keepers", WeakSet())
    monkeypatch.setattr(keeping, "LITTLE", 0.05)

    def run(keepers, takes=1.0, epochs=40):
        def save(path, model, optimizer, epoch, *others):
            states.append((path.name, epoch, optimizer is None))
            now[0] += takes

        monkeypatch.setattr(checkpoints, "save", save)
        for epoch in range(1, epochs + 1):
            now[0] += 2
            for keeper in keepers:
                optimizer = torch.optim.SGD([torch.zeros(1)])
                keeper.save(network(), optimizer, epoch, epochs, torch.device("cpu"))
        return states

    return run


def test_writing_takes_no_more_than_its_share(tmp_path, written):
    keeper = keeping.Keeper(tmp_path / "state", keeping._Context(tmp_path, ""))
    assert written([keeper]) == [("state", epoch, False) for epoch in (3, 13, 23, 33)]  # the end has another clock


def test_a_file_of_its_own_has_every_state_that_takes_little_and_always_the_last(tmp_path, written):
    assert written([keeping.Keeper(tmp_path / "large", None)]) == [("large", epoch, False) for epoch in (1, 11, 21, 31, 40)]
    assert written([keeping.Keeper(tmp_path / "small", None)], takes=0.04)[5:] == [("small", epoch, False) for epoch in range(1, 41)]


def test_trainings_side_by_side_share_the_time_for_writing(tmp_path, written):
    keepers = [keeping.Keeper(tmp_path / name, None) for name in "abcd"]
    states = written(keepers, epochs=200)  # 400 seconds, of which each of four may take 5
    assert len(states) <= 4 * (5 + 2) and {name for name, epoch, _ in states if epoch == 200} == set("abcd")


def test_a_full_disk_stops_nothing(tmp_path, always, monkeypatch):
    expected, _ = program(tmp_path / "whole")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save", full)
    assert program(tmp_path / "kept") == (expected, 30)


def test_a_state_holds_no_samples(tmp_path, stopping):
    stopping(1)
    with pytest.raises(Stop):
        program(tmp_path)
    with safe_open(tmp_path / "training-0001.safetensors", framework="pt") as file:
        assert {name.partition("/")[0] for name in file.keys()} == {"model", "optimizer", "random"}
        assert not any(40 in file.get_tensor(name).shape for name in file.keys())


def test_a_file_of_its_own_comes_first(tmp_path, always):
    with training.kept(tmp_path / "kept"):
        train(network(), data(), TUNING, keep=tmp_path / "own.safetensors")
    assert (tmp_path / "own.safetensors").exists() and not (tmp_path / "kept").exists()


def test_trainings_side_by_side_are_kept_too(tmp_path, stopping):
    def together():
        models = [network(seed) for seed in range(2)]
        train_together([Training(model, data(), TUNING) for model in models])
        return [weights_digest(model) for model in models]

    expected = together()
    stopping(2)
    with pytest.raises(Stop), training.kept(tmp_path):
        together()
    with training.kept(tmp_path):
        assert together() == expected


class Louder:
    """A loss of one's own that is not the same at every step."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch, losses):
        self.calls += 1
        return (1 + self.calls / 10) * losses(model(batch[0]), batch[1]).mean()

    def carried(self):
        return Carried(lambda: self.calls, lambda calls: setattr(self, "calls", calls))


@pytest.mark.parametrize("says", [False, True])
def test_a_loss_of_one_s_own_goes_on_where_it_says_what_it_holds(says, tmp_path, stopping):
    def own():
        loss, model = Louder(), network()
        phase = Phase(as_batches(data(), "data", 8), "data", loss)
        train_phases(model, lambda epoch: [phase], TUNING, carried=loss.carried() if says else None)
        return weights_digest(model)

    expected = own()
    stopping(0)
    if says:
        with pytest.raises(Stop), training.kept(tmp_path):
            own()
    with training.kept(tmp_path):
        assert own() == expected
    assert bool(os.listdir(tmp_path)) == says


def test_callbacks_that_say_nothing_begin_again(tmp_path, always):
    for _ in range(2):
        epochs = []
        with training.kept(tmp_path):
            train(network(), data(), TUNING, after_epoch=epochs.append)
        assert epochs == [1, 2, 3]


def test_an_explosion_is_judged_by_the_first_step_also_after_a_stop(tmp_path):
    """The reference is the loss of the first step, not of the first after the stop."""
    seen = []
    check = keeping.checkpoints.load_tensors

    def stop(epoch):
        if epoch == 2:
            raise Stop

    broken = network()
    with torch.no_grad():
        broken[-1].weight.mul_(50)  # begins with a high loss
    with pytest.raises(Stop):
        train(broken, data(), TUNING, after_epoch=stop, keep=tmp_path / "state")
    seen.append(check(tmp_path / "state", checkpoints.KIND)[1]["carried"])
    train(broken, data(), TUNING, keep=tmp_path / "state")
    seen.append(check(tmp_path / "state", checkpoints.KIND)[1]["carried"])
    first, last = (checkpoints.parse_json(text)["explosion"] for text in seen)
    assert first["reference"] == last["reference"] > 10 and (first["epochs"], last["epochs"]) == (1, 3)
