"""Draw docs/pictures/forgetting.svg, evidence against cost: `python docs/pictures/forgetting.py results/paper`, a second or two.

From the results of `expunge bench run forget` where a class is forgotten, one panel per model. `--out` names another file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from expunge.experiments.results import Result, load
from expunge.report.evidence import cost
from expunge.report.rows import Row, Setting, settings

MARKERS = "osDv^<>PXdp1234"
OURS = {"ResetAndDistil": "#c8402f", "FisherMask": "#33628f", "Finetune": "#b8862b"}  # the rest is grey
OTHER = "#8a8f98"
AXIS = "cost: epochs, % of a retraining's"


def pictured(results: Sequence[Result]) -> list[Setting]:
    """The settings where re-learning was measured and there is a method to show, one per model."""
    measured = [asdict(result) for result in results if result.evidence is not None and len(result.evidence.relearn_unseen) > 1]
    return [setting for setting in settings(measured) if setting.methods]


def points(row: Row) -> list[tuple[float, float]]:
    """Percent of a retraining, and percent of the class that is back after one epoch of re-learning, for every seed."""
    return [(100 * share, 100 * result["evidence"]["relearn_unseen"][1]) for result in row.results if (share := cost(result)) is not None]


def colour(row: Row) -> str:
    return next((shade for name, shade in OURS.items() if row.label.startswith(name)), OTHER)


def draw(axes: Axes, setting: Setting, markers: Mapping[str, str]) -> None:
    """A mark for every method and seed; the dotted level is the retrained network's mean."""
    spots = {row: points(row) for row in setting.rows if not row.original}
    least = min((x for row in spots for x, _ in spots[row] if x > 0), default=1.0)
    nothing = least / 2  # where what costs nothing is drawn: a logarithmic axis has no zero
    free = any(x == 0 for row in spots for x, _ in spots[row])
    for row, places in spots.items():
        across, up = [x or nothing for x, _ in places], [y for _, y in places]
        label = f"{row.label}: {fmean(up):.0f} %"
        if row.retrained:
            axes.axhline(fmean(up), color="black", linestyle=":", linewidth=1)
            axes.plot(across, up, "*", color="black", markersize=9, label=label)
        else:
            axes.plot(across, up, markers[row.label], color=colour(row), markersize=6, markerfacecolor="none", label=label)
    axes.set(xscale="log", ylim=(-4, 104), xlabel=AXIS, title=setting.title)
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) if least * 0.99 <= tick]
    axes.set_xticks([*[nothing] * free, *ticks], [*["0"] * free, *(f"{tick:g}" for tick in ticks)])
    axes.minorticks_off()
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def main(arguments: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description="Draw evidence against cost.")
    parser.add_argument("folder", help="of results, the one that holds cells/")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    options = parser.parse_args(arguments)
    shown = pictured(load(options.folder))
    if not shown:
        parser.error(f"{options.folder} has no results with a re-learn curve: expunge bench run forget")
    labels = dict.fromkeys(row.label for setting in shown for row in setting.methods)
    markers = {label: MARKERS[place % len(MARKERS)] for place, label in enumerate(labels)}
    figure = Figure(figsize=(7.2, 3.4 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, setting in zip(panels, shown, strict=True):
        draw(axes, setting, markers)
        axes.set_ylabel("class back after one\nepoch of re-learning, %")
    with matplotlib.rc_context({"svg.hashsalt": "forgetting", "svg.fonttype": "none"}):  # the same file every time, and a small one
        figure.savefig(options.out, metadata={"Date": None})
    return options.out


if __name__ == "__main__":
    print(main())
