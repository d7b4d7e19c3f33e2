"""What several methods do to a network that forgets a digit, epoch by epoch: one panel a method."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from expunge.methods import Method
from expunge.unlearning import unlearn
from expunge.vision.datasets.digits import digits
from expunge.vision.digits_network import trained
from expunge.vision.scenarios import category

COLOURS = {"remain": "C0", "forget": "C3"}


def draw(methods: Mapping[str, Method], path: Path) -> None:
    """Accuracies on the test part after every epoch, printed and drawn."""
    data = digits()
    model = trained(data.train, epochs=40)
    forget, remain = category(data.train, label=0)
    watch = dict(zip(("forget", "remain"), category(data.test, label=0), strict=True))
    figure = Figure(figsize=(2.6 * len(methods), 2.8), layout="constrained")
    panels = figure.subplots(1, len(methods), sharey=True)
    for axes, (title, method) in zip(panels, methods.items(), strict=True):
        history = unlearn(model, forget, remain, method, watch=watch).epochs
        for name, colour in COLOURS.items():
            accuracies = [100 * record.accuracies[name] for record in history]
            axes.plot(range(len(history)), accuracies, "o-", color=colour, markersize=3, label=name)
            print(f"{title:32} {name}", *(f"{accuracy:5.1f}" for accuracy in accuracies))
        axes.set(title=title, xlabel="epoch", ylim=(-4, 104))
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy, % (test)")
    panels[-1].legend(fontsize=8, loc="center right")
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
