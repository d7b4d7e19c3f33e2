"""Which passes are captured at once, and audited again: graphs are stand-ins that note what is asked of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from expunge.data.objective import Objective
from expunge.errors import InputError
from expunge.fisher import adders, diagonal, familiar, planned
from expunge.fisher.closed_forms.audit import Audit
from expunge.fisher.familiar import FamiliarStep
from expunge.fisher.planning.layouts import Layout
from expunge.fisher.planning.passes import Pass
from expunge.fisher.planning.plan import Plan
from expunge.fisher.queueing import QueuedConfirmation
from expunge.runtime.nested import tensors

GIVEN = torch.zeros(4, 3), torch.zeros(4)


@pytest.fixture
def made(monkeypatch):
    """The passes of all steps, in turn: "eager", "audited" or "at once"."""
    events = []

    class Graphed:
        fails = False

        def __init__(self, step, warm, lasting):
            self.step, self.capturable, self.warm = step, True, False

        def skip_eager(self, given):
            self.warm = True

        def __call__(self, given, *aside):
            self.capturable = not (self.warm and Graphed.fails)
            events.append("audited" if aside else "at once" if self.warm and self.capturable else "eager")
            self.warm = not aside
            return self.step(given, *aside)

    monkeypatch.setattr(familiar, "GraphedStep", Graphed)
    return events, Graphed


def passed(*forms, **more):
    return lambda given, audit=None: Pass({}, [], torch.zeros(4), set(), False, [], set(), forms={*forms}, **more)


def call(step=None, plan=None, settings=None, given=GIVEN, audited=True):
    """The first batch of a call."""
    plan = Plan({"weight": Layout()}, surveyed=False) if plan is None else plan
    first = FamiliarStep(passed("linear") if step is None else step, plan, settings)
    first(given, Audit(0.5, once=True) if audited else None)
    return first


def test_the_second_call_is_captured_at_once_and_not_audited(made):
    events, _ = made
    call()
    call()
    assert events == ["audited", "at once"]


@pytest.mark.parametrize(
    "other",
    [
        {"given": (torch.zeros(5, 3), torch.zeros(5))},
        {"given": (torch.zeros(4, 3).double(), torch.zeros(4))},
        {"given": (torch.zeros(3, 4).T, torch.zeros(4))},
        {"plan": Plan({"weight": Layout(1)}, surveyed=False)},
        {"plan": Plan({"bias": Layout()}, surveyed=False)},
        {"settings": "expected"},
    ],
    ids=["batch size", "type", "memory format", "layout", "parameter", "settings"],
)
def test_what_is_another_pass_is_audited(other, made):
    events, _ = made
    call()
    call(**other)
    assert events == ["audited", "audited"]


def test_other_rounding_is_another_pass(made, monkeypatch):
    events, _ = made
    call()
    monkeypatch.setattr(familiar.tf32, "in_matmuls", lambda: True)
    call()
    assert events == ["audited", "audited"]


def test_other_forms_of_operations_are_audited(made):
    events, _ = made
    call(passed("linear", "bias"))
    call(passed("linear", "table"))  # which it has is known only after the capture
    for forms in (("linear", "table"), ("linear", "bias"), ("table",)):
        call(passed(*forms))
    assert events == ["audited", "at once", "audited", "at once", "at once", "at once"]


def test_a_form_that_was_audited_beside_fewer_samples_is_audited(made):
    events, _ = made
    call(audited=False, plan=Plan({"weight": Layout()}), given=(torch.zeros(5, 3), torch.zeros(5)))
    call()
    call(given=(torch.zeros(5, 3), torch.zeros(5)))
    assert events == ["eager", "audited", "audited"]


@pytest.mark.parametrize("fault", [{"wrong": {"weight"}}, {"silent": True}], ids=["wrong", "silent"])
def test_what_its_audit_did_not_show_is_audited_again(fault, made):
    events, _ = made
    call(passed("linear", **fault))
    call()
    assert events == ["audited", "audited"]


def test_an_obvious_plan_without_an_audit_shows_nothing(made):
    events, _ = made
    call(audited=False)
    call()
    assert events == ["eager", "audited"]


def test_a_plan_of_a_survey_needs_no_audit(made):
    events, _ = made
    for _ in range(2):
        call(plan=Plan({"weight": Layout()}), audited=False)
    assert events == ["eager", "at once"]


def test_what_cannot_be_captured_at_once_is_eager_in_the_next_call(made):
    events, graphs = made
    call()
    graphs.fails = True
    call()
    call()
    assert events == ["audited", "eager", "audited"]


def test_audits_of_later_batches_of_the_form_are_left_out(made):
    """Small batches have several."""
    events, _ = made
    call()
    second = call()
    second(GIVEN, Audit(0.5, once=True))
    second((torch.zeros(3, 3), torch.zeros(3)), Audit(0.5, once=True))
    assert events == ["audited", "at once", "at once", "audited"]


def test_later_batches_are_captured_as_ever(made):
    events, _ = made
    first = call()
    first(GIVEN)
    first(GIVEN)
    assert events == ["audited", "eager", "at once"]


def test_memory_of_passes_is_bounded(made, monkeypatch):
    monkeypatch.setattr(familiar, "MOST", 3)
    for settings in range(10):
        call(settings=settings)
        assert len(familiar._made) <= 3 and len(familiar._audited) <= 3


def on_cuda(*given):
    confirmation = QueuedConfirmation(*given)
    confirmation._on_cuda = True
    return confirmation


class Captured:
    """A graph that is the step itself, in which no value can be read, as in a capture."""

    capturing = False

    def __init__(self, step, warm, lasting):
        self.step, self.capturable, self.warm = step, True, False

    def skip_eager(self, given):
        self.warm = True

    def __call__(self, given, *aside):
        Captured.capturing = self.warm and not aside
        self.warm = True
        try:
            return self.step(given, *aside)
        finally:
            Captured.capturing = False


@pytest.fixture
def captured(monkeypatch):
    """Calls on the CPU as on a GPU: queued comparisons, graphs, audits of one parameter of each form."""
    monkeypatch.setattr(familiar, "GraphedStep", Captured)
    for module in (adders, planned):
        monkeypatch.setattr(module, "tensors", lambda batch: [SimpleNamespace(is_cuda=True, device=part.device) for part in tensors(batch)])
    monkeypatch.setattr(adders, "_confirmation", lambda place, *given: on_cuda(*given))
    check = Objective.check_targets
    monkeypatch.setattr(Objective, "check_targets", lambda self, *given: None if Captured.capturing else check(self, *given))


@pytest.mark.parametrize("bad", [-100, 7])
def test_labels_are_checked_before_a_first_batch_is_captured(bad, captured):
    """On CUDA a label outside the head ends the process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x, y = torch.randn(96, 4), torch.randint(3, (96,))
    wrong = y.clone()
    wrong[3] = bad
    diagonal(model, list(zip(x.split(32), y.split(32), strict=True)))
    for labels in (wrong, wrong.roll(40)):
        with pytest.raises(InputError, match=rf"labels must be in \[0, 3\).*found {bad}"):
            diagonal(model, list(zip(x.split(32), labels.split(32), strict=True)))


