"""Train shadow networks side by side, have each forget its candidates, and keep their answers on disk; stop and resume at any time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from expunge.audit.membership import confidence
from expunge.audit.shadow_attacks import ShadowSignals
from expunge.audit.shadow_evidence import ShadowEvidence, forms_of
from expunge.data.batches import device_of, measuring_size
from expunge.data.digest import data_digest
from expunge.data.indices import resolved, rows_of
from expunge.data.objective import Objective
from expunge.errors import InputError, MismatchError, UncheckedWarning
from expunge.metrics.predictions import logits
from expunge.runtime.callers import level_of_caller, warnings_about
from expunge.runtime.modes import generator, seeded
from expunge.runtime.progress import is_shown, track
from expunge.storage.documents import excerpt
from expunge.storage.files import check_folder
from expunge.storage.locks import try_lock
from expunge.storage.tensors import load_tensors, save_tensors, weights_digest
from expunge.training.side_by_side import Training, train_together
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from expunge.validate import check_seed, check_whole

WEIGHTS, ANSWERS = "shadow weights", "shadow answers"
Unlearn = Callable[[nn.Module, Any, Any], Any]  # (model, forget, remain): the new model, or an outcome that has it
Noted = Callable[[int], bool | None]  # after a group, with how many are done; False: begin no other


def memberships(shadows: int, candidates: int, seed: int = 0) -> Tensor:
    """Which candidates each shadow is trained on, (shadows, candidates): shadows 2k and 2k + 1 share them out, each half, by a permutation.

    So every candidate is in exactly half of the shadows, and those of more shadows begin with those of fewer.
    """
    members = torch.zeros(shadows, candidates, dtype=torch.bool)
    numbers = generator(seed)
    for pair in range(0, shadows, 2):
        order = torch.randperm(candidates, generator=numbers)
        members[pair, order[: candidates // 2]] = True
        members[pair + 1] = ~members[pair]
    return members


@dataclass(frozen=True, eq=False)
class Shadows:
    """Networks as the audited one, each trained on all of `data` but half of the `candidates`, and then made to forget the other half.

    `data` is a dataset, with the candidates among its samples: the forget set of the audited network and about as many that it never saw.
    `build(seed)` makes a network with fresh weights, on the device to train on. Shadow n has the seed `tuning.seed` + n. `asked` are the
    candidates as networks are asked about them, if not as `data` has them (augmented, for example). `at_once`: how many are trained side
    by side, which on a GPU is faster. `validation`: data that neither the audited network nor a shadow was trained on, by which a method
    that chooses did so.

    In `folder` each shadow has its state while it is trained, then its weights and answers, in files named by a digest of the data, the
    settings and the fresh weights; and its answers for each method that it forgot by. Nothing is computed twice, whoever stops it when.
    Weights (`*.weights.safetensors`) may be removed when no other method is to follow.
    """

    build: Callable[[int], nn.Module]
    data: Any
    candidates: Any
    tuning: Tuning
    folder: str | os.PathLike[str]
    number: int = 64
    seed: int = 0
    asked: Any = None
    at_once: int = 8
    objective: Objective = Objective()
    validation: Any = None

    def __post_init__(self) -> None:
        check_whole("number", self.number, minimum=4, maximum=10**5)
        if self.number % 2:
            raise InputError("number", "must be even: two shadows share the candidates out", self.number)
        check_whole("at_once", self.at_once, minimum=1)
        check_seed("seed", self.seed)
        if not isinstance(self.tuning, Tuning):
            raise InputError("tuning", "must be a Tuning, such as Tuning(Constant(0.01, epochs=5))", type(self.tuning).__name__)
        if not callable(self.build):
            raise InputError("build", "must make a network from a seed", type(self.build).__name__)
        if not hasattr(self.data, "__len__") or not hasattr(self.data, "__getitem__"):
            raise InputError("data", "must be a dataset, with a length and items", type(self.data).__name__)
        if len(self.rows) < 2 or len(self.rows.unique()) < len(self.rows) or len(self.rows) >= len(self.data):
            rule = f"must be two or more different samples of data, not all of its {len(self.data)}"
            raise InputError("candidates", rule, f"{len(self.rows)}, {len(self.rows.unique())} different")
        if self.asked is not None and len(self.asked) != len(self.rows):
            raise InputError("asked", f"must be the {len(self.rows)} candidates", len(self.asked))
        check_folder("folder", self.folder)

    @cached_property
    def rows(self) -> Tensor:
        return rows_of(self.candidates, len(self.data), "candidates") % len(self.data)

    @cached_property
    def members(self) -> Tensor:
        return memberships(self.number, len(self.rows), self.seed)

    def train(
        self, seconds: float | None = None, progress: bool | None = None, among: Sequence[int] | None = None, noted: Noted | None = None
    ) -> int:
        """Train shadows that are missing, and return how many there are; begin none that may not end within `seconds`.

        `among` are the shadows to train, by number; `noted` is called after those that were trained together.
        """

        def group(shadows: Sequence[int]) -> None:
            models = [self._fresh(shadow) for shadow in shadows]
            trainings = [
                Training(model, self._training_data(shadow), self._tuning(shadow), keep=self._path(shadow, "training"))
                for shadow, model in zip(shadows, models, strict=True)
            ]
            train_together(trainings, self.objective, is_shown(progress))
            for shadow, model in zip(shadows, models, strict=True):
                save_tensors(self._path(shadow, "weights"), model.state_dict(), {"kind": WEIGHTS})
                self._keep_answers(shadow, "trained", model)  # last: a shadow with answers is done
                self._path(shadow, "training").unlink(missing_ok=True)

        if len(self._done("trained")) < self.number:
            self._warn_of_equal_weights()
        return self._work("trained", self.at_once, group, seconds, False, among, noted)

    def _warn_of_equal_weights(self) -> None:
        first, second = (weights_digest(self._fresh(shadow)) for shadow in (0, 1))
        if first == second:
            warnings.warn(
                "build: gives the same weights for every seed, so the shadows are more alike than networks of other seeds; right where the "
                "audited network was trained from these weights, else draw fresh ones by the seed",
                UncheckedWarning,
                stacklevel=level_of_caller(),
            )

    def unlearn(
        self,
        method: Any,
        about: str | None = None,
        seconds: float | None = None,
        progress: bool | None = None,
        among: Sequence[int] | None = None,
        noted: Noted | None = None,
    ) -> int:
        """Have each trained shadow forget its candidates, and return how many have; see `train`.

        `method` is one of expunge's, or a function (model, forget, remain) → new model; a function is known again by `about`, or its name.
        """
        name = self._name(method, about)

        def group(shadows: Sequence[int]) -> None:
            for shadow in shadows:
                model = self._fresh(shadow)
                model.load_state_dict(self._weights(shadow))
                forget = Subset(self.data, self.rows[self.members[shadow]].tolist())
                remain = Subset(self.data, self._remain.tolist())
                with seeded(self._tuning(shadow).seed, device_of(model)), warnings_about(f"shadow {shadow}"):
                    if is_dataclass(method):
                        given: dict[str, Any] = {"objective": self.objective, "validation": self._validation_for(method)}
                        outcome: Any = unlearn(model, forget, remain, method, watch={}, progress=False, **given)  # type: ignore[arg-type]
                    else:
                        outcome = method(model, forget, remain)
                new = getattr(outcome, "model", outcome)
                if not isinstance(new, nn.Module):
                    raise InputError("method", "must return the new model", type(outcome).__name__)
                self._keep_answers(shadow, name, new)

        trained = [shadow for shadow in self._done("trained") if among is None or shadow in among]
        return self._work(name, 1, group, seconds, is_shown(progress), trained, noted)

    def missing(self, method: Any = None, about: str | None = None) -> list[int]:
        """The shadows that are not trained, or, given a method, have not forgotten by it."""
        done = self._done("trained" if method is None else self._name(method, about))
        return [shadow for shadow in range(self.number) if shadow not in done]

    @cached_property
    def plan(self) -> dict[str, Any]:
        """All that makes the shadows but their number, so that more can be added: shadows of plans that differ are of two audits."""
        data, asked = (None if part is None else data_digest(part) or len(part) for part in (self.data, self.asked))
        tuning = re.sub(r" at 0x[0-9a-f]+", "", repr(self.tuning))  # a function counts by its name: it is elsewhere in every process
        about = {"data": data, "asked": asked, "candidates": self.rows.tolist(), "seed": self.seed, "recipe": tuning}
        return about | {"network": weights_digest(self._fresh(0))}

    def signals(self, method: Any, about: str | None = None, floor: float | None = None) -> ShadowSignals:
        """φ of every candidate by every shadow before and after it forgot by the method; all of them must have."""
        names = {"trained": "trained", "unlearned": self._name(method, about)}
        if missing := self.number - len(self._done(names["unlearned"])):
            raise InputError("shadows", f"{missing} of {self.number} have not been trained and unlearned yet: call train and unlearn again")
        rows = {part: torch.stack([self._answers(shadow, name, floor) for shadow in range(self.number)]) for part, name in names.items()}
        return ShadowSignals(rows["trained"], rows["unlearned"], self.members)

    def evidence(self, method: Any, forgotten: Any, about: str | None = None) -> ShadowEvidence:
        """What `expunge.audit(..., shadows=...)` takes. `forgotten` are the rows of `data` that the audited network was to forget.

        They must be candidates. The other candidates must be samples that it never saw.
        """
        rows = rows_of(forgotten, len(self.data), "forgotten") % len(self.data)
        if strange := int((~torch.isin(rows, self.rows)).sum()):
            raise InputError("forgotten", "must be rows of data that are candidates", f"{strange} of {len(rows)} are not")
        samples = Subset(self.data, self.rows.tolist())
        return ShadowEvidence(
            signals=self.signals(method, about),
            bounded=self.signals(method, about, floor=1e-6),
            forgotten=torch.isin(self.rows, rows),
            samples=samples,
            asked=samples if self.asked is None else self.asked,
            labels=load_tensors(self._path(0, "trained"), ANSWERS)[0]["labels"],
            forms=forms_of(self._fresh(0)),
            method=str(about or (repr(method) if is_dataclass(method) else getattr(method, "__qualname__", ""))),
        )

    def _work(
        self,
        name: str,
        size: int,
        group: Callable[[Sequence[int]], None],
        seconds: float | None,
        progress: bool,
        among: Sequence[int] | None = None,
        noted: Noted | None = None,
    ) -> int:
        """Call `group` for shadows without answers of this name that no other process works on, `size` at a time."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        started = last = time.monotonic()
        longest = 0.0
        missing = [shadow for shadow in (range(self.number) if among is None else among) if not self._path(shadow, name).exists()]
        for parts in track(_cut(missing, size), name, -(-len(missing) // size), enabled=progress):
            if seconds is not None and last - started + longest > seconds:
                break
            with ExitStack() as stack:
                free = [shadow for shadow in parts if stack.enter_context(try_lock(self._lock(shadow)))]
                if free := [shadow for shadow in free if not self._path(shadow, name).exists()]:
                    group(free)
                    if noted is not None and noted(len(self._done(name))) is False:
                        break
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return len(self._done(name))

    def _done(self, name: str) -> list[int]:
        return [shadow for shadow in range(self.number) if self._path(shadow, name).exists()]

    def _keep_answers(self, shadow: int, name: str, model: nn.Module) -> None:
        asked = Subset(self.data, self.rows.tolist()) if self.asked is None else self.asked
        answers = logits(model, asked, self.objective, measuring_size(model))
        save_tensors(self._path(shadow, name), {"logits": answers.logits, "labels": answers.targets}, {"kind": ANSWERS, "name": name})

    def _answers(self, shadow: int, name: str, floor: float | None) -> Tensor:
        tensors, _ = load_tensors(self._path(shadow, name), ANSWERS)
        if set(tensors) != {"logits", "labels"} or len(tensors["logits"]) != len(self.rows):
            raise InputError("folder", f"must hold the answers of the {len(self.rows)} candidates", os.fspath(self._path(shadow, name)))
        return confidence(tensors["logits"], tensors["labels"], floor)

    def _weights(self, shadow: int) -> dict[str, Tensor]:
        path = self._path(shadow, "weights")
        if not path.exists():
            raise MismatchError(f"{path} is gone: without its weights a shadow cannot forget; remove its answers to train it again")
        return load_tensors(path, WEIGHTS)[0]

    def _fresh(self, shadow: int) -> nn.Module:
        seed = self._tuning(shadow).seed
        with seeded(seed, torch.device("cpu")):
            return self.build(seed)

    def _tuning(self, shadow: int) -> Tuning:
        return replace(self.tuning, seed=self.tuning.seed + shadow)

    @cached_property
    def _remain(self) -> Tensor:
        remain = torch.ones(len(self.data), dtype=torch.bool)
        remain[self.rows] = False
        return remain.nonzero().flatten()

    def _training_data(self, shadow: int) -> Any:
        rows = torch.cat([self._remain, self.rows[self.members[shadow]]]).sort().values
        return Subset(resolved(self.data, "data"), rows.tolist())

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps([*self.plan.values()]).encode()).hexdigest()[:24]

    def _path(self, shadow: int, name: str) -> Path:
        return Path(self.folder) / f"{self._digest}-{shadow:04d}.{name}.safetensors"

    def _lock(self, shadow: int) -> Path:
        return Path(self.folder) / "locks" / f"{self._digest}-{shadow:04d}.lock"

    def _validation_for(self, method: Any) -> Any:
        return self.validation if getattr(method, "takes_validation", False) else None

    def _name(self, method: Any, about: str | None) -> str:
        """A short name of a method for files: its settings count."""
        if not callable(method) or isinstance(method, type):
            raise InputError("method", "must be a method with its settings, or a function of model, forget and remain", excerpt(method))
        text = about or (repr(method) if is_dataclass(method) else getattr(method, "__qualname__", ""))
        if not text or " at 0x" in text or text.endswith("<lambda>"):
            raise InputError("about", "must name what the method does: nothing else tells it from others in the folder", excerpt(text))
        if (validation := self._validation_for(method)) is not None:
            text += f", validation {data_digest(validation) or len(validation)}"
        return f"unlearned-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _cut(shadows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    yield from (shadows[start : start + size] for start in range(0, len(shadows), size))
