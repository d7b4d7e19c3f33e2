"""Data give the batches and samples they promise, each time they are read, or are refused; streams need not promise any."""

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

import expunge
from expunge import Finetune, FisherMask, InputError, curvature, fisher, metrics, unlearn
from expunge.data.batches import as_batches
from expunge.data.promises import raise_if_broken_off
from expunge.metrics import Relearning, relearn_time
from expunge.model import activations, channels
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from tests.methods import cases

SIZE = 48
whole = cases.dataset()


@pytest.fixture(autouse=True, scope="module")
def impatient():
    """Torch waits so long for a worker of data that broke off: five seconds otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
        yield


def stop(row: int = 30):
    raise StopIteration(row)


class Broken(Dataset):
    """Ends its data by a StopIteration at one sample."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return stop() if index == 30 else whole[index]


class Long(Dataset):
    """Promises more samples than there are."""

    def __len__(self):
        return SIZE + 2

    def __getitem__(self, index):
        return whole[index]


class BrokenGenerator(Broken):
    """The same from inside a generator, which Python makes a RuntimeError of."""

    def __getitem__(self, index):
        return next(stop() if index == 30 else whole[index] for _ in range(1))


class BrokenBatches(Broken):
    def batch_of(self, rows):
        return stop() if 30 in rows else whole[rows]


class Short(Broken):
    """Leaves the last sample of every batch out."""

    def batch_of(self, rows):
        return whole[rows[:-1]]


