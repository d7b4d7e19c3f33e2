"""What is particular to the methods that mask channels."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from expunge.data.objective import Objective
from expunge.editing.patches import Patch
from expunge.errors import InputError
from expunge.methods import ActivationMask, RandomMask, TfIdfMask
from expunge.model import channels
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases
from tests.methods.properties import assert_same_weights
from tests.model.test_activations import HEADS, NORMS, network

TUNING = Tuning(Constant(0.05, 2), batch_size=16)
every_network = pytest.mark.parametrize("name", NORMS)


def data(labels: tuple[int, ...], size: int, seed: int) -> TensorDataset:
    """Images whose brightness, place by place, follows the label."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.tensor(labels).repeat(-(-size // len(labels)))[:size]
    images = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)
    images[:, 0] += targets[:, None, None]
    return TensorDataset(images, targets)


FORGET, REMAIN = data((2,), 10, 0), data((0, 1, 3), 27, 1)


def table(model: nn.Module, name: str, held: TensorDataset, before_norm: bool = False) -> dict[str, torch.Tensor]:
    points = {layer: layer if before_norm or norm is None else norm for layer, norm in NORMS[name].items()}
    return reference.activations(model, held.tensors[0], points)


def top(score: dict[str, torch.Tensor], ratio: float) -> dict[str, list[bool]]:
    """The channels above the threshold of all layers together; no two scores are equal here."""
    together = torch.cat(list(score.values())).sort(descending=True).values
    wanted = round(ratio * len(together))
    return {name: (values > together[wanted]).tolist() for name, values in score.items()}


def silenced(before: nn.Module, after: nn.Module, name: str) -> dict[str, list[bool]]:
    """The channels whose weight and bias are zero; every other weight of these layers must be as before."""
    found = {}
    for layer in NORMS[name]:
        old, new = before.get_submodule(layer), after.get_submodule(layer)
        zero = ~new.weight.flatten(1).any(1)
        assert torch.equal(new.weight[~zero], old.weight[~zero])
        if new.bias is not None:
            assert not new.bias[zero].any() and torch.equal(new.bias[~zero], old.bias[~zero])
        found[layer] = zero.tolist()
    return found


def others_unchanged(before: nn.Module, after: nn.Module, changed: set[str]) -> None:
    for key, value in before.state_dict().items():
        if key.rpartition(".")[0] not in changed:
            assert torch.equal(value, after.state_dict()[key]), key


@every_network
def test_activation_mask_silences_the_top_of_the_difference(name):
    model = network(name)
    outcome = unlearn(model, FORGET, REMAIN, ActivationMask(ratio=0.2, tuning=None), batch_size=7)
    forget, remain = table(model, name, FORGET), table(model, name, REMAIN)
    chosen = top({layer: forget[layer].mean(0) - remain[layer].mean(0) for layer in forget}, 0.2)
    assert silenced(model, outcome.model, name) == chosen
    others_unchanged(model, outcome.model, set(NORMS[name]))


def test_without_remain_data_the_activation_on_the_forget_data_stands_alone():
    model = network("residual")
    outcome = unlearn(model, FORGET, method=ActivationMask(ratio=0.2, tuning=None))
    assert silenced(model, outcome.model, "residual") == top(
        {layer: rows.mean(0) for layer, rows in table(model, "residual", FORGET).items()}, 0.2
    )


def test_layer_scope_takes_its_share_of_every_layer():
    model = network("residual")
    outcome = unlearn(model, FORGET, REMAIN, ActivationMask(ratio=0.25, scope="layer", tuning=None))
    assert [sum(chosen) / len(chosen) for chosen in silenced(model, outcome.model, "residual").values()] == [0.25] * 7


@pytest.mark.parametrize("method", [ActivationMask(0.5, tuning=None), TfIdfMask(0.5, tuning=None)])
def test_the_head_is_masked_only_when_included(method):
    head = set(HEADS["plain"])
    out, included = (
        unlearn(network("plain"), FORGET, REMAIN, dataclasses.replace(method, ratio=0.9, include_head=include)).edit
        for include in (False, True)
    )
    assert not out.edits.keys() & head and head <= included.edits.keys()
    assert included.mask(network("plain"))["7.bias"].any()


