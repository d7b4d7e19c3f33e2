"""Up the loss of the forget data: equal to a plain loop, and noticed when it runs away."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

from expunge.errors import DivergedError, InputError
from expunge.methods import SCRUB, Finetune, GradientAscent, NegGradPlus
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, properties, small
from tests.methods.small import FORGET, REMAIN, SIZE, TWO_EPOCHS

every_network = pytest.mark.parametrize("name", small.NETWORKS)


def loss_on(data, rows, sign=1.0):
    images, labels = data[rows]
    return lambda model: sign * cross_entropy(model(images), labels)


@every_network
def test_gradient_ascent_is_the_plain_loop(name):
    model, forget = small.network(name), small.forget()
    tuning = Tuning(Constant(0.02, 2), batch_size=3, weight_decay=0.01, seed=3)
    outcome = unlearn(model, forget, method=GradientAscent(tuning))
    batches = [rows for epoch in range(2) for rows in reference.cut(FORGET, 3, seed=3 + epoch)]
    assert [len(rows) for rows in batches] == [3, 3, 1] * 2  # a lone sample is enough for BatchNorm where there are many positions
    expected = reference.descended(model, [loss_on(forget, rows, -1) for rows in batches], rate=0.02, decay=0.01)
    small.assert_close(outcome.model, expected, model)
    assert outcome.edit is None


def test_gradient_ascent_raises_the_loss_on_the_forget_data():
    model, (images, labels) = small.network("no BatchNorm"), small.forget().tensors
    changed = unlearn(model, small.forget(), method=GradientAscent(TWO_EPOCHS)).model
    assert cross_entropy(changed(images), labels) > cross_entropy(model(images), labels)


def test_an_ascent_that_runs_away_is_noticed():
    model = cases.model()
    with properties.assert_untouched(model), pytest.raises(DivergedError, match="no longer finite: epoch"):
        unlearn(model, cases.forget(), method=GradientAscent(Tuning(Constant(1e20, 4), batch_size=4)))


@every_network
def test_neg_grad_plus_is_the_plain_loop(name):
    model, forget, remain = small.network(name), small.forget(), small.remain()
    outcome = unlearn(model, forget, remain, NegGradPlus(0.7, TWO_EPOCHS))
    # One forget batch a pass, so the passes follow each other: seeds 3, 4, 5 in the first epoch, 6, 7, 8 in the second.
    against = [reference.cut(FORGET, SIZE, seed=3 + turn)[0] for turn in range(6)]
    steps = [rows for epoch in range(2) for rows in reference.cut(REMAIN, SIZE, seed=3 + epoch)]

    def loss(kept, lost):
        return lambda model: loss_on(remain, kept, 0.7)(model) + loss_on(forget, lost, -0.3)(model)

    losses = [loss(kept, lost) for kept, lost in zip(steps, against, strict=True)]
    small.assert_close(outcome.model, reference.descended(model, losses, 0.02, decay=0.01), model)


def test_with_all_weight_on_the_remain_data_it_is_fine_tuning():
    model = small.network("no BatchNorm")
    found, tuned = (
        unlearn(model, small.forget(), small.remain(), method).model for method in (NegGradPlus(1.0, TWO_EPOCHS), Finetune(TWO_EPOCHS))
    )
    small.assert_close(found, tuned, model)


@pytest.mark.parametrize("method", [GradientAscent(TWO_EPOCHS), NegGradPlus(0.7, TWO_EPOCHS)], ids=repr)
def test_batches_may_be_mappings(method):
    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small.network("no BatchNorm")

        def forward(self, pixels):
            return {"logits": self.inner(pixels)}

    parts = [list(DataLoader(data, batch_size=SIZE)) for data in (small.forget(), small.remain())]
    named = [[{"pixels": images, "labels": labels} for images, labels in part] for part in parts]
    plain = unlearn(small.network("no BatchNorm"), *parts, method).model
    properties.assert_same_weights(plain.state_dict(), unlearn(Named(), *named, method).model.inner.state_dict())


@pytest.mark.parametrize("weight", [-0.1, 1.1, float("nan")])
def test_the_weight_is_a_fraction(weight):
    with pytest.raises(InputError, match=r"^remain_weight: must be in \[0, 1\]"):
        NegGradPlus(weight)


def lone_scrub(tuning: Tuning) -> SCRUB:
    return SCRUB(forget_batch_size=4, tuning=tuning)


LONE = {"gradient-ascent": GradientAscent, "neg-grad-plus": lambda tuning: NegGradPlus(0.9, tuning), "scrub": lone_scrub}


@pytest.mark.parametrize("name", LONE)
def test_a_lone_forget_sample_is_skipped_or_refused_where_batchnorm_would_refuse_it(name):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    tuning, forget = Tuning(Constant(0.01, 2), batch_size=4), cases.forget()
    properties.assert_finite(unlearn(model, Subset(forget, range(5)), cases.remain(), LONE[name](tuning)).model)
    with properties.assert_untouched(model), pytest.raises(InputError, match="forget: BatchNorm needs two samples"):
        unlearn(model, Subset(forget, [0]), cases.remain(), LONE[name](tuning))
    fixed = dataclasses.replace(tuning, eval_mode=True)
    properties.assert_finite(unlearn(model, Subset(forget, [0]), cases.remain(), LONE[name](fixed)).model)