class ShortItems(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return whole[index]

    def __getitems__(self, indices):
        return [whole[index] for index in indices if index != 30]


def broken_collate(samples):
    return stop() if len(samples) < 16 or torch.equal(samples[0][0], whole[32][0]) else default_collate(samples)


class Promising:
    """An iterable with a length that it does not keep."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([whole[:16], whole[16:32]])


def generator():
    yield whole[:16]
    stop()


class Fewer(DataLoader):
    def __len__(self):
        return 4


class Rows(Sampler):
    """Does not say how many."""

    def __iter__(self):
        return iter(range(20))


class Stream(IterableDataset):
    """Some rows, shared by the workers; `promise` None: no length."""

    def __init__(self, rows) -> None:
        self.rows = rows

    def __iter__(self):
        worker = get_worker_info()
        rows = self.rows if worker is None else self.rows[worker.id :: worker.num_workers]
        return (whole[row] for row in rows)


class Promised(Stream):
    def __len__(self):
        return 40


TRUNCATED = {
    "dataset": Broken,
    "dataset that is too long": Long,
    "loader that is too long": lambda: DataLoader(Long(), 16),
    "generator in a dataset": BrokenGenerator,
    "batches": BrokenBatches,
    "short batches": Short,
    "subset": lambda: Subset(Broken(), range(20, 40)),
    "concatenation": lambda: ConcatDataset([whole, Broken()]),
    "loader": lambda: DataLoader(Broken(), 16),
    "shuffled loader": lambda: DataLoader(Broken(), 16, shuffle=True, drop_last=True),
    "loader with workers": lambda: DataLoader(Broken(), 16, num_workers=1),
    "collation": lambda: DataLoader(whole, 16, collate_fn=broken_collate),
    "last batch of a collation": lambda: DataLoader(Subset(whole, range(31)), 16, collate_fn=broken_collate),
    "items of a loader": lambda: DataLoader(ShortItems(), 16),
    "loader of its own length": lambda: Fewer(whole, 16),
    "batch sampler": lambda: DataLoader(Broken(), batch_sampler=BatchSampler(range(SIZE), 16, False)),
    "stream": lambda: DataLoader(Promised(range(30)), 16),
    "stream as a dataset": lambda: Promised(range(30)),
    "stream in workers": lambda: DataLoader(Promised(range(30)), 16, num_workers=2),
    "long stream in workers": lambda: DataLoader(Promised(range(41)), 16, num_workers=2),
    "iterable": Promising,
    "iterator": generator,
}


@pytest.mark.parametrize("name", TRUNCATED)
def test_data_that_end_early_are_refused(name):
    for seed in (None,) if "workers" in name else (None, 3):
        with pytest.raises(InputError, match="^forget: (must give|a dataset must give)"):
            batches = as_batches(TRUNCATED[name](), "forget", 16)
            list(batches if seed is None else batches.shuffled(seed))


def untrained(model: nn.Module) -> nn.Module:
    """A loss of log 3, which the model is to come down to from more."""
    original = cases.model().eval()
    with torch.no_grad():
        original[-1].weight.zero_(), original[-1].bias.zero_()
        model[-1].weight.mul_(-20)
    return original


def test_a_generator_that_broke_off_in_a_worker_is_known_by_its_text():
    error = RuntimeError("Caught RuntimeError in DataLoader worker process 0.\n...\nRuntimeError: generator raised StopIteration")
    with pytest.raises(InputError, match="^forget: must give every sample it promises"):
        raise_if_broken_off(error, "forget")
    raise_if_broken_off(RuntimeError("out of memory"), "forget")


READERS = {
    "fisher": lambda model, data: fisher.diagonal(model, data),
    "accuracy": lambda model, data: metrics.accuracy(model, data),
    "logits": lambda model, data: metrics.logits(model, data),
    "train": lambda model, data: expunge.train(model, data, cases.QUICK),
    "gradient": lambda model, data: curvature.gradient(model, data),
    "product": lambda model, data: curvature.hessian_product(model, data, dict(model.named_parameters())),
    "solver": lambda model, data: curvature.LiSSA(passes=1)(model, data, {"0.weight": model[0].weight}),
    "activations": lambda model, data: activations.measure(model, data, channels.find(model, whole[:2])),
    "relearning": lambda model, data: relearn_time(model, untrained(model), whole, data, Relearning(Tuning(Constant(0.1, 1)), draws=400)),
    "forget": lambda model, data: unlearn(model, data, cases.remain(), FisherMask(tuning=cases.QUICK)),
    "remain": lambda model, data: unlearn(model, TensorDataset(whole[:4][0] + 1, whole[:4][1]), data, FisherMask(tuning=cases.QUICK)),
    "watch": lambda model, data: unlearn(model, cases.forget(), cases.remain(), Finetune(cases.QUICK), watch={"test": data}),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["dataset", "collation"])
def test_whoever_reads_them_refuses_them(reader, name):
    message = "draws need a dataset" if (reader, name) == ("relearning", "collation") else "must give"
    argument = {"forget": "forget", "remain": "remain", "watch": r"watch\['test'\]"}.get(reader, "(batches|data)")
    model = cases.model().requires_grad_()
    with pytest.raises(InputError, match=f"^{argument}: {message}"):
        READERS[reader](model, TRUNCATED[name]())


def labels(batches) -> list[list[int]]:
    return [batch[1].tolist() for batch in batches]


KEPT = {
    "drop_last": lambda: DataLoader(whole, 20, drop_last=True),
    "shuffled, drop_last": lambda: DataLoader(whole, 20, shuffle=True, drop_last=True),
    "batch sampler": lambda: DataLoader(whole, batch_sampler=[[0, 1], [2], [3, 4, 5]]),
    "no collation": lambda: DataLoader([whole[:4], whole[4:]], batch_size=None),
    "a collation that leaves samples out": lambda: DataLoader(whole, 16, collate_fn=lambda samples: default_collate(samples[:-1])),
    "workers": lambda: DataLoader(Subset(whole, range(40)), 16, num_workers=2),
    "stream": lambda: DataLoader(Promised(range(40)), 16),
    "stream, drop_last": lambda: DataLoader(Promised(range(40)), 16, drop_last=True),
    "stream in workers": lambda: DataLoader(Promised(range(40)), 12, num_workers=2),  # 2 x (12, 8): not 12, 12, 12, 4
    "stream in workers, drop_last": lambda: DataLoader(Promised(range(40)), 16, num_workers=2, drop_last=True),
    "no length": lambda: DataLoader(Stream(range(40)), 16),
    "no length, in workers": lambda: DataLoader(Stream(range(40)), 16, num_workers=2),
    "no length of the sampler": lambda: DataLoader(whole, 16, sampler=Rows()),
    "no length, no loader": lambda: Stream(range(40)),
}


@pytest.mark.parametrize("name", KEPT)
def test_data_that_keep_their_promise_are_read(name):
    batches = as_batches(KEPT[name](), "data", 16)
    first = labels(batches)
    assert batches.known == len(batches) == len(first) == len(labels(batches))
    assert sum(map(len, first)) == sum(map(len, labels(batches.shuffled(1)))) > 0


def test_a_length_is_learned_by_the_first_whole_pass():
    dataset = Stream(range(40))
    batches = as_batches(DataLoader(dataset, 16), "remain")
    assert batches.known is None and next(iter(batches)) and batches.known is None
    assert len(batches) == batches.known == 3  # reads them
    others = {
        "must give 3 batches, as many as before, .*; found 2": 30,
        "a loader must not give more batches than before; found more than 3": 49,
        "a loader must give its batches each time": 0,
    }
    for message, size in others.items():
        dataset.rows = [row % SIZE for row in range(size)]
        with pytest.raises(InputError, match=f"^remain: {message}"):
            list(batches)
    with pytest.raises(InputError, match="^remain: must not be empty"):
        list(as_batches(DataLoader(Stream([])), "remain"))


def test_a_stream_without_a_length_gives_what_a_list_gives():
    forget, remain = list(range(0, SIZE, 3)), [row for row in range(SIZE) if row % 3]
    for method in (FisherMask(0.1, tuning=cases.QUICK), expunge.RandomLabels(tuning=cases.QUICK), cases.CASES["influence"]()):
        found = []
        for make in (lambda rows: DataLoader(Stream(rows), 16), lambda rows: DataLoader(Subset(whole, rows), 16)):
            found.append(unlearn(cases.model(), make(forget), make(remain), method))
        assert found[0].history[-1].accuracies == found[1].history[-1].accuracies
        assert all(torch.equal(*pair) for pair in zip(*(one.model.state_dict().values() for one in found), strict=True))


def test_a_stream_is_not_read_only_to_be_counted(capsys):
    reads = []

    class Counted(Stream):
        def __iter__(self):
            reads.append(1)
            return super().__iter__()

    loader = DataLoader(Counted(range(40)), 16)
    metrics.accuracy(cases.model(), loader)
    fisher.diagonal(cases.model(), loader, progress=True)
    curvature.gradient(cases.model(), loader, progress=True)
    assert len(reads) == 3
    expunge.train(cases.model(), loader, Tuning(Constant(0.01, 2)))
    assert len(reads) == 6  # the rates of an epoch need its length, so it is counted once


def test_a_stream_that_can_be_read_once_is_refused():
    rows = iter(range(40))

    class Once(IterableDataset):
        def __iter__(self):
            return (whole[row] for row in rows)

    with pytest.raises(InputError, match="^data: a loader must give its batches each time it is read"):
        expunge.train(cases.model(), DataLoader(Once(), 16), Tuning(Constant(0.01, 2)))


def test_an_iterator_that_fills_the_same_tensors_again_is_refused():
    inputs, labels = (torch.stack([torch.as_tensor(part) for part in column]) for column in zip(*whole, strict=True))
    x, y = inputs[:4].clone(), labels[:4].clone()

    def refilled():
        for rows in torch.arange(12).split(4):
            yield x.copy_(inputs[rows]), y.copy_(labels[rows])

    rule = (
        "^batches: an iterator is kept in memory, so it must not write to what it gave: .*; found batch 1 in the memory of an earlier one"
    )
    with pytest.raises(InputError, match=rule):
        fisher.diagonal(cases.model(), refilled())
    slots = torch.empty(3, 4, *inputs.shape[1:])
    filled = ((slots[number].copy_(inputs[rows]), labels[rows]) for number, rows in enumerate(torch.arange(12).split(4)))
    assert fisher.diagonal(cases.model(), filled).count == fisher.diagonal(cases.model(), [(x, y)] * 3).count == 12
    copies = ((first.clone(), second.clone()) for first, second in refilled())
    assert fisher.diagonal(cases.model(), copies).count == 12
