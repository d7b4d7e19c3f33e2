"""Draws dampening.svg: `python docs/pictures/dampening.py`, about 30 s."""

from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

from expunge import fisher
from expunge.methods import SSD
from expunge.unlearning import unlearn
from expunge.vision.datasets.digits import digits
from expunge.vision.digits_network import trained
from expunge.vision.scenarios import category

THRESHOLDS = (1.5, 2, 3, 4, 5, 6, 7, 8, 9, 9.5, 10, 12)
SHOWN = 5.0

if __name__ == "__main__":
    data = digits()
    model = trained(data.train, epochs=40)
    forget, remain = category(data.train, label=0)
    watch = dict(zip(("forget", "remain"), category(data.test, label=0), strict=True))
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    weights, curve = figure.subplots(1, 2)

    few, many = fisher.diagonal(model, forget), fisher.diagonal(model, remain)
    together = few + many
    most = together.count / few.count
    before, after = (torch.cat([mean.flatten() for mean in sums.mean().values()]) for sums in (together, few))
    alive = (before > 0) & (after > 0)
    before, after = before[alive], after[alive]
    dampened = after > SHOWN * before
    for chosen, colour, label in ((~dampened, "0.6", "left alone"), (dampened, "C3", f"dampened at α = {SHOWN:g}")):
        weights.plot(
            before[chosen], after[chosen], ".", color=colour, markersize=1.5, rasterized=True, label=f"{label}: {int(chosen.sum())}"
        )
    ends = torch.tensor([before.min(), before.max()])
    weights.plot(ends, most * ends, "k:", linewidth=1, label=f"n / n_forget = {most:.1f}, the most there is")
    weights.set(xscale="log", yscale="log", xlabel="Fisher information, all data", ylabel="Fisher information, forget data")
    weights.legend(fontsize=7, markerscale=6, loc="lower right")

    found = [unlearn(model, forget, remain, SSD(threshold), watch=watch).history[-1].accuracies for threshold in THRESHOLDS]
    for name, colour in (("remain", "C0"), ("forget", "C3")):
        accuracies = [100 * each[name] for each in found]
        curve.plot(THRESHOLDS, accuracies, "o-", color=colour, markersize=4, label=name)
        print(name, *(f"α={threshold:g}: {accuracy:.1f}" for threshold, accuracy in zip(THRESHOLDS, accuracies, strict=True)))
    curve.axvline(most, color="k", linestyle=":", linewidth=1)
    curve.set(xlabel="threshold α (λ = 1)", ylabel="accuracy, % (test)", ylim=(-4, 104))
    curve.grid(alpha=0.3)
    curve.legend(fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": "dampening", "svg.fonttype": "none"}):
        figure.savefig(Path(__file__).with_suffix(".svg"), dpi=150, metadata={"Date": None})
