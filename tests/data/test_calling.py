"""What a model cannot take is one line that names it, in every function; what it can take in another form works."""

import contextlib
import copy
import gc
import weakref
from collections import UserDict

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from expunge import METHODS, curvature, fisher, metrics
from expunge.data.batches import as_batches
from expunge.data.objective import Objective
from expunge.errors import InputError, ModelError
from expunge.methods import Finetune, FisherMask, NegGradPlus
from expunge.metrics import Relearning
from expunge.model import activations, channels, heads
from expunge.training.loop import train
from expunge.unlearning import unlearn
from tests.methods import cases, properties
from tests.methods.cases import CASES, QUICK

IMAGES, LABELS = cases.dataset().tensors
FEW, MANY = slice(0, 48, 3), [row for row in range(48) if row % 3]


def layers() -> tuple[channels.Layer, ...]:
    return channels.find(cases.model(), (IMAGES, LABELS))


# name: called with a model, inputs and labels
CALLS = {
    "unlearn": lambda model, x, y: unlearn(model, (x[FEW], y[FEW]), (x[MANY], y[MANY]), FisherMask(tuning=QUICK)),
    "unlearn, remain data": lambda model, x, y: unlearn(
        model, cases.forget(), TensorDataset(x + 1, y), NegGradPlus(tuning=QUICK), watch={}
    ),
    "empirical Fisher": lambda model, x, y: fisher.diagonal(model, (x, y)),
    "expected Fisher": lambda model, x, y: fisher.diagonal(model, (x, y), kind="expected"),
    "batch Fisher": lambda model, x, y: fisher.diagonal(model, (x, y), kind="batch"),
    "accuracy": lambda model, x, y: metrics.accuracy(model, (x, y)),
    "logits": lambda model, x, y: metrics.logits(model, (x, y)),
    "re-learn time": lambda model, x, y: metrics.relearn_time(model, model, (x, y), (x, y), Relearning(QUICK)),
    "train": lambda model, x, y: train(copy.deepcopy(model) if isinstance(model, nn.Module) else model, (x, y), QUICK),
    "head": lambda model, x, y: heads.find(model, (x, y)),
    "channels": lambda model, x, y: channels.find(model, (x, y)),
    "activations": lambda model, x, y: activations.measure(model, [(x, y)], layers()),
    "gradient": lambda model, x, y: curvature.gradient(model, as_batches((x, y))),
}


def test_token_numbers_are_not_told_to_be_floats():
    """The weights' types clash with what the model makes of its inputs."""

    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, ids):
            return self.head(self.table(ids).mean(1).float())

    ids, labels = torch.randint(9, (8, 5)), torch.randint(3, (8,))
    with pytest.raises(InputError) as caught:
        metrics.accuracy(Text().half(), (ids, labels))
    assert "convert the inputs" not in str(caught.value)


