"""Hold the result of an audit: show it in a few lines, write it as JSON and as a section of a model card."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expunge.audit.findings import Judgement, Measure, Pictures, ShadowsUsed
from expunge.audit.intervals import Interval
from expunge.audit.measures import (
    ATTACK,
    ATTACK_REMAIN,
    DIVERGENCE,
    FORGET,
    NEIGHBOURS,
    READ_BACK,
    RELEARNED,
    REMAIN,
    RMIA,
    UNSEEN,
    Kind,
)
from expunge.audit.policy import Policy
from expunge.audit.settings import Settings
from expunge.audit.shadow_measures import ordered
from expunge.errors import InputError
from expunge.runtime.display import counted, html_table, text_table
from expunge.storage.codec import Count, decode, encode
from expunge.storage.documents import excerpt, read_json
from expunge.storage.files import write_bytes, write_json
from expunge.storage.folders import RESULT, reserved, signature

COMMAND = "audit"
CARD = "model-card.md"
WIDTH = 80
SHORT = (
    *(REMAIN, FORGET, UNSEEN, ATTACK, ATTACK_REMAIN, RMIA),
    *(READ_BACK, RELEARNED, f"{UNSEEN}, 4 bits", f"{FORGET}, 4 bits", NEIGHBOURS, DIVERGENCE),
)
LIMITS = (
    "It is about these networks, these data and these attacks; others may find more.",
    "Whether copies, caches, backups or other networks hold the data is not looked at.",
    "Probabilities are of the samples drawn and of the seeds of training, as far as seeds were given.",
)


@dataclass(frozen=True)
class Audit:
    """What can be said about a network that was to forget. `schema` is the version of the JSON: 2 may have shadows, 1 is read too."""

    verdict: Judgement
    kind: Kind
    labels: tuple[int, ...]
    sizes: Mapping[str, Count]
    retrained: Count
    measures: tuple[Measure, ...]
    policy: Policy
    settings: Settings
    weights: Mapping[str, str]
    data: Mapping[str, str | None]
    pictures: Pictures
    done: str = ""
    shadows: ShadowsUsed | None = None
    schema: Literal[1, 2] = 2

    def __getitem__(self, name: str) -> Measure:
        """A measure by its name."""
        for measure in self.measures:
            if measure.name == name:
                return measure
        raise InputError("name", f"must be one of {', '.join(measure.name for measure in self.measures)}", name)

    def asked(self) -> str:
        """What was to be forgotten, in words."""
        samples = counted(self.sizes["forget"], "sample")
        if self.kind == "samples":
            return samples
        classes = "class" if len(self.labels) == 1 else "classes"
        return f"{classes} {', '.join(map(str, self.labels[:10]))}{' …' if self.labels[10:] else ''} ({samples})"

    def by_shadows(self) -> str:
        """How many shadows there were, in words."""
        used = self.shadows
        if used is None:
            return "no shadows"
        return f"by {used.number} shadows, on {used.forgotten} forgotten and {used.never_seen} never seen samples"

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write `result.json` and `model-card.md`, whole or not at all; an earlier audit there is replaced."""

        def write(new: Path) -> None:
            write_bytes(new / CARD, self.markdown().encode())
            write_json(new / RESULT, signature(COMMAND, [CARD]) | {"audit": encode(self)})

        with reserved("folder", folder, COMMAND) as place:
            return place.save(write)

    def markdown(self) -> str:
        """A section for a model card."""
        lines = [
            "## Audit of forgetting",
            "",
            f"Asked to forget: {self.asked()}. Verdict: **{self.verdict.word}**.",
            "",
            f"{capital(self.verdict.sentence)}.",
            "",
            *([f"What was done: {self.done}.", ""] if self.done else []),
            *(f"- {reason.words}" for reason in self.verdict.reasons),
            *(f"- missing: {missing}" for missing in self.verdict.missing),
            "",
            *_markdown_table(self._rows(SHORT)),
            *([f"{capital(self.by_shadows())}:", "", *_markdown_table(self._shadow_rows())] if self.shadows else []),
            "What this does not say:",
            "",
            *(f"- {limit}" for limit in LIMITS),
            "",
            f"Weights after: `{self.weights['after']}`.",
            "",
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Audit({self.verdict.word}: {self.asked()}, {counted(self.retrained, 'retrained network')})"

    def __str__(self) -> str:
        title = f"audit: {self.asked()}, {counted(self.retrained, 'retrained network') if self.retrained else 'no retrained network'}"
        lines = [*_wrapped(title), text_table("", self._rows(SHORT)).lstrip("\n")]
        if self.shadows:
            lines += [*_wrapped(self.by_shadows()), text_table("", self._shadow_rows()).lstrip("\n")]
        lines += _wrapped(self.verdict.sentence)
        lines += [line for missing in self.verdict.missing for line in _wrapped(f"missing: {missing}", "- ")]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        tables = html_table(f"audit: {self.asked()}; {self.verdict.sentence}", self._rows(SHORT))
        return tables + html_table(self.by_shadows(), self._shadow_rows()) if self.shadows else tables

    def _rows(self, names: Sequence[str]) -> list[Sequence[str]]:
        known = {measure.name: measure for measure in self.measures}
        head = ["", "before", "after", *(["retrained"] if self.retrained else [])]
        rows: list[Sequence[str]] = [head]
        for name in names:
            if (measure := known.get(name)) is not None:
                others = measure.floor or measure.retrained
                cells = [shown(measure.before), shown(measure.after), *([shown_mean(others)] if self.retrained else [])]
                rows.append([name, *cells])
        return rows

    def _shadow_rows(self) -> list[Sequence[str]]:
        rows: list[Sequence[str]] = [["", "before", "after", *(["retrained"] if self.retrained else []), "never trained"]]
        for measure in ordered(self.measures):
            cells = [shown(measure.before), shown(measure.after), *([shown_mean(measure.retrained)] if self.retrained else [])]
            rows.append([measure.name, *cells, shown(measure.shadows)])
        return rows


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:], ""]


def load_audit(folder: str | os.PathLike[str]) -> Audit:
    """The audit that `Audit.save` wrote."""
    try:
        return decode(Audit, read_json(Path(folder) / RESULT)["audit"], "the audit")
    except (ValueError, KeyError, TypeError, FileNotFoundError, NotADirectoryError) as error:
        raise InputError("folder", f"must hold the result.json of an audit ({excerpt(error)})", os.fspath(folder)) from error


def shown(interval: Interval | None) -> str:
    """0.978 ± half the interval, which is short enough for a table."""
    return "" if interval is None else f"{interval.value:.3f} ± {max(interval.high - interval.value, interval.value - interval.low):.2f}"


def shown_mean(intervals: Sequence[Interval]) -> str:
    """The mean of several networks and how far they lie apart; of one, its interval."""
    if len(intervals) < 2:
        return shown(intervals[0]) if intervals else ""
    values = [interval.value for interval in intervals]
    return f"{sum(values) / len(values):.3f} ({min(values):.2f}–{max(values):.2f})"


def _wrapped(text: str, start: str = "") -> list[str]:
    return textwrap.wrap(f"{start}{text}", WIDTH, subsequent_indent="  ")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
