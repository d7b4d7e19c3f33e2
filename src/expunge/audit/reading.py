"""Read data once with a network: one number per sample and measure, and the features and logits of a bounded sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from expunge.audit.features import Places, places_of, taking
from expunge.data.batches import Data, as_batches, device_of, to_device
from expunge.data.classes import check_classes
from expunge.data.fingerprints import Unreadable, fingerprints
from expunge.data.labels import as_labels
from expunge.data.objective import Batch, Objective
from expunge.errors import DivergedError, InputError, naming
from expunge.model.checks import check_batch
from expunge.runtime.modes import eager, in_mode, seeded, unchanged

SAMPLE = 4000  # samples of a set whose features and logits are kept


@dataclass(frozen=True, eq=False)
class Part:
    """A network's answers on one set, in the order of the data.

    `signals` are φ = log p_y − log(1 − p_y), in float64 from the logits. `rows` are the numbers of the samples whose `logits` and
    `features` are kept. `outputs` are the mean probabilities of the samples of each label, `counts` how many those are.
    """

    labels: Tensor
    predicted: Tensor
    losses: Tensor
    signals: Tensor
    outputs: Tensor
    counts: Tensor
    rows: Tensor
    logits: Tensor
    features: Mapping[str, Tensor]
    marks: Any = None  # fingerprints of the samples; None where they cannot be made

    @property
    def classes(self) -> int:
        return self.outputs.shape[1]

    @property
    def right(self) -> Tensor:
        return self.predicted == self.labels

    @property
    def sampled_labels(self) -> Tensor:
        return self.labels[self.rows]

    def of_labels(self, labels: Tensor) -> Tensor:
        """Which samples have one of the labels."""
        return torch.isin(self.labels, labels)


@dataclass(frozen=True, eq=False)
class Reading:
    """All that is read of one network, by set: "forget", "remain" and "test"."""

    parts: Mapping[str, Part]
    places: Places
    classifier: tuple[Tensor, Tensor] | None = None  # weight and bias of the last matrix

    def __getitem__(self, name: str) -> Part:
        return self.parts[name]


def read(
    model: nn.Module,
    sets: Mapping[str, Data],
    objective: Objective = Objective(),
    batch_size: int = 128,
    sample: int = SAMPLE,
    argument: str = "model",
    inside: bool = True,
) -> Reading:
    """Let a network answer on every set, in eval mode and in the order of the data. `inside=False` takes no features."""
    first = next(iter(as_batches(sets["forget"], "forget", batch_size)))
    places = places_of(model, first, objective) if inside else Places((), None)
    parts = {name: _read_part(model, data, name, places, objective, batch_size, sample, argument) for name, data in sets.items()}
    classifier = None
    if places.classifier is not None:
        layer: Any = model.get_submodule(places.classifier)
        weight = layer.weight.detach().cpu().float()
        bias = torch.zeros(len(weight)) if layer.bias is None else layer.bias.detach().cpu().float()
        classifier = weight, bias
    return Reading(parts, places, classifier)


def _read_part(
    model: nn.Module, data: Data, name: str, places: Places, objective: Objective, batch_size: int, sample: int, argument: str
) -> Part:
    home, gathered = device_of(model), _Gathered(sample)
    with (
        naming(name),
        seeded(0, home),
        in_mode(model, training=False),
        unchanged(model),
        torch.no_grad(),
        eager(),
        taking(model, places) as features,
    ):
        for batch in as_batches(data, name, batch_size):
            moved = to_device(batch, home)
            features.clear()
            logits, labels = objective.logits(model, moved), as_labels(objective.targets(moved))
            check_classes(objective, logits.shape, "an audit needs")
            if logits.dim() != 2 or labels.dim() != 1 or labels.dtype != torch.int64:
                rule = "must have one whole-number label per sample, and the network one row of logits"
                raise InputError(name, rule, f"labels {tuple(labels.shape)} of {labels.dtype}, logits {tuple(logits.shape)}")
            objective.check_batch(logits.shape, moved, same_batch=True)
            broken = int(logits.isnan().any(1).sum())
            if broken or (logits == torch.inf).any():
                check_batch(batch, name, objective)  # the data may be what is broken
                found = f"{broken} of {len(logits)} rows" if broken else "infinite"
                raise DivergedError(f"{argument}: its logits on {name} are no numbers ({found}): it diverged, nothing was measured")
            if bad := next((place for place, rows in features.items() if not torch.isfinite(rows).all()), None):
                raise DivergedError(
                    f"{argument}: its outputs at {bad} on {name} are not finite: the network diverged, nothing was measured"
                )
            gathered.add(batch, logits.cpu(), labels.cpu(), objective, {place: rows.cpu() for place, rows in features.items()})
    return gathered.part()


@dataclass
class _Gathered:
    """What a pass keeps. The sample is that of the smallest of one random number per sample: the same rows for every network."""

    limit: int
    columns: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in ("labels", "predicted", "losses", "signals")})
    outputs: Tensor | None = None
    counts: Tensor | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)
    marks: list[Any] | None = field(default_factory=list)
    seen: int = 0
    numbers: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def add(self, batch: Batch, logits: Tensor, labels: Tensor, objective: Objective, features: Mapping[str, Tensor]) -> None:
        wide = logits.double()
        logs = torch.log_softmax(wide, 1)
        own = logs.gather(1, labels[:, None]).squeeze(1)
        others = torch.logsumexp(logs.scatter(1, labels[:, None], -torch.inf), 1)
        news = {
            "labels": labels,
            "predicted": wide.argmax(1),
            "losses": objective.per_sample(wide, labels).double(),
            "signals": own - others,
        }
        for name, values in news.items():
            self.columns[name].append(values)
        if self.outputs is None or self.counts is None:
            self.outputs, self.counts = torch.zeros(logits.shape[1], logits.shape[1], dtype=torch.float64), torch.zeros(logits.shape[1])
        self.outputs.index_add_(0, labels, logs.exp())
        self.counts += torch.bincount(labels, minlength=len(self.counts))
        self._mark(batch)
        order = torch.rand(len(labels), generator=self.numbers, dtype=torch.float64)
        rows = torch.arange(self.seen, self.seen + len(labels))
        self.seen += len(labels)
        together = {"order": order, "rows": rows, "logits": logits.float()} | {f"at {place}": values for place, values in features.items()}
        if self.kept:
            together = {name: torch.cat([self.kept[name], values]) for name, values in together.items()}
        if len(together["order"]) > self.limit:
            chosen = together["order"].topk(self.limit, largest=False).indices.sort().values
            together = {name: values[chosen] for name, values in together.items()}
        self.kept = together

    def _mark(self, batch: Batch) -> None:
        if self.marks is not None:
            try:
                self.marks.append(fingerprints(batch))
            except Unreadable:
                self.marks = None

    def part(self) -> Part:
        assert self.outputs is not None and self.counts is not None  # data are never empty
        columns = {name: torch.cat(values) for name, values in self.columns.items()}
        features = {name.removeprefix("at "): values for name, values in self.kept.items() if name.startswith("at ")}
        return Part(
            **columns,
            outputs=self.outputs / self.counts.clamp(min=1)[:, None],
            counts=self.counts,
            rows=self.kept["rows"],
            logits=self.kept["logits"],
            features=features,
            marks=None if self.marks is None else numpy.concatenate(self.marks),
        )


def check_alike(first: Reading, other: Reading, argument: str) -> None:
    """Require the same samples in the same order, and the same classes."""
    for name, part in first.parts.items():
        second = other.parts.get(name)
        if second is None:
            continue
        if part.classes != second.classes:
            raise InputError(argument, f"must have as many classes as the original network, {part.classes}", second.classes)
        same = torch.equal(part.labels, second.labels)
        if not same or (part.marks is not None and second.marks is not None and not numpy.array_equal(part.marks, second.marks)):
            rule = "must give the same samples in the same order whenever they are read: pass a dataset without random transforms"
            raise InputError(name, rule, "other samples at the second reading")


def same_answers(first: Reading, second: Reading) -> bool:
    """Whether two networks have the same losses, to the bit: by their weights a wrapper could not be told from what it wraps."""
    return all(torch.equal(part.losses, second.parts[name].losses) for name, part in first.parts.items())
