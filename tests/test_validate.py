"""Wrong settings are named where they are given, before any work."""

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset

from expunge import (
    ASSD,
    LFSSD,
    SCRUB,
    SSD,
    ActivationMask,
    BadTeacher,
    Constant,
    Finetune,
    FisherMask,
    FisherNoise,
    GradientAscent,
    Influence,
    InputError,
    JiT,
    MaskClassifier,
    MuMis,
    NegGradPlus,
    NewtonNoise,
    Potion,
    RandomLabels,
    RandomMask,
    Retrain,
    SalUn,
    Steps,
    TfIdfMask,
    Tuning,
    unlearn,
)
from expunge.data.batches import as_batches
from tests.methods import cases

SETTINGS = [
    *[(Tuning, "batch_size", value) for value in (0, -1, 1.5, "8", None, True)],
    *[(Tuning, "momentum", value) for value in (-1, "a", None, float("nan"), float("inf"))],
    *[(Tuning, "weight_decay", value) for value in (-1, "a", None)],
    *[(Tuning, "seed", value) for value in (1.5, "a", None)],
    *[(Tuning, "schedule", value) for value in (0.1, None, Steps)],
    (Tuning, "optimizer", "adam"),
    (Tuning, "precision", "half"),
    *[
        (method, "tuning", None)
        for method in (Finetune, GradientAscent, MuMis, JiT, NegGradPlus, RandomLabels, SalUn, SCRUB, BadTeacher, Retrain)
    ],
    *[(method, "tuning", 0.1) for method in (FisherMask, RandomMask, ActivationMask, TfIdfMask, MaskClassifier)],
    *[(method, "tuning", 0.1) for method in (FisherNoise, NewtonNoise, Influence, SSD, ASSD, LFSSD, Potion, Retrain)],
    *[(method, "ratio", value) for method in (FisherMask, RandomMask, ActivationMask, TfIdfMask) for value in ("0.1", None, 1, -0.1)],
    *[(method, "kind", value) for method in (FisherMask, FisherNoise, NewtonNoise, SSD) for value in ("fast", None, [])],
    *[(method, "scope", "all") for method in (FisherMask, RandomMask, ActivationMask, TfIdfMask)],
    *[(method, key, "row") for method in (FisherMask, RandomMask) for key in ("granularity", "which")],
    *[(FisherMask, "remain_weight", value) for value in ("a", float("inf"))],
    *[(method, "seed", "a") for method in (RandomMask, TfIdfMask, FisherNoise, NewtonNoise)],
    *[(method, "scale", value) for method in (FisherNoise, NewtonNoise) for value in ("a", None, -1, float("inf"))],
    *[(SCRUB, key, value) for key in ("obey_weight", "task_weight") for value in (-0.1, "a")],
    *[(SCRUB, key, value) for key in ("max_epochs", "forget_batch_size") for value in (-1, 1.5, None)],
    *[(method, "temperature", value) for method in (SCRUB, BadTeacher) for value in (0, "a", float("inf"))],
    *[(TfIdfMask, "batches", value) for value in (0, 1.5)],
    *[(method, key, value) for method in (SSD, LFSSD) for key in ("threshold", "dampening") for value in (-1, "a", None)],
    *[(Potion, "goal", value) for value in (-0.1, 1, 1.5, float("nan"), "a", None)],
    *[(Potion, "growth", value) for value in (1, 0.5, float("inf"), float("nan"), "a", None)],
    *[(Potion, "steps", value) for value in (0, 1.5, "a", None)],
    *[(Influence, "strength", value) for value in ("a", -1)],
    (NegGradPlus, "remain_weight", "a"),
    (SalUn, "salient", None),
]


@pytest.mark.parametrize("kind, argument, value", SETTINGS)
def test_a_wrong_setting_is_named(kind, argument, value):
    with pytest.raises(InputError, match=f"^{argument}: .*; found "):
        kind(**{argument: value})


def test_numbers_of_numpy_are_numbers():
    assert FisherMask(numpy.float64(0.1)).ratio == 0.1
    assert Tuning(Constant(0.1, 1), batch_size=numpy.int64(4), seed=-3).batch_size == 4
    assert FisherMask(0).ratio == 0 and NegGradPlus(1).remain_weight == 1 and SSD(threshold=float("inf"))


@pytest.mark.parametrize(
    "argument, value",
    [
        *[("batch_size", value) for value in (0, -1, 1.5, None)],
        *[("watch", value) for value in ([], cases.dataset(), "test")],
        *[("objective", value) for value in (None, nn.CrossEntropyLoss())],
    ],
)
def test_a_wrong_argument_of_unlearn_is_named(argument, value):
    with pytest.raises(InputError, match=f"^{argument}: .*; found "):
        unlearn(cases.model(), cases.forget(), cases.remain(), FisherMask(tuning=None), **{argument: value})


def test_a_subset_of_rows_that_are_not_there_is_refused():
    bad = Subset(cases.dataset(), [3, 48])
    rule = "a Subset's indices must be rows of its dataset of 48; found 48"
    for forget in (bad, DataLoader(bad), Subset(bad, [0]), ConcatDataset([bad, cases.forget()])):
        with pytest.raises(InputError, match=f"^forget: {rule}"):
            unlearn(cases.model(), forget, cases.remain())
    with pytest.raises(InputError, match=f"^remain: {rule}"):
        unlearn(cases.model(), cases.forget(), bad)
    with pytest.raises(InputError, match=f"^forget: {rule}"):
        unlearn(cases.model(), bad, method=FisherMask(tuning=None))
    with pytest.raises(InputError, match="must be rows of its dataset of 2; found -3"):
        as_batches(Subset([(torch.zeros(2), 1), (torch.zeros(2), 0)], [-3]))