INPUTS = {
    "float64": (IMAGES.double(), r"inputs are float64 and the model's weights float32: convert the inputs with \.float\(\)"),
    "bytes": (IMAGES.byte(), r"inputs are uint8 and the model's weights float32: convert the inputs with \.float\(\)"),
    "channels last": (IMAGES.expand(48, 2, 4, 4).movedim(1, -1)[..., :1], r"channels come first: give inputs\.movedim\(-1, 1\)"),
    "wide": (IMAGES.repeat(1, 1, 1, 2), r"5, Linear\(in_features=64, out_features=8, bias=True\), raised RuntimeError: mat1 and mat2"),
    "flat": (IMAGES.flatten(1), r"0, Conv2d\(1, 4, .* raised RuntimeError: .*found \(float32 \(\d+, 16\), int64"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_the_model_cannot_take_are_named(name, call):
    inputs, message = INPUTS[name]
    model = cases.model()
    with (
        properties.assert_untouched(model),
        pytest.raises(InputError, match=rf"^\w+: must be what the model \(Sequential\) takes; .*{message}") as error,
    ):
        CALLS[call](model, inputs, LABELS)
    assert "\n" not in str(error.value) and isinstance(error.value.__cause__, RuntimeError)


MODELS = {
    "a lazy module": (
        lambda: nn.Sequential(nn.LazyConv2d(2, 3), nn.Flatten(), nn.LazyLinear(3)),
        ModelError,
        "model: 0.weight has no shape",
    ),
    "the meta device": (lambda: cases.model().to("meta"), ModelError, "model: 0.weight is on the meta device"),
    "a class": (lambda: nn.Linear, InputError, r"model: must be a torch.nn.Module, built, as in Linear\(...\); found the class Linear"),
    "a function": (lambda: lambda x: x, InputError, "model: must be a torch.nn.Module; found function"),
    "none": (lambda: None, InputError, "model: must be a torch.nn.Module; found NoneType"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_none_yet_are_named(name, call):
    build, error, message = MODELS[name]
    with pytest.raises(error, match=message):
        CALLS[call](build(), IMAGES, LABELS)


class Answer(nn.Module):
    """Returns what it is told to make of the logits."""

    def __init__(self, change) -> None:
        super().__init__()
        self.inner, self.change = cases.model(), change

    def forward(self, pixels: Tensor):
        return self.change(self.inner(pixels))


def test_a_model_that_returns_other_things_is_named_with_what_to_do():
    rule = r"^objective: the model must return logits .*; else give Objective\(outputs=...\), .*; found dict \{out: float32 \(16, 3\)"
    with pytest.raises(InputError, match=rule):
        unlearn(Answer(lambda logits: {"out": logits, "aux": logits}), cases.forget(), cases.remain())
    for change in (lambda logits: (logits, None), lambda logits: {"logits": logits}):
        assert metrics.accuracy(Answer(change), cases.dataset()) == metrics.accuracy(cases.model(), cases.dataset())


def mappings(rows, **more) -> list[dict]:
    return [{"image": IMAGES[rows], "label": LABELS[rows], **more}]


@pytest.mark.parametrize("name", METHODS)
def test_a_mapping_with_one_input_suits_a_model_that_takes_it_by_place(name):
    expected = unlearn(Answer(lambda logits: logits), [(IMAGES[FEW], LABELS[FEW])], [(IMAGES[MANY], LABELS[MANY])], CASES[name]())
    outcome = unlearn(Answer(lambda logits: logits), mappings(FEW), [UserDict(mappings(MANY)[0])], CASES[name]())
    properties.assert_same_weights(expected.model.state_dict(), outcome.model.state_dict())


class TwoInputs(Answer):
    def forward(self, pixels: Tensor, scale: Tensor | None = None):
        return self.inner(pixels) * (1 if scale is None else scale)


def test_entries_go_by_name_where_the_model_knows_it():
    model = TwoInputs(None)
    doubled = metrics.logits(model, [{"scale": torch.full((48, 1), 2.0), "pixels": IMAGES, "labels": LABELS, "path": ["a"] * 48}])
    assert torch.equal(doubled.logits, 2 * metrics.logits(model, (IMAGES, LABELS)).logits)
    message = r"^data: the model's forward takes pixels, scale; rename the entries .*; found the keys image, index"
    with pytest.raises(InputError, match=message):
        metrics.logits(model, mappings(slice(None), index=torch.arange(48)))


class ByName(Answer):
    def forward(self, *, pixels: Tensor):
        return self.inner(pixels)


class AnyName(Answer):
    def forward(self, **entries: Tensor):
        return self.inner(entries["image"])


WRAPPED = {
    "a compiled model": lambda: torch.compile(Answer(lambda logits: logits), backend="eager"),
    "DataParallel": lambda: nn.DataParallel(Answer(lambda logits: logits)),
    "any name": lambda: AnyName(None),
    "Sequential": cases.model,
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_models_take_mappings_too(name):
    assert metrics.accuracy(WRAPPED[name](), mappings(slice(None))) == metrics.accuracy(cases.model(), cases.dataset())


def test_a_model_that_takes_nothing_by_place_is_not_given_it():
    with pytest.raises(InputError, match="^data: the model's forward takes pixels; rename the entries"):
        metrics.accuracy(ByName(None), mappings(slice(None)))
    assert metrics.accuracy(ByName(None), [{"pixels": IMAGES, "y": LABELS}]) == metrics.accuracy(cases.model(), cases.dataset())


class Full(Answer):
    def forward(self, pixels: Tensor):
        raise self.change


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
@pytest.mark.parametrize("call", ["unlearn", "accuracy", "train", "batch Fisher", "head"])
def test_a_machine_that_is_out_of_memory_is_not_the_inputs_fault(call, error):
    with pytest.raises(RuntimeError) as raised:
        CALLS[call](Full(error), IMAGES, LABELS)
    assert (type(raised.value), str(raised.value)) == (type(error), str(error))


def test_a_later_batch_that_the_model_cannot_take_is_named_too():
    batches = [(IMAGES[:24], LABELS[:24]), (IMAGES[24:].double(), LABELS[24:])]
    for method in (Finetune(QUICK), NegGradPlus(tuning=QUICK), CASES["bad-teacher"](), CASES["scrub"]()):
        with pytest.raises(InputError, match="^(remain|forget): "):
            unlearn(cases.model(), cases.forget(), batches, method, watch={})


def test_functions_of_ones_own_that_fail_are_named():
    with pytest.raises(InputError, match="^objective.targets: must find the targets in a batch, and raised TypeError: tuple indices"):
        unlearn(cases.model(), cases.forget(), cases.remain(), objective=Objective(targets=lambda batch: batch["digit"]))
    with pytest.raises(InputError, match="^forget: .*raised TypeError: tuple indices must be"):
        unlearn(cases.model(), cases.forget(), cases.remain(), objective=Objective(outputs=lambda model, batch: model(batch["x"])))
    with pytest.raises(InputError, match="^objective.outputs: must return the logits, a tensor .*; found dict"):
        unlearn(cases.model(), cases.forget(), cases.remain(), objective=Objective(outputs=lambda model, batch: {"a": model(batch[0])}))
    for argument in ("outputs", "targets", "losses"):
        for value in (None, "a", nn.CrossEntropyLoss):
            with pytest.raises(InputError, match=f"^objective.{argument}: must be a function"):
                Objective(**{argument: value})


class Methods(nn.Module):
    """A layer that is not called as a module."""

    def __init__(self, way):
        super().__init__()
        self.inner, self.way = nn.Sequential(nn.Linear(7, 3)), way

    def forward(self, x):
        return self.way(self.inner, x)


class Called(nn.Linear):
    def __call__(self, x):
        return self.forward(x)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(Called(7, 3)),
        Methods(lambda inner, x: inner[0].forward(x)),
        Methods(lambda inner, x: inner(x)),
    ],
    ids=["its own __call__", "forward", "called"],
)
def test_the_layer_that_failed_is_named_however_it_is_called(model):
    with pytest.raises(InputError, match=r"0, (Linear|Called)\(in_features=7"):
        Objective().logits(model, (torch.randn(2, 3), torch.zeros(2)))


def test_what_a_failing_model_has_computed_is_freed():
    """Its error is caught where a CUDA graph cannot be captured: a graph of autograd that lived on would be taken up by later passes."""
    made = []

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            inner = self.layer(x)
            made.append(weakref.ref(inner))
            raise RuntimeError(f"not with {len(inner)}")

    gc.disable()
    try:
        with contextlib.suppress(InputError):
            Objective().logits(Fails(), (torch.randn(2, 3), torch.zeros(2)))
        assert made and made[0]() is None
    finally:
        gc.enable()
