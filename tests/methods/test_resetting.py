"""ResetAndDistil: the plain loop from fresh weights, what is fresh, which classes go, what is never read, what is refused."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

from expunge.data.objective import Objective
from expunge.errors import DivergedError, InputError, ModelError, NoEffectWarning
from expunge.methods import ByFisher, ResetAndDistil
from expunge.training import Constant, Distillation, OneCycle, Tuning
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, properties, small
from tests.methods.small import CLASSES, SIZE, TWO_EPOCHS

# Some of these small networks do not survive a rate of 0.1.
pytestmark = pytest.mark.filterwarnings("ignore::expunge.errors.LostAccuracyWarning")
every_network = pytest.mark.parametrize("name", small.NETWORKS)
HEAD = {"residual": ("classifier",), "concatenation": ("classifier",), "no BatchNorm": ("3",)}


def another(name):
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        return small.NETWORKS[name]().double()


def without(*classes):
    return replace(cases.QUICK, distillation=Distillation(without=classes))


def without_class(label):
    """(forget, remain): all samples of a class and all others."""
    data = small.pictures(30, seed=9)
    rows = data.tensors[1] == label
    return Subset(data, rows.nonzero().flatten().tolist()), Subset(data, (~rows).nonzero().flatten().tolist())


@every_network
@pytest.mark.parametrize("reset", ["names", "all", "nothing"])
def test_it_is_the_plain_loop(name, reset):
    model, (forget, remain) = small.network(name), without_class(2)
    chosen = {"names": HEAD[name], "all": 1.0, "nothing": 0.0}[reset]
    method = ResetAndDistil(chosen, replace(TWO_EPOCHS, distillation=Distillation(3.0, 0.8)), lambda: another(name))
    found = unlearn(model, forget, remain, method)
    start, fresh = copy.deepcopy(model), another(name).state_dict()
    renewed = {"names": HEAD[name], "all": ("",), "nothing": ("none",)}[reset]
    start.load_state_dict({key: fresh[key] if key.startswith(renewed) else value for key, value in start.state_dict().items()})
    kept = [label for label in range(CLASSES) if label != 2]

    def loss(rows):
        images, labels = remain.dataset[[remain.indices[row] for row in rows]]

        def value(student):
            logits = student(images)
            apart = reference.divergence(model(images).detach()[:, kept], logits[:, kept], 3.0)
            return 0.2 * cross_entropy(logits, labels) + 0.8 * 9 * apart

        return value

    losses = [loss(rows) for epoch in range(2) for rows in reference.cut(len(remain), SIZE, seed=3 + epoch)]
    small.assert_close(found.model, reference.descended(start, losses, rate=0.02, decay=0.01), model)


def test_the_patch_is_what_was_reset():
    outcome = unlearn(cases.model(), cases.forget(), cases.remain(), ResetAndDistil(0.4, tuning=cases.QUICK))
    assert {*outcome.edit.edits} == {"7.weight", "7.bias"}
    outcome = unlearn(cases.model(), cases.forget(), cases.remain(), ResetAndDistil(1.0, tuning=cases.QUICK))
    assert "0.bias" not in outcome.edit.edits  # frozen
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} <= {*outcome.edit.edits}


def test_fisher_chooses_kernels_by_the_ratio():
    """Fresh values at the kernels whose share of forget to remain Fisher is largest, the others and BatchNorm as they were."""
    model, (forget, remain) = small.network("residual"), without_class(2)
    outcome = unlearn(
        model, forget, remain, ResetAndDistil(ByFisher(0.3, "expected"), tuning=TWO_EPOCHS, fresh=lambda: another("residual"))
    )
    sums = [reference.fisher(model, part.dataset[part.indices], "expected") for part in (forget, remain)]
    means = [{name: value / len(part) for name, value in found.items()} for found, part in zip(sums, (forget, remain), strict=True)]
    guard = 1e-8 * torch.cat([value.flatten() for name, value in means[1].items() if value.dim() > 1]).mean()
    units = {}
    for name, value in means[0].items():
        if value.dim() > 1:
            ratio = value / (means[1][name] + guard)
            units |= {(name, *place): float(ratio[place].mean()) for place in itertools.product(*map(range, ratio.shape[:2]))}
    chosen = sorted(units, key=units.__getitem__)[-math.floor(0.3 * len(units) + 0.5) :]
    mask = outcome.edit.mask(model)
    assert {
        (name, *place) for name, part in mask.items() for place in itertools.product(*map(range, part.shape[:2])) if part[place].any()
    } == {*chosen}
    for name, edit in outcome.edit.edits.items():
        assert torch.equal(edit.new, another("residual").state_dict()[name].flatten()[edit.indices])


def test_a_ratio_of_zero_resets_nothing():
    nothing, none = (
        unlearn(cases.model(), cases.forget(), cases.remain(), ResetAndDistil(reset, tuning=cases.QUICK)) for reset in (ByFisher(0.0), 0.0)
    )
    assert len(nothing.edit) == len(none.edit) == 0
    properties.assert_same_weights(nothing.model.state_dict(), none.model.state_dict())


@pytest.mark.parametrize("include_head", [True, False])
def test_the_classifier_may_be_left_out(include_head):
    method = ResetAndDistil(ByFisher(0.9, "empirical", "element", include_head), tuning=cases.QUICK)
    assert ("7.weight" in unlearn(cases.model(), cases.forget(), cases.remain(), method).edit.edits) == include_head


def test_the_callers_random_numbers_do_not_matter():
    first, second = (unlearn(cases.model(), cases.forget(), cases.remain(), ResetAndDistil(tuning=cases.QUICK)).model for _ in range(2))
    properties.assert_same_weights(first.state_dict(), second.state_dict())
    other = ResetAndDistil(tuning=Tuning(cases.QUICK.schedule, 16, seed=1))
    assert not torch.equal(unlearn(cases.model(), cases.forget(), cases.remain(), other).model[7].weight, first[7].weight)


class Refusing(Subset):
    """Forget data that may be looked at before the method begins, and not after."""

    readable = True

    def __getitem__(self, index):
        assert self.readable
        return super().__getitem__(index)

    __getitems__ = None


@pytest.mark.parametrize("classes", [(0,), ()])
def test_with_named_classes_the_forget_data_are_never_read(classes):
    forget = Refusing(cases.dataset(), cases.forget().indices)

    class Method(ResetAndDistil):
        def __call__(self, model, forget, remain, run):
            forget.readable = False
            return super().__call__(model, forget, remain, run)

    found = unlearn(cases.model(), forget, cases.remain(), Method(tuning=without(*classes)), watch={}).model
    expected = unlearn(cases.model(), cases.forget(), cases.remain(), ResetAndDistil(tuning=without(*classes)), watch={}).model
    properties.assert_same_weights(found.state_dict(), expected.state_dict())


def test_whole_classes_are_noticed():
    named, noticed = (
        unlearn(cases.model(), cases.forget(), cases.remain(), ResetAndDistil(tuning=tuning)).model for tuning in (without(0), cases.QUICK)
    )
    properties.assert_same_weights(named.state_dict(), noticed.state_dict())
    few, rest = Subset(cases.dataset(), range(6)), Subset(cases.dataset(), range(6, 48))  # samples of every class
    nothing, samples = (unlearn(cases.model(), few, rest, ResetAndDistil(tuning=tuning)).model for tuning in (without(), cases.QUICK))
    properties.assert_same_weights(nothing.state_dict(), samples.state_dict())


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        return x @ self.weight.T


def opaque():
    model = cases.model()
    with torch.random.fork_rng([]):
        torch.manual_seed(0)  # an untrained teacher may be worse than chance, and is refused then
        model[7] = Opaque()
    return model


def unlearned(method, model=None, forget=None, remain=None):
    return unlearn(model or cases.model(), forget or cases.forget(), remain or cases.remain(), method, watch={})


BAD = {
    "a share above 1": (InputError, "^reset: ", lambda: ResetAndDistil(1.5)),
    "a share that is no number": (InputError, "^reset: ", lambda: ResetAndDistil(None)),
    "all weights by Fisher": (InputError, "^ratio: ", lambda: ResetAndDistil(ByFisher(1.0))),
    "Fisher of batches": (InputError, "^kind: ", lambda: ResetAndDistil(ByFisher(kind="batch"))),
    "no distillation": (InputError, "^distillation: ", lambda: ResetAndDistil(tuning=Tuning(distillation=4))),
    "no tuning": (InputError, "^tuning: ResetAndDistil trains", lambda: ResetAndDistil(tuning=None)),
    "no epochs": (InputError, "^epochs: ", lambda: OneCycle(0.1, 0)),
    "fresh that builds nothing": (InputError, "^fresh: ", lambda: ResetAndDistil(fresh=3)),
    "an unknown name": (InputError, "^reset: .*found 'fc'", lambda: unlearned(ResetAndDistil(("fc",), tuning=cases.QUICK))),
    "all classes": (
        InputError,
        "^remain: must not hold samples of the forgotten classes",
        lambda: unlearned(ResetAndDistil(tuning=without(0, 1, 2))),
    ),
    "a class without a logit": (
        InputError,
        "^without: .*in \\[0, 3\\); found \\[7\\]",
        lambda: unlearned(ResetAndDistil(tuning=without(7))),
    ),
    "remain data of the class": (InputError, "^remain: .*found \\[1\\]", lambda: unlearned(ResetAndDistil(tuning=without(0, 1)))),
    "modules that cannot be reset": (
        ModelError,
        "reset_parameters on every module.*missing in 7",
        lambda: unlearned(ResetAndDistil(), opaque()),
    ),
    "no name": (InputError, "^reset: must name parameters of the model", lambda: unlearned(ResetAndDistil(""))),
    "another network": (
        InputError,
        "^fresh: must build a network with the same parameters; found",
        lambda: unlearned(ResetAndDistil(fresh=lambda: nn.Linear(2, 2))),
    ),
    "a loss that explodes": (
        DivergedError,
        "no longer finite",
        lambda: unlearned(ResetAndDistil(tuning=Tuning(Constant(1e30, 2), batch_size=16))),
    ),
    "a teacher worse than chance": (
        ModelError,
        "^the teacher must be better than chance",
        lambda: unlearned(
            ResetAndDistil(), cases.model(), cases.forget(), TensorDataset(cases.dataset().tensors[0].repeat(4, 1, 1, 1) + 0.1, wrong())
        ),
    ),
}


def wrong():
    """The label the model finds least likely of the two that are kept."""
    logits = cases.model().eval()(cases.dataset().tensors[0].repeat(4, 1, 1, 1) + 0.1).detach()
    return logits[:, 1:].argmin(1) + 1


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_done_is_refused(case):
    error, message, call = BAD[case]
    with pytest.raises(error, match=message):
        call()


def test_fresh_weights_that_are_the_old_ones_are_told():
    model = cases.model()
    with pytest.warns(NoEffectWarning, match="`fresh` built the weights that the model has"):
        unlearned(ResetAndDistil(tuning=cases.QUICK, fresh=lambda: model), model)


def test_a_ratio_too_small_for_any_weight_is_told():
    with pytest.warns(NoEffectWarning, match="nothing was reset: the ratio 1e-09 chose no weight"):
        unlearned(ResetAndDistil(ByFisher(1e-9), tuning=cases.QUICK))


def test_modules_that_cannot_be_reset_may_stay():
    model = opaque()
    found = unlearned(ResetAndDistil(("5",), tuning=cases.QUICK), model)
    assert {*found.edit.edits} == {"5.weight", "5.bias"}
    with torch.no_grad():
        model[7].weight.add_(1)  # as training would have done
    built = unlearned(ResetAndDistil(1.0, tuning=cases.QUICK, fresh=opaque), model)
    assert torch.equal(built.edit.edits["7.weight"].new, opaque()[7].weight.flatten())


class Adapted(nn.Module):
    """A frozen matrix and a small one beside it that was trained."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def reset_parameters(self):
        nn.init.normal_(self.down)
        nn.init.zeros_(self.up)

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def test_of_a_model_with_adapters_the_adapters_are_renewed():
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Flatten(), Adapted(16, 8), nn.ReLU(), Adapted(8, 3))
    outcome = unlearned(ResetAndDistil(1.0, tuning=cases.QUICK), model)
    assert {*outcome.edit.edits} == {"1.down", "1.up", "3.down", "3.up"}
    assert not outcome.edit.edits["3.up"].new.any()
    assert torch.equal(outcome.model[1].base.weight, model[1].base.weight)


