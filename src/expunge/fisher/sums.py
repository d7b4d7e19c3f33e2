"""Add, subtract, save and load sums of squared gradients by parameter name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from expunge.errors import InputError, MismatchError
from expunge.runtime import processes
from expunge.runtime.display import counted, first_rows, html_table, text_table
from expunge.storage.documents import excerpt, named_number
from expunge.storage.tensors import load_tensors, save_tensors


@dataclass(frozen=True)
class FisherSums:
    """Σ_n (∂ log p_n / ∂w)² for every named parameter, in float64, and the number of samples n.

    Sums of disjoint samples at the same weights add up, and those of a part can be taken away again:
    F(all) − F(forget) = F(remain). For the kind "batch" the count is of batches, since that rule averages over batches.
    """

    sums: dict[str, Tensor]
    count: int
    kind: str
    digest: str  # of the weights the gradients were taken at
    objective: str = ""  # the loss and its settings; "": not known, as in files of earlier versions

    def __repr__(self) -> str:
        entries = sum(total.numel() for total in self.sums.values())
        where = f"{counted(len(self.sums), 'parameter')}, {counted(entries, 'entry', 'entries')}, at {self.digest[:12]}"
        return f"FisherSums({self.kind}, {self._of()}, {where})"

    def __str__(self) -> str:
        return text_table(repr(self), self._rows())

    def _repr_html_(self) -> str:
        return html_table(repr(self), self._rows())

    def _of(self) -> str:
        return counted(self.count, "batch", "batches") if "batch" in self.kind else counted(self.count, "sample")

    def _rows(self) -> list[Sequence[str]]:
        return first_rows([("parameter", "entries"), *((name, f"{total.numel():,}") for name, total in self.sums.items())])

    def mean(self) -> dict[str, Tensor]:
        """The sums divided by the count."""
        if self.count < 1:
            raise InputError("count", "a mean needs at least one sample", self.count)
        return {name: total / self.count for name, total in self.sums.items()}

    def __add__(self, other: FisherSums) -> FisherSums:
        if not isinstance(other, FisherSums):
            return NotImplemented
        self.check_compatible(other)
        sums = {name: total + other.sums[name].to(total.device) for name, total in self.sums.items()}
        return replace(self, sums=sums, count=self.count + other.count, objective=self.objective or other.objective)

    def __sub__(self, other: FisherSums) -> FisherSums:
        """Take a part away. Entries that rounding leaves below zero are set to 0; entries clearly below zero raise.

        Where the part holds nearly all of an entry, few digits are left of it: `cancelled` says of how many.
        """
        if not isinstance(other, FisherSums):
            return NotImplemented
        self.check_compatible(other)
        if other.count > self.count:
            raise InputError("count", f"only a part can be taken away from {self.count} samples", other.count)
        left = {}
        for name, whole in self.sums.items():
            difference = whole - other.sums[name].to(whole.device)
            # In float32 a sample's squares change with the rest of its batch, by up to 1e-3 of an entry (seen on a ResNet8 and 3 samples).
            if whole.numel() and bool((difference < -(1e-2 * whole + 1e-6 * whole.max())).any()):
                raise MismatchError(f"the sums of {name} are smaller than the part taken away: these samples are not among them")
            left[name] = difference.clamp_(min=0)
        return replace(self, sums=left, count=self.count - other.count, objective=self.objective or other.objective)

    def cancelled(self, part: FisherSums, digits: float = 3) -> float:
        """The share of entries that lose at least this many significant digits in `self - part`: of w at most 10^−digits · w remains.

        If both sums are right to a relative ε, what remains, r of w, is right to about 2ε · w/r. ε is some 1e-15 for models in float64 and
        1e-6 for those in float32 (more in deep ones), so of these an entry that loses 6 digits is noise. Entries that are 0 do not count.
        """
        self.check_compatible(part)
        lost = entries = 0
        for name, whole in self.sums.items():
            remaining = whole - part.sums[name].to(whole.device)
            lost += int(((remaining <= 10.0**-digits * whole) & (whole > 0)).sum())
            entries += int((whole > 0).sum())
        return lost / max(1, entries)

    @staticmethod
    def merge(parts: Iterable[FisherSums]) -> FisherSums:
        """The sums of all parts together, as from several processes or machines."""
        all_sums = list(parts)
        if not all_sums:
            raise InputError("parts", "must hold at least one FisherSums")
        return reduce(FisherSums.__add__, all_sums)

    def all_reduce(self, patience: float = processes.PATIENCE) -> FisherSums:
        """The sums over all processes of the default group, each of which has computed its own share of the samples.

        Processes with sums of other weights, kinds, losses or parameters raise MismatchError on all of them, one that does not come
        within `patience` seconds MissingProcessError. So does one that ends, or stops, while the sums are added up; with nccl that limit
        is the process group's own (`init_process_group(timeout=...)`, else 10 minutes), at which nccl may end this process.
        """
        import torch.distributed as distributed

        if processes.is_alone():
            return self
        described = {"weights": self.digest, "kind": self.kind, "objective": self.objective}
        processes.agree(lambda: described | {"parameters": str(list(self._shapes().items()))}, patience)  # in one order, too
        totals = list(self.sums.values())
        flat = torch.cat([*(total.reshape(-1) for total in totals), totals[0].new_tensor([self.count])])
        shared = flat.to(processes.device_of_group(flat.device))
        with processes.collective((), patience):
            distributed.all_reduce(shared)
        flat = shared.to(flat.device)
        parts = flat[:-1].split([total.numel() for total in totals])
        sums = {name: part.view(total.shape).clone() for (name, total), part in zip(self.sums.items(), parts, strict=True)}
        return replace(self, sums=sums, count=int(flat[-1].item()))

    def check_compatible(self, other: FisherSums) -> None:
        """Raise MismatchError for sums of other weights, another kind, another loss or other parameters."""
        if self.digest != other.digest:
            first, second = (f"{part._of()} at fingerprint {part.digest[:12]}" for part in (self, other))
            raise MismatchError(f"sums of different weights: {first} and {second}; was the model changed in between?")
        if self.kind != other.kind:
            raise MismatchError(f"sums of different kinds: {self.kind} and {other.kind}")
        if self.objective and other.objective and self.objective != other.objective:
            raise MismatchError(f"sums of different losses: {self.objective} and {other.objective}")
        if self._shapes() != other._shapes():
            shapes = set(self._shapes().items()) ^ set(other._shapes().items())
            names = sorted({name for name, _ in shapes})
            raise MismatchError(f"sums of different parameters: {', '.join(names[:4])}")

    def to(self, device: torch.device | str) -> FisherSums:
        """The same sums on another device."""
        return replace(self, sums={name: total.to(device) for name, total in self.sums.items()})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """A safetensors file with the count, the kind, the weights' digest and the objective as metadata."""
        metadata = {"kind": "fisher-sums", "count": str(self.count), "fisher": self.kind, "digest": self.digest}
        if self.objective:
            metadata["objective"] = self.objective
        return save_tensors(path, self.sums, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FisherSums:
        """Read sums from their file, onto the CPU. A file that is incomplete or was changed raises an error."""
        sums, metadata = load_tensors(path, "fisher-sums")
        rule = "must carry a count, a kind and a digest"
        if missing := {"count", "fisher", "digest"} - set(metadata):
            raise InputError("path", rule, f"{os.fspath(path)} without {sorted(missing)}")
        try:
            count = named_number(metadata["count"], 2**63 - 1)
        except ValueError as error:
            raise InputError("path", rule, f"{os.fspath(path)} without a whole count ({error})") from error
        if not sums:
            raise InputError("path", "must hold at least one sum", os.fspath(path))
        for name, total in sums.items():
            if total.dtype != torch.float64 or not bool(torch.isfinite(total).all()) or bool((total < 0).any()):
                raise InputError("path", "must hold finite sums of squares in float64", excerpt(name))
        return cls(sums, count, metadata["fisher"], metadata["digest"], metadata.get("objective", ""))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(total.shape) for name, total in self.sums.items()}
