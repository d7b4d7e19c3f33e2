"""Sums by chunks, in one process: the sums of `diagonal`, by group, resumed, and refused where they do not belong together."""

from __future__ import annotations

import inspect

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from expunge import fisher
from expunge.data.tokens import TOKENS
from expunge.errors import InputError, MismatchError
from expunge.fisher import FisherSums, chunks
from expunge.runtime.processes import MissingProcessError
from expunge.storage.locks import try_lock
from tests import reference


def case(samples: int = 203) -> tuple[nn.Module, TensorDataset]:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        return model, TensorDataset(torch.randn(samples, 6), torch.randint(0, 3, (samples,)))


def same_bits(first: FisherSums, second: FisherSums) -> bool:
    return first.count == second.count and all(torch.equal(first.sums[name], second.sums[name]) for name in first.sums)


@pytest.mark.parametrize("kind", ["empirical", "expected", "batch"])
def test_the_sums_of_diagonal(kind):
    model, data = case()
    model.double()
    data = TensorDataset(data.tensors[0].double(), data.tensors[1])
    chunked = fisher.by_chunks(model, data, kind=kind, batch_size=16, batches_per_chunk=2)
    whole = fisher.diagonal(model, data, kind=kind, batch_size=16)
    assert (chunked.count, chunked.kind, chunked.digest, chunked.objective) == (whole.count, whole.kind, whole.digest, whole.objective)
    assert list(chunked.sums) == list(whole.sums) and reference.worst_error(chunked.sums, whole.sums) <= 1e-12


def test_groups_are_the_sums_of_their_samples():
    model, data = case()
    inputs, labels = data.tensors
    sums = fisher.by_group(model, data, labels, batch_size=16, batches_per_chunk=2)
    assert list(sums) == ["0", "1", "2"] and sum(part.count for part in sums.values()) == len(data)
    for name, part in sums.items():
        rows = labels == int(name)
        alone = fisher.by_chunks(model, TensorDataset(inputs[rows], labels[rows]), batch_size=16, batches_per_chunk=2)
        assert same_bits(part, alone)  # other groups do not matter


def test_names_of_files_and_numbers_of_numpy_are_groups(tmp_path):
    model, data = case(6)
    sums = fisher.by_group(model, data, ["\udcff.txt", "b"] * 3, keep=tmp_path / "pass", batches_per_chunk=2**62)  # as os.listdir gives it
    assert {name: part.count for name, part in sums.items()} == {"b": 3, "\udcff.txt": 3}
    assert [*fisher.by_group(model, data, [numpy.int64(1), 0, numpy.uint8(1), 0, 0, 0])] == ["0", "1"]


def test_a_folder_that_another_process_holds_is_told_in_time(tmp_path):
    """It was stopped before it had written the listing."""
    model, data = case()
    with try_lock(tmp_path / "pass" / "folder.lock"):
        with pytest.raises(MissingProcessError, match="listing.json was not written within 0.2 seconds, by a process that holds"):
            fisher.by_chunks(model, data, keep=tmp_path / "pass", patience=0.2)
    assert fisher.by_chunks(model, data, keep=tmp_path / "pass").count == len(data)


def test_sampled_sums_are_drawn_by_chunk_and_unbiased_enough():
    model, data = case()
    first, again, other = (
        fisher.by_chunks(model, data, kind="sampled", draws=50, seed=seed, batch_size=16, batches_per_chunk=2) for seed in (1, 1, 2)
    )
    exact = fisher.diagonal(model, data, kind="expected")
    assert same_bits(first, again) and not same_bits(first, other)
    assert reference.worst_error(first.sums, exact.sums) < 0.1


@pytest.mark.parametrize("form", ["loader", "dropping loader", "list"])
def test_loaders_and_lists_keep_their_batches(form):
    model, data = case()
    given = {
        "loader": DataLoader(data, batch_size=16),
        "dropping loader": DataLoader(data, batch_size=16, drop_last=True),
        "list": [tuple(column[start : start + 16] for column in data.tensors) for start in range(0, len(data), 16)],
    }[form]
    expected = TensorDataset(*(column[:192] for column in data.tensors)) if form == "dropping loader" else data
    assert same_bits(
        fisher.by_chunks(model, given, batches_per_chunk=2), fisher.by_chunks(model, expected, batch_size=16, batches_per_chunk=2)
    )


