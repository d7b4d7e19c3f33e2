"""Compute Fisher sums chunk by chunk: by any number of processes with the same bits, and on where a pass was stopped."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from expunge.data.batches import Data, device_of
from expunge.data.chunk_passes import fold, fold_alone
from expunge.data.chunks import BATCHES, Chunks, cut
from expunge.data.objective import Objective, check_objective
from expunge.errors import naming
from expunge.fisher import kinds
from expunge.fisher.borrowing import wanted_parameters
from expunge.fisher.engine import KINDS, summed
from expunge.fisher.lending import LentPlan, UnfitError, lent_plan
from expunge.fisher.naming import listed, objective_name
from expunge.fisher.sums import FisherSums
from expunge.model.copying import unwrapped
from expunge.runtime.processes import PATIENCE
from expunge.runtime.progress import is_shown
from expunge.storage.folding import Sums
from expunge.storage.tensors import weights_digest
from expunge.validate import check_choice, check_positive, check_whole


def by_chunks(
    model: nn.Module,
    data: Data,
    *,
    kind: str = "empirical",
    objective: Objective | None = None,
    parameters: Iterable[str] | None = None,
    draws: int = 1,
    seed: int = 0,
    batch_size: int = 128,
    batches_per_chunk: int = BATCHES,
    keep: str | os.PathLike[str] | None = None,
    threads: int = 1,
    patience: float = PATIENCE,
    progress: bool | None = None,
) -> FisherSums:
    """`fisher.diagonal` over chunks of the data, shared by all processes of a torchrun; on each of them the sums of all data.

    On one type of machine the sums are the same bits for any number of processes, and whether or not the pass was stopped: a chunk is
    32 batches (`batches_per_chunk`) of fixed sizes, computed by itself with one thread on a CPU (`threads`), and chunks are added in
    float64 in the order of the data. Every sample counts once. Apart from rounding, the sums are those of `diagonal`.

    `keep` names a folder for finished chunks, at most some 64 files at a time. A pass that was stopped goes on from there, also with
    another number of processes; when a process ends early, the others do its chunks. Processes need not be of a torchrun: whatever
    runs the same pass with the same folder takes part. On several machines the folder must be one that all of them see.

    `kind`, `objective`, `parameters`, `draws`, `seed`, `batch_size` and `progress` are as in `diagonal`; the kind "sampled" draws by chunk.
    Processes with other weights, data or settings raise MismatchError on all of them; one that does not come, or finishes nothing, within
    `patience` seconds raises MissingProcessError.
    """
    (sums,) = by_group(
        model,
        data,
        None,
        kind=kind,
        objective=objective,
        parameters=parameters,
        draws=draws,
        seed=seed,
        batch_size=batch_size,
        batches_per_chunk=batches_per_chunk,
        keep=keep,
        threads=threads,
        patience=patience,
        progress=progress,
    ).values()
    return sums


def by_group(
    model: nn.Module,
    data: Data,
    groups: Sequence[Any] | Tensor | None,
    *,
    kind: str = "empirical",
    objective: Objective | None = None,
    parameters: Iterable[str] | None = None,
    draws: int = 1,
    seed: int = 0,
    batch_size: int = 128,
    batches_per_chunk: int = BATCHES,
    keep: str | os.PathLike[str] | None = None,
    threads: int = 1,
    patience: float = PATIENCE,
    progress: bool | None = None,
) -> dict[str, FisherSums]:
    """`by_chunks` for each group of the samples; `groups` holds a name or a number, such as the label, for every sample of a dataset.

    The total is `FisherSums.merge(sums.values())`. A group's sums do not depend on the other groups.
    """
    objective = Objective() if objective is None else objective
    summing = Pass(model, data, groups, kind, objective, parameters, draws, seed, batch_size, batches_per_chunk, threads)
    with summing.folded(keep, patience, progress) as totals:
        return {group: summing.sums(part).to(device_of(model)) for group, part in totals.items()}


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass over data chunk by chunk, as `by_group` makes it, and `expunge fisher build` and the requests that use its store."""

    model: nn.Module
    data: Data
    groups: Sequence[Any] | Tensor | None = None
    kind: str = "empirical"
    objective: Objective = field(default_factory=Objective)
    parameters: Iterable[str] | None = None
    draws: int = 1
    seed: int = 0
    batch_size: int = 128
    batches_per_chunk: int = BATCHES
    threads: int = 1
    probe: Data | None = None  # samples on which every chunk is planned, once, by `lending`; None: each on its own first ones
    _chosen: dict[str, nn.Parameter] = field(default_factory=dict, init=False)  # once they are checked
    _lent: list[LentPlan | None] = field(default_factory=list, init=False)  # of this pass, once it is made
    _known: dict[str, str] = field(default_factory=dict, init=False)  # likewise of the weights and the loss

    @contextmanager
    def folded(
        self, keep: str | os.PathLike[str] | None = None, patience: float = PATIENCE, progress: bool | None = None
    ) -> Iterator[Mapping[str, Sums]]:
        """Make the pass, and give the sums of every group, on the CPU, within the context; `sums` makes FisherSums of them."""
        check_positive("patience", patience)
        title, shown = f"Fisher ({self.kind})", is_shown(progress)
        with fold(self._prepare, self._work, keep, cpu_threads=self.threads, patience=patience, title=title, progress=shown) as totals:
            yield totals

    def alone(self, progress: bool | None = None) -> dict[str, FisherSums]:
        """The sums of every group, on the CPU, by this process alone, though it be one of several."""
        title, shown = f"Fisher ({self.kind})", is_shown(progress)
        totals = fold_alone(self._prepare, self._work, cpu_threads=self.threads, title=title, progress=shown)
        return {group: self.sums(part) for group, part in totals.items()}

    def sums(self, part: Sums) -> FisherSums:
        """After the pass: the sums of a group with what they are of, parameters in their order."""
        ordered = {name: part.sums[name] for name in self._chosen}
        return FisherSums(ordered, part.count, self.kind, self._known["weights"], self._known["objective"])

    def _prepare(self) -> tuple[Chunks, Mapping[str, str]]:
        """Checks what it is given, so that an error on one process is told to all."""
        check_choice("kind", self.kind, KINDS)
        kinds.check_draws(self.kind, self.draws)
        check_whole("seed", self.seed, minimum=0)
        check_whole("threads", self.threads, minimum=1, maximum=1024)
        check_objective(self.objective)
        kinds.check_distribution(self.kind, self.objective)
        model = unwrapped(self.model)
        self._lent.clear()  # the model may have changed since
        self._chosen.clear()
        self._chosen.update(wanted_parameters(model, self.parameters))
        self._known.update(weights=weights_digest(model), objective=objective_name(self.objective, self.kind))
        of_draws = {"draws": str(self.draws), "seed": str(self.seed)} if self.kind == "sampled" else {}
        settings = {"kind": self.kind, **self._known, "parameters": listed(self._chosen), **of_draws, "device": device_of(model).type}
        return cut(self.data, self.batch_size, self.batches_per_chunk, self.groups), settings

    def _work(self, chunks: Chunks, number: int) -> Sums:
        """A function of the chunk and the probe alone: a lent plan that does not hold for the chunk gives way to one of its own."""
        model, seed = unwrapped(self.model), _seed(self.seed, chunks, number)

        def made(plan: LentPlan | None) -> tuple[dict[str, Tensor], int]:
            return summed(model, chunks.read(number), self._chosen, self.kind, self.objective, self.draws, seed, False, plan)

        with naming("data"):
            try:
                sums, count = made(self._plan(model))
            except UnfitError:
                sums, count = made(None)
        return Sums({name: value.cpu() for name, value in sums.items()}, count)

    def _plan(self, model: nn.Module) -> LentPlan | None:
        if not self._lent:
            probed = self.probe is not None and self.kind != "batch"
            self._lent.append(lent_plan(model, self._chosen, self.probe, self.objective) if probed else None)
        return self._lent[0]


def _seed(seed: int, chunks: Chunks, number: int) -> int:
    """A seed for every chunk, so that no two draw the same numbers; by its place in its group, whatever other groups there are."""
    group = chunks.groups[number]
    text = f"{seed}|{number - chunks.groups.index(group)}|{group}"
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big") >> 1  # a name may be a file's
