"""List the numbers the paper prints, in percent (epochs in epochs), each with its ± : table, block of models, section, row.

"Unlearning with Fisher Masking", tables main_results (1), finetune_stability (2), poison (3), outlier_deletion (4), only_forget (5). Its
figures print no numbers. The caption of table 1 calls the ± a variance; its sizes are those of standard deviations.
"""

from __future__ import annotations

from typing import NamedTuple

RESNET20 = "cifar10/resnet20"
GOOGLENET = "cifar100/googlenet"
AVERAGE = "average"  # over 16 models × 3 seeds: four datasets, four networks
ORIGINAL = "original"  # the row of w*


class Number(NamedTuple):
    value: float
    sd: float


class Key(NamedTuple):
    """`view`: "masked" (without fine-tuning), "best" (with), "stability"; `section`: a ratio or a share, "" where there is none."""

    experiment: str
    view: str
    block: str
    section: str
    row: str


Values = tuple[float, ...]
SCORES = ("remain", "forget", "unlearn_score")
EPOCHS = (*SCORES, "epochs")

# value, sd, value, sd, ... in the order of the measures
TABLE1: dict[tuple[str, str], dict[str, Values]] = {
    (RESNET20, "masked"): {
        "finetune": (85.0, 0.5, 87.6, 0.4, 45.3, 0.3),  # w* itself
        "random-mask": (79.7, 4.4, 83.6, 5.8, 43.4, 1.1),
        "tf-idf-mask": (82.6, 3.2, 69.1, 21.3, 49.5, 4.8),
        "fisher-noise": (78.1, 5.0, 0.1, 0.1, 78.0, 5.0),
        "activation-mask": (81.7, 1.3, 10.0, 5.3, 74.5, 3.6),
        "fisher-mask": (86.2, 0.4, 0.0, 0.1, 86.1, 0.3),
    },
    (RESNET20, "best"): {
        "retrain": (85.5, 0.4, 0.0, 0.0, 85.5, 0.4, 133.7, 16.1),
        "finetune": (85.9, 0.3, 63.5, 0.6, 52.5, 0.1, 4.0, 0.0),
        "random-mask": (85.6, 0.3, 5.0, 2.7, 81.6, 1.9, 4.0, 0.0),
        "tf-idf-mask": (83.2, 3.6, 53.8, 10.6, 54.2, 1.5, 2.7, 1.9),
        "fisher-noise": (85.5, 0.2, 0.0, 0.0, 85.5, 0.2, 4.0, 0.0),
        "activation-mask": (85.6, 0.5, 0.0, 0.0, 85.6, 0.5, 4.0, 0.0),
        "fisher-mask": (86.1, 0.4, 0.0, 0.0, 86.1, 0.4, 1.0, 0.8),
    },
    (GOOGLENET, "masked"): {
        "finetune": (74.0, 0.1, 90.7, 0.5, 38.8, 0.1),
        "random-mask": (64.3, 1.0, 90.7, 5.4, 33.8, 1.5),
        "tf-idf-mask": (1.0, 0.0, 0.0, 0.0, 1.0, 0.0),
        "fisher-noise": (20.5, 3.4, 0.0, 0.0, 20.5, 3.4),
        "activation-mask": (64.4, 1.0, 0.0, 0.0, 64.4, 1.0),
        "fisher-mask": (73.8, 0.1, 0.0, 0.0, 73.8, 0.1),
    },
    (GOOGLENET, "best"): {
        "retrain": (73.7, 0.2, 0.0, 0.0, 73.7, 0.2, 134.7, 8.7),
        "finetune": (73.9, 0.2, 75.7, 3.8, 42.1, 1.0, 3.7, 0.5),
        "random-mask": (72.7, 0.5, 34.0, 29.5, 56.7, 10.8, 3.0, 0.0),
        "tf-idf-mask": (72.1, 0.9, 23.3, 25.3, 60.8, 11.5, 3.0, 0.8),
        "fisher-noise": (72.7, 0.4, 0.0, 0.0, 72.7, 0.4, 4.0, 0.0),
        "activation-mask": (73.6, 0.3, 0.0, 0.0, 73.6, 0.3, 4.0, 0.0),
        "fisher-mask": (74.0, 0.3, 0.0, 0.0, 74.0, 0.3, 2.0, 1.4),
    },
    (AVERAGE, "masked"): {
        "finetune": (74.2, 0.5, 84.7, 1.2, 40.3, 0.4),
        "random-mask": (68.5, 3.4, 84.1, 7.2, 37.0, 2.2),
        "tf-idf-mask": (42.2, 5.4, 38.7, 11.3, 25.3, 2.4),
        "fisher-noise": (37.9, 5.1, 0.2, 0.1, 37.8, 5.1),
        "activation-mask": (65.6, 3.0, 4.4, 2.6, 62.6, 4.2),
        "fisher-mask": (67.4, 1.5, 1.4, 0.9, 66.4, 2.1),
    },
    (AVERAGE, "best"): {
        "retrain": (76.1, 0.2, 0.0, 0.0, 76.1, 0.2, 91.7, 6.1),
        "finetune": (74.8, 1.2, 54.1, 11.0, 50.4, 4.0, 3.3, 0.6),
        "random-mask": (75.8, 0.3, 27.2, 7.7, 63.1, 3.4, 3.5, 0.4),
        "tf-idf-mask": (75.6, 0.5, 37.8, 8.2, 58.5, 3.7, 3.5, 0.5),
        "fisher-noise": (75.9, 0.2, 0.0, 0.0, 75.9, 0.2, 3.4, 0.3),
        "activation-mask": (75.3, 0.4, 0.8, 0.7, 74.8, 0.6, 3.2, 0.3),
        "fisher-mask": (76.3, 0.2, 0.0, 0.0, 76.3, 0.3, 2.1, 0.9),
    },
}