@pytest.mark.parametrize("name", ["residual", "dense"])
def test_as_released_divides_by_batches_and_takes_the_norm_along(name):
    model, size = network(name), 9
    outcome = unlearn(model, FORGET, REMAIN, ActivationMask.as_released(0.2, tuning=None), batch_size=size)
    forget, remain = table(model, name, FORGET), table(model, name, REMAIN)
    chosen = top({layer: forget[layer].sum(0) / 2 - remain[layer].sum(0) / 3 for layer in forget}, 0.2)
    assert chosen != top({layer: forget[layer].mean(0) - remain[layer].mean(0) for layer in forget}, 0.2)
    assert silenced(model, outcome.model, name) == chosen
    for layer, norm in NORMS[name].items():
        if norm is not None:
            old, new = model.get_submodule(norm), outcome.model.get_submodule(norm)
            part = torch.tensor(chosen[layer])
            for key in ("weight", "bias", "running_mean", "running_var"):
                assert not getattr(new, key)[part].any()
                assert torch.equal(getattr(new, key)[~part], getattr(old, key)[~part])
    others_unchanged(model, outcome.model, set(NORMS[name]) | set(NORMS[name].values()))


def test_the_patch_of_as_released_undoes_statistics_too(tmp_path):
    model = network("residual")
    outcome = unlearn(model, FORGET, REMAIN, ActivationMask.as_released(0.2, tuning=None))
    assert {"norm.running_mean", "norm.running_var", "norm.weight", "conv.weight"} <= outcome.patch.edits.keys()
    Patch.load(outcome.patch.save(tmp_path / "patch.safetensors")).revert(outcome.model)
    assert_same_weights(model.state_dict(), outcome.model.state_dict())