class Stopping(Dataset):
    """Raises KeyboardInterrupt after so many samples; counts those it gave."""

    def __init__(self, data: TensorDataset, limit: int) -> None:
        self.data, self.limit, self.read = data, limit, 0

    def __len__(self) -> int:
        return len(self.data)

    def batch_of(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(rows) > 1:
            self.read += len(rows)
        if self.read > self.limit:
            raise KeyboardInterrupt
        return self.data[rows]


def test_the_settings_are_in_the_signature_and_those_of_by_group():
    ours, of_groups, of_diagonal = (inspect.signature(call).parameters for call in (fisher.by_chunks, fisher.by_group, fisher.diagonal))
    assert {**ours} == {name: parameter for name, parameter in of_groups.items() if name != "groups"}
    settings = [parameter for parameter in of_diagonal.values() if parameter.kind is parameter.KEYWORD_ONLY]
    assert settings and all(ours[setting.name] == setting for setting in settings)


def test_every_setting_is_passed_on(monkeypatch):
    given = {name: object() for name, one in inspect.signature(fisher.by_chunks).parameters.items() if one.kind is one.KEYWORD_ONLY}
    monkeypatch.setattr(chunks, "by_group", lambda model, data, groups, **settings: {"all": (model, data, groups, settings)})
    assert fisher.by_chunks("model", "data", **given) == ("model", "data", None, given)


def test_a_stopped_pass_goes_on(tmp_path):
    model, data = case()
    whole = fisher.by_chunks(model, data, batch_size=16, batches_per_chunk=1)
    stopped, resumed, done = Stopping(data, 100), Stopping(data, 10**9), Stopping(data, 0)
    with pytest.raises(KeyboardInterrupt):
        fisher.by_chunks(model, stopped, batch_size=16, batches_per_chunk=1, keep=tmp_path / "pass")
    sums = fisher.by_chunks(model, resumed, batch_size=16, batches_per_chunk=1, keep=tmp_path / "pass")
    assert same_bits(sums, whole) and resumed.read == len(data) - 96  # six chunks were finished
    assert same_bits(fisher.by_chunks(model, done, batch_size=16, batches_per_chunk=1, keep=tmp_path / "pass"), whole) and not done.read
    assert len(list((tmp_path / "pass").iterdir())) == 4  # listing, total, group, lock


def test_a_folder_of_another_pass_is_refused_and_left_alone(tmp_path):
    model, data = case()
    fisher.by_chunks(model, data, keep=tmp_path / "pass")
    before = {path.name: path.read_bytes() for path in (tmp_path / "pass").iterdir()}
    changed = TensorDataset(data.tensors[0].clone(), data.tensors[1])
    changed.tensors[0][100, 3] += 1
    for what, arguments in {
        "another data": (model, changed),
        "another weights": (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), data),
    }.items():
        with pytest.raises(MismatchError, match=f"belongs to a pass with {what}"):
            fisher.by_chunks(*arguments, keep=tmp_path / "pass")
    for settings in ({"kind": "expected"}, {"parameters": ["0.bias"]}, {"batch_size": 16}, {"threads": 2}):
        with pytest.raises(MismatchError, match="belongs to a pass with another"):
            fisher.by_chunks(model, data, keep=tmp_path / "pass", **settings)
    assert {path.name: path.read_bytes() for path in (tmp_path / "pass").iterdir()} == before


FINGERPRINTS = "fingerprint [0-9a-f]{12} there and fingerprint [0-9a-f]{12} here$"


