"""The picture of docs/influence.md: `python docs/pictures/influence.py` (about 50 seconds). Accuracies are of the validation part."""

from __future__ import annotations

from pathlib import Path

from expunge import Finetune, FisherMask, Influence, unlearn
from expunge.curvature.solvers import ConjugateGradients, LiSSA
from expunge.editing.patches import Patch
from expunge.metrics import accuracy
from expunge.runtime.modes import one_thread
from expunge.vision.datasets.digits import digits
from expunge.vision.digits_network import recipe, trained
from expunge.vision.scenarios import category

LABEL, EPOCHS = 0, 5
MULTIPLES = [10**power for power in (-2, -1, 0, 0.5, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5)]
SOLVERS = {"Gauss-Newton, CG": ConjugateGradients(), "Hessian, LiSSA": LiSSA()}
COLOURS = ["#33628f", "#c8402f", "#7a9a3a", "#8a5aa8"]


def main() -> None:
    data = digits()
    model = trained(data.train, epochs=40)
    forget, remain = category(data.train, LABEL)
    parts = dict(zip(("forget", "remain"), category(data.validation, LABEL), strict=True))
    by_multiple: dict[str, dict[str, list[float]]] = {}
    for title, solver in SOLVERS.items():
        stepped = unlearn(model, forget, remain, Influence("sum", solver=solver), watch={}).model
        weights = dict(model.named_parameters())
        step = {name: (value - weights[name]).detach() for name, value in stepped.named_parameters()}
        by_multiple[title] = {name: [] for name in parts}
        for multiple in MULTIPLES:
            patch = Patch.setting(model, {name: weights[name] + multiple * part for name, part in step.items()})
            patch.apply(model)
            for name, held in parts.items():
                by_multiple[title][name].append(100 * accuracy(model, held))
            patch.revert(model)
        print(title, by_multiple[title])
    tuning = recipe(EPOCHS)
    methods = {
        "Finetune": Finetune(tuning),
        "Influence": Influence("sum", tuning=tuning),
        "Influence, strength 20": Influence("sum", strength=20, tuning=tuning),
        "FisherMask, λ = 3": FisherMask(remain_weight=3, tuning=tuning),
    }
    by_epoch = {}
    for title, method in methods.items():
        history = unlearn(model, forget, remain, method, watch=parts).epochs
        by_epoch[title] = [100 * record.accuracies["forget"] for record in history]
        print(title, by_epoch[title], "remain", [round(100 * record.accuracies["remain"], 1) for record in history])
    draw(by_multiple, by_epoch, 1 / len(forget), Path(__file__).with_suffix(".svg"))


def draw(by_multiple: dict[str, dict[str, list[float]]], by_epoch: dict[str, list[float]], text: float, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "influence", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for colour, (title, curves) in zip(COLOURS, by_multiple.items(), strict=False):
            left.plot(MULTIPLES, curves["forget"], color=colour, label=f"forget ({title})")
            left.plot(MULTIPLES, curves["remain"], "--", color=colour, label=f"remain ({title})")
        for place, name in ((text, "text"), (1, "sum")):
            left.axvline(place, color="#8c96a0", linewidth=0.8)
            left.annotate(name, (place, 50), xytext=(3, 20), textcoords="offset points", color="#5c6670")
        left.set_xscale("log")
        left.set_xlabel("multiple of the step for all of D_f")
        left.set_ylabel("accuracy, %")
        left.legend(frameon=False, fontsize=7, loc="lower left")
        for colour, style, (title, values) in zip(COLOURS, ("o-", "o-", "s-", "d--"), by_epoch.items(), strict=True):
            right.plot(range(len(values)), values, style, color=colour, markersize=3.5, label=title)
        right.set_xlabel("epochs of fine-tuning")
        right.set_title("forget accuracy", fontsize=9)
        right.legend(frameon=False, fontsize=8)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    with one_thread():
        main()
