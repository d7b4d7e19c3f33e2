"""One suite for all methods: see cases.py to let another join."""

import copy
import dataclasses
import gc
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from expunge.data.objective import Objective, model_outputs
from expunge.editing.patches import Patch
from expunge.errors import InputError, ModelError, NoEffectWarning
from expunge.methods import METHODS
from expunge.methods.readings import readings
from expunge.storage.tensors import weights_digest
from expunge.unlearning import unlearn
from tests.methods import cases, properties
from tests.methods.cases import READINGS

# Some of these small networks do not survive a rate of 0.1, and two epochs meet no goal.
pytestmark = [
    pytest.mark.filterwarnings("ignore::expunge.errors.LostAccuracyWarning"),
    pytest.mark.filterwarnings("ignore::expunge.errors.GoalNotMetWarning"),
]

CASES = cases.OWN or cases.CASES | READINGS | cases.UNLISTED
BOTH = {"remain", "forget"}
every_method = pytest.mark.parametrize("name", CASES)


@pytest.mark.skipif(bool(cases.OWN), reason="of a method of one's own")
def test_every_method_is_here():
    assert cases.CASES.keys() == METHODS.keys()
    assert all(type(case()) is METHODS[name] for name, case in cases.CASES.items())
    others = {f"{name}-{reading}": kind for name, kind in METHODS.items() for reading in readings(kind) if reading != "text"}
    assert others.keys() == READINGS.keys() and all(type(READINGS[name]()) is kind for name, kind in others.items())


@every_method
def test_settings_are_frozen_and_comparable(name):
    method = CASES[name]()
    assert dataclasses.is_dataclass(method) and method == CASES[name]() and hash(method) == hash(CASES[name]())
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.tuning = None


@every_method
def test_the_callers_model_is_untouched(name):
    model = cases.model()
    with properties.assert_untouched(model):
        outcome = unlearn(model, cases.forget(), cases.remain(), CASES[name]())
    assert outcome.model is not model
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), outcome.model.parameters(), strict=True))


def in_graphs() -> list[torch.Tensor]:
    """All tensors of the process that autograd computed."""
    gc.collect()
    return [part for part in gc.get_objects() if type(part) is torch.Tensor and in_graph(part)]


def in_graph(tensor):
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view that an earlier test made without gradients, and wrote to with them
        return True


@every_method
def test_no_graph_of_the_weights_is_alive_while_they_are_trained(name):
    """One that is keeps CUDA from capturing the steps, and their memory from being used again."""
    alive: list[int] = []
    others = in_graphs()  # of tests that ran before, in the same process

    def count(model, batch):
        if model.training and not alive:
            alive.append(sum(not any(tensor is other for other in others) for tensor in in_graphs()))
        return model_outputs(model, batch)

    unlearn(cases.model(), cases.forget(), cases.remain(), CASES[name](), objective=Objective(outputs=count), watch={})
    assert sum(alive) == 0


@every_method
def test_the_callers_model_is_untouched_when_it_fails(name):
    model, broken = cases.model(), cases.dataset()
    broken.tensors[0][4] = float("inf")
    kept = Subset(broken, [row for row in range(48) if row % 3 != 0])
    forget, remain = (broken, None) if name in cases.NEEDS_NO_REMAIN else (cases.forget(), kept)
    with properties.assert_untouched(model), pytest.raises(InputError, match="finite"):
        unlearn(model, forget, remain, CASES[name](cases.QUICK))


@every_method
def test_form_is_kept_and_all_is_finite(name):
    model = cases.model()
    outcome = unlearn(model, cases.forget(), cases.remain(), CASES[name]())
    properties.assert_same_form(model, outcome.model)
    properties.assert_finite(outcome.model)
    assert all(parameter.grad is None for parameter in outcome.model.parameters())
    assert torch.equal(model[0].bias, outcome.model[0].bias)  # frozen


