"""Weights of a user's file: loaded whole or not at all, no code run, tied weights and adapters as they are."""

import pickle
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from expunge.errors import InputError, MismatchError
from expunge.requests.request import fulfil
from expunge.requests.settings import Settings
from expunge.requests.task import load_task
from expunge.requests.verifying import verify
from expunge.requests.weights import digest_of, load_saved, load_weights, save_weights, shared_names, weights_of
from tests.requests.small import TASK, request, write_task


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.embedding.weight


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a.pth"])
def test_weights_are_those_of_the_file(name, tmp_path):
    source, target = network(), network()
    (save_file if name.endswith("safetensors") else torch.save)(source.state_dict(), tmp_path / name)
    assert load_weights(tmp_path / name, target) == tuple(source.state_dict())
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in target.state_dict().items())


@pytest.mark.parametrize(
    "wrap, name",
    [
        (lambda state: {f"module.{key}": value for key, value in state.items()}, "ddp.safetensors"),
        (lambda state: {f"module._orig_mod.{key}": value for key, value in state.items()}, "compiled.pt"),
        (lambda state: {"epoch": 3, "state_dict": {f"model.{key}": value for key, value in state.items()}, "rates": [0.1]}, "a.ckpt"),
        (lambda state: {"model": state, "optimizer": {"state": {0: {"step": torch.ones(1)}}, "param_groups": [{"lr": 1}]}}, "a.pt"),
    ],
)
def test_checkpoints_and_names_of_wrappers_are_taken(wrap, name, tmp_path):
    """As they lie about: saved from under a wrapper, or with the optimizer beside the weights."""
    source, target = network(), network()
    (save_file if name.endswith("safetensors") else torch.save)(wrap(source.state_dict()), tmp_path / name)
    assert load_weights(tmp_path / name, target) == tuple(source.state_dict())
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in target.state_dict().items())


def test_a_prefix_that_is_no_wrappers_is_of_another_model(tmp_path):
    save_file({f"module.x.{key}": value for key, value in network().state_dict().items()}, tmp_path / "w.safetensors")
    with pytest.raises(MismatchError, match="only the model has 0.bias"):
        load_weights(tmp_path / "w.safetensors", network())


def test_a_file_of_torchs_that_was_cut_off_is_refused(tmp_path):
    torch.save(nn.Linear(60, 60).state_dict(), tmp_path / "whole.pt")
    content, untouched = (tmp_path / "whole.pt").read_bytes(), network()
    for part in (1, 100, 0.3, 0.6, 0.9, 0.99):
        (tmp_path / "w.pt").write_bytes(content[: part if part >= 1 else int(part * len(content))])
        with pytest.raises(InputError, match="weights: must .*; found .*w.pt"):
            load_weights(tmp_path / "w.pt", untouched)


def test_of_two_states_none_is_guessed(tmp_path):
    torch.save({"model": network().state_dict(), "ema": network().state_dict()}, tmp_path / "w.pt")
    with pytest.raises(InputError, match="weights: must hold one state_dict; save that of the model alone; found model, ema in "):
        load_weights(tmp_path / "w.pt", network())


def test_models_that_rename_when_saved_get_a_hint(tmp_path):
    model = network()
    model.save_pretrained = None
    save_file({"old.name": torch.ones(1)}, tmp_path / "w.safetensors")
    with pytest.raises(MismatchError, match="only the model has 0.bias; save_pretrained may rename: store model.state_dict"):
        load_weights(tmp_path / "w.safetensors", model)


def test_what_is_saved_is_a_plain_state_dict(tmp_path):
    model = Tied()
    save_weights(tmp_path / "w.safetensors", weights_of(model, model.state_dict()), shared_names(model))
    other = Tied()
    other.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert torch.equal(other.out.weight, model.out.weight)
    tensors, shared = load_saved(tmp_path / "w.safetensors")
    assert shared == {"out.weight": "embedding.weight"}
    assert digest_of(tensors, shared) == digest_of({"embedding.weight": tensors["out.weight"]}, shared)


@pytest.mark.parametrize("name", ["embedding.weight", "out.weight"])
def test_tied_weights_may_be_stored_once(name, tmp_path):
    save_file({name: torch.ones(5, 3)}, tmp_path / "w.safetensors")
    model = Tied()
    assert load_weights(tmp_path / "w.safetensors", model) == ("embedding.weight", "out.weight")
    assert model.embedding.weight.eq(1).all()


