"""The algebra of FisherSums: parts add up to the whole and can be taken away again; what does not belong together is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Subset, TensorDataset

from expunge.errors import InputError, MismatchError
from expunge.fisher import FisherSums, diagonal
from expunge.storage.tensors import save_tensors
from expunge.vision.datasets.digits import raw
from expunge.vision.networks import resnet8

SAMPLES = 12
KINDS = ("empirical", "expected")


@cache
def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(9, 4)).to(dtype)


@cache
def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 2, 5, generator=generator).to(dtype), torch.randint(0, 4, (SAMPLES,), generator=generator))


@cache
def sums_of(rows: tuple[int, ...], kind: str = "empirical", dtype: torch.dtype = torch.float64) -> FisherSums:
    return diagonal(network(dtype), Subset(data(dtype), rows), kind=kind)


def whole(kind: str = "empirical", dtype: torch.dtype = torch.float64) -> FisherSums:
    return sums_of(tuple(range(SAMPLES)), kind, dtype)


def assert_same(found: FisherSums, expected: FisherSums, of: FisherSums, rounding: float) -> None:
    """Equal counts, and sums that differ by at most `rounding` of the largest of `of`, parameter by parameter."""
    assert found.count == expected.count and (found.kind, found.digest) == (expected.kind, expected.digest)
    assert found.sums.keys() == expected.sums.keys() == of.sums.keys()
    for name, total in found.sums.items():
        assert float((total - expected.sums[name]).abs().max()) <= rounding * float(of.sums[name].max()), name


# A group number for each sample; every group that occurs is one part.
groupings = st.lists(st.integers(0, 3), min_size=SAMPLES, max_size=SAMPLES)
quick = settings(max_examples=25, deadline=None)


def parts_of(groups: list[int], kind: str = "empirical", dtype: torch.dtype = torch.float64) -> list[FisherSums]:
    return [sums_of(tuple(row for row in range(SAMPLES) if groups[row] == group), kind, dtype) for group in sorted(set(groups))]


@quick
@given(groupings, st.sampled_from(KINDS))
def test_parts_add_up_to_the_whole(groups, kind):
    assert_same(FisherSums.merge(parts_of(groups, kind)), whole(kind), whole(kind), 1e-12)


@quick
@given(groupings, st.randoms(use_true_random=False), st.sampled_from(KINDS))
def test_the_order_of_parts_does_not_matter(groups, random, kind):
    parts = parts_of(groups, kind)
    shuffled = random.sample(parts, len(parts))
    assert_same(FisherSums.merge(iter(shuffled)), FisherSums.merge(parts), whole(kind), 1e-14)


@quick
@given(groupings, st.sampled_from(KINDS))
def test_taking_a_part_away_leaves_the_rest(groups, kind):
    forget, *others = parts_of(groups, kind)
    left = whole(kind) - forget
    assert all(bool((total >= 0).all()) for total in left.sums.values())
    if others:
        assert_same(left, FisherSums.merge(others), whole(kind), 1e-9)
    else:
        nothing = replace(left, sums={name: torch.zeros_like(total) for name, total in left.sums.items()}, count=0)
        assert_same(left, nothing, whole(kind), 1e-12)


@quick
@given(groupings)
def test_float32_models(groups):
    parts = parts_of(groups, dtype=torch.float32)
    together = whole(dtype=torch.float32)
    assert all(total.dtype == torch.float64 for part in parts for total in part.sums.values())
    assert_same(FisherSums.merge(parts), together, together, 1e-6)
    assert_same(together - parts[0] + parts[0], together, together, 1e-6)


@pytest.mark.parametrize("samples", [3, 20])
def test_float32_rounding_is_no_reason_to_refuse(samples):
    """A deep network and few samples: squares change by up to 1e-3 of an entry with the batch they are computed in."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = resnet8(10, channels=1)
    images, labels = raw()
    held = TensorDataset(images[:samples].float().unsqueeze(1) / 16, labels[:samples])
    everything = diagonal(model, held)
    for left_out in range(3):
        rows = [row for row in range(samples) if row != left_out]
        remain = everything - diagonal(model, Subset(held, rows))
        assert_same(remain, diagonal(model, Subset(held, [left_out])), everything, 1e-4)


