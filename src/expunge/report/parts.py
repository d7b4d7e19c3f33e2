"""Map experiments to the parts of the page that show them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Experiment:
    """The title and question of an experiment, and the parts of the page that answer it; without parts, all that have data."""

    title: str
    text: str
    parts: tuple[str, ...] = ()
    digits: int = 1


PARTS = {  # by name, with the text where there are no data for it
    "accuracies": "accuracies",
    "end": "accuracies at the last epoch",
    "tradeoff": "the trade-off",
    "curves": "accuracy by epoch",
    "nearness": "the distance to the retrained network",
    "stability": "stability",
    "relearning": "re-learn time",
    "classes": "accuracy by class",
    "destinations": "where the forget samples go",
    "shares": "masked shares",
    "ratios": "accuracy by ratio",
    "known": "what is still known",
    "against cost": "evidence against cost",
    "relearned": "accuracy while re-learning",
    "relearn losses": "the loss while re-learning",
}
AFTERWARDS = {"afterwards": "accuracies after the last epoch"}  # as "end", with the cost: for experiments that name it
MEASURED_IF_ASKED = ("known", "against cost", "relearned", "relearn losses")  # so they are never said to be missing
EXPERIMENTS = {
    "table1": Experiment(
        "Table 1: a category is removed",
        "Accuracies on test data, forget: of the removed category, remain: of the others.",
        ("accuracies", "end", "tradeoff", "curves", "nearness", "classes", "destinations", "shares"),
    ),
    "table2": Experiment("Table 2: stability", "How much the accuracies move while fine-tuning.", ("stability",)),
    "table3": Experiment(
        "Table 3: poisoned samples are removed",
        "Remain: the test data; forget: the poisoned training samples themselves.",
        ("accuracies", "end", "tradeoff", "curves", "nearness", "shares"),
    ),
    "table4": Experiment(
        "Table 4: wrongly labelled samples are removed",
        "Remain: the test data, which is what the paper prints; forget: the wrongly labelled training samples.",
        ("accuracies", "end", "curves", "nearness"),
        digits=2,
    ),
    "table5": Experiment(
        "Table 5: little remain data, or none",
        "The methods with all, some and none of the remain data at hand.",
        ("accuracies", "end", "tradeoff", "curves", "nearness"),
    ),
    "fig-influence": Experiment(
        "Figure 1: fine-tuning and influence", "The removed category's accuracy while unlearning.", ("curves", "accuracies", "end")
    ),
    "fig-relearn": Experiment(
        "Re-learn time",
        "How long until the forgotten is known again: a retrained network sets the measure.",
        ("relearning", "accuracies", "end"),
    ),
    "fig-schedule": Experiment(
        "Learning rates of the fine-tuning", "The training's schedule replayed, against constant rates.", ("curves", "accuracies", "end")
    ),
    "fig-ratio": Experiment(
        "Mask ratios", "What masking more of the weights brings, and what it costs.", ("ratios", "curves", "accuracies", "end")
    ),
    "settings": Experiment(
        "What decides for FisherMask",
        "Not in the paper: one change at a time of what its text leaves open, or its released program does otherwise.",
        ("accuracies", "end", "tradeoff", "shares"),
    ),
    "forget": Experiment(
        "Forget as retraining does",
        "Not in the paper: what methods give, what they still know and what they cost, beside the retrained network.",
        ("afterwards", "known", "against cost", "relearned", "relearn losses", "curves"),
    ),
}
OTHER = Experiment("Other results", "Results that belong to no experiment of the paper.")
