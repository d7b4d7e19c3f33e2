"""Data that can only be read from their beginning: the sums of the same samples in memory, in the stated order, a batch at a time."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from expunge import fisher
from expunge.data.chunks import cut
from expunge.data.streams import Shards
from expunge.errors import InputError, MismatchError


def case(samples: int = 203) -> tuple[nn.Module, TensorDataset]:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        return model, TensorDataset(torch.randn(samples, 6), torch.randint(0, 3, (samples,)))


class Stream(IterableDataset):
    def __init__(self, data: TensorDataset) -> None:
        self.data, self.begun, self.given = data, 0, 0

    def __iter__(self):
        self.begun += 1
        for number in range(len(self.data)):
            self.given += 1
            yield self.data[number]


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.data)


def same_bits(first: fisher.FisherSums, second: fisher.FisherSums) -> bool:
    return first.count == second.count and all(torch.equal(first.sums[name], second.sums[name]) for name in first.sums)


CUT = {"batch_size": 16, "batches_per_chunk": 2}


@pytest.mark.parametrize("kind", [Stream, Sized])
def test_a_stream_gives_the_sums_of_its_samples(kind):
    model, data = case()
    stream = kind(data)
    assert same_bits(fisher.by_chunks(model, stream, **CUT), fisher.by_chunks(model, data, **CUT))
    # Counted once where it has no length, else looked at for its first chunk; then read once, all chunks going on from each other.
    assert (stream.begun, stream.given) == ((2, 2 * 203) if kind is Stream else (2, 32 + 203))


def test_a_loader_of_a_stream_keeps_its_batches():
    model, data = case()
    loader = DataLoader(Sized(data), batch_size=16)
    assert same_bits(fisher.by_chunks(model, loader, batches_per_chunk=2), fisher.by_chunks(model, data, **CUT))


def test_parts_of_a_stream_can_be_read_in_any_order():
    _, data = case()
    chunks = cut(Sized(data), 16, 2)
    for number in (5, 2, 3, 3, 6, 0):
        batches = list(chunks.read(number))
        assert torch.equal(torch.cat([inputs for inputs, _ in batches]), data.tensors[0][number * 32 : (number + 1) * 32])


class Changing(Sized):
    """Gives row `row` another value from the second time on that it is read to the chunk of that row; or is shuffled each time."""

    def __init__(self, data: TensorDataset, row: int | None = None, times: int = 0) -> None:
        super().__init__(data)
        self.row, self.times = row, times

    def __iter__(self):
        self.begun += 1
        order = torch.randperm(203).tolist() if self.row is None else range(203)
        for number in order:
            inputs, label = self.data[number]
            yield (inputs + 1 if number == self.row and self.begun > self.times else inputs), label


@pytest.mark.parametrize("kept", [False, True])
def test_a_stream_that_shuffles_is_refused(tmp_path, kept):
    model, data = case()
    keep = {"keep": tmp_path / "pass"} if kept else {}
    with pytest.raises(MismatchError, match="data: chunk 0 held other samples when it was read again; a stream must give the same samples"):
        fisher.by_chunks(model, Changing(data), **CUT, **keep)


def test_a_part_that_is_read_again_must_be_the_same():
    _, data = case()
    chunks = cut(Changing(data, row=70, times=1), 16, 2)  # read on up to chunk 3, and then from the beginning
    list(chunks.read(3))
    with pytest.raises(MismatchError, match="data: chunk 2 held other samples"):
        list(chunks.read(2))


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_of_another_stream_is_refused_though_its_first_chunk_is_the_same(tmp_path, finished):
    model, data = case()
    keep = tmp_path / "pass"
    if finished:
        sums = fisher.by_chunks(model, Sized(data), **CUT, keep=keep)
        stream = Sized(data)
        assert same_bits(fisher.by_chunks(model, stream, **CUT, keep=keep), sums) and stream.given == 203  # read, not computed
    else:
        with pytest.raises(KeyboardInterrupt):
            fisher.by_chunks(model, Stopping(data, 5 * 32), **CUT, keep=keep)
        assert len(list(keep.glob("chunk-*"))) == 5  # of seven
    before = {path.name: path.read_bytes() for path in keep.iterdir()}
    with pytest.raises(MismatchError, match="data: chunk 2 of .* held other samples"):
        fisher.by_chunks(model, Changing(data, row=70), **CUT, keep=keep)
    after = {path.name: path.read_bytes() for path in keep.iterdir()}
    assert {name: after[name] for name in before} == before
    assert not finished or after == before
    if not finished:
        with pytest.raises(MismatchError, match="use a new folder"):  # the two contradict each other for good
            fisher.by_chunks(model, Sized(data), **CUT, keep=keep)


class Stopping(Sized):
    """Ends by Ctrl-C when it has given so many samples, after the look at its first chunk."""

    def __init__(self, data: TensorDataset, limit: int) -> None:
        super().__init__(data)
        self.limit = limit

    def __iter__(self):
        self.begun += 1
        for number in range(203):
            if self.begun > 1 and number == self.limit:
                raise KeyboardInterrupt
            yield self.data[number]


def test_a_stream_that_gives_more_than_it_promises_is_refused():
    model, data = case()

    class Long(Stream):
        def __len__(self) -> int:
            return 128

    with pytest.raises(InputError, match="data: .* more"):
        fisher.by_chunks(model, Long(data), **CUT)


def files(folder, data: TensorDataset) -> list[str]:
    """Files of 50, 3, 100 and 50 samples."""
    names, start = [], 0
    for number, size in enumerate((50, 3, 100, 50)):
        columns = [column[start : start + size].numpy() for column in data.tensors]
        numpy.savez(folder / f"part-{number}.npz", inputs=columns[0], labels=columns[1])
        names.append(str(folder / f"part-{number}.npz"))
        start += size
    return names


def read(path: str):
    with numpy.load(path) as content:
        yield from zip(torch.from_numpy(content["inputs"]), torch.from_numpy(content["labels"]), strict=True)


def test_shards_are_chunks_in_their_order(tmp_path):
    model, data = case()
    shards = Shards(files(tmp_path, data), read)
    sums, whole = fisher.by_chunks(model, shards, batch_size=16, keep=tmp_path / "pass"), fisher.diagonal(model, data)
    assert sums.count == whole.count == 203
    assert all(torch.allclose(sums.sums[name], total, rtol=1e-5) for name, total in whole.sums.items())
    opened: list[str] = []
    again = Shards(shards.sources, lambda path: opened.append(path) or read(path))
    assert same_bits(fisher.by_chunks(model, again, batch_size=16, keep=tmp_path / "pass"), sums) and len(opened) == 4  # first samples
    with pytest.raises(MismatchError, match="another data"):
        fisher.by_chunks(model, Shards(shards.sources[::-1], read), batch_size=16, keep=tmp_path / "pass")


def test_bad_streams_are_named(tmp_path):
    model, data = case()
    names = files(tmp_path, data)
    for sources in ([], "part.npz", [names[0], names[0]]):
        with pytest.raises(InputError, match="sources"):
            Shards(sources, read)
    with pytest.raises(InputError, match="groups: needs a dataset"):
        fisher.by_group(model, Shards(names, read), [0] * 203)
    with pytest.raises(InputError, match="data: samples must be tensors or numbers of one shape"):
        fisher.by_chunks(model, Shards(names, lambda path: iter([(torch.ones(6), 0), (torch.ones(5), 0)])))

    class Fading(Stream):
        def __iter__(self):
            self.begun += 1
            return (self.data[number] for number in range(len(self.data) if self.begun < 2 else 100))

    with pytest.raises(InputError, match="data"):
        fisher.by_chunks(model, Fading(data), **CUT)
