"""Draw docs/pictures/scenarios.svg: what the scenarios do to the digits. A second or two: `python docs/pictures/scenarios.py`."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from expunge.vision.datasets.digits import digits
from expunge.vision.scenarios import category, limited, mislabelled, poisoned, subset

COLUMNS = 8
RED, GREEN = "#c0392b", "#2d7d46"

data = digits()
WHITE = float(data.train.tensors[0].max())
ROWS = {
    "category(train, 0): every zero": category(data.train, 0),
    "poisoned(train, 100, trigger=2): a white square, the label 0": poisoned(data.train, 100, trigger=2, value=WHITE),
    "mislabelled(train, 0.1): a wrong label": mislabelled(data.train, 0.1),
    "subset(train, fraction=0.02): any samples": subset(data.train, fraction=0.02),
    "limited(category(train, 0), count=8): all there is to keep": limited(category(data.train, 0), count=COLUMNS),
}


def main() -> None:
    matplotlib.rcParams |= {"svg.hashsalt": "expunge", "svg.fonttype": "none"}  # the same file every time, and a small one
    figure = Figure(figsize=(2 * COLUMNS * 0.62, 1.05 * len(ROWS)), layout="constrained")
    parts = figure.subfigures(len(ROWS), 1)
    for part, (title, scenario) in zip(parts, ROWS.items(), strict=True):
        part.suptitle(title, x=0.01, ha="left", fontsize=9)
        axes = part.subplots(1, 2 * COLUMNS)
        for half, (samples, colour) in enumerate(((scenario.forget, RED), (scenario.remain, GREEN))):
            for column in range(COLUMNS):
                image, label = samples[column * len(samples) // COLUMNS]
                axis = axes[half * COLUMNS + column]
                axis.imshow(image[0], cmap="gray", interpolation="none", vmin=float(data.train.tensors[0].min()), vmax=WHITE)
                axis.set(xticks=[], yticks=[])
                axis.set_xlabel(f"{int(label)}", fontsize=8, color=colour, labelpad=1)
                for side in axis.spines.values():
                    side.set(color=colour, linewidth=1.5)
    figure.supxlabel("red: forget; green: remain; below each image its label", fontsize=8)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