def test_transformers_are_renewed_from_their_end():
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Embedding(5, 8), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(24, 3))
        words, labels = torch.randint(0, 5, (30, 3)), torch.arange(30) % 3
        data = TensorDataset(words, labels)
    forget, remain = (Subset(data, [row for row in range(30) if (row % 3 == 0) == lost]) for lost in (True, False))
    outcome = unlearned(ResetAndDistil(0.5, tuning=Tuning(OneCycle(0.01, 2), batch_size=8)), model, forget, remain)
    assert {name.rpartition("layers.")[2].partition(".")[0] for name in outcome.edit.edits if "layers" in name} == {"1"}
    assert {"1.layers.1.self_attn.in_proj_weight", "1.layers.1.self_attn.out_proj.weight", "3.weight"} <= {*outcome.edit.edits}
    properties.assert_finite(outcome.model)


def test_targets_that_are_no_labels_are_taught_too():
    """Soft labels name no class, so nothing is taken out."""
    images, labels = cases.dataset().tensors
    soft = TensorDataset(images, nn.functional.one_hot(labels, 3).float())
    forget, remain = Subset(soft, range(6)), Subset(soft, range(6, 48))
    properties.assert_finite(
        unlearn(cases.model(), forget, remain, ResetAndDistil(tuning=cases.QUICK), objective=Objective(), watch={}).model
    )


def test_a_share_takes_one_layer_at_least():
    """A third of one or two layers rounds to none, and a method that resets nothing would forget nothing."""
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        single = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    assert {*unlearned(ResetAndDistil(0.1, cases.QUICK), single).edit.edits} == {"1.weight", "1.bias"}
    assert len(unlearned(ResetAndDistil(0.0, cases.QUICK), single).edit) == 0
