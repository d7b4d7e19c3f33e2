"""Which tensors of a batch are its inputs: by rule, by name, or refused."""

import pytest
import torch

from expunge.data.inputs import check_inputs, input_tensors, replaced
from expunge.data.objective import Objective
from expunge.errors import InputError

X, OTHER, SOFT = torch.randn(4, 3), torch.randn(4, 2), torch.rand(4, 5)
LABELS, IDS, MASK = torch.arange(4), torch.arange(8).reshape(4, 2), torch.ones(4, 2)
OWN = Objective(targets=lambda batch: batch["answer"], losses=lambda logits, targets: logits.sum(1), classes=False)
FIRST = Objective(targets=lambda batch: batch[0], losses=lambda logits, targets: logits.sum(1), classes=False)

FOUND = {
    "a pair": (Objective(), (X, LABELS)),
    "a list": (Objective(), [X, LABELS]),
    "soft labels, last": (Objective(), (X, SOFT)),
    "integers beside": (Objective(), (IDS, X, LABELS)),
    "a mapping": (Objective(), {"pixels": X, "labels": LABELS}),
    "soft labels by key": (Objective(), {"pixels": X, "target": SOFT}),
    "a mask": (Objective(), {"inputs_embeds": X, "attention_mask": MASK, "labels": LABELS}),
    "nested": (Objective(), ({"x": X, "ids": IDS}, LABELS)),
    "targets of one's own": (OWN, {"x": X, "answer": SOFT}),
    "targets of one's own, first": (FIRST, (SOFT, X)),
    "a view of the targets": (Objective(targets=lambda batch: batch["answer"].view(4, 5)), {"x": X, "answer": SOFT}),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_inputs_are_found(name):
    objective, batch = FOUND[name]
    (found,) = input_tensors(batch, objective, None, "JiT needs")
    assert found is X


REFUSED = {
    "two": ((X, OTHER, LABELS), r"several may be: name them, as in inputs=\(0,\) or \(0, 1\); found \(float32 \(4, 3\), float32 \(4, 2\)"),
    "two of a mapping": ({"a": X, "b": OTHER, "label": LABELS}, r"inputs=\('a',\) or \('a', 'b'\)"),
    "weights of samples": ({"x": X, "weight": torch.ones(4), "label": LABELS}, r"inputs=\('x',\) or \('x', 'weight'\)"),
    "token ids": (
        {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS},
        "of floating-point numbers; token ids have neighbours only",
    ),
    "bytes": ((X.to(torch.uint8), LABELS), "of floating-point numbers; convert bytes before"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_ambiguous_or_has_no_neighbours_is_refused(name):
    batch, message = REFUSED[name]
    with pytest.raises(InputError, match=f"^forget: JiT needs .*{message}"):
        input_tensors(batch, Objective(), None, "JiT needs")


def test_names_decide():
    batch = {"a": X, "b": OTHER, "ids": IDS, "label": LABELS}
    assert input_tensors(batch, Objective(), ("b",), "JiT needs")[0] is OTHER
    assert [tensor.shape for tensor in input_tensors((X, OTHER, LABELS), Objective(), (1, 0), "JiT needs")] == [(4, 2), (4, 3)]
    for names, message in [(("c",), "must name entries"), ((5,), "must name entries"), (("ids",), "JiT needs inputs of floating-point")]:
        with pytest.raises(InputError, match=f"^inputs: {message}"):
            input_tensors(batch, Objective(), names, "JiT needs")
    with pytest.raises(InputError, match="^inputs: must name tensors"):
        input_tensors({"a": [X], "label": LABELS}, Objective(), ("a",), "JiT needs")


def test_only_the_inputs_are_replaced():
    batch = {"a": X, "rest": (OTHER, LABELS)}
    new = replaced(batch, [X], [X + 1])
    assert torch.equal(new["a"], X + 1) and new["rest"][0] is OTHER and new["rest"][1] is LABELS and batch["a"] is X


def test_names_are_checked():
    assert check_inputs(None) is None and check_inputs("x") == ("x",) and check_inputs(0) == (0,) and check_inputs(["x", 1]) == ("x", 1)
    for value in ((), [], 1.5, True, -1, (None,), {"x"}):
        with pytest.raises(InputError, match="^inputs: must name the inputs in a batch"):
            check_inputs(value)