@every_method
def test_float64_stays_float64(name):
    model = cases.model(torch.float64)
    outcome = unlearn(model, cases.forget(torch.float64), cases.remain(torch.float64), CASES[name]())
    properties.assert_same_form(model, outcome.model)


@every_method
def test_the_same_seed_gives_the_same_weights(name):
    first = unlearn(cases.model(), cases.forget(), cases.remain(), CASES[name]())
    torch.rand(7)
    second = unlearn(cases.model(), cases.forget(), cases.remain(), CASES[name]())
    properties.assert_same_weights(first.model.state_dict(), second.model.state_dict())


@every_method
def test_one_sample_can_be_forgotten(name):
    properties.assert_finite(unlearn(cases.model(), Subset(cases.dataset(), [0]), cases.remain(), CASES[name]()).model)


@every_method
def test_one_shot_iterators_give_what_lists_give(name):
    forget, remain = list(DataLoader(cases.forget(), batch_size=16)), list(DataLoader(cases.remain(), batch_size=16))
    listed = unlearn(cases.model(), forget, remain, CASES[name]())
    iterated = unlearn(cases.model(), iter(forget), (batch for batch in remain), CASES[name]())
    properties.assert_same_weights(listed.model.state_dict(), iterated.model.state_dict())
    assert [record.accuracies for record in listed.history] == [record.accuracies for record in iterated.history]


@every_method
def test_history_has_a_record_before_and_after_every_epoch(name):
    outcome = unlearn(cases.model(), cases.forget(), cases.remain(), CASES[name](cases.QUICK))
    trained = getattr(outcome.method, "tuning", None) is not None
    assert [record.epoch for record in outcome.history] == ([None, 0, 1, 2] if trained else [None, 0])
    assert [set(record.accuracies) for record in outcome.history] == ([BOTH, BOTH, {"forget"}, BOTH] if trained else [BOTH, BOTH])
    assert [record.seconds for record in outcome.history] == sorted(record.seconds for record in outcome.history)
    assert outcome.history[-1].seconds <= outcome.seconds


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "ratio" in {field.name for field in dataclasses.fields(case())}])
def test_ratio_zero_is_the_identity(name):
    model = cases.model()
    method = dataclasses.replace(CASES[name](None), ratio=0.0)
    with pytest.warns(NoEffectWarning, match="the mask changed nothing: it names no weight; give a larger ratio"):
        outcome = unlearn(model, cases.forget(), cases.remain(), method)
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())
    assert len(outcome.patch) == 0


@pytest.mark.parametrize("name", [name for name in cases.WITHOUT_TUNING if name in CASES])
def test_the_patch_undoes_the_masking(name):
    model = cases.model()
    outcome = unlearn(model, cases.forget(), method=CASES[name](None))
    assert len(outcome.patch) > 0
    outcome.patch.revert(outcome.model)
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())


@every_method
def test_the_patch_takes_the_new_model_back_to_the_original(name, tmp_path):
    """Bit for bit, buffers too, after fine-tuning, from memory and from disk; and forth again."""
    model = cases.model()
    outcome = unlearn(model, cases.forget(), cases.remain(), CASES[name](cases.QUICK), watch={})
    before, after = weights_digest(model), weights_digest(outcome.model)
    assert len(outcome.patch) > 0 and before != after
    outcome.patch.revert(outcome.model)
    assert weights_digest(outcome.model) == before
    patch = Patch.load(outcome.patch.save(tmp_path / "patch.safetensors"))
    patch.apply(outcome.model)
    assert weights_digest(outcome.model) == after
    patch.revert(outcome.model)
    assert weights_digest(outcome.model) == before


@pytest.mark.parametrize("name", [name for name in CASES if name not in (*cases.NEEDS_NO_REMAIN, *cases.CHOOSES, *cases.OWN)])
def test_training_without_remain_data_is_refused(name):
    with pytest.raises(InputError, match="^remain: .* needs the data to keep; pass remain data"):
        unlearn(cases.model(), cases.forget(), None, CASES[name](cases.QUICK))


