"""Shadows: shared out evenly, as a plain loop would train them, kept and resumed, attacked."""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import expunge
from expunge.audit.membership import confidence
from expunge.audit.shadow_attacks import method_rates
from expunge.audit.shadows import Shadows, memberships
from expunge.errors import InputError, MismatchError, UncheckedWarning
from expunge.metrics import logits


def plain(samples=60, seed=0):
    """Labels that can only be remembered."""
    numbers = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, 6, generator=numbers), torch.randint(3, (samples,), generator=numbers))


def build(seed):
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def keep_all(model, forget, remain):
    return model


TUNING = expunge.Tuning(expunge.Constant(0.05, epochs=2), batch_size=16, seed=5)


def made(folder, **settings):
    return Shadows(build, plain(), range(20, 40), TUNING, folder, **{"number": 4, "at_once": 2} | settings)


def test_candidates_are_in_half_of_the_shadows_and_shadows_have_half_of_them():
    members = memberships(10, 21, seed=3)
    assert members.sum(0).tolist() == [5] * 21 and set(members.sum(1).tolist()) == {10, 11}
    assert torch.equal(memberships(4, 21, seed=3), members[:4]) and not torch.equal(memberships(10, 21, seed=4), members)


def test_shadows_are_what_a_loop_would_train(tmp_path):
    """Trained alone, on its own half; unlearned on that half beside the remain data."""
    shadows, data = made(tmp_path), plain()
    numbers = torch.get_rng_state()
    method = expunge.Finetune(expunge.Tuning(expunge.Constant(0.05, epochs=1), batch_size=16))
    assert (shadows.train(), shadows.unlearn(method)) == (4, 4) and torch.equal(numbers, torch.get_rng_state())
    signals = shadows.signals(method)
    remain = [*range(20), *range(40, 60)]
    for shadow in range(4):
        members = (20 + shadows.members[shadow].nonzero().flatten()).tolist()
        with torch.random.fork_rng():
            torch.manual_seed(5 + shadow)
            model = build(0)
        seeded = expunge.Tuning(TUNING.schedule, batch_size=16, seed=5 + shadow)
        expunge.train(model, Subset(data, sorted(remain + members)), seeded)
        asked = Subset(data, range(20, 40))
        labels = data.tensors[1][20:40]
        assert torch.equal(signals.trained[shadow], confidence(logits(model, asked).logits, labels))
        after = expunge.unlearn(model, Subset(data, members), Subset(data, remain), method, watch={}).model
        assert torch.equal(signals.unlearned[shadow], confidence(logits(after, asked).logits, labels))


@dataclass(frozen=True)
class Choosing:
    """Keeps the model, and warns of the validation data that it was given."""

    takes_validation: ClassVar[bool] = True

    def __call__(self, model, forget, remain, run):
        warnings.warn(f"{len(run.validation or [])} samples to choose by", UncheckedWarning, stacklevel=1)


def test_a_method_that_chooses_is_given_the_validation_data_and_warnings_name_the_shadow(tmp_path):
    without, chosen = made(tmp_path), made(tmp_path, validation=plain(12, seed=9))
    without.train()
    for shadows, number in ((without, 0), (chosen, 12)):
        with pytest.warns(UncheckedWarning) as caught:
            assert shadows.missing(Choosing()) == [0, 1, 2, 3] and shadows.unlearn(Choosing()) == 4
        told = [str(warning.message) for warning in caught]
        assert told == [f"shadow {shadow}: {number} samples to choose by" for shadow in range(4)]
    with_a_method = expunge.FisherMask(tuning=None)  # which has no use for them
    assert without.unlearn(with_a_method) == 4 and chosen.missing(with_a_method) == []


def test_nothing_is_computed_twice_and_pieces_go_on(tmp_path):
    calls = []

    def half_broken(model, forget, remain):
        calls.append(len(forget))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return model

    assert made(tmp_path).train(seconds=0) == 2  # a group at a time
    assert made(tmp_path).train(seconds=0) == 4
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path).unlearn(half_broken, "keeps all")
    with pytest.raises(InputError, match="shadows: 2 of 4 have not been trained and unlearned yet"):
        made(tmp_path).signals(half_broken, "keeps all")
    assert made(tmp_path).unlearn(half_broken, "keeps all") == 4 and calls == [10] * 5
    assert made(tmp_path).train() == 4
    assert all((tmp_path / name).stat().st_mtime_ns == when for name, when in written.items() if name != "locks")
    signals = made(tmp_path).signals(half_broken, "keeps all")
    assert torch.equal(signals.trained, signals.unlearned)


