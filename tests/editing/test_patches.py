"""A patch applies and reverts bit for bit, and refuses everything it was not made for."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from expunge.editing import masks
from expunge.editing.patches import Edit, Patch
from expunge.errors import InputError, MismatchError
from expunge.fisher import FisherSums
from expunge.storage.tensors import save_tensors, weights_digest
from expunge.vision.zoo import load_network

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3)).to(dtype)
        model.scale = nn.Parameter(torch.tensor(-0.0, dtype=dtype))
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = -0.0
        model[0].weight[1, 0, 0, 0] = 0.0
        model[3].bias[0] = torch.finfo(dtype).smallest_normal / 2  # subnormal
        model[3].bias[1] = float("nan")  # other weights' business: kept as found
    return model


def mask_of(model: nn.Module, seed: int, ratio: float) -> masks.Mask:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(parameter.shape, generator=generator) < ratio for name, parameter in model.named_parameters()}


def content(model: nn.Module) -> str:
    return weights_digest(model)


def same(left: Patch, right: Patch) -> bool:
    """Equal bit for bit, in the same order."""

    def fields(patch: Patch) -> list[object]:
        tensors = [(name, tensor) for name, edit in patch.edits.items() for tensor in (edit.indices, edit.old, edit.new)]
        held = [(name, tensor.dtype, tuple(tensor.shape), bytes(tensor.view(torch.uint8).tolist())) for name, tensor in tensors]
        return [patch.digest, held, [edit.shape for edit in patch.edits.values()]]

    return fields(left) == fields(right)


def changed(patch: Patch, **fields) -> Edit:
    edit = patch.edits["3.weight"]
    held = {"indices": edit.indices, "old": edit.old, "new": edit.new, "shape": edit.shape}
    return Edit(**(held | fields))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), ratio=st.sampled_from([0.0, 0.01, 0.3, 1.1]), dtype=st.sampled_from(DTYPES), last=st.booleans())
def test_apply_zeroes_and_revert_is_its_inverse(seed: int, ratio: float, dtype: torch.dtype, last: bool) -> None:
    model = network(dtype, seed)
    if last:
        model = model.to(memory_format=torch.channels_last)
        assert not model[0].weight.is_contiguous()
    mask = mask_of(model, seed, ratio)
    before, expected = content(model), copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter[mask[name]] = 0
    patch = Patch.zeroing(model, mask)
    assert content(model) == before == patch.digest
    assert len(patch) == masks.count(mask)
    found = patch.mask(model)
    assert found.keys() == mask.keys() and all(torch.equal(found[name], mask[name]) for name in mask)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    patch.apply(model)
    assert content(model) == content(expected)
    patch.revert(model)
    assert content(model) == before
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_patch_holds_copies() -> None:
    model = network()
    mask = mask_of(model, 0, 0.5)
    patch = Patch.zeroing(model, mask)
    kept = patch.edits["3.weight"].old.clone()
    with torch.no_grad():
        model[3].weight.add_(1)
    assert torch.equal(patch.edits["3.weight"].old, kept)


@pytest.mark.parametrize("wrong", [1.0, -0.0])
def test_other_values_are_refused_and_nothing_is_changed(wrong: float) -> None:
    model = network()
    with torch.no_grad():
        model[3].weight[2, 3] = 0.0
    mask = {name: torch.ones_like(parameter, dtype=torch.bool) for name, parameter in model.named_parameters()}
    patch = Patch.zeroing(model, mask)
    with torch.no_grad():
        model[3].weight[2, 3] = wrong
    before = content(model)
    with pytest.raises(MismatchError, match="3.weight does not hold the values this patch was made for; nothing was changed"):
        patch.apply(model)
    assert content(model) == before
    with torch.no_grad():
        model[3].weight[2, 3] = 0.0
    patch.apply(model)
    with pytest.raises(MismatchError):
        patch.apply(model)
    with torch.no_grad():
        model[3].weight[2, 3] = wrong
    before = content(model)
    with pytest.raises(MismatchError, match="3.weight does not hold the values this patch leaves behind"):
        patch.revert(model)
    assert content(model) == before


def test_weights_beside_the_mask_may_move() -> None:
    model = network()
    mask = {"3.weight": torch.zeros(3, 4, dtype=torch.bool)}
    mask["3.weight"][0] = True
    row = model[3].weight[0].detach().clone()
    patch = Patch.zeroing(model, mask)
    patch.apply(model)
    with torch.no_grad():
        model[3].weight[1] += 1
        model[0].weight *= 2
    patch.revert(model)
    assert torch.equal(model[3].weight[0], row)


def test_other_models_are_refused() -> None:
    patch = Patch.zeroing(network(), mask_of(network(), 0, 0.5))
    others = {
        "which the model does not have": nn.Linear(2, 2),
        "found shape .*, torch.float64": network().double(),
        r"for 3.weight of shape \(3, 4\), torch.float32; found shape \(4, 3\)": network(),
    }
    list(others.values())[2][3].weight = nn.Parameter(torch.zeros(4, 3))
    for rule, model in others.items():
        before = content(model)
        for action in (patch.apply, patch.revert, patch.mask):
            with pytest.raises(MismatchError, match=rule):
                action(model)
        assert content(model) == before


def test_masks_that_do_not_fit_are_refused() -> None:
    model = network()
    for mask in ({"3.bias": torch.ones(4, dtype=torch.bool)}, {"3.bias": torch.ones(3)}, {"nothing": torch.ones(3, dtype=torch.bool)}):
        with pytest.raises(InputError, match="mask: "):
            Patch.zeroing(model, mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_save_and_load(tmp_path: Path, dtype: torch.dtype, ratio: float) -> None:
    model = network(dtype)
    patch = Patch.zeroing(model, mask_of(model, 1, ratio))
    path = patch.save(tmp_path / "request" / "patch.safetensors")
    loaded = Patch.load(path)
    assert same(loaded, patch)
    before = content(model)
    loaded.apply(model)
    patch.revert(model)
    assert content(model) == before


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "patch"
    model = network()
    patch = Patch.zeroing(model, mask_of(model, 1, 0.4))
    intact = patch.save(path).read_bytes()
    if data.draw(st.booleans()):
        path.write_bytes(intact[: data.draw(st.integers(0, len(intact) - 1))])
    else:
        place = data.draw(st.integers(0, len(intact) - 1))
        damaged = bytearray(intact)
        damaged[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(damaged)
    try:
        loaded = Patch.load(path)
    except InputError:
        return
    # Only what carries no meaning may be lost unseen, such as the padding of the header.
    assert same(loaded, patch)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(InputError, match="path: must hold 'patch'"):
        Patch.load(path)
    with pytest.raises(FileNotFoundError):
        Patch.load(tmp_path / "missing")


@pytest.mark.parametrize("load", [Patch.load, FisherSums.load, load_network])
def test_a_folder_is_no_file(load, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"path: must be a safetensors file; found {tmp_path}, a folder or device"):
        load(tmp_path)
    with pytest.raises(InputError, match="path: must be a safetensors file; found /dev/null"):
        load("/dev/null")


def forged(path: Path, tensors: dict[str, Tensor], shapes: object) -> Path:
    """A file whose content digest is right and whose content is not."""
    metadata = {"kind": "patch", "digest": "d", "shapes": shapes if isinstance(shapes, str) else json.dumps(shapes)}
    return save_tensors(path, tensors, metadata)


def test_forged_files_are_refused(tmp_path: Path) -> None:
    edit = {"indices/w": torch.tensor([0, 2]), "old/w": torch.ones(2), "new/w": torch.zeros(2)}
    assert len(Patch.load(forged(tmp_path / "right", edit, {"w": [3]}))) == 2
    wrong: list[tuple[dict[str, Tensor], object]] = [
        (edit, {"w": [2]}),
        (edit, {"w": [-3]}),
        (edit, {"w": "three"}),
        (edit, {}),
        (edit, {"w": [3], "v": [3]}),
        (edit, [3]),
        (edit, "not json"),
        (edit, "[" * 100_000),
        (edit, '{"w": [NaN]}'),
        (edit, '{"w": [1e400]}'),
        (edit, '{"w": [3], "w": [3]}'),
        (edit, {"w": "33"}),
        (edit, {"w": [3.5]}),
        (edit, {"w": [True, 3]}),
        (edit, {"w": [10**400]}),
        (edit, {"w": [1] * 99 + [3]}),
        (edit | {"indices/w": torch.tensor([2, 0])}, {"w": [3]}),
        (edit | {"indices/w": torch.tensor([1, 1])}, {"w": [3]}),
        (edit | {"indices/w": torch.tensor([-1, 1])}, {"w": [3]}),
        (edit | {"indices/w": torch.tensor([0.0, 1.0])}, {"w": [3]}),
        (edit | {"indices/w": torch.tensor([0, 2], dtype=torch.int32)}, {"w": [3]}),
        (edit | {"indices/w": torch.tensor([0])}, {"w": [3]}),
        (edit | {"old/w": torch.ones(3)}, {"w": [3]}),
        (edit | {"new/w": torch.zeros(2, dtype=torch.float64)}, {"w": [3]}),
        (edit | {"new/w": torch.zeros(2, 1), "old/w": torch.zeros(2, 1)}, {"w": [3]}),
    ]
    for tensors, shapes in wrong:
        with pytest.raises(InputError):
            Patch.load(forged(tmp_path / "wrong", tensors, shapes))


def test_edits_by_hand_are_checked() -> None:
    patch = Patch.zeroing(network(), {"3.weight": torch.ones(3, 4, dtype=torch.bool)})
    for fields, rule in [
        ({"indices": patch.edits["3.weight"].indices.flip(0)}, "indices must rise"),
        ({"shape": (3, 3)}, r"indices must be in \[0, 9\); found \(0, 11\)"),
        ({"old": torch.zeros(12, dtype=torch.float64)}, "old and new values must have one type"),
        ({"new": torch.zeros(11)}, "of one length"),
    ]:
        with pytest.raises(InputError, match=rule):
            Patch({"3.weight": changed(patch, **fields)}, patch.digest)


def test_file_is_plain_safetensors(tmp_path: Path) -> None:
    model = network()
    patch = Patch.zeroing(model, {"3.bias": torch.tensor([True, False, True])})
    held = load_file(patch.save(tmp_path / "patch"))
    assert held["indices/3.bias"].tolist() == [0, 2]
    assert torch.equal(held["old/3.bias"], model[3].bias.detach()[[0, 2]]) and held["new/3.bias"].tolist() == [0, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_patch_of_the_cpu_on_cuda() -> None:
    model = network()
    patch = Patch.zeroing(model, mask_of(model, 0, 0.4))
    before = content(model)
    model.cuda()
    patch.apply(model)
    assert content(model) != before and all(part.is_cuda for part in patch.mask(model).values())
    patch.revert(model)
    assert content(model) == before


def test_setting_changes_parameters_and_buffers_and_takes_it_back():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    values = {"0.weight": before["0.weight"] * torch.tensor([[1.0], [0.5], [1.0]]), "1.running_var": torch.zeros(3)}
    patch = Patch.setting(model, values)
    assert len(patch) == 2 + 3 and set(patch.mask(model)) == {"0.weight"}
    patch.apply(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())
    patch.revert(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("values", "message"),
    [({"nonsense": torch.zeros(1)}, "parameters or buffers"), ({"weight": torch.zeros(2)}, r"weight must have shape \(3, 2\)")],
)
def test_setting_refuses_what_does_not_fit(values, message):
    with pytest.raises(InputError, match=message):
        Patch.setting(nn.Linear(2, 3), values)


def moved(model: nn.Module, seed: int, share: float) -> nn.Module:
    """A copy with other values in some entries, of parameters and buffers: zeros of the other sign and NaNs of other bits among them."""
    after, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*after.parameters(), *after.buffers()]:
            chosen = torch.rand(tensor.shape, generator=generator) < share
            tensor[chosen] = -tensor[chosen] if tensor.dtype.is_floating_point else tensor[chosen] + 1
    return after


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.0, 0.1, 1.1]), dtype=st.sampled_from(DTYPES), last=st.booleans())
def test_between_takes_one_model_to_the_other_and_back(seed: int, share: float, dtype: torch.dtype, last: bool) -> None:
    before = network(dtype, seed)
    after = moved(before.to(memory_format=torch.channels_last) if last else before, seed, share)
    digests = content(before), content(after)
    patch = Patch.between(before, after)
    assert (content(before), content(after)) == digests and patch.digest == digests[0]
    assert (len(patch) > 0) == (digests[0] != digests[1])
    patch.revert(after)
    assert content(after) == digests[0]
    patch.apply(before)
    assert content(before) == digests[1]


def test_between_holds_what_differs_bit_for_bit_and_nothing_else(tmp_path: Path) -> None:
    before = network()
    after = copy.deepcopy(before)
    with torch.no_grad():
        after[0].weight[0, 0, 0, 0] = 0.0  # was −0.0
        after[3].bias[1] = -after[3].bias[1]  # a NaN of another sign
        after[1].num_batches_tracked.add_(1)
    patch = Patch.between(before, after)
    indices = {name: edit.indices.tolist() for name, edit in patch.edits.items()}
    assert indices == {"0.weight": [0], "3.bias": [1], "1.num_batches_tracked": [0]}
    assert same(Patch.load(patch.save(tmp_path / "patch.safetensors")), patch)
    assert len(Patch.between(before, before)) == 0


class Tied(nn.Module):
    def __init__(self, tied: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, dtype=dtype), nn.Linear(3, 3, dtype=dtype)
        if tied:
            self.second.weight = self.first.weight


def test_between_holds_a_shared_parameter_once() -> None:
    before = Tied()
    after = moved(before, 0, 1.1)
    digest = content(before)
    patch = Patch.between(before, after)
    assert set(patch.edits) == {"first.weight", "first.bias", "second.bias"}
    patch.revert(after)
    assert content(after) == digest and after.second.weight is after.first.weight


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_between_complex_weights(dtype: torch.dtype) -> None:
    before = Tied(dtype=dtype)
    after = copy.deepcopy(before)
    with torch.no_grad():
        after.first.bias[1] = torch.conj(after.first.bias[1])
    patch = Patch.between(before, after)
    assert {name: edit.indices.tolist() for name, edit in patch.edits.items()} == {"first.bias": [1]}
    patch.revert(after)
    assert torch.equal(before.first.bias, after.first.bias)


def test_between_refuses_models_of_other_forms() -> None:
    for after, rule in (
        (Tied(tied=False), "same parameters and buffers; only one of them has second.weight"),
        (Tied(dtype=torch.float64), "first.weight in one shape and type; found .*float32, and .*float64"),
        (nn.Linear(3, 3), "only one of them has bias, first.bias, first.weight, second.bias and 1 more"),
    ):
        with pytest.raises(MismatchError, match=rule):
            Patch.between(Tied(), after)
    with pytest.raises(InputError, match="^names: .* found second.weight"):
        Patch.between(Tied(), Tied(), ["second.weight"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_between_models_on_different_devices() -> None:
    before = network()
    after = moved(before, 0, 0.5)
    digest = content(before)
    patch = Patch.between(before, after.cuda())
    patch.revert(after)
    assert content(after) == digest