@pytest.mark.parametrize("name", [name for name in cases.NEEDS_NO_REMAIN if name in CASES])
def test_remain_data_change_nothing_where_none_are_needed(name):
    first, second = (unlearn(cases.model(), cases.forget(), remain, CASES[name]()).model for remain in (None, cases.remain()))
    properties.assert_same_weights(first.state_dict(), second.state_dict())


@every_method
def test_data_that_carry_a_graph_are_only_read(name):
    forget, remain = (DataLoader(part, batch_size=16) for part in (cases.forget(), cases.remain()))
    expected = unlearn(cases.model(), list(forget), list(remain), CASES[name]()).model
    leaves, graphs = [], []
    for part in (forget, remain):
        images = [images.requires_grad_() for images, _ in part]
        leaves += images
        graphs.append([(image * 1.0, labels) for image, (_, labels) in zip(images, part, strict=True)])
    found = unlearn(cases.model(), *graphs, CASES[name]()).model
    properties.assert_same_weights(expected.state_dict(), found.state_dict())
    assert all(leaf.grad is None for leaf in leaves)


ONCE = 16  # samples, one batch


class Once(IterableDataset):
    def __init__(self, samples) -> None:
        self.samples = iter(samples)

    def __len__(self) -> int:
        return ONCE

    def __iter__(self):
        return self.samples


@every_method
def test_a_loader_that_can_be_read_only_once_is_refused(name):
    loader = DataLoader(Once(list(cases.forget())), batch_size=ONCE)
    with pytest.raises(InputError, match="^forget: a loader must give its batches each time"):
        unlearn(cases.model(), loader, cases.remain(), CASES[name](cases.QUICK))


class Keeping(nn.Module):
    """Makes a tensor at its first call and keeps it, and its last activations, with their graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.features = cases.model(), None, []

    def forward(self, x):
        if self.scale is None:
            self.scale = torch.full((3,), 2.0)
        self.features = [self.inner[:6](x)]
        return self.inner[6:](self.features[0]) * self.scale


@every_method
def test_a_model_that_keeps_tensors_can_be_unlearnt(name):
    model = Keeping()
    model.scale = torch.full((3,), 2.0)
    expected = unlearn(model, cases.forget(), cases.remain(), CASES[name]()).model
    fresh, used, inferred = Keeping(), Keeping(), Keeping()
    used(cases.dataset()[:4][0])
    with torch.inference_mode():
        inferred.eval()(cases.dataset()[:4][0])
        inferred.train(), inferred.inner[1].eval()
    for each in (fresh, used, inferred):
        each.inner.load_state_dict(model.inner.state_dict())
        found = unlearn(each, cases.forget(), cases.remain(), CASES[name]()).model
        properties.assert_same_weights(expected.state_dict(), found.state_dict())


@every_method
def test_in_inference_mode_all_is_as_outside(name):
    expected = unlearn(cases.model(), cases.forget(), cases.remain(), CASES[name]())
    model = cases.model()
    with torch.inference_mode():
        forget, remain = list(DataLoader(cases.forget(), 128)), list(DataLoader(cases.remain(), 128))
        model = copy.deepcopy(model)  # of tensors that were made in inference mode
        found = unlearn(model, cases.forget(), cases.remain(), CASES[name]())
        of_lists = unlearn(model, forget, remain, CASES[name]())
    properties.assert_same_weights(expected.model.state_dict(), found.model.state_dict())
    assert [record.accuracies for record in found.history] == [record.accuracies for record in expected.history]
    properties.assert_finite(of_lists.model)


def test_a_model_that_cannot_be_copied_is_refused():
    model = cases.model()
    model.lock = threading.Lock()
    with pytest.raises(ModelError, match="copy.deepcopy can copy; found: cannot pickle"):
        unlearn(model, cases.forget(), cases.remain(), cases.CASES["finetune"]())