numbers = st.floats(0, 1e12, allow_subnormal=False)


@given(st.lists(numbers, min_size=1, max_size=6), st.lists(numbers, min_size=1, max_size=6))
def test_any_sums_can_be_added_and_taken_away(one, other):
    size = min(len(one), len(other))
    first, second = (FisherSums({"w": torch.tensor(each[:size], dtype=torch.float64)}, 2, "empirical", "digest") for each in (one, other))
    back = first + second - second
    assert back.count == 2 and bool((back.sums["w"] >= 0).all())
    assert torch.allclose(back.sums["w"], first.sums["w"], rtol=0, atol=1e-12 * float((first + second).sums["w"].max()))


def test_adding_and_taking_away_change_neither_side():
    one, other = sums_of((0, 1, 2)), sums_of((3, 4))
    before = {name: total.clone() for name, total in one.sums.items()}
    _ = one + other, whole() - one, one.mean(), FisherSums.merge([one])
    assert all(torch.equal(one.sums[name], total) for name, total in before.items())


def test_mean():
    means = whole().mean()
    assert means.keys() == whole().sums.keys()
    assert all(torch.equal(means[name], total / SAMPLES) for name, total in whole().sums.items())
    with pytest.raises(InputError, match="count: a mean needs at least one sample; found 0"):
        (whole() - whole()).mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_bit_for_bit(tmp_path, kind, dtype):
    held = whole(kind, dtype)
    loaded = FisherSums.load(held.save(tmp_path / "folder" / "sums.safetensors"))
    assert (loaded.count, loaded.kind, loaded.digest) == (held.count, held.kind, held.digest)
    assert loaded.sums.keys() == held.sums.keys()
    assert all(torch.equal(loaded.sums[name].view(torch.int64), total.view(torch.int64)) for name, total in held.sums.items())
    assert_same(loaded - sums_of((0, 1), kind, dtype), held - sums_of((0, 1), kind, dtype), held, 0)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["sums.safetensors"]


def test_to_a_device():
    moved = whole().to("cpu")
    assert moved.count == SAMPLES and all(torch.equal(total, whole().sums[name]) for name, total in moved.sums.items())


def other_weights() -> FisherSums:
    model = nn.Sequential(*network())
    model[3] = nn.Linear(9, 4).double()
    return diagonal(model, Subset(data(), [0, 1]))


def other_shape() -> FisherSums:
    return replace(whole(), sums={name: total.flatten() for name, total in whole().sums.items()})


