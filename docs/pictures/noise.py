"""The picture of docs/noise.md: `python docs/pictures/noise.py` (about 40 seconds). Accuracies are of the validation part of the digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean

from torch import Tensor, nn

from expunge import fisher, heads
from expunge.editing.patches import Patch
from expunge.methods.noise import FisherNoise, released_variances, standard_normal, text_variances
from expunge.metrics import accuracy
from expunge.runtime.modes import one_thread
from expunge.unlearning import unlearn
from expunge.vision.datasets.digits import digits
from expunge.vision.digits_network import recipe, trained
from expunge.vision.scenarios import category

LABEL, DRAWS = 0, 5
SCALES = {"the text: (λσ²)^¼ F^-¼": [10**power for power in (-13, -12.5, -12, -11.5, -11, -10.5, -10, -9.5, -9)]}
SCALES["Golatkar's rule: (α/F)^½, row redrawn"] = [10**power for power in (-9, -8.5, -8, -7.5, -7, -6.5, -6, -5.5, -5)]
TUNED = (1e-12, 1e-11, 1e-10)

Curve = dict[str, list[list[float]]]  # part of the data -> one list of draws a scale


def measured(
    model: nn.Module,
    parts: dict[str, object],
    scales: list[float],
    variances: Callable[[float], dict[str, Tensor]],
    zeroed: dict[str, Tensor],
) -> Curve:
    """Accuracies right after the noise, for several draws of it."""
    found: Curve = {name: [[] for _ in scales] for name in parts}
    for place, scale in enumerate(scales):
        for seed in range(DRAWS):
            held = variances(scale)
            noise = standard_normal(held, seed)
            weights = {
                name: value.detach().masked_fill(zeroed[name], 0) if name in zeroed else value for name, value in model.named_parameters()
            }
            patch = Patch.setting(model, {name: weights[name] + held[name].sqrt() * noise[name] for name in held})
            patch.apply(model)
            for name, data in parts.items():
                found[name][place].append(100 * accuracy(model, data))
            patch.revert(model)
    return found


def draw(curves: dict[str, Curve], tuned: Curve, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    colours = {"remain": "#33628f", "forget": "#c8402f"}
    with matplotlib.rc_context({"svg.hashsalt": "noise", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        for axes, (title, curve) in zip(figure.subplots(1, 2, sharey=True), curves.items(), strict=True):
            for part, colour in colours.items():
                middle = [mean(values) for values in curve[part]]
                axes.plot(SCALES[title], middle, color=colour, label=part)
                axes.fill_between(SCALES[title], [min(v) for v in curve[part]], [max(v) for v in curve[part]], color=colour, alpha=0.15)
                if "text" in title:
                    marks = [value for (value,) in tuned[part]]
                    axes.plot(TUNED, marks, "o", color=colour, markerfacecolor="white", label=f"{part}, then 5 epochs")
            axes.set_xscale("log")
            axes.set_xlabel("λσ²" if "text" in title else "α")
            axes.set_title(title, fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8, loc="center right" if "text" in title else "center left")
        figure.axes[0].set_ylabel("accuracy, %")
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    data = digits()
    model = trained(data.train, epochs=40)
    forget, remain = category(data.train, LABEL)
    parts = dict(zip(("forget", "remain"), category(data.validation, LABEL), strict=True))
    information = fisher.diagonal(model, remain, kind="expected").mean()
    head = heads.find(model, forget[:2])
    rows = heads.class_rows(model, head, LABEL)
    text, released = SCALES
    curves = {
        text: measured(model, parts, SCALES[text], lambda scale: text_variances(information, scale), {}),
        released: measured(model, parts, SCALES[released], lambda scale: released_variances(information, scale, head, rows), rows),
    }
    tuned: Curve = {name: [] for name in parts}
    for scale in TUNED:
        last = unlearn(model, forget, remain, FisherNoise(scale, tuning=recipe(5)), watch=parts).history[-1]
        for name in parts:
            tuned[name].append([100 * last.accuracies[name]])
    for title, curve in curves.items():
        for place, scale in enumerate(SCALES[title]):
            print(title, f"{scale:.1e}", {part: f"{mean(values[place]):.1f}" for part, values in curve.items()})
    print("tuned", TUNED, tuned)
    draw(curves, tuned, Path(__file__).with_suffix(".svg"))


if __name__ == "__main__":
    with one_thread():
        main()
