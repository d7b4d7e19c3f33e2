"""What `unlearn` returns: shown in a few lines, saved to a folder, loaded from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from expunge.editing.patches import Patch
from expunge.methods import Method
from expunge.runtime.display import counted, first_rows, html_table, shortened, text_table


@dataclass(frozen=True)
class Record:
    """The model after an epoch (0: after masking, before any training); accuracies are fractions."""

    epoch: int
    accuracies: Mapping[str, float]
    unlearn_score: float | None
    seconds: float  # of work so far; the time spent on measuring accuracies is left out


@dataclass(frozen=True)
class Outcome:
    """The new model, all that was changed in it, and how it went.

    `patch.revert(outcome.model)` gives the original's weights and buffers back, bit for bit, after every method. `patch` is None only where
    a method gave the model other parameters than it had. `edit` is what the method itself set before any training (masked weights, noise,
    a Newton step), None where it only trains.
    """

    model: nn.Module
    patch: Patch | None
    history: list[Record]
    seconds: float
    method: Method | str  # its repr where the outcome was loaded
    edit: Patch | None = None

    def __repr__(self) -> str:
        watched = ", ".join(f"{name} {' → '.join(accuracies)}" for name, *accuracies in self._rows()[1:])
        return f"Outcome({self._title()}, {watched or 'nothing watched'})"

    def __str__(self) -> str:
        return text_table(self._title(), self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._title(), self._rows())

    def _title(self) -> str:
        name = self.method.partition("(")[0] if isinstance(self.method, str) else type(self.method).__name__
        epochs = counted(self.history[-1].epoch if self.history else 0, "epoch")
        seconds = f"{self.seconds:.2f} s" if self.seconds < 100 else f"{self.seconds:,.0f} s"
        return f"{shortened(name)}: {epochs}, {seconds}, {self._changed()}"

    def _changed(self) -> str:
        if self.patch is None:
            return "other parameters than before"
        parameters = dict(self.model.named_parameters())
        number = sum(len(edit.indices) for name, edit in self.patch.edits.items() if name in parameters)
        return f"{number:,} of {counted(sum(parameter.numel() for parameter in parameters.values()), 'weight')} changed"

    def _rows(self) -> list[Sequence[str]]:
        """What was watched, at the first record and the last."""
        if not self.history or not self.history[0].accuracies:
            return []
        ends = [self.history[0], self.history[-1]] if len(self.history) > 1 else self.history
        head = ("accuracy", *(f"epoch {record.epoch}" for record in ends))
        rows = [(str(name), *(f"{100 * record.accuracies[name]:.1f} %" for record in ends)) for name in ends[0].accuracies]
        return first_rows([head, *rows])
