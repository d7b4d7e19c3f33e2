"""Progress is shown by default where a person looks on, and nowhere else."""

import sys
from types import SimpleNamespace

import pytest

from expunge import Constant, FisherMask, InputError, Tuning, fisher, metrics, train, unlearn
from expunge.metrics import Relearning
from expunge.runtime.progress import is_shown, track
from tests.methods import cases

ONE_EPOCH = Tuning(Constant(0.01, 1), batch_size=16)
LONG_WORK = {
    "unlearn": (
        lambda **settings: unlearn(cases.model(), cases.forget(), cases.remain(), FisherMask(0.1, tuning=ONE_EPOCH), **settings),
        "Fisher",
    ),
    "diagonal": (lambda **settings: fisher.diagonal(cases.model(), cases.forget(), **settings), "Fisher"),
    "train": (lambda **settings: train(cases.model(), cases.remain(), ONE_EPOCH, **settings), "training"),
    "relearn_time": (
        lambda **settings: metrics.relearn_time(
            cases.model(), trained(), cases.forget(), cases.dataset(), Relearning(ONE_EPOCH), **settings
        ),
        "training",
    ),
}


def trained():
    model = cases.model()
    train(model, cases.dataset(), Tuning(Constant(0.05, 3), batch_size=16), progress=False)
    return model


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object())))


@pytest.mark.parametrize("name", LONG_WORK)
def test_a_log_stays_empty(name, capsys):
    LONG_WORK[name][0]()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", LONG_WORK)
def test_a_terminal_shows_it_unless_told_not_to(name, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    work, shown = LONG_WORK[name]
    work(progress=False)
    assert capsys.readouterr() == ("", "")
    work()
    captured = capsys.readouterr()
    assert captured.out == "" and shown in captured.err


@pytest.mark.parametrize("name", LONG_WORK)
def test_a_notebook_shows_it(name, notebook, capsys):
    work, shown = LONG_WORK[name]
    work()
    assert f"\r{shown}" in capsys.readouterr().err


def test_a_log_holds_a_line_where_asked_for(capsys):
    LONG_WORK["train"][0](progress=True)
    assert capsys.readouterr().err.startswith("training: 2 steps, ")
    list(track([1], "one", enabled=True))
    assert capsys.readouterr().err.startswith("one: 1 step, ")


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    assert not is_shown(None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not is_shown(None)


def test_no_standard_error_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert not is_shown(None)
    assert list(track(range(2), "counting", enabled=is_shown(None))) == [0, 1]


def test_other_than_a_flag_is_refused():
    for work, _ in LONG_WORK.values():
        with pytest.raises(InputError, match="^progress: must be True or False"):
            work(progress="yes")
