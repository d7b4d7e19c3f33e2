"""What `Run` gives the author of a method: edits, trainings with a loss of one's own, and records that are made for them."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from expunge.data.batches import as_batches
from expunge.editing.patches import Patch
from expunge.errors import InputError, NoEffectWarning
from expunge.methods import Run
from expunge.metrics import best_epoch
from expunge.training.loop import Phase, train
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from tests.methods import cases, properties

TWO = Tuning(Constant(0.02, 2), batch_size=16)


def recorded() -> tuple[Run, list[int]]:
    """A run whose records are epochs alone."""
    epochs: list[int] = []
    return Run(after_epoch=epochs.append, epochs=epochs), epochs


def columns(value: bool = True) -> dict[str, torch.Tensor]:
    mask = torch.zeros(8, 64, dtype=torch.bool)
    mask[:, :8] = value
    return {"5.weight": mask}


def test_edit_sets_values_and_zeroes_masks():
    model, before = cases.model(), cases.model()
    patch = Run().edit(model, {"5.bias": torch.full((8,), 3.0), "1.running_mean": torch.ones(4), **columns()})
    assert isinstance(patch, Patch) and len(patch) == 8 + 4 + 64
    assert (model[5].bias == 3).all() and (model[1].running_mean == 1).all() and not model[5].weight[:, :8].any()
    patch.revert(model)
    properties.assert_same_weights(model.state_dict(), before.state_dict())


def test_a_mask_keeps_its_entries_also_where_they_are_zero():
    model = cases.model()
    with torch.no_grad():
        model[5].weight[2, :4] = 0
    assert len(Run().edit(model, columns())) == 64


@pytest.mark.parametrize("values", [columns(False), {}])
def test_a_mask_that_changes_nothing_warns(values):
    with pytest.warns(NoEffectWarning, match="the mask changed nothing: it names no weight; give a larger ratio"):
        Run().edit(cases.model(), values)
    with pytest.warns(NoEffectWarning, match="all 64 weights it names are zero already"):
        model = cases.model()
        Run().edit(model, columns())
        Run().edit(model, columns())
    Run().edit(cases.model(), {"5.bias": cases.model()[5].bias.detach()})  # values that are there already are no mistake


BAD_EDITS = {
    "no such parameter": {"nine": torch.zeros(3)},
    "another shape": {"5.bias": torch.zeros(3)},
    "a number": {"5.bias": 0.5},
    "no such mask": {**{"nine": torch.ones(3, dtype=torch.bool)}, "5.bias": torch.zeros(8)},
}


@pytest.mark.parametrize("name", BAD_EDITS)
def test_a_bad_edit_is_refused_and_changes_nothing(name):
    model = cases.model()
    with properties.assert_untouched(model), pytest.raises(InputError):
        Run().edit(model, BAD_EDITS[name])


def test_train_is_the_training_loop_with_records():
    model, expected, (run, epochs) = cases.model(), cases.model(), recorded()
    run.train(model, cases.remain(), TWO)
    train(expected, cases.remain(), TWO)
    properties.assert_same_weights(model.state_dict(), expected.state_dict())
    assert epochs == [0, 1, 2]
    run.train(model, cases.remain(), None)  # no training, and the record of epoch 0 is there
    run.train(model, cases.remain(), TWO)
    assert epochs == [0, 1, 2, 3, 4]


def test_training_stops_early_where_the_method_says_so():
    model, expected, (run, epochs) = cases.model(), cases.model(), recorded()
    asked = []
    longer = Tuning(Constant(0.02, 5), batch_size=16)
    run.train(model, cases.remain(), longer, until=lambda: asked.append(len(epochs)) or len(asked) == 2)
    train(expected, cases.remain(), TWO)
    properties.assert_same_weights(model.state_dict(), expected.state_dict())
    assert epochs == [0, 1, 2] and asked == [1, 2]  # asked before the record, which a lost network does not get


def test_a_loss_of_ones_own_has_the_objectives_losses():
    weighed, plain, (run, _) = cases.model(), cases.model(), recorded()

    def loss(model, batch, losses):
        return losses(run.objective.outputs(model, batch), run.objective.targets(batch)).mean()

    run.train(weighed, cases.remain(), TWO, loss=loss)
    train(plain, cases.remain(), TWO)
    properties.assert_same_weights(weighed.state_dict(), plain.state_dict())
    other = cases.model()
    run.train(other, cases.remain(), TWO, loss=lambda model, batch, losses: model(batch[0]).square().mean())
    assert not torch.equal(other[5].weight, plain[5].weight)


@pytest.mark.parametrize("result", [None, 0.5, torch.zeros(()), torch.zeros(3, requires_grad=True)])
def test_a_loss_that_cannot_be_minimised_is_named(result):
    with pytest.raises(InputError, match="^loss: must return the number to minimise, a tensor of one value that depends on the weights"):
        recorded()[0].train(cases.model(), cases.remain(), TWO, loss=lambda model, batch, losses: result)


@pytest.mark.parametrize("freeze", [True, False])
def test_the_users_tuning_says_whether_masked_weights_stay(freeze):
    model, (run, _) = cases.model(), recorded()
    run.edit(model, columns())
    run.train(model, cases.remain(), Tuning(Constant(0.1, 1), batch_size=16, freeze=freeze), mask=columns())
    assert bool(model[5].weight[:, :8].any()) != freeze


def test_errors_name_the_data():
    broken = cases.dataset()
    broken.tensors[0][0] = torch.nan
    for argument in ("remain", "forget"):
        with pytest.raises(InputError, match=f"^{argument}: .*finite"):
            recorded()[0].train(cases.model(), broken, TWO, argument=argument)
    with pytest.raises(InputError, match="^tuning: must be a Tuning"):
        recorded()[0].train(cases.model(), cases.remain(), 5)


@dataclass(frozen=True)
class Silent:
    """Calls nothing of `run`."""

    def __call__(self, model: nn.Module, forget, remain, run) -> None:
        with torch.no_grad():
            model[5].weight.mul_(0.5)


@dataclass(frozen=True)
class Own:
    """A loop of its own, which counts from 1."""

    def __call__(self, model: nn.Module, forget, remain, run) -> None:
        for epoch in (1, 2):
            with torch.no_grad():
                model[5].weight.mul_(0.5)
            run.after_epoch(epoch)


def test_a_method_that_makes_no_record_has_one():
    watch = {"remain": cases.remain(), "forget": cases.forget()}
    outcome = unlearn(cases.model(), cases.forget(), cases.remain(), Silent(), watch=watch)
    assert [record.epoch for record in outcome.history] == [None, 0]
    assert best_epoch(outcome.history, on="test").epoch == 0
    outcome = unlearn(cases.model(), cases.forget(), cases.remain(), Silent())
    assert [set(record.accuracies) for record in outcome.history] == [{"remain", "forget"}] * 2
    outcome = unlearn(cases.model(), cases.forget(), cases.remain(), Own())
    assert [record.epoch for record in outcome.history] == [None, 1, 2]
    assert [set(record.accuracies) for record in outcome.history] == [{"remain", "forget"}, {"forget"}, {"remain", "forget"}]


@pytest.mark.parametrize("epochs", [(1.5,), (-1,), (True,), ("1",), (1, 1), (0, 2, 1)])
def test_epochs_that_are_not_in_order_are_refused(epochs):
    def method(model, forget, remain, run):
        for epoch in epochs:
            run.after_epoch(epoch)

    with pytest.raises(InputError, match="after_epoch: a method must call it with whole numbers that go up"):
        unlearn(cases.model(), cases.forget(), method=method)


def test_what_is_no_patch_is_not_taken_for_the_edit():
    with pytest.raises(InputError, match="method: must return the Patch that `run.edit` gave, or None; found 5"):
        unlearn(cases.model(), cases.forget(), method=lambda model, forget, remain, run: 5)
    with pytest.raises(InputError, match="values: must map names of parameters or buffers to tensors; found None"):
        Run().edit(cases.model(), None)


def test_a_training_of_phases_can_end_early():
    run, epochs = recorded()
    phase = Phase(as_batches(cases.remain(), "remain", 16), "remain")
    answers = iter([False, True])
    run.train_phases(cases.model(), lambda epoch: [phase], Tuning(Constant(0.02, 5), batch_size=16), until=lambda: next(answers))
    assert epochs == [0, 1, 2]
