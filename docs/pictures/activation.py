"""The picture and the table of docs/activation.md, from the digits.

Run `python docs/pictures/activation.py` for the picture; `--table SEEDS` prints the table instead, over so many seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import torch
from torch import nn

from expunge import ActivationMask, Finetune, RandomMask, TfIdfMask, Tuning, unlearn
from expunge.editing import masks, scores
from expunge.methods import Method
from expunge.model import activations, channels, heads
from expunge.vision.datasets.digits import digits
from expunge.vision.digits_network import recipe, trained
from expunge.vision.scenarios import category

LABEL, RATIO, EPOCHS = 0, 0.05, 20
METHODS: dict[str, Callable[[Tuning], Method]] = {
    "ActivationMask()": lambda tuning: ActivationMask(RATIO, tuning=tuning),
    "ActivationMask.as_released()": lambda tuning: ActivationMask.as_released(RATIO, tuning),
    "TfIdfMask()": lambda tuning: TfIdfMask(RATIO, tuning=tuning),
    "TfIdfMask.as_released()": lambda tuning: TfIdfMask.as_released(RATIO, tuning),
    "RandomMask.as_released()": lambda tuning: RandomMask.as_released(RATIO, tuning, tuning.seed),
    "Finetune()": Finetune,
}


def channel_scores(model: nn.Module) -> dict[str, torch.Tensor]:
    """A_f − A_r of every channel, by layer."""
    forget, remain = category(digits().train, LABEL)
    batch = forget[:128]
    layers = channels.find(model, batch, head=heads.find(model, batch))
    return scores.activation_difference(*(activations.measure(model, [held[:]], layers) for held in (forget, remain)))


def draw(score: dict[str, torch.Tensor], path: Path) -> None:
    """One column a layer, one mark a channel; those that would be masked stand out."""
    import matplotlib
    from matplotlib.figure import Figure

    chosen = masks.select(score, RATIO)
    with matplotlib.rc_context({"svg.hashsalt": "activation", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for column, (name, values) in enumerate(score.items()):
            places = column + torch.linspace(-0.3, 0.3, len(values))
            part = chosen[name]
            axes.plot(places[~part], values[~part], "o", color="#8c96a0", markersize=3, label="kept" if column == 0 else None)
            axes.plot(places[part], values[part], "D", color="#c8402f", markersize=5, label=f"masked, R = {RATIO}" if column == 0 else None)
        axes.axhline(0, color="#444444", linewidth=0.6)
        axes.set_xticks(range(len(score)), list(score), rotation=20)
        axes.set_ylabel(f"A_f − A_r, digit {LABEL} against the others")
        axes.legend(frameon=False, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


def table(seeds: int) -> str:
    """Accuracies on the test part, after masking and after five epochs of fine-tuning, means over the seeds."""
    data = digits()
    scenario = category(data.train, LABEL, data.test)
    models = [trained(data.train, EPOCHS, seed) for seed in range(seeds)]
    lines = ["| method | remain, masked | forget, masked | remain, tuned | forget, tuned |", "|---|---|---|---|---|"]
    for name, build in METHODS.items():
        found = []
        for seed, model in enumerate(models):
            history = unlearn(model, scenario.forget, scenario.remain, build(recipe(5, seed)), watch=scenario.tests).epochs
            found.append([100 * history[row].accuracies[part] for row in (0, -1) for part in ("remain", "forget")])
        cells = [f"{mean(column):.1f} ({min(column):.0f}-{max(column):.0f})" for column in zip(*found, strict=True)]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--table"]:
        print(table(int(sys.argv[2])))
    else:
        draw(channel_scores(trained(digits().train, EPOCHS)), Path(__file__).with_suffix(".svg"))
