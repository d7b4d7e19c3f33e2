"""Up the loss of the forget data: equal to a plain loop, and noticed when it runs away."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from expunge.errors import DivergedError, InputError
from expunge.methods import Finetune, GradientAscent, NegGradPlus
from expunge.tuning import Constant, Tuning
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
    # With BatchNorm the lone last sample of an epoch is left out, as in every training here.
    kept = [rows for rows in batches if len(rows) > 1 or name == "no BatchNorm"]
    assert len(kept) == (6 if name == "no BatchNorm" else 4)
    expected = reference.descended(model, [loss_on(forget, rows, -1) for rows in kept], rate=0.02, decay=0.01)
    small.assert_close(outcome.model, expected, model)
    assert outcome.patch is None


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
