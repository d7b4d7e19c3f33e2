"""Share trainings among the processes of a torchrun: the same batches in the same order, each cut among the processes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from expunge.data.batches import Batches, batch_size, device_of, take
from expunge.data.chunks import fingerprint
from expunge.data.digest import add_batch
from expunge.data.indices import size_of
from expunge.data.objective import Batch
from expunge.errors import InputError, MismatchError
from expunge.model.checks import check_unsharded
from expunge.runtime import processes
from expunge.runtime.modes import seeded
from expunge.storage.tensors import weights_digest
from expunge.training.explosion import Explosion
from expunge.training.same_batches import all_equal, mark
from expunge.training.shared_norms import synchronised
from expunge.training.tuning import Tuning
from expunge.validate import check_positive

_patience: list[float] = []  # of the contexts that are open


@contextmanager
def shared(patience: float = processes.PATIENCE) -> Iterator[None]:
    """Within the context every training (`train`, the fine-tuning of `unlearn`) is shared by the processes of torch.distributed.

    Every process calls the same functions with the same arguments. Each batch is the same as in one process and is cut into parts, sizes
    differing by one at most; the gradient is that of the mean over the whole batch: Σ_r (n_r / n) · gradient of process r. After every step
    all processes have the same weights, those of one process apart from rounding. BatchNorm takes the statistics of the whole batch.
    Where the forward pass draws random numbers (dropout), they are other ones than in one process.

    Processes that differ in weights, data or settings raise MismatchError, one that is missing for `patience` seconds MissingProcessError,
    before the first step and on all of them. In a single process nothing changes.
    """
    check_positive("patience", patience)
    _patience.append(patience)
    try:
        yield
    finally:
        _patience.pop()


def is_shared() -> bool:
    return bool(_patience) and not processes.is_alone()


class Share:
    """This process's part of a training."""

    def __init__(self, model: nn.Module, tuning: Tuning, steps_done: int) -> None:
        self.rank, self.size, self.device = processes.rank(), processes.world_size(), device_of(model)
        self.first = self.rank == 0
        self.seed, self.number = tuning.seed, steps_done
        self.counted = 0.0  # samples of this part, 0 for a process that has none of a small batch
        self.whole_loss = torch.zeros((), device=self.device)
        self._settled, self._same = False, torch.ones((), dtype=torch.bool, device=self.device)
        # A group of its own: with this time limit, and left when the training ends, so that who waits for this process hears of it.
        self.name = processes.meeting()
        self.group: Any = distributed.new_group(timeout=timedelta(seconds=_patience[-1]))
        self._computation = _Computation(model, self.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers: what comes in its place cannot leave them alone yet
            self._parallel = DistributedDataParallel(
                self._computation, process_group=self.group, broadcast_buffers=False, find_unused_parameters=True, init_sync=False
            )

    @classmethod
    @contextmanager
    def of(cls, model: nn.Module, tuning: Tuning, plan: Sequence[Sequence[Any]], settings: Mapping[str, str], done: int) -> Iterator[Share]:
        """Share a training of which `done` epochs are done, once all processes have come with the same."""
        processes.agree(lambda: _described(model, tuning, plan, settings, done), _patience[-1])
        with processes.named_failures():
            share = cls(model, tuning, sum(len(phase.batches) for parts in plan[:done] for phase in parts))
        try:
            with synchronised(model, share.add_up, lambda: share.counted > 0):
                yield share
        except BaseException as error:
            processes.tell_failure(share.name, error)
            raise
        finally:  # at once: its hooks on the model's gradients would wait for the garbage collector
            share._computation.compute = _nothing
            del share._parallel
            distributed.destroy_process_group(share.group)
            del share.group

    def loss(self, compute: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """The loss of this process's part, scaled so that the mean of all gradients is the gradient of the whole batch.

        A process without a sample takes the first one, with weight 0: all must make the same passes.
        """
        samples, self.number = batch_size(batch), self.number + 1
        rows = slice(self.rank * samples // self.size, (self.rank + 1) * samples // self.size)
        self.counted = float(rows.stop - rows.start)
        own = take(batch, rows if self.counted else slice(0, 1))
        draws = int.from_bytes(hashlib.sha256(f"{self.seed}|{self.number}|{self.rank}".encode()).digest()[:7], "big")
        with seeded(draws, self.device), self.together():
            self._computation.compute = lambda: compute(own)
            loss: Tensor = self._parallel()
        own_mark = mark(batch, self.device)
        part = loss.detach().double() * (self.counted / samples)
        told = self.add_up(torch.stack([part, own_mark, own_mark.square()]))
        self._same &= all_equal(self.size, told[1], told[2])
        if self.device.type == "cpu":  # reading it would make a GPU wait
            self.check_batches(own_mark)
        self.whole_loss = told[0].to(loss.dtype)
        return loss * (self.size * self.counted / samples)

    def check_batches(self, own_mark: Tensor | None = None) -> None:
        """Raise MismatchError, on all processes, where they were given different batches; on a GPU it is called after every epoch."""
        if bool(self._same):
            return
        place = "in this epoch"
        if own_mark is not None:
            marks = [torch.zeros_like(own_mark) for _ in range(self.size)]
            distributed.all_gather(marks, own_mark, group=self.group)
            other = next(number for number, value in enumerate(marks) if value != marks[0])
            place = f"in step {self.number}, where rank {other} has another than rank 0"
        rule = "a loader or stream must draw the same samples in the same order everywhere (seed its generator alike)"
        raise MismatchError(f"all processes must have the same batch {place}; {rule}")

    def settle(self, explosion: Explosion) -> None:
        """Give all processes one loss to compare later ones with: all must stop at the same step, or none."""
        if explosion.reference is not None and not self._settled:
            distributed.all_reduce(explosion.reference, distributed.ReduceOp.MAX, group=self.group)
            self._settled = True

    def add_up(self, values: Tensor) -> Tensor:
        """The sums over all processes, in place."""
        with self.together():
            distributed.all_reduce(values, group=self.group)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within the context, what torch raises when another process has ended is a MissingProcessError."""
        with processes.named_failures(f" in step {self.number}", self.name):
            yield


class _Computation(nn.Module):
    """What DistributedDataParallel wraps: the model stays itself, so that it is called by the names of its own arguments."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.unused = nn.Parameter(torch.zeros(1, device=device))  # torch would print a warning where every parameter is used
        self.compute: Callable[[], Tensor] = _nothing

    def forward(self) -> Tensor:
        return self.compute()


def _nothing() -> Tensor:
    return torch.zeros(())


def _described(model: nn.Module, tuning: Tuning, plan: Sequence[Sequence[Any]], settings: Mapping[str, str], done: int) -> dict[str, str]:
    check_unsharded(model, "training.shared() gives every process all of it")
    size = processes.world_size()
    if tuning.batch_size < size:
        raise InputError("batch_size", f"must be at least the number of processes, {size}", tuning.batch_size)
    phases = {id(phase.batches): phase for parts in plan for phase in parts}.values()
    if any(phase.loss is not None and not phase.mean for phase in phases):
        raise InputError("method", "must have a loss that is a mean over the samples of a batch to be shared by processes", "another loss")
    samples = "; ".join(_samples(phase.batches, phase.argument) for phase in phases)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = f"{len(trained)} ({hashlib.sha256(' '.join(trained).encode()).hexdigest()[:8]})"
    return {"weights": weights_digest(model), "trained parameters": parameters, "epochs done": str(done), "samples": samples, **settings}


def _samples(batches: Batches, argument: str) -> str:
    """A digest of some samples; nothing is read of a loader, which may draw random numbers of its own."""
    dataset = batches.source.dataset if isinstance(batches.source, DataLoader) else batches.source
    if dataset is None:
        digest = hashlib.sha256()
        add_batch(digest, next(iter(batches)))
        return f"batches, the first with {digest.hexdigest()}"
    size = size_of(dataset)
    return "" if isinstance(dataset, IterableDataset) or not size else f"{size} with {fingerprint(dataset, size, argument)}"
