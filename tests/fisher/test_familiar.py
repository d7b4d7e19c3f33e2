"""Which passes are captured at once, and audited again: graphs are stand-ins that note what is asked of them."""

from __future__ import annotations

import pytest
import torch

from expunge.fisher import familiar
from expunge.fisher.closed_forms.audit import Audit
from expunge.fisher.familiar import FamiliarStep
from expunge.fisher.planning.layouts import Layout
from expunge.fisher.planning.operations import path_after
from expunge.fisher.planning.passes import Pass
from expunge.fisher.planning.survey import Plan

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


def passed(path=1, **more):
    return lambda given, audit=None: Pass({}, [], torch.zeros(4), set(), False, [], set(), path=path, **more)


def call(step=None, plan=None, settings=None, given=GIVEN, audited=True):
    """The first batch of a call."""
    plan = Plan({"weight": Layout()}, surveyed=False) if plan is None else plan
    first = FamiliarStep(passed() if step is None else step, plan, settings)
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


def test_other_operations_on_the_same_shapes_are_audited(made):
    events, _ = made
    call(passed(1))
    call(passed(2))  # its path is known only after the capture
    call(passed(2))
    assert events == ["audited", "at once", "audited", "at once"]


@pytest.mark.parametrize("fault", [{"wrong": {"weight"}}, {"silent": True}], ids=["wrong", "silent"])
def test_what_its_audit_did_not_show_is_audited_again(fault, made):
    events, _ = made
    call(passed(**fault))
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


def test_what_cannot_be_captured_at_once_is_tried_once(made):
    events, graphs = made
    call()
    graphs.fails = True
    for _ in range(3):
        call()
    assert events == ["audited", "eager", "audited", "audited"]


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
        assert len(familiar._paths) <= 3


def test_a_path_tells_strides_and_dimensions():
    def path(*arguments):
        return path_after(1, torch.conv2d, arguments, torch.zeros(2, 3))

    x = torch.zeros(2)
    assert path(x, (1, 1), 2) == path(torch.ones(2), (1, 1), 2)
    assert len({path(x, (1, 1), 2), path(x, (2, 1), 2), path(x, (1, 1), 1), path(x)}) == 4
