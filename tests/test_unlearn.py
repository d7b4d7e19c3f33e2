"""Bad input, each with a clear error and nothing changed; and what `unlearn` accepts."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

import expunge
from expunge import FisherMask, InputError, ModelError, RandomMask, unlearn
from tests.methods import cases, properties
from tests.methods.cases import QUICK


def with_labels(value: int) -> TensorDataset:
    return TensorDataset(torch.randn(5, 1, 4, 4), torch.full((5,), value))


def with_inputs(value: float) -> TensorDataset:
    images = torch.zeros(5, 1, 4, 4)
    images[3, 0, 2, 1] = value
    return TensorDataset(images, torch.zeros(5, dtype=torch.int64))


def broken_weight(value: float) -> nn.Module:
    model = cases.model()
    with torch.no_grad():
        model[5].weight[2, 3] = value
    return model


def without_statistics() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))


def only_a_head() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


whole = cases.dataset()
half = Subset(whole, range(24))

# name: (what the error says, the call)
BAD_INPUT = {
    "empty forget set": ("forget: must not be empty", lambda: unlearn(cases.model(), Subset(whole, []), cases.remain())),
    "empty list": ("forget: must not be empty", lambda: unlearn(cases.model(), [], cases.remain())),
    "empty iterator": ("forget: must not be empty", lambda: unlearn(cases.model(), iter([]), cases.remain())),
    "forget everything": ("remain: must not be empty", lambda: unlearn(cases.model(), whole, Subset(whole, []))),
    "forget is remain": ("remain: must not be the forget set", lambda: unlearn(cases.model(), whole, whole)),
    "forget within remain": ("remain: .*24 shared", lambda: unlearn(cases.model(), half, whole)),
    "overlap": ("remain: .*4 shared, the first at index 20", lambda: unlearn(cases.model(), half, Subset(whole, range(20, 48)))),
    "overlap of loaders": ("remain: .*24 shared", lambda: unlearn(cases.model(), DataLoader(half), DataLoader(whole, shuffle=True))),
    "overlap of nested subsets": ("remain: .*index 4", lambda: unlearn(cases.model(), Subset(half, [4]), Subset(whole, [4, 40]))),
    "ratio 1": (r"ratio: must be in \[0, 1\); found 1", lambda: FisherMask(ratio=1)),
    "negative ratio": (r"ratio: must be in \[0, 1\); found -0.1", lambda: RandomMask(ratio=-0.1)),
    "ratio nan": ("ratio: ", lambda: FisherMask(ratio=float("nan"))),
    "label above the head": (r"labels must be in \[0, 3\).*found 3", lambda: unlearn(cases.model(), with_labels(3), cases.remain())),
    "label below zero": (r"labels must be in \[0, 3\).*found -1", lambda: unlearn(cases.model(), with_labels(-1), cases.remain())),
    "label in remain": (r"labels must be in \[0, 3\).*found 7", lambda: unlearn(cases.model(), cases.forget(), with_labels(7))),
    "nan in forget": ("forget: .*finite; found nan", lambda: unlearn(cases.model(), with_inputs(float("nan")), cases.remain())),
    "inf in forget": ("forget: .*finite; found inf", lambda: unlearn(cases.model(), with_inputs(float("inf")), cases.remain())),
    "nan in remain": ("remain: .*finite; found nan", lambda: unlearn(cases.model(), cases.forget(), with_inputs(float("nan")))),
    "nan in weights": (
        r"5\.weight must be finite; found nan",
        lambda: unlearn(broken_weight(float("nan")), cases.forget(), cases.remain()),
    ),
    "inf in weights": (
        r"5\.weight must be finite; found -inf",
        lambda: unlearn(broken_weight(-float("inf")), cases.forget(), cases.remain()),
    ),
    "nothing to mask": ("no parameter is left to mask", lambda: unlearn(only_a_head(), cases.forget(), cases.remain())),
    "all frozen": ("no parameter is left to mask", lambda: unlearn(cases.model().requires_grad_(False), cases.forget(), cases.remain())),
    "BatchNorm without statistics": ("BatchNorm.*found 2$", lambda: unlearn(without_statistics(), cases.forget(), cases.remain())),
    "arrays": (
        "forget: .*must be tensors; found ndarray",
        lambda: unlearn(cases.model(), iter([(torch.zeros(2, 16).numpy(), torch.zeros(2))]), whole),
    ),
    "arrays in mappings": (
        "forget: .*must be tensors; found ndarray",
        lambda: unlearn(cases.model(), iter([{"input": torch.zeros(2, 16).numpy(), "labels": torch.zeros(2)}]), whole),
    ),
    "strings": ("forget: ", lambda: unlearn(cases.model(), ["a", "b"], cases.remain())),
    "numbers": ("forget: ", lambda: unlearn(cases.model(), [1, 2, 3], cases.remain())),
    "no data": ("forget: must be a dataset", lambda: unlearn(cases.model(), None, cases.remain())),
    "a tensor": (r"forget: a batch must be \(inputs, targets\)", lambda: unlearn(cases.model(), torch.zeros(3), cases.remain())),
    "not a module": ("model: must be a torch.nn.Module; found function", lambda: unlearn(lambda x: x, cases.forget(), cases.remain())),
    "a class as method": ("method: .*FisherMask", lambda: unlearn(cases.model(), cases.forget(), cases.remain(), FisherMask)),
    "no remain data": ("remain: FisherMask with tuning needs", lambda: unlearn(cases.model(), cases.forget())),
    "unknown head": ("head: must name parameters", lambda: unlearn(cases.model(), cases.forget(), cases.remain(), head=("nine.weight",))),
    "bad watch": (
        r"watch\['test'\]: must not be empty",
        lambda: unlearn(cases.model(), cases.forget(), cases.remain(), watch={"test": []}),
    ),
}


# name: (what the error says, the targets of the five forget samples)
BAD_TARGETS = {
    "float labels": (r"^forget: targets must be integer labels of shape \(N,\) or probab.*float32 of shape \(5,\)", torch.zeros(5)),
    "a column of labels": (r"^forget: targets must be integer labels of shape \(N,\)", torch.zeros(5, 1, dtype=torch.int64)),
    "probabilities of other classes": (r"^forget: .*probabilities of shape \(N, 3\)", torch.rand(5, 4)),
    "label above the head": (r"^forget: labels must be in \[0, 3\)", torch.full((5,), 3)),
}


@pytest.mark.parametrize("name", BAD_TARGETS)
@pytest.mark.parametrize("watch", [None, {}])
def test_bad_targets_are_named_before_any_work(name, watch):
    message, targets = BAD_TARGETS[name]
    data = TensorDataset(torch.randn(5, 1, 4, 4), targets)
    with pytest.raises(InputError, match=message):
        unlearn(cases.model(), data, cases.remain(), unreached, watch=watch)
    with pytest.raises(InputError, match=message.replace("forget", "remain")):
        unlearn(cases.model(), cases.forget(), data, FisherMask(tuning=None), watch={})
    with pytest.raises(InputError, match=message.replace("forget", "data")):
        expunge.train(cases.model(), data, QUICK)
    with pytest.raises(InputError, match=message.replace("forget", "remain")):
        unlearn(cases.model(), cases.forget(), data, expunge.Finetune(QUICK), watch={})


def unreached(model, forget, remain, run):
    raise AssertionError("the data should have been refused")


def test_positions_must_come_last_in_logits():
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(x[:, 0])  # (N, 4 positions, 3 classes)

    data = TensorDataset(torch.randn(5, 1, 4, 4), torch.zeros(5, 4, dtype=torch.int64))
    with pytest.raises(InputError, match=r"^forget: targets must be integer labels of shape \(N, 3\).*\(5, 4\)"):
        unlearn(Positions(), data, cases.remain(), unreached, watch={})


def test_accuracies_that_cannot_be_had_are_refused_before_any_work():
    soft = TensorDataset(torch.randn(5, 1, 4, 4), torch.rand(5, 3))
    with pytest.raises(InputError, match=r"^forget: accuracy needs one integer label .*watch=\{\} measures no accuracy"):
        unlearn(cases.model(), soft, cases.remain(), unreached)
    with pytest.raises(InputError, match=r"^watch\['test'\]: accuracy needs one integer label"):
        unlearn(cases.model(), cases.forget(), cases.remain(), unreached, watch={"test": soft})
    assert len(unlearn(cases.model(), soft, cases.remain(), FisherMask(0.1, tuning=QUICK), watch={}).edit)


def test_later_watched_labels_are_named_too():
    watch = {"test": [cases.dataset()[:4], with_labels(3)[:]]}
    with pytest.raises(InputError, match=r"^watch\['test'\]: labels must be in"):
        unlearn(cases.model(), cases.forget(), cases.remain(), expunge.Finetune(QUICK), watch=watch)


def binary(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none").sum(1)


@pytest.mark.parametrize("method", [expunge.BadTeacher(), expunge.SCRUB(), expunge.RandomLabels(), expunge.SalUn()])
def test_methods_of_the_softmax_need_classes(method):
    one = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 1))
    data = TensorDataset(torch.randn(5, 1, 4, 4), torch.ones(5, 1, dtype=torch.int64))
    with pytest.raises(InputError, match=r"^objective: .* needs? logits of shape \(N, K, ...\) with two classes or more; found \(5, 1\)"):
        unlearn(one, data, cases.remain(), method, objective=expunge.Objective(losses=binary), watch={})


@pytest.mark.parametrize("method", [expunge.RandomLabels(), expunge.SalUn()])
def test_random_labels_need_one_label_a_sample(method):
    data = TensorDataset(torch.randn(5, 1, 4, 4), torch.ones(5, 3, dtype=torch.int64))
    for classes in (None, False):
        objective = expunge.Objective(losses=binary, classes=classes)
        with pytest.raises(InputError, match=rf"^objective: random labels need class logits; .*found classes={classes}"):
            unlearn(cases.model(), data, cases.remain(), method, objective=objective, watch={})
    with pytest.raises(
        InputError, match=r"^forget: targets must be integer labels .*give labels.argmax\(1\).*found torch.int64 of shape \(5, 3\)"
    ):
        unlearn(cases.model(), data, cases.remain(), method, objective=expunge.Objective(losses=binary, classes=True), watch={})
    soft = TensorDataset(torch.randn(5, 1, 4, 4), torch.full((5, 3), 1 / 3))
    with pytest.raises(InputError, match=r"^forget: random labels need one integer label for each row of logits; found shape \(5, 3\)"):
        unlearn(cases.model(), soft, cases.remain(), method, watch={})


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_has_a_clear_error(name):
    message, call = BAD_INPUT[name]
    with pytest.raises((InputError, ModelError), match=message):
        call()


@pytest.mark.parametrize(
    "forget, remain", [(with_labels(3), cases.remain()), (cases.forget(), with_inputs(float("nan"))), ([], cases.remain())]
)
def test_nothing_is_changed_by_bad_input(forget, remain):
    model = cases.model()
    with properties.assert_untouched(model), pytest.raises(InputError):
        unlearn(model, forget, remain, FisherMask(tuning=QUICK))


def test_nothing_is_changed_when_training_diverges():
    model = cases.model()
    wild = expunge.Tuning(expunge.Constant(1e30, 3))
    with properties.assert_untouched(model), pytest.raises(expunge.DivergedError):
        unlearn(model, cases.forget(), cases.remain(), FisherMask(tuning=wild))


@pytest.mark.parametrize(
    "method", [expunge.Influence(strength=1e45), expunge.FisherNoise(scale=1e200, tuning=None), expunge.NewtonNoise(scale=1e200)]
)
def test_weights_that_are_no_longer_finite_are_not_returned(method):
    model = cases.model()
    with properties.assert_untouched(model), pytest.raises(expunge.DivergedError, match=r"0\.weight.* no longer finite after "):
        unlearn(model, cases.forget(), cases.remain(), method)


def test_nothing_is_changed_by_an_interrupt():
    model = cases.model()

    def interrupted(logits, targets):
        raise KeyboardInterrupt

    with properties.assert_untouched(model), pytest.raises(KeyboardInterrupt):
        unlearn(model, cases.forget(), cases.remain(), objective=expunge.Objective(losses=interrupted, classes=True))


def as_dicts(data: Subset) -> list[dict[str, torch.Tensor]]:
    return [{"input": images, "labels": labels} for images, labels in DataLoader(data, batch_size=128)]


FORMS = {
    "loaders": lambda data: DataLoader(data, batch_size=128),
    "lists of batches": lambda data: list(DataLoader(data, batch_size=128)),
    "lists of samples": lambda data: [data[index] for index in range(len(data))],
    "mappings": as_dicts,
    "generators": lambda data: (batch for batch in DataLoader(data, batch_size=128)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_mask(form):
    expected = unlearn(cases.model(), cases.forget(), cases.remain(), FisherMask(0.1, tuning=None))
    found = unlearn(cases.model(), FORMS[form](cases.forget()), FORMS[form](cases.remain()), FisherMask(0.1, tuning=None))
    properties.assert_same_weights(expected.model.state_dict(), found.model.state_dict())
    assert expected.history[0].accuracies == found.history[0].accuracies


def test_loaders_with_samplers_over_one_dataset_are_no_overlap():
    rows = [list(range(0, 48, 3)), [row for row in range(48) if row % 3]]
    forget, remain = (DataLoader(whole, batch_size=16, sampler=SubsetRandomSampler(part)) for part in rows)
    properties.assert_finite(unlearn(cases.model(), forget, remain, FisherMask(tuning=QUICK)).model)


def test_watched_data_are_recorded_by_name():
    watch = {"remain": cases.remain(), "forget": iter([cases.dataset()[:8]]), "test": whole}
    outcome = unlearn(cases.model(), cases.forget(), cases.remain(), FisherMask(tuning=QUICK), watch=watch)
    assert [list(record.accuracies) for record in outcome.history] == [["remain", "forget", "test"]] * 3
    for record in outcome.history:
        assert record.unlearn_score == record.accuracies["remain"] / (1 + record.accuracies["forget"])


def test_nothing_watched_is_nothing_measured():
    outcome = unlearn(cases.model(), cases.forget(), cases.remain(), FisherMask(tuning=QUICK), watch={})
    assert [dict(record.accuracies) for record in outcome.history] == [{}] * 3


def test_a_given_head_is_left_alone():
    model = cases.model()
    patch = unlearn(model, cases.forget(), cases.remain(), RandomMask(0.5, tuning=None), head=("5.weight", "5.bias")).edit
    assert not patch.edits.keys() & {"5.weight", "5.bias"} and "7.weight" in patch.edits


def test_the_outcome_carries_method_patch_and_time():
    method = FisherMask(0.1, tuning=QUICK)
    outcome = unlearn(cases.model(), cases.forget(), cases.remain(), method)
    assert outcome.method == method and len(outcome.edit) > 0 and outcome.seconds > 0


class Masked(nn.Module):
    """A causal mask of its own, and another with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(16, 3), nn.Linear(3, 3)
        self.register_buffer("causal", torch.triu(torch.full((3, 3), -torch.inf), 1))

    def forward(self, input, attention_mask):
        scores = self.inner(input.flatten(1))
        return self.head((scores[:, None] + self.causal + attention_mask[:, None]).softmax(-1).diagonal(0, 1, 2))


