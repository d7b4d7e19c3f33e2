"""SalUn: which weights are salient, that the others keep their bits, and the training equal to a plain loop."""

import copy
import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy

from expunge import curvature
from expunge.data.batches import as_batches
from expunge.editing import masks, scores
from expunge.errors import InputError
from expunge.methods import RandomLabels, SalUn
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, small
from tests.methods.small import FORGET, REMAIN, SIZE, TWO_EPOCHS
from tests.methods.test_relabelling import drawn


def salient(model, data, share):
    """True for the largest |gradient of the mean loss on all the data|."""
    model = copy.deepcopy(model).eval()
    cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
    sizes = {name: value.grad.abs() for name, value in model.named_parameters()}
    ranked = torch.cat([size.flatten() for size in sizes.values()]).sort(descending=True).values
    return {name: size >= ranked[int(share * len(ranked) + 0.5) - 1] for name, size in sizes.items()}


@pytest.mark.parametrize("name", small.NETWORKS)
def test_saliency_is_the_size_of_the_whole_gradient(name):
    model, data = small.network(name), small.forget()
    score = scores.saliency(curvature.gradient(model, as_batches(data, batch_size=2))[0])
    expected = salient(model, data, 0.5)
    chosen = masks.select(score, 0.5)
    assert chosen.keys() == expected.keys()
    assert all(torch.equal(chosen[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", small.NETWORKS)
def test_salun_is_the_plain_loop(name):
    model, forget, remain = small.network(name), small.forget(), small.remain()
    outcome = unlearn(model, forget, remain, SalUn(0.3, tuning=TWO_EPOCHS))
    labels, moving = drawn(forget.tensors[1]), salient(model, forget, 0.3)

    def loss(kept, lost):
        images = torch.cat([remain.tensors[0][kept], forget.tensors[0][lost]])
        return lambda model: cross_entropy(model(images), torch.cat([remain.tensors[1][kept], labels[lost]]))

    losses = []
    for epoch in range(2):
        steps = reference.cut(REMAIN, SIZE, seed=3 + epoch)
        losses += [loss(*rows) for rows in zip(steps, reference.shares(FORGET, len(steps), seed=3 + epoch), strict=True)]
    small.assert_close(outcome.model, reference.descended(model, losses, rate=0.02, decay=0.01, moving=moving), model)


ADAM = Tuning(Constant(0.01, 2), batch_size=SIZE, optimizer=lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.1))


@pytest.mark.parametrize("tuning", [TWO_EPOCHS, ADAM], ids=["momentum", "AdamW"])
def test_what_is_not_salient_keeps_its_bits(tuning):
    model, forget = small.network("residual"), small.forget()
    changed = unlearn(model, forget, small.remain(), SalUn(0.3, tuning=tuning)).model
    for name, part in salient(model, forget, 0.3).items():
        before, after = model.get_parameter(name), changed.get_parameter(name)
        assert torch.equal(before[~part], after[~part])
        assert (before[part] != after[part]).all()


def test_nothing_moves_where_nothing_is_salient():
    model = cases.model()
    changed = unlearn(model, cases.forget(), cases.remain(), SalUn(0.0, tuning=cases.QUICK)).model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), changed.parameters(), strict=True))


def test_where_nearly_all_is_salient_it_is_random_labels():
    model = small.network("concatenation")
    found = unlearn(model, small.forget(), small.remain(), SalUn(1 - 1e-9, tuning=TWO_EPOCHS)).model
    small.assert_close(found, unlearn(model, small.forget(), small.remain(), RandomLabels(tuning=TWO_EPOCHS)).model, model)


@pytest.mark.parametrize("name", small.NETWORKS)
def test_as_released_is_a_pass_over_the_forget_data_then_one_over_the_remain_data(name):
    """Labels of the forget data are drawn anew in each epoch, from all classes."""
    model, forget, remain = small.network(name), small.forget(), small.remain()
    outcome = unlearn(model, forget, remain, SalUn.as_released(0.3, TWO_EPOCHS))
    generator, moving = torch.Generator().manual_seed(TWO_EPOCHS.seed), salient(model, forget, 0.3)

    def loss(data, rows, labels):
        return lambda model: cross_entropy(model(data.tensors[0][rows]), labels)

    losses, draws = [], []
    for epoch in range(2):
        for rows in reference.cut(FORGET, SIZE, seed=3 + epoch):
            own = forget.tensors[1][rows]
            draws.append((own + torch.randint(0, small.CLASSES, own.shape, generator=generator)) % small.CLASSES)
            losses.append(loss(forget, rows, draws[-1]))
        losses += [loss(remain, rows, remain.tensors[1][rows]) for rows in reference.cut(REMAIN, SIZE, seed=3 + epoch)]
    small.assert_close(outcome.model, reference.descended(model, losses, rate=0.02, decay=0.01, moving=moving), model)


def test_settings():
    released = SalUn.as_released()
    assert (released.salient, released.exclude_own, released.passes, released.tuning) == (0.5, False, "apart", SalUn().tuning)
    with pytest.raises(InputError, match="^passes: must be one of 'mixed', 'apart'"):
        SalUn(passes="both")
    assert dataclasses.asdict(SalUn())["salient"] == 0.5
    with pytest.raises(InputError, match=r"^salient: must be in \[0, 1\); found 1"):
        SalUn(1.0)