TABLE2: dict[str, Values] = {
    "finetune": (1.2, 0.4, 11.0, 4.2, 3.3, 1.7),
    "random-mask": (2.6, 0.9, 16.5, 3.7, 7.3, 1.3),
    "tf-idf-mask": (8.9, 1.6, 17.7, 3.7, 9.2, 1.6),
    "fisher-noise": (9.8, 1.3, 0.0, 0.0, 9.9, 1.3),
    "activation-mask": (3.5, 1.2, 2.3, 0.8, 3.8, 1.2),
    "fisher-mask": (2.6, 0.6, 0.4, 0.2, 2.8, 0.6),
}

TABLE3: dict[str, dict[str, Values]] = {  # by mask ratio; Finetune masks nothing
    "": {"finetune": (82.9, 3.4, 88.2, 16.7, 44.3, 2.3)},
    "ratio 0.15": {
        "random-mask": (81.2, 2.0, 42.7, 24.1, 58.4, 8.6),
        "activation-mask": (78.5, 4.1, 11.2, 3.3, 70.8, 5.9),
        "fisher-mask": (84.9, 0.1, 11.0, 15.6, 77.9, 10.0),
    },
    "ratio 0.20": {
        "random-mask": (77.0, 1.6, 0.0, 0.0, 77.0, 1.6),
        "activation-mask": (84.3, 0.3, 8.0, 4.8, 78.2, 3.6),
        "fisher-mask": (82.3, 2.8, 2.2, 3.1, 80.7, 5.0),
    },
    "ratio 0.25": {
        "random-mask": (80.8, 4.9, 7.8, 5.7, 75.2, 7.0),
        "activation-mask": (82.0, 3.3, 39.8, 38.2, 62.4, 13.7),
        "fisher-mask": (79.9, 1.2, 0.5, 0.7, 79.5, 0.9),
    },
}

TABLE4: dict[str, dict[str, Values]] = {  # test accuracy by share of wrong labels
    "10 %": {
        "finetune": (83.04, 0.36),
        "random-mask": (83.22, 0.47),
        "activation-mask": (83.06, 0.31),
        "fisher-mask": (83.25, 0.22),
    },
    "30 %": {
        "finetune": (80.05, 1.03),
        "random-mask": (80.16, 0.68),
        "activation-mask": (80.16, 0.71),
        "fisher-mask": (80.36, 0.71),
    },
    "50 %": {
        "finetune": (76.91, 0.08),
        "random-mask": (77.23, 0.49),
        "activation-mask": (77.18, 0.17),
        "fisher-mask": (77.45, 0.40),
    },
}
# Its caption: "the model without noisy training data". It stands for no row of ours: at 50 % the network trained on the correct half has
# seen half of the data, while this number is near that of the whole data without wrong labels.
TABLE4_CLEAN = Number(84.43, 0.20)

TABLE5: dict[str, dict[str, Values]] = {
    "": {ORIGINAL: (85.0, 0.5, 87.6, 0.4, 45.3, 0.3)},
    "no remain data": {
        "random-mask": (79.7, 4.4, 83.6, 5.8, 43.4, 1.1),
        "tf-idf-mask": (73.2, 16.2, 55.5, 38.1, 47.4, 1.5),
        "activation-mask": (42.0, 21.3, 1.0, 0.7, 41.5, 21.0),
        "fisher-mask": (45.2, 8.8, 0.0, 0.0, 45.2, 8.8),
    },
    "0.1 % remain data": {
        "finetune": (79.8, 7.1, 75.4, 17.6, 45.5, 0.6),
        "random-mask": (80.0, 2.8, 79.3, 8.1, 44.7, 0.5),
        "tf-idf-mask": (64.0, 3.0, 7.2, 4.3, 59.7, 1.3),
        "fisher-noise": (84.4, 0.5, 0.1, 0.0, 84.3, 0.4),
        "activation-mask": (75.2, 3.3, 8.0, 3.8, 69.7, 2.7),
        "fisher-mask": (86.1, 0.4, 0.0, 0.0, 86.1, 0.4),
    },
}


def _numbers(values: Values) -> dict[str, Number]:
    pairs = zip(values[::2], values[1::2], strict=True)
    return {measure: Number(*pair) for measure, pair in zip(EPOCHS, pairs, strict=False)}


PRINTED: dict[Key, dict[str, Number]] = {
    **{Key("table1", view, block, "", row): _numbers(values) for (block, view), rows in TABLE1.items() for row, values in rows.items()},
    **{Key("table2", "stability", AVERAGE, "", row): _numbers(values) for row, values in TABLE2.items()},
    **{Key("table3", "best", RESNET20, part, row): _numbers(values) for part, rows in TABLE3.items() for row, values in rows.items()},
    **{Key("table4", "best", RESNET20, part, row): _numbers(values) for part, rows in TABLE4.items() for row, values in rows.items()},
    **{Key("table5", "best", RESNET20, part, row): _numbers(values) for part, rows in TABLE5.items() for row, values in rows.items()},
}


def printed(experiment: str, view: str, block: str, section: str, row: str) -> dict[str, Number]:
    """What the paper prints there by measure; nothing where it prints nothing."""
    return PRINTED.get(Key(experiment, view, block, section, row), {})
