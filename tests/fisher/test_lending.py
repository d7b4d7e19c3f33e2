"""One plan, made on a few samples, serves all chunks of a pass: the same bits whatever else is summed, and right where it does not fit."""

import copy

import pytest
import torch
from torch.utils.data import TensorDataset

from expunge.fisher import adders, lending
from expunge.fisher.chunks import Pass
from tests import reference
from tests.fisher.test_later_calls import Branch, Tokens, interleaved


@pytest.fixture
def surveys(monkeypatch):
    """Who has made a plan, in turn."""
    made = []
    for module in (lending, adders):
        plain, name = module.survey, module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "survey", lambda *given, plain=plain, name=name: made.append(name) or plain(*given))
    obvious = adders.obvious_plan

    def recorded(*given):
        plan = obvious(*given)
        if plan is not None:
            made.append("obvious")
        return plan

    monkeypatch.setattr(adders, "obvious_plan", recorded)
    return made


def branching():
    """Samples of groups 0 and 2 leave the branch shut, those of group 1 open it; the probe leaves it shut."""
    torch.manual_seed(0)
    x, y, groups = torch.randn(96, 6), torch.randint(0, 3, (96,)), torch.arange(96) // 32
    x[:, 0] = torch.where(groups == 1, 1.0, -1.0)
    return Branch(), TensorDataset(x, y), groups


def passed(model, data, groups, probe, rows=None):
    rows = torch.arange(len(data)) if rows is None else rows
    return Pass(model, TensorDataset(*data[rows]), groups[rows], batch_size=8, batches_per_chunk=2, probe=probe)


def assert_same_bits(first, second):
    assert first.count == second.count and first.sums.keys() == second.sums.keys()
    assert all(torch.equal(value, second.sums[name]) for name, value in first.sums.items())


def test_a_pass_is_planned_once(surveys):
    model, data, groups = branching()
    rows = (groups != 1).nonzero().flatten()
    sums = passed(model, data, groups, TensorDataset(*data[:2]), rows).alone()
    assert surveys == ["lending"]
    for group, expected in passed(model, data, groups, None, rows).alone().items():
        assert_same_bits(sums[group], expected)
    assert surveys == ["lending"] + 4 * ["adders"]  # without a probe, each of its chunks


def test_a_chunk_that_the_plan_does_not_fit_makes_its_own(surveys):
    model, data, groups = branching()
    sums = passed(model, data, groups, TensorDataset(*data[:2])).alone()
    assert surveys == ["lending", "obvious", "obvious"]  # the two chunks of group 1
    for group in range(3):
        rows = (groups == group).nonzero().flatten()
        expected = reference.fisher(copy.deepcopy(model).double(), (data[rows][0].double(), data[rows][1]))
        for name, value in expected.items():
            torch.testing.assert_close(sums[str(group)].sums[name], value, rtol=1e-4, atol=1e-6)
    assert sums["1"].sums["branch.weight"].any()


@pytest.mark.parametrize("kept", [(0,), (1,), (2,), (1, 2), (0, 1)])
def test_what_else_is_summed_changes_no_bit(kept):
    model, data, groups = branching()
    probe = TensorDataset(*data[:2])
    whole = passed(model, data, groups, probe).alone()
    rows = torch.isin(groups, torch.tensor(kept)).nonzero().flatten()
    for group, sums in passed(model, data, groups, probe, rows).alone().items():
        assert_same_bits(sums, whole[group])


@pytest.mark.parametrize("order", [(5, 0, 3, 1, 4, 2), (2, 3, 4, 5, 0, 1)])
def test_the_order_of_the_chunks_changes_no_bit(order):
    """As where other processes take some of them."""
    model, data, groups = branching()
    passes = [passed(model, data, groups, TensorDataset(*data[:2])) for _ in range(2)]
    (chunks, _), (others, _) = (each._prepare() for each in passes)
    rising = {number: passes[0]._work(chunks, number) for number in range(6)}
    for number in order:
        assert_same_bits(passes[1]._work(others, number), rising[number])


def test_rows_sorted_over_the_batch_in_a_group_that_the_probe_is_not_of(surveys):
    """The probe's tokens are in order, so that its plan counts rows to the samples they are not of."""
    torch.manual_seed(1)
    model, (x, y) = Tokens().double(), interleaved()
    model.settings["nested"]["too"]["deep"]["sorts"] = True
    groups = (torch.arange(128) >= 32).long()
    expected = reference.fisher(model, (x[32:], y[32:]))
    for seed in range(3):
        sums = Pass(model, TensorDataset(x, y), groups, seed=seed, probe=TensorDataset(x[:2], y[:2])).alone()
        for name, value in expected.items():
            torch.testing.assert_close(sums["1"].sums[name], value, rtol=1e-9, atol=0)
    assert surveys[0] == "lending"


def test_a_second_pass_looks_at_the_model_anew(surveys):
    torch.manual_seed(1)
    model, (x, y) = Tokens().double(), interleaved()
    again = Pass(model, TensorDataset(x, y), torch.zeros(128, dtype=torch.int64), probe=TensorDataset(x[40:42], y[40:42]))
    again.alone()
    model.settings["nested"]["too"]["deep"]["sorts"] = True
    sums, expected = again.alone()["0"].sums, reference.fisher(model, (x, y))
    for name, value in expected.items():
        torch.testing.assert_close(sums[name], value, rtol=1e-9, atol=0)
    assert surveys.count("lending") == 2


def test_a_probe_of_single_samples_gives_no_plan(surveys):
    model, data, groups = branching()
    sums = passed(model, data, groups, [(data[:1][0], data[:1][1])]).alone()
    for group, expected in passed(model, data, groups, None).alone().items():
        assert_same_bits(sums[group], expected)
    assert "lending" not in surveys