def with_mask(data, value: float, name: str = "attention_mask") -> list[dict[str, torch.Tensor]]:
    return [{"input": images, "labels": labels, name: torch.tensor([0, value, 0]).expand(len(images), 3)} for images, labels in [data[:]]]


def test_masks_may_hold_infinities():
    forget, remain = (with_mask(TensorDataset(*whole[rows]), -torch.inf) for rows in (slice(0, 48, 3), slice(1, 48, 3)))
    outcome = unlearn(Masked(), forget, remain, FisherMask(0.1, tuning=QUICK))
    assert torch.isneginf(outcome.model.causal).any() and len(outcome.edit)


def test_other_infinities_and_nan_are_refused():
    with pytest.raises(InputError, match="forget: .*finite; found nan"):
        unlearn(Masked(), with_mask(whole, torch.nan), method=FisherMask(tuning=None))
    with pytest.raises(InputError, match="forget: .*finite; found inf"):
        unlearn(Masked(), with_mask(whole, torch.inf, "offset"), method=FisherMask(tuning=None))
    model = Masked()
    model.causal[0, 0] = torch.nan
    with pytest.raises(ModelError, match="causal must be finite; found nan"):
        unlearn(model, with_mask(whole, 0.0), method=FisherMask(tuning=None))


class Caching(nn.Module):
    """Makes a buffer of the batch's size in every forward pass, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = cases.model()

    def forward(self, x):
        self.register_buffer("cache", torch.ones(len(x), 1), persistent=False)
        return self.inner(x) * self.cache


@pytest.mark.parametrize("used", [False, True])
def test_a_cache_that_a_forward_pass_makes_is_no_part_of_the_patch(used):
    model = Caching()
    if used:
        model(cases.dataset()[:5][0])
    outcome = unlearn(model, cases.forget(), cases.remain(), FisherMask(0.1, tuning=QUICK), watch={})
    assert "cache" not in outcome.patch.edits
    outcome.patch.revert(outcome.model)
    properties.assert_same_weights(model.state_dict(), outcome.model.state_dict())


def test_a_method_that_gives_the_model_other_parameters_has_no_patch():
    def widened(model, forget, remain, run):
        model.append(nn.Linear(3, 3))

    outcome = unlearn(cases.model(), cases.forget(), None, widened, watch={})
    assert outcome.patch is None and outcome.edit is None