def test_a_training_that_was_interrupted_ends_the_same(tmp_path):
    class Stopping(nn.Linear):
        left = 10**6

        def forward(self, inputs):
            if self.training:
                Stopping.left -= 1
                if Stopping.left < 0:
                    raise KeyboardInterrupt
            return super().forward(inputs)

    def stopping(seed):
        return nn.Sequential(Stopping(6, 3))

    whole = Shadows(stopping, plain(), range(20, 40), TUNING, tmp_path / "whole", number=4, at_once=2)
    whole.train()
    whole.unlearn(keep_all)
    Stopping.left = 2 * 4 + 3  # in the second of two epochs of four steps, of two networks
    parts = Shadows(stopping, plain(), range(20, 40), TUNING, tmp_path / "parts", number=4, at_once=2)
    with pytest.raises(KeyboardInterrupt):
        parts.train()
    assert len([*(tmp_path / "parts").glob("*.training.safetensors")]) == 2
    Stopping.left = 10**6
    assert parts.train() == 4 and not [*(tmp_path / "parts").glob("*.training.safetensors")]
    assert 10**6 - Stopping.left < 4 * 8  # less than all over again
    parts.unlearn(keep_all)
    assert torch.equal(whole.signals(keep_all).trained, parts.signals(keep_all).trained)


def test_more_shadows_are_added_and_other_settings_are_apart(tmp_path):
    made(tmp_path).train()
    assert len([*made(tmp_path, number=6)._done("trained")]) == 4
    others = [made(tmp_path, seed=1), Shadows(build, plain(seed=9), range(20, 40), TUNING, tmp_path, 4), made(tmp_path, asked=plain(20))]
    assert all(not other._done("trained") for other in others)


def test_methods_have_their_own_answers_from_the_same_networks(tmp_path):
    def wipe(model, forget, remain):
        model = copy.deepcopy(model)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model

    shadows = made(tmp_path)
    shadows.train()
    shadows.unlearn(keep_all)
    shadows.unlearn(wipe)
    assert not torch.equal(shadows.signals(keep_all).unlearned, shadows.signals(wipe).unlearned)
    assert torch.equal(shadows.signals(keep_all).trained, shadows.signals(wipe).trained)
    assert torch.allclose(shadows.signals(wipe).unlearned, torch.tensor(0.5, dtype=torch.float64).log())  # ⅓ against ⅔


@pytest.mark.slow
def test_what_was_remembered_is_found_in_a_method_that_keeps_it(tmp_path):
    tuning = expunge.Tuning(expunge.Constant(0.3, epochs=12), batch_size=8)
    shadows = Shadows(lambda seed: nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)), plain(), range(40), tuning, tmp_path, 10)
    shadows.train()
    shadows.unlearn(keep_all)
    assert method_rates(shadows.signals(keep_all)).area.low > 0.6


def test_missing_weights_are_named(tmp_path):
    shadows = made(tmp_path)
    shadows.train()
    for path in tmp_path.glob("*.weights.safetensors"):
        os.remove(path)
    with pytest.raises(MismatchError, match="is gone: without its weights a shadow cannot forget"):
        shadows.unlearn(keep_all)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"number": 5}, "number: must be even"),
        ({"number": 2}, "number"),
        ({"candidates": range(60)}, "candidates: must be two or more different samples of data, not all of its 60"),
        ({"candidates": [1, 1, 2]}, "candidates: .* found 3, 2 different"),
        ({"candidates": [99]}, "candidates"),
        ({"tuning": None}, "tuning: must be a Tuning"),
        ({"build": 3}, "build: must make a network from a seed"),
        ({"data": iter([])}, "data: must be a dataset"),
        ({"asked": plain(3)}, "asked: must be the 20 candidates; found 3"),
        ({"at_once": 0}, "at_once"),
    ],
)
def test_bad_settings_are_named_and_nothing_is_written(settings, message, tmp_path):
    arguments = {"build": build, "data": plain(), "candidates": range(20, 40), "tuning": TUNING, "number": 4} | settings
    with pytest.raises(InputError, match=message):
        Shadows(folder=tmp_path / "shadows", **arguments)
    assert not (tmp_path / "shadows").exists()


@pytest.mark.parametrize("method", [expunge.Finetune, 3, lambda *_: None, type("Own", (), {"__call__": lambda self, *_: None})()])
def test_methods_that_cannot_be_told_apart_are_refused(method, tmp_path):
    with pytest.raises(InputError, match="method: must be a method|about: must name"):
        made(tmp_path).unlearn(method)


def test_a_method_must_return_a_model(tmp_path):
    shadows = made(tmp_path)
    shadows.train()
    with pytest.raises(InputError, match="method: must return the new model; found NoneType"):
        shadows.unlearn(lambda model, forget, remain: None, "nothing")


def test_the_same_weights_for_every_seed_are_told(tmp_path):
    model = build(0)
    shadows = Shadows(lambda seed: copy.deepcopy(model), plain(), range(20, 40), TUNING, tmp_path, number=4)
    with pytest.warns(UncheckedWarning, match="build: gives the same weights for every seed"):
        shadows.train()
    shadows.train()  # all are there: nothing to tell