# name: (what does not belong to the whole, what the error says)
STRANGERS = {
    "weights": (other_weights, "sums of different weights: 12 samples at fingerprint [0-9a-f]{12} and 2 samples at fingerprint"),
    "kind": (lambda: sums_of((0, 1), "expected"), "sums of different kinds: empirical and expected"),
    "parameters": (lambda: diagonal(network(), data(), parameters=["3.bias"]), "sums of different parameters: 0.bias, 0.weight, 3.weight$"),
    "shapes": (other_shape, "sums of different parameters: 0.weight, 3.weight"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_refused(name):
    build, message = STRANGERS[name]
    stranger = build()
    for combine in (lambda a, b: a + b, lambda a, b: a - b, lambda a, b: FisherSums.merge([a, b])):
        with pytest.raises(MismatchError, match=message):
            combine(whole(), stranger)


def test_more_than_there_is_cannot_be_taken_away():
    with pytest.raises(InputError, match="count: only a part can be taken away from 2 samples; found 3"):
        sums_of((0, 1)) - sums_of((2, 3, 4))
    with pytest.raises(MismatchError, match="these samples are not among them"):
        sums_of((0, 1, 2)) - sums_of((3, 4))


def test_clearly_negative_is_an_error_and_rounding_is_not():
    def of(*values: float) -> FisherSums:
        return FisherSums({"w": torch.tensor(values, dtype=torch.float64)}, 1, "empirical", "digest")

    assert (of(1.0, 1e-9) - of(1.0 + 1e-4, 2e-9)).sums["w"].tolist() == [0, 0]
    assert (of() - of()).sums["w"].tolist() == []
    for part in (of(1.1, 0.0), of(0.0, 1e-5)):
        with pytest.raises(MismatchError, match="the sums of w are smaller"):
            of(1.0, 1e-9) - part


def test_other_things_are_refused():
    with pytest.raises(TypeError):
        whole() + 1
    with pytest.raises(TypeError):
        whole() - {}
    with pytest.raises(InputError, match="parts: must hold at least one"):
        FisherSums.merge([])


def test_alone_all_reduce_changes_nothing():
    assert whole().all_reduce() is whole()


def rewritten(path, change_tensors=None, change_metadata=None):
    """The same file with something in it changed, as another program might."""
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    save_file((change_tensors or dict)(tensors), path, metadata=(change_metadata or dict)(metadata))
    return path


def forged(path, change_tensors=None, change_metadata=None):
    """A file whose content digest is right and whose content is not."""
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())
    del metadata["content"]
    return save_tensors(path, (change_tensors or dict)(tensors), (change_metadata or dict)(metadata))


def first_entry(value: float):
    def change(tensors):
        tensors["3.bias"][0] = value
        return tensors

    return change


def truncated(path):
    path.write_bytes(path.read_bytes()[:-9])
    return path


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    return path


def written(content: bytes):
    def change(path):
        path.write_bytes(content)
        return path

    return change


FILES = {
    "negative": (lambda path: forged(path, first_entry(-1.0)), "finite sums of squares in float64; found 3.bias"),
    "not a number": (lambda path: forged(path, first_entry(float("nan"))), "finite sums of squares in float64; found 3.bias"),
    "infinite": (lambda path: forged(path, first_entry(float("inf"))), "finite sums of squares in float64; found 3.bias"),
    "float32": (lambda path: forged(path, lambda tensors: {name: total.float() for name, total in tensors.items()}), "in float64"),
    "another value": (lambda path: rewritten(path, first_entry(1.0)), "as it was saved; its content was changed"),
    "another count": (lambda path: rewritten(path, None, lambda metadata: metadata | {"count": "13"}), "its content was changed"),
    "another digest": (lambda path: rewritten(path, None, lambda metadata: metadata | {"digest": "0" * 64}), "its content was changed"),
    "a parameter less": (lambda path: rewritten(path, lambda tensors: {"3.bias": tensors["3.bias"]}), "its content was changed"),
    "count not a number": (lambda path: forged(path, None, lambda metadata: metadata | {"count": "²"}), "without a whole count"),
    "count of many digits": (lambda path: forged(path, None, lambda metadata: metadata | {"count": "9" * 5000}), "without a whole count"),
    "no sums": (lambda path: forged(path, lambda tensors: {}), "at least one sum"),
    "no digest": (lambda path: forged(path, None, lambda metadata: {"kind": "fisher-sums", "count": "1"}), "without .*digest"),
    "a bit flipped": (flipped, "its content was changed|finite sums"),
    "truncated": (truncated, "must be a whole safetensors file"),
    "empty": (written(b""), "must be a whole safetensors file"),
    "not safetensors": (written(b"PK\x03\x04 a pickle, perhaps" * 10), "must be a whole safetensors file"),
    "something else": (lambda path: rewritten(path, None, lambda metadata: metadata | {"kind": "patch"}), "'fisher-sums'; found patch"),
    "no metadata": (lambda path: rewritten(path, None, lambda metadata: {}), "must hold 'fisher-sums'; found no kind"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_not_what_was_saved(tmp_path, name):
    change, message = FILES[name]
    path = change(whole().save(tmp_path / "sums.safetensors"))
    with pytest.raises(InputError, match=f"path: .*{message}" if "|" not in message else message):
        FisherSums.load(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        FisherSums.load(tmp_path / "nothing")