def convolution(kernel=1, groups=1, dilation=1):
    layer = nn.Conv2d(8, 8, kernel, padding=dilation * (kernel // 2), groups=groups, dilation=dilation)
    return lambda: nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3))


class Split(nn.Module):
    """Linear maps on parts of the channels."""

    def __init__(self, *sizes):
        super().__init__()
        self.sizes, self.parts = list(sizes), nn.ModuleList(nn.Linear(size * 16, 3) for size in sizes)

    def forward(self, x):
        return sum(part(rows.flatten(1)) for part, rows in zip(self.parts, x.split(self.sizes, 1), strict=True))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (convolution(1), convolution(3)),
        (convolution(3), convolution(3, groups=8)),
        (convolution(3), convolution(3, dilation=2)),
        (lambda: Split(4, 4), lambda: Split(2, 6)),
        (convolution(3), lambda: convolution(3)().double()),
    ],
    ids=["kernel", "groups", "dilation", "split", "type"],
)
def test_passes_of_other_forms_are_audited_though_their_shapes_are_the_same(first, second, captured, monkeypatch):
    audits, settle = [], Audit.settle
    monkeypatch.setattr(Audit, "settle", lambda self: audits.append(self) or settle(self))
    torch.manual_seed(0)
    counts = []
    for make in (first, first, second, second, first):
        model = make().eval()
        dtype = next(model.parameters()).dtype
        diagonal(model, [(torch.randn(20, 8, 4, 4).to(dtype), torch.randint(3, (20,))) for _ in range(3)])
        counts.append(len(audits))
    assert counts == [1, 1, 2, 2, 2]
