"""FisherSums: named sums of squared gradients and how many samples they are of."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from expunge.artifacts import load_tensors, save_tensors
from expunge.errors import InputError, MismatchError


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

    def mean(self) -> dict[str, Tensor]:
        """The sums divided by the count."""
        if self.count < 1:
            raise InputError("count", "a mean needs at least one sample", self.count)
        return {name: total / self.count for name, total in self.sums.items()}

    def __add__(self, other: FisherSums) -> FisherSums:
        if not isinstance(other, FisherSums):
            return NotImplemented
        self.check_compatible(other)
        return replace(self, sums={name: total + other.sums[name] for name, total in self.sums.items()}, count=self.count + other.count)

    def __sub__(self, other: FisherSums) -> FisherSums:
        """Take a part away. Rounding may leave entries of about −1e-16 of the whole; they are set to 0."""
        if not isinstance(other, FisherSums):
            return NotImplemented
        self.check_compatible(other)
        if other.count > self.count:
            raise InputError("count", f"only a part can be taken away from {self.count} samples", other.count)
        left = {name: (total - other.sums[name]).clamp_(min=0) for name, total in self.sums.items()}
        for name, total in left.items():
            worst = (other.sums[name] - self.sums[name] - 1e-6 * self.sums[name].abs()).max() if total.numel() else torch.tensor(0.0)
            if worst > 1e-12 * float(self.sums[name].sum()):
                raise MismatchError(f"the sums of {name} are smaller than the part taken away: these samples are not among them")
        return replace(self, sums=left, count=self.count - other.count)

    @staticmethod
    def merge(parts: Iterable[FisherSums]) -> FisherSums:
        """The sums of all parts together, as from several processes or machines."""
        held = list(parts)
        if not held:
            raise InputError("parts", "must hold at least one FisherSums")
        return reduce(FisherSums.__add__, held)

    def all_reduce(self) -> FisherSums:
        """The sums over all processes of the default group (each having seen its own share of the samples)."""
        import torch.distributed as distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            return self
        described: list[object] = [None] * distributed.get_world_size()
        distributed.all_gather_object(described, (self.digest, self.kind, self._shapes()))
        if any(other != described[0] for other in described):
            raise MismatchError("the processes hold sums of different weights, kinds or parameters")
        flat = torch.cat([total.reshape(-1) for total in self.sums.values()] + [torch.tensor([float(self.count)], dtype=torch.float64, device=self._device())])
        distributed.all_reduce(flat)
        parts = flat[:-1].split([total.numel() for total in self.sums.values()])
        sums = {name: part.view(total.shape).clone() for (name, total), part in zip(self.sums.items(), parts, strict=True)}
        return replace(self, sums=sums, count=int(flat[-1].item()))

    def check_compatible(self, other: FisherSums) -> None:
        """Refuse sums of other weights, another kind or other parameters."""
        if self.digest != other.digest:
            raise MismatchError(f"sums of different weights: {self.digest[:12]} and {other.digest[:12]}")
        if self.kind != other.kind:
            raise MismatchError(f"sums of different kinds: {self.kind} and {other.kind}")
        if self._shapes() != other._shapes():
            names = sorted(set(self.sums) ^ set(other.sums)) or [name for name in self.sums if self.sums[name].shape != other.sums[name].shape]
            raise MismatchError(f"sums of different parameters: {', '.join(names[:4])}")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """A safetensors file with the count, the kind and the weights' digest as metadata."""
        return save_tensors(path, self.sums, {"kind": "fisher-sums", "count": str(self.count), "fisher": self.kind, "digest": self.digest})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FisherSums:
        sums, metadata = load_tensors(path, "fisher-sums")
        missing = {"count", "fisher", "digest"} - set(metadata)
        if missing or not metadata["count"].isdigit():
            raise InputError("path", "must carry a count, a kind and a digest", f"{os.fspath(path)} without {sorted(missing) or 'a whole count'}")
        for name, total in sums.items():
            if total.dtype != torch.float64 or not bool(torch.isfinite(total).all()) or bool((total < 0).any()):
                raise InputError("path", "must hold finite sums of squares in float64", name)
        return cls(sums, int(metadata["count"]), metadata["fisher"], metadata["digest"])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(total.shape) for name, total in self.sums.items()}

    def _device(self) -> torch.device:
        return next(iter(self.sums.values())).device
