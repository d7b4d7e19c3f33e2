"""A comparison on paper: a table, what it does not say by itself, a JSON file, a picture, and the models."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from expunge import __version__
from expunge.experiments.comparison import CHOSEN, REFERENCE, RELEARNING, Refused, Row
from expunge.experiments.demo import Accuracies
from expunge.storage import files
from expunge.storage.folders import RESULT, signature
from expunge.vision.datasets.digits import CLASSES
from expunge.vision.scenarios import Scenario
from expunge.vision.zoo import save_network

EXPLAINED = (
    "Percent on the test part. masked: what the method sets at once, before any training. trained: the epoch chosen on validation data",
    "(0: masked alone; retrain: the last). Δ: fluctuation of the score over the epochs. re-learn: epochs on all data until the forget",
    "loss is the original's again. same, KL: classes shared with the retrained network, divergence from it. seconds: up to the epoch.",
)


def in_order(found: Sequence[Row | Refused]) -> list[Row]:
    """The network before, the methods as asked for, the retrained one last."""
    return sorted((each for each in found if isinstance(each, Row)), key=lambda row: row.name == REFERENCE)


def table(found: Sequence[Row | Refused], terminal: bool = False) -> str:
    """A line a network; bold and dim on a terminal."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    rows = in_order(found)
    attacked = any(row.measures.attack is not None for row in rows)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    drawn.add_column("method", no_wrap=True)
    for heading in _headings(attacked):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(row.name, *_cells(row, attacked), style="dim" if row.name in ("before", REFERENCE) else None)
    console = Console(file=io.StringIO(), width=1000, force_terminal=terminal)
    # As wide as it must be: on a narrow terminal lines wrap, and no number is cut.
    console.width = Measurement.get(console, console.options, drawn).maximum
    with console.capture() as capture:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def _headings(attacked: bool) -> list[str]:
    masked = [f"masked\n{name}" for name in ("remain", "forget", "score")]
    trained = [f"trained\n{name}" for name in ("remain", "forget", "score", "epoch")]
    attack = ["attack\nsuccess"] if attacked else []
    return [*masked, *trained, "score\nΔ", "\nre-learn", *attack, "same\nremain", "same\nforget", "KL\nremain", "KL\nforget", "\nseconds"]


def _cells(row: Row, attacked: bool) -> list[str]:
    told = row.measures
    trained = row.epochs or row.masked is None  # the row before has its accuracies there too
    relearned = f">{told.relearned.limit}" if told.relearned.epochs is None else str(told.relearned.epochs)
    return [
        *_numbers(row.masked),
        *_numbers(told.accuracies if trained else None),
        f"{row.epoch}/{row.epochs}" if row.epochs else "",
        _percent(None if row.stability is None else row.stability.unlearn_score),
        relearned,
        *([_percent(told.attack)] if attacked else []),
        *(_percent(told.agreement[name]) for name in ("remain", "forget")),
        *(f"{told.divergence[name]:.2f}" for name in ("remain", "forget")),
        f"{row.seconds:.2f}" if row.seconds else "",
    ]


def _numbers(found: Accuracies | None) -> list[str]:
    return ["", "", ""] if found is None else [_percent(value) for value in (found.remain, found.forget, found.score)]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def notes(scenario: Scenario, found: Sequence[Row | Refused]) -> str:
    """What the columns are, what to expect of the reference, and who is missing and why."""
    lines = [*EXPLAINED, f"{REFERENCE}: {scenario.reference}"]
    if any(each.name == CHOSEN for each in found):
        lines.append(f"{CHOSEN}: λ and R were chosen on validation data, and its seconds include the choice.")
    lines += [f"not here: {each.name}: {each.reason}" for each in found if isinstance(each, Refused)]
    return "\n".join(lines)


def save(
    folder: Path,
    settings: dict[str, Any],
    scenario: Scenario,
    found: Sequence[Row | Refused],
    finished: bool,
    models: bool = False,
) -> Path:
    """tradeoff.png, with `models` one safetensors file per network, and last result.json, in a new folder; the folder."""
    rows = in_order(found)
    networks = {re.sub(r"[^\w.-]+", "-", f"{row.name}.safetensors"): row.model for row in rows} if models else {}  # a path has slashes
    for name, model in networks.items():
        save_network(folder / name, model, "resnet8", CLASSES, channels=1)
    result = {
        **signature("compare", ["tradeoff.png", *networks]),
        "settings": settings,
        "finished": finished,
        "scenario": {
            "name": scenario.name,
            "reference": scenario.reference,
            "forget": len(scenario.forget),
            "remain": 0 if scenario.remain is None else len(scenario.remain),
        },
        "versions": {"expunge": __version__, "torch": torch.__version__},
        "relearning": repr(RELEARNING),
        "rows": [_record(row) for row in rows],
        "refused": {each.name: each.reason for each in found if isinstance(each, Refused)},
    }
    files.write_bytes(folder / "tradeoff.png", picture(scenario, rows))
    files.write_json(folder / RESULT, result)
    return folder


def _record(row: Row) -> dict[str, Any]:
    told = row.measures
    return {
        "name": row.name,
        "setting": row.setting,
        "masked": None if row.masked is None else _accuracies(row.masked),
        "epoch": row.epoch,
        "epochs": row.epochs,
        "final": _accuracies(told.accuracies),
        "stability": None if row.stability is None else asdict(row.stability),
        "attack_success": told.attack,
        "agreement": dict(told.agreement),
        "divergence": dict(told.divergence),
        "relearn": {"epochs": told.relearned.epochs, "limit": told.relearned.limit, "losses": told.relearned.losses},
        "seconds": row.seconds,
    }


def _accuracies(found: Accuracies) -> dict[str, float]:
    return {"remain": found.remain, "forget": found.forget, "unlearn_score": found.score}


def picture(scenario: Scenario, rows: Sequence[Row]) -> bytes:
    """Left remain against forget accuracy, right a line a method, since many end on one spot; open marks are masks alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2 + 0.24 * len(rows)), dpi=130, layout="constrained")
    plane, lines = figure.subplots(1, 2)
    plane.set(xlabel="forget accuracy, % (test)", ylabel="remain accuracy, % (test)", title=f"{scenario.name}: up and to the left")
    lines.set(xlabel="accuracy, % (test)", title="blue: remain; red: forget; open: masked alone", xlim=(-14, 103))
    lines.set_yticks(range(len(rows)), [row.name for row in rows])
    lines.invert_yaxis()
    for place, row in enumerate(rows):
        last, first = row.measures.accuracies, row.masked if row.epochs else None
        special = {"before": "*", REFERENCE: "X"}.get(row.name)
        colour, mark = "black" if special else f"C{place % 10}", special or "osD^vP<"[place % 7]
        for axes, *spot in ((plane, 100 * last.forget, 100 * last.remain), (lines, -9, place)):
            axes.plot(*spot, mark, color=colour, alpha=0.75, markersize=12 if axes is plane and special else 8)
        if first is not None:
            start, end = ((100 * each.forget, 100 * each.remain) for each in (first, last))
            plane.plot(*start, mark, color=colour, markerfacecolor="none", markersize=5)
            plane.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": colour, "alpha": 0.4})
        for part, tone, line in (("forget", "C3", place + 0.12), ("remain", "C0", place - 0.12)):
            lines.plot(100 * getattr(last, part), line, "o", color=tone, markersize=5)
            if first is not None:
                lines.plot(100 * getattr(first, part), line, "o", color=tone, markerfacecolor="none", markersize=8)
    plane.set_xlim(-4, 104)
    for axes in (plane, lines):
        axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
