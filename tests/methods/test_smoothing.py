"""JiT: equal to a plain loop in both readings, lost networks noticed, no labels needed, inputs of every form."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from expunge.data.objective import Objective
from expunge.errors import DivergedError, InputError, ModelError
from expunge.methods import JiT
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, properties, small
from tests.methods.small import FORGET
from tests.methods.test_sensitivity import LAYERS, Two, Words, sentences

every_network = pytest.mark.parametrize("name", small.NETWORKS)
TEXT = Tuning(Constant(1e-3, 2), batch_size=3, momentum=0.0, weight_decay=0.0, seed=3, eval_mode=True)


def plain_loop(model, images, tuning, noise, copies, released=False):
    """Algorithm 1 on batches; as released with z(x + ξ) held fixed, clipped, and gradients that are never cleared."""
    model = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(tuning.seed)
    for epoch in range(tuning.schedule.epochs):
        for rows in reference.cut(FORGET, tuning.batch_size, seed=tuning.seed + epoch):
            x, loss = images[rows], 0.0
            for _ in range(copies):
                noisy = x + noise * torch.randn(x.shape, generator=generator).to(x)
                noisy = noisy.clamp(x.min(), x.max()) if released else noisy
                for one, other in zip(x, noisy, strict=True):
                    target = model(other[None])
                    difference = model(one[None]) - (target.detach() if released else target)
                    loss = loss + difference.norm() / (one - other).norm() / copies
            if not released:
                model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= tuning.schedule.rate(0) * parameter.grad
    return model


@every_network
def test_it_is_the_plain_loop(name):
    model, forget = small.network(name), small.forget()
    outcome = unlearn(model, forget, method=JiT(0.3, 3, tuning=TEXT))
    small.assert_close(outcome.model, plain_loop(model, forget.tensors[0], TEXT, 0.3, 3), model)
    assert outcome.edit is None


@every_network
def test_as_released_is_the_plain_loop_of_the_program(name):
    """In eval mode, where samples can be taken one by one."""
    model, forget = small.network(name), small.forget()
    tuning = Tuning(Constant(1e-3, 2), batch_size=3, momentum=1.0, weight_decay=0.0, seed=3, eval_mode=True)
    found = unlearn(model, forget, method=JiT.as_released(0.3, 3, tuning)).model
    small.assert_close(found, plain_loop(model, forget.tensors[0], tuning, 0.3, 3, released=True), model)


def test_readings():
    released = JiT.as_released()
    assert (released.both_sides, released.clip, released.tuning.momentum, released.tuning.eval_mode) == (False, True, 1.0, False)
    assert (JiT().both_sides, JiT().clip, JiT().tuning.momentum, JiT().tuning.eval_mode) == (True, False, 0.0, True)
    assert JiT().tuning.schedule.epochs == released.tuning.schedule.epochs == 1


def test_a_linear_map_is_made_flatter():
    model = nn.Linear(4, 3).double()
    changed = unlearn(model, (torch.randn(9, 4).double(), torch.arange(9) % 3), method=JiT(tuning=TEXT)).model
    assert changed.weight.norm() < model.weight.norm() and torch.equal(changed.bias, model.bias)


def test_images_that_clipping_leaves_alone_do_no_harm():
    """An image of one value has no room for clipped noise: ‖ξ‖ = 0."""
    model = cases.model()
    blank = TensorDataset(torch.ones(4, 1, 4, 4), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ModelError, match="^model: JiT needs outputs that depend on the inputs; noise on the forget data changes nothing"):
        unlearn(model, blank, method=JiT.as_released())
    some = TensorDataset(torch.cat([torch.ones(3, 1, 4, 4), torch.full((1, 1, 4, 4), 2.0)]), torch.zeros(4, dtype=torch.int64))
    properties.assert_finite(unlearn(model, some, method=JiT.as_released()).model)


@pytest.mark.parametrize("rate, message", [(0.3, r"0\.[01]\d* times what it was, outside \[0.25, 3\]"), (1e6, r"outside \[0, 3\]|finite")])
def test_a_lost_network_is_not_returned(rate, message):
    model = small.network("no BatchNorm")
    tuning = Tuning(Constant(rate, 10 if rate < 1 else 1), batch_size=8, momentum=0.0, weight_decay=0.0, eval_mode=True)
    with properties.assert_untouched(model), pytest.raises(DivergedError, match=message):
        unlearn(model, small.forget(), method=JiT(copies=2, tuning=tuning))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_kind(name):
    with torch.random.fork_rng([]):
        torch.manual_seed(4)
        model = LAYERS[name]().double()
    properties.assert_finite(unlearn(model, small.forget(), method=JiT(copies=2)).model)


def test_labels_are_not_read():
    model, (images, labels) = small.network("residual"), small.forget().tensors
    first, second = (unlearn(model, (images, each), method=JiT(copies=2), watch={}).model for each in (labels, labels.flip(0)))
    properties.assert_same_weights(first.state_dict(), second.state_dict())


def test_token_ids_are_refused_and_embedded_ones_are_not():
    model = Words()
    with pytest.raises(InputError, match=r"^forget: JiT needs inputs of floating-point numbers; token ids .*\(inputs_embeds\)"):
        unlearn(model, sentences(input_ids=torch.randint(6, (16, 4))), method=JiT())
    changed = unlearn(model, sentences(inputs_embeds=torch.randn(16, 4, 5)), method=JiT(copies=2)).model
    assert not torch.equal(changed.head.weight, model.head.weight)


def test_bytes_are_refused():
    objective = Objective(outputs=lambda model, batch: model(batch[0].float() / 255))
    images = torch.randint(256, (8, 1, 4, 4), dtype=torch.uint8)
    with pytest.raises(
        InputError, match=r"^forget: JiT needs inputs of floating-point numbers; convert bytes before, with .float\(\) / 255"
    ):
        unlearn(cases.model(), (images, torch.zeros(8, dtype=torch.int64)), method=JiT(), objective=objective)


def test_the_noise_of_several_inputs_is_measured_together():
    forget = TensorDataset(torch.randn(8, 4), torch.randn(8, 2), torch.arange(8) % 3)
    model = Two()
    with pytest.raises(InputError, match="^forget: JiT needs to know which entries are the inputs"):
        unlearn(model, forget, method=JiT())
    changed = unlearn(model, forget, method=JiT(copies=2, inputs=(0, 1))).model
    assert not torch.equal(changed.first.weight, model.first.weight) and not torch.equal(changed.second.weight, model.second.weight)


@pytest.mark.parametrize(
    "argument, value", [("noise", 0), ("noise", "a"), ("copies", 0), ("copies", 1.5), ("clip", 1), ("both_sides", None)]
)
def test_wrong_settings_are_named(argument, value):
    with pytest.raises(InputError, match=f"^{argument}: must be .*; found "):
        JiT(**{argument: value})