METHODS = {
    "text": ActivationMask(0.2),
    "released": ActivationMask.as_released(0.2),
    "tf-idf": TfIdfMask(0.2),
    "random": RandomMask.as_released(0.2),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("freeze", [True, False])
def test_frozen_channels_stay_zero_and_free_ones_grow_back(name, freeze):
    model = network("plain" if name == "text" else "residual")
    method = dataclasses.replace(METHODS[name], tuning=dataclasses.replace(TUNING, freeze=freeze))
    outcome = unlearn(model, FORGET, REMAIN, method)
    parts = outcome.edit.mask(model)
    assert any(part.any() for part in parts.values())
    assert all(not outcome.model.get_parameter(key)[part].any() for key, part in parts.items()) == freeze


@every_network
@pytest.mark.parametrize("reading", ["text", "released"])
def test_tf_idf_mask_silences_by_tf_idf_before_the_norm(name, reading):
    model = network(name)
    outcome = unlearn(model, FORGET, REMAIN, TfIdfMask(0.2, reading=reading, tuning=None), batch_size=7)
    assert_chosen_by_tf_idf(model, outcome.model, name, FORGET, REMAIN, reading)
    others_unchanged(model, outcome.model, set(NORMS[name]))


def assert_chosen_by_tf_idf(model, after, name, forget, remain, reading, classes=0):
    """The text zeroes the highest scores; the program what is at or below the ⌊0.8·n⌋-th largest, one more than 0.2·n."""
    both = TensorDataset(*(torch.cat(parts) for parts in zip(forget.tensors, remain.tensors, strict=True)))
    forgotten, absent = set(forget.tensors[1].tolist()), max(0, classes - len(both.tensors[1].unique()))
    rows = table(model, name, both, before_norm=True)
    score = {layer: torch.tensor(reference.tf_idf(rows[layer], both.tensors[1], forgotten, reading, absent)) for layer in rows}
    together = torch.cat(list(score.values()))
    chosen = torch.cat([torch.tensor(part) for part in silenced(model, after, name).values()])
    if reading == "text":
        assert int(chosen.sum()) == round(0.2 * len(together))
        assert together[chosen].min() >= together[~chosen].max() - 1e-12
    else:
        threshold = together.sort(descending=True).values[int(0.8 * len(together)) - 1]
        assert (together[chosen] <= threshold + 1e-12).all() and (together[~chosen] >= threshold - 1e-12).all()
        assert int(chosen.sum()) >= math.ceil(0.2 * len(together)) + 1


def test_the_two_readings_of_tf_idf_choose_other_channels():
    model = network("residual")
    text, released = (unlearn(model, FORGET, REMAIN, TfIdfMask(0.2, reading=each, tuning=None)).model for each in ("text", "released"))
    assert silenced(model, text, "residual") != silenced(model, released, "residual")


def test_tf_idf_mask_forgets_several_classes():
    model, forget, remain = network("residual"), data((0, 3), 11, 4), data((1, 2), 16, 5)
    outcome = unlearn(model, forget, remain, TfIdfMask(0.2, tuning=None))
    assert_chosen_by_tf_idf(model, outcome.model, "residual", forget, remain, "text")


def test_tf_idf_as_released_prunes_the_lowest_from_one_batch():
    method = TfIdfMask.as_released(0.2, tuning=None)
    assert (method.reading, method.batches) == ("released", 1)
    model = network("residual")
    forget, remain = ([held[:6], held[6:]] for held in (FORGET, REMAIN))  # kept as they are: the seed draws one of the two
    outcome = unlearn(model, forget, remain, method)
    found = []
    for first in forget:
        for second in remain:
            try:
                assert_chosen_by_tf_idf(
                    model, outcome.model, "residual", TensorDataset(*first), TensorDataset(*second), "released", classes=4
                )
                found.append((first, second))
            except AssertionError:
                pass
    assert len(found) == 1
    everything = unlearn(model, forget, remain, dataclasses.replace(method, batches=2))
    assert silenced(model, everything.model, "residual") != silenced(model, outcome.model, "residual")


def test_tf_idf_is_for_whole_classes():
    for forget in (data((1, 2), 8, 0), TensorDataset(FORGET.tensors[0], torch.zeros(10, dtype=torch.int64))):
        shared = sorted({*forget.tensors[1].tolist()} & {0, 1, 3})
        with pytest.raises(InputError, match=rf"^forget: .*whole classes.*; found \[{shared[0]}\]"):
            unlearn(network("plain"), forget, REMAIN, TfIdfMask(tuning=None))
    with pytest.raises(InputError, match="^remain: TfIdfMask needs the data to keep"):
        unlearn(network("plain"), FORGET, None, TfIdfMask(tuning=None))


def test_random_mask_as_released_draws_channels_with_their_norm_and_rows_of_the_head():
    model = network("residual")
    outcome = unlearn(model, FORGET, method=RandomMask.as_released(0.3, tuning=None))
    mask, drawn = outcome.edit.mask(model), 0
    for layer, norm in (NORMS["residual"] | {"classifier": None}).items():
        part = mask[f"{layer}.weight"].flatten(1)
        assert torch.equal(part.all(1), part.any(1))
        drawn += int(part.any(1).sum())
        for key in (f"{norm}.weight", f"{norm}.bias") if norm else ("classifier.bias",):
            assert torch.equal(mask[key], part.any(1))
    assert drawn == round(0.3 * (3 * 4 + 2 * 8 + 2 * 16 + 4))
    assert len(mask) == len(list(model.parameters()))
    assert torch.equal(outcome.model.norm.running_mean, model.norm.running_mean)
    other = unlearn(model, FORGET, method=RandomMask.as_released(0.3, seed=1, tuning=None)).edit.mask(model)
    assert any(not torch.equal(mask[key], other[key]) for key in mask)


def test_mappings_and_own_objectives_work():
    objective = Objective(outputs=lambda model, batch: model(batch["picture"]), targets=lambda batch: batch["digit"])
    for method in (ActivationMask(0.2, tuning=None), TfIdfMask(0.2, tuning=None)):
        held = [[dict(zip(("picture", "digit"), each[:], strict=True))] for each in (FORGET, REMAIN)]
        mapped = unlearn(network("residual"), *held, method, objective=objective).model
        assert_same_weights(mapped.state_dict(), unlearn(network("residual"), FORGET, REMAIN, method).model.state_dict())


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda: ActivationMask(ratio=1.0), "ratio"),
        (lambda: ActivationMask(average="epochs"), "average"),
        (lambda: TfIdfMask(ratio=-0.1), "ratio"),
        (lambda: TfIdfMask(reading="original"), "reading"),
        (lambda: TfIdfMask(batches=0), "batches"),
        (lambda: RandomMask(with_norm=True), "with_norm"),
    ],
)
def test_settings_are_checked_at_once(build, argument):
    with pytest.raises(InputError, match=f"^{argument}: "):
        build()


@pytest.mark.parametrize("method", [ActivationMask(0.2, tuning=None), TfIdfMask(0.2, tuning=None)])
def test_a_compiled_model_is_masked_as_its_original(method):
    """Compiled code does not call hooks that were registered after it was made."""
    plain, batch = cases.model().eval(), cases.dataset()[:16]
    expected = unlearn(plain, cases.forget(), cases.remain(), method).model.state_dict()
    compiled = torch.compile(plain, backend="eager")
    with torch.no_grad():
        compiled(batch[0])
        compiled(batch[0][:2])
    found = unlearn(compiled, cases.forget(), cases.remain(), method).model.state_dict()
    assert any(not torch.equal(expected[key], value) for key, value in plain.state_dict().items())
    assert_same_weights(expected, {key.removeprefix("_orig_mod."): value for key, value in found.items()})
    names = [layer.name for layer in channels.find(compiled, batch)]
    assert names == [f"_orig_mod.{layer.name}" for layer in channels.find(plain, batch)]
