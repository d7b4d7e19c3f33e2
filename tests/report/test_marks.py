"""One mark per method: its own, stable, and distinguishable without colours."""

from expunge.methods import METHODS
from expunge.report.marks import MARKS, mark
from expunge.report.svg import COLOURS, FORMS


def test_every_method_has_a_form_of_its_own():
    assert len({form for _, form in MARKS.values()}) == len(MARKS) and {*MARKS} <= {*METHODS}
    assert all(form in FORMS and colour in range(COLOURS) for colour, form in MARKS.values())
    assert len({(mark(name).colour, mark(name).form) for name in METHODS}) == len(METHODS)


def test_readings_of_a_method_differ_by_the_filling_alone():
    marks = [mark("fisher-noise", reading) for reading in ("text", "released", "golatkar")]
    assert len({(one.colour, one.form) for one in marks}) == 1 and len({one.filling for one in marks}) == 3


def test_a_method_of_ones_own_keeps_its_mark_and_takes_none_of_ours():
    own = mark("research.methods:Mine")
    assert own == mark("research.methods:Mine") and (own.colour, own.form) not in MARKS.values()
    assert len({mark(f"research.methods:Mine{place}") for place in range(20)}) > 10
