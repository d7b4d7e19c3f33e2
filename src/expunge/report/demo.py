"""The demonstration on paper: a table, a JSON file, a picture, and the models."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expunge import __version__
from expunge.experiments.demo import REFERENCE, TEXT, Accuracies, Row
from expunge.storage import files
from expunge.storage.folders import RESULT, signature
from expunge.vision.datasets.digits import CLASSES
from expunge.vision.zoo import save_network

FORGOTTEN = 0.01  # a forget accuracy up to this counts as forgotten
HEADINGS = f"{'remain':>6} {'forget':>7} {'score':>7}"


def table(before: Accuracies, rows: Sequence[Row]) -> str:
    """Accuracies on the test part in percent."""
    reference = next(row.seconds for row in rows if row.name == REFERENCE)
    lines = [
        f"{'':24} {'after masking alone':^22}   {'after training':^22}",
        f"{'method':24} {HEADINGS}   {HEADINGS}   {'epochs':>6} {'seconds':>7} {'speed-up':>8}",
    ]
    lines.append("-" * len(lines[1]))
    lines.append(f"{'before':24} {_numbers(before)}")
    for row in rows:
        tuned = row.tuned if row.epochs else None
        faster = f"{reference / row.seconds:.1f}x" if row.name != REFERENCE else "1x"
        lines.append(f"{row.name:24} {_numbers(row.masked)}   {_numbers(tuned)}   {row.epochs:>6} {row.seconds:>7.2f} {faster:>8}")
    return "\n".join(line.rstrip() for line in lines)


def notes(rows: Sequence[Row]) -> str:
    """What the table does not say by itself."""
    text = next(row for row in rows if row.name == TEXT)
    said = [
        "Percent on the test part; speed-up over retraining.",
        "λ and R of the second FisherMask were chosen on the validation part; its seconds include the choice.",
    ]
    if text.tuned.forget > FORGOTTEN:
        said.append(
            "FisherMask as the paper's text has it (λ = n_remain/n_forget, R = 0.02) fails here: "
            f"{100 * text.tuned.forget:.1f} % forget accuracy is left."
        )
    said.append("MaskClassifier is a control: one row of the classifier is gone, and everything the network knew is still in it.")
    return "\n".join(said)


def save(folder: Path, settings: dict[str, Any], before: Accuracies, model: nn.Module, rows: Sequence[Row]) -> Path:
    """tradeoff.png, one safetensors file per model, and last result.json, in a new folder."""
    models = {f"{_file_name(name)}.safetensors": saved for name, saved in [("before", model), *((row.name, row.model) for row in rows)]}
    for name, saved in models.items():
        save_network(folder / name, saved, "resnet8", CLASSES, channels=1)
    result = {
        **signature("demo", ["tradeoff.png", *models]),
        "settings": settings,
        "versions": {"expunge": __version__, "torch": torch.__version__},
        "before": _record(before),
        "rows": [
            {
                "name": row.name,
                "masked": _record(row.masked),
                "final": _record(row.tuned),
                "epochs": row.epochs,
                "seconds": row.seconds,
                "model": f"{_file_name(row.name)}.safetensors",
            }
            for row in rows
        ],
    }
    files.write_bytes(folder / "tradeoff.png", picture(before, rows))
    return files.write_json(folder / RESULT, result)


def picture(before: Accuracies, rows: Sequence[Row]) -> bytes:
    """Remain against forget accuracy: an open mark after masking, an arrow, a full mark at the end. The upper left is the aim."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.5), dpi=130, layout="constrained")
    axes = figure.add_subplot(xlabel="forget accuracy, % (test)", ylabel="remain accuracy, % (test)")
    axes.set_title("A network forgets a digit: up and to the left is better")
    axes.plot(100 * before.forget, 100 * before.remain, "k*", markersize=15, label="before")
    for index, row in enumerate(rows):
        colour, last = f"C{index}", (100 * row.tuned.forget, 100 * row.tuned.remain)
        if row.masked is not None and row.epochs:
            first = (100 * row.masked.forget, 100 * row.masked.remain)
            axes.plot(*first, "o", color=colour, markerfacecolor="none", markersize=9)
            axes.annotate("", last, first, arrowprops={"arrowstyle": "->", "color": colour, "alpha": 0.6})
        # Marks differ in form and size: several methods end on the same spot.
        axes.plot(*last, "osD^vP"[index % 6], color=colour, alpha=0.75, markersize=14 - 1.5 * index, linestyle="none", label=row.name)
    lowest = min([before.remain, *(each.remain for row in rows for each in (row.masked, row.tuned) if each is not None)])
    axes.set(xlim=(-4, 104), ylim=(min(90, 100 * lowest - 2), 101))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=9, frameon=False, title="open mark:\nafter masking alone", title_fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _numbers(found: Accuracies | None) -> str:
    if found is None:
        return f"{'-':>6} {'-':>7} {'-':>7}"
    return f"{100 * found.remain:>6.1f} {100 * found.forget:>7.1f} {100 * found.score:>7.1f}"


def _record(found: Accuracies | None) -> dict[str, float] | None:
    return None if found is None else {"remain": found.remain, "forget": found.forget, "unlearn_score": found.score}


def _file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower().replace("λ", "lambda")).strip("-")