def test_tied_weights_of_two_values_are_refused(tmp_path):
    save_file({"embedding.weight": torch.ones(5, 3), "out.weight": torch.zeros(5, 3)}, tmp_path / "w.safetensors")
    with pytest.raises(MismatchError, match="which the model has as one"):
        load_weights(tmp_path / "w.safetensors", Tied())


def test_a_file_of_what_is_trained_leaves_frozen_weights_as_they_are(tmp_path):
    model = network()
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    parts = {name: value + 1 for name, value in model.state_dict().items() if not name.startswith("0.")}
    save_file(parts, tmp_path / "w.safetensors")
    assert load_weights(tmp_path / "w.safetensors", model) == tuple(parts)
    assert torch.equal(model[0].weight, frozen) and torch.equal(model[2].bias, parts["2.bias"])


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda state: state.pop("2.weight"), "only the model has 2.weight"),
        (lambda state: state.update(more=torch.ones(1)), "only the file has more"),
        (lambda state: state.update({"2.bias": torch.ones(3)}), r"holds 2.bias as \(3,\)"),
        (lambda state: state.update({"2.bias": torch.ones(2).double()}), "float64; the model has it as"),
    ],
)
def test_weights_of_another_model_change_nothing(change, told, tmp_path):
    model, state = network(), network().state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    change(state)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(MismatchError, match=told):
        load_weights(tmp_path / "w.safetensors", model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/expunge-was-here", "w"))


@pytest.mark.parametrize(
    "name, content",
    [
        ("w.safetensors", b"nonsense"),
        ("w.safetensors", b""),
        ("w.pt", b"nonsense"),
        ("w.pt", pickle.dumps(Evil())),
        ("w.bin", b""),
    ],
)
def test_files_that_are_no_weights_are_refused(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_weights(tmp_path / name, network())
    assert str(caught.value).startswith("weights: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [network, lambda: {"epoch": 3}, lambda: [torch.ones(1)]])
def test_a_pickle_of_anything_but_tensors_is_refused(content, tmp_path):
    torch.save(content(), tmp_path / "w.pt")
    with pytest.raises(InputError, match="weights: must hold"):
        load_weights(tmp_path / "w.pt", network())


def test_a_whole_model_is_answered_with_what_to_save(tmp_path):
    torch.save(network(), tmp_path / "w.pt")
    rule = r"weights: .*torch\.save\(model\.state_dict\(\), \.\.\.\) write them; a whole model is never read.*code; found .*w\.pt$"
    with pytest.raises(InputError, match=rule):
        load_weights(tmp_path / "w.pt", network())


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="must be a file of weights"):
        load_weights(tmp_path / "w.safetensors", network())


SEED = "torch.manual_seed(7)"
DRAWN = f"def model():\n    {SEED}\n    return nn.Sequential(nn.Linear(6, 16).requires_grad_(False), nn.ReLU(), nn.Linear(16, 4))\n"


def test_what_a_file_leaves_out_must_be_the_same_each_time(tmp_path):
    """Else every request, and the replay, would begin with another network."""
    write_task(tmp_path, f"{TASK}\n{DRAWN}")
    weights = load_task(tmp_path / "mytask.py").model.state_dict()
    save_file({name: weights[name] for name in ("2.weight", "2.bias")}, tmp_path / "model.safetensors")
    asked = request(tmp_path, settings=Settings("finetune", threads=1))
    receipt = fulfil(asked)
    assert [finding for finding in verify(tmp_path / "out" / "receipt.json", task=asked.task) if not finding.fits] == []
    assert receipt.data["frozen"] is not None and receipt.data["frozen"] != receipt.weights_before
    write_task(tmp_path, f"{TASK}\n{DRAWN.replace(SEED, 'torch.manual_seed(8)')}")
    with pytest.raises(MismatchError, match="must give what the file of weights leaves out the values that it had in .*out; found others"):
        fulfil(replace(asked, forget="20"))
    lines = [finding.line for finding in verify(tmp_path / "out" / "receipt.json", task=asked.task) if not finding.fits]
    assert "model(): what is frozen, as in the receipt" in lines
    write_task(tmp_path, f"{TASK}\n{DRAWN.replace(SEED, 'pass')}")
    with pytest.raises(InputError, match="must give what the file of weights leaves out, .* found other values in a second call"):
        fulfil(replace(asked, out=tmp_path / "another"))
    assert not (tmp_path / "another").exists()
