"""Draw docs/pictures/measures.svg and print its figures: a digit is forgotten, measured over epochs and by re-learning.

Under a minute on one core: `python docs/pictures/measures.py`.
"""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from expunge import FisherMask, MaskClassifier, Retrain, metrics, unlearn
from expunge.runtime.modes import one_thread
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.vision import digits_network
from expunge.vision.datasets.digits import digits
from expunge.vision.scenarios import category

EPOCHS = 20
RELEARNING = metrics.Relearning(Tuning(Constant(0.01, 25), batch_size=32))


def main() -> None:
    data = digits()
    scenario = category(data.train, 0, data.test, data.validation)
    model = digits_network.trained(data.train, EPOCHS)
    methods = {
        "FisherMask": FisherMask(ratio=0.05, remain_weight=3, tuning=digits_network.recipe(5)),
        "MaskClassifier": MaskClassifier(0),
        "Retrain": Retrain(digits_network.recipe(EPOCHS), fresh=digits_network.network),
    }
    found = {name: unlearn(model, *scenario, method, watch=scenario.watch) for name, method in methods.items()}
    retrained = {name: metrics.logits(found["Retrain"].model, part) for name, part in scenario.tests.items()}
    relearned = {}
    for name, outcome in found.items():
        relearned[name] = metrics.relearn_time(outcome.model, model, scenario.forget, scenario.train, RELEARNING)
        said = {part: metrics.logits(outcome.model, tested) for part, tested in scenario.tests.items()}
        agreed = {part: metrics.agreement(said[part], retrained[part]) for part in said}
        apart = {part: metrics.divergence(said[part], retrained[part]) for part in said}
        numbers = [metrics.accuracy_of(said["remain"]), metrics.accuracy_of(said["forget"]), *agreed.values(), *apart.values()]
        print(f"{name:16}", *(f"{number:.3f}" for number in numbers), f"re-learn time {relearned[name]}")
    history = found["FisherMask"].epochs
    print(metrics.best_epoch(history), metrics.stability(history), sep="\n")
    draw(history, relearned)


def draw(history: list, relearned: dict) -> None:
    matplotlib.rcParams |= {"svg.hashsalt": "expunge", "svg.fonttype": "none"}  # the same file every time, and a small one
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = [record.epoch for record in history]
    for name, style in (("validation ", "o-"), ("", "s--")):
        scores = [metrics.unlearn_score(record.accuracies[f"{name}remain"], record.accuracies[f"{name}forget"]) for record in history]
        left.plot(epochs, scores, style, markersize=4, label=name.strip() or "test")
    best = metrics.best_epoch(history)
    left.plot(best.epoch, best.score, "r*", markersize=14, label="chosen on validation")
    left.set(xlabel="epoch of fine-tuning (0: masked)", ylabel="unlearn score", title="FisherMask: the best epoch")
    for name, each in relearned.items():
        right.plot(range(len(each.losses)), each.losses, "o-", markersize=4, label=f"{name}: {each}")
    right.axhline(next(iter(relearned.values())).goal, color="k", linewidth=1, linestyle=":", label="the original's loss")
    right.set(xlabel="epoch on all data", ylabel="loss on the forgotten digit", yscale="log", title="re-learn time")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    with one_thread():
        main()
