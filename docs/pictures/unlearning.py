"""The picture of docs/fisher-mask.md: `python docs/pictures/unlearning.py` (40 seconds). Accuracies are of the digits' validation part."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from expunge.methods import Finetune, FisherMask, RandomMask, Retrain
from expunge.runtime.modes import one_thread
from expunge.unlearning import unlearn
from expunge.vision.datasets.digits import digits
from expunge.vision.digits_network import network, recipe, trained
from expunge.vision.scenarios import category

RATIOS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12)
COLOURS = {"remain": "#33628f", "forget": "#c8402f"}
MASKS = {
    "FisherMask, the text": lambda ratio: FisherMask(ratio, tuning=None),
    "FisherMask, λ = 3, expected": lambda ratio: FisherMask(ratio, kind="expected", remain_weight=3, tuning=None),
    "RandomMask": lambda ratio: RandomMask(ratio, tuning=None),
}
LINES = ("o-", "s--", "^:")


def main() -> None:
    data = digits()
    model = trained(data.train, epochs=40)
    forget, remain = category(data.train, label=0)
    watch = dict(zip(("forget", "remain"), category(data.validation, label=0), strict=True))
    figure = Figure(figsize=(7.6, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for line, (title, method) in zip(LINES, MASKS.items(), strict=True):
        found = [unlearn(model, forget, remain, method(ratio), watch=watch).epochs[0].accuracies for ratio in RATIOS]
        for part, colour in COLOURS.items():
            left.plot(RATIOS, [100 * each[part] for each in found], line, color=colour, markersize=4, label=f"{title}: {part}")
    methods = {
        "Finetune": Finetune(recipe(5)),
        "RandomMask": RandomMask(tuning=recipe(5)),
        "FisherMask, the text": FisherMask(tuning=recipe(5)),
    }
    for line, (title, method) in zip(LINES, methods.items(), strict=True):
        history = unlearn(model, forget, remain, method, watch=watch).epochs
        for part, colour in COLOURS.items():
            right.plot([100 * record.accuracies[part] for record in history], line, color=colour, markersize=4, label=f"{title}: {part}")
    retrained = unlearn(model, forget, remain, Retrain(recipe(40), fresh=network), watch=watch).history[-1].accuracies
    for part, colour in COLOURS.items():
        right.axhline(100 * retrained[part], color=colour, alpha=0.3, linewidth=4, label=f"Retrain: {part}")
    left.set(title="after masking alone", xlabel="ratio", ylabel="accuracy, %")
    right.set(title="fine-tuning, R = 0.02", xlabel="epoch")
    for axes in (left, right):
        axes.title.set_fontsize(9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=6)
    path = Path(__file__).with_suffix(".svg")
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    with one_thread():
        main()