def test_what_differs_of_a_kept_pass_is_told_in_words(tmp_path):
    model, data = case()
    half, other = TensorDataset(*(column[:100] for column in data.tensors)), nn.Sequential(nn.Linear(6, 3)).double()
    changed = TensorDataset(data.tensors[0] + 1, data.tensors[1])
    fisher.by_chunks(model, data, keep=tmp_path / "pass", batch_size=16)
    sizes = f"another number of samples or batch size: {len(data)} samples, batches of 16, 32 per chunk there and "
    for given, told in {
        (model, half): f"{sizes}100 samples, batches of 16, 32 per chunk here$",
        (model, (data.tensors,)): f"{sizes}{len(data)} samples in 1 batch, 32 per chunk here$",
        (model, changed): rf"another data \(values, order or groups\): {FINGERPRINTS}",
        (other, data): f"another weights: {FINGERPRINTS}",
    }.items():
        with pytest.raises(MismatchError, match=told):
            fisher.by_chunks(*given, keep=tmp_path / "pass", batch_size=16)
    with pytest.raises(MismatchError, match="another parameters: 4, names with fingerprint .* there and 1, names with "):
        fisher.by_chunks(model, data, keep=tmp_path / "pass", batch_size=16, parameters=["0.bias"])


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, first, second, factor=1.0):
        return self.head(first - factor * second)


def test_names_and_plain_values_of_batches_belong_to_the_data(tmp_path):
    _, data = case(9)
    model, labels, (first, second) = Shifted(), data.tensors[1], (data.tensors[0], data.tensors[0].flip(0))
    fisher.by_chunks(model, [{"first": first, "second": second, "labels": labels}], keep=tmp_path / "pass")
    for changed in ({"second": first, "first": second}, {"factor": 2.0}):
        with pytest.raises(MismatchError, match="belongs to a pass with another data"):
            fisher.by_chunks(model, [{"first": first, "second": second, "labels": labels, **changed}], keep=tmp_path / "pass")


@pytest.mark.parametrize("kind", ["empirical", "expected"])
def test_kinds_of_token_distributions(kind):
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)).double(), torch.randint(0, 5, (7, 3))
    whole = fisher.diagonal(model, TensorDataset(ids, ids), kind=kind, objective=TOKENS)
    chunked = fisher.by_chunks(model, TensorDataset(ids, ids), kind=kind, objective=TOKENS, batch_size=2, batches_per_chunk=2)
    assert chunked.objective == whole.objective and reference.worst_error(chunked.sums, whole.sums) <= 1e-12
    if kind == "expected":  # over the labels of each position, not over the positions
        with pytest.raises(MismatchError, match="different losses"):
            whole + fisher.diagonal(model, TensorDataset(ids, ids), kind=kind)


def test_bad_input_writes_nothing(tmp_path):
    model, data = case()
    keep = tmp_path / "pass"
    for argument, settings in {
        "kind": {"kind": "other"},
        "threads": {"threads": 0},
        "patience": {"patience": 0},
        "batches_per_chunk": {"batches_per_chunk": 0},
        "parameters": {"parameters": ["other"]},
    }.items():
        with pytest.raises(InputError, match=argument):
            fisher.by_chunks(model, data, keep=keep, **settings)
    with pytest.raises(InputError, match="data: a loader must read its dataset in order"):
        fisher.by_chunks(model, DataLoader(data, shuffle=True), keep=keep)
    bad = (
        [0],
        [0.5] * len(data),
        "x" * len(data),
        [0, "a"] * 102,
        torch.tensor(3),
        dict.fromkeys(range(len(data)), 0),
        {*range(len(data))},
    )
    for groups in bad:
        with pytest.raises(InputError, match="groups"):
            fisher.by_group(model, data, groups, keep=keep)
    assert not keep.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="keep: must be a new folder"):
        fisher.by_chunks(model, data, keep=tmp_path / "full")


def test_a_damaged_total_is_refused(tmp_path):
    model, data = case()
    fisher.by_chunks(model, data, keep=tmp_path / "pass")
    path = tmp_path / "pass" / "group-000000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(InputError, match="content was changed"):
        fisher.by_chunks(model, data, keep=tmp_path / "pass")
