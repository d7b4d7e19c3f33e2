"""Pictures: round ticks, points where they belong, styles that differ, nothing unescaped."""

from itertools import product
from xml.etree import ElementTree

import pytest

from expunge.report import svg

MARK = svg.Mark(0, "circle")


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0, 100, 5, [0, 20, 40, 60, 80, 100]),
        (-3, 103, 4, [0, 50, 100]),
        (0, 0.12, 6, [0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12]),
        (82.5, 88.5, 6, [83, 84, 85, 86, 87, 88]),
        (0, 5, 5, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_ticks_are_round(low, high, most, expected):
    assert svg.ticks(low, high, most) == expected


def test_corners_of_the_plane_are_corners_of_the_picture():
    plane = svg.Plane((0, 10), (50, 100), ("x", "y"), (400, 300))
    assert plane.at(0, 100) == (plane.left, plane.top)
    assert plane.at(10, 50) == (400 - plane.right, 300 - plane.bottom)
    assert plane.holds(10, 100) and not plane.holds(10.1, 100)


def test_marks_differ_in_colour_form_or_filling():
    marks = [svg.Mark(*parts) for parts in product(range(svg.COLOURS), svg.FORMS, ("full", "open", "dotted"))]
    assert len({svg.symbol(mark) for mark in marks}) == len(marks)


def test_everything_is_escaped():
    plane = svg.Plane((0, 1), (0, 1), ("<x>", "&"))
    plane.mark(0.5, 0.5, MARK, tip='<script>"', letter="<u>")
    plane.column(0.5, 0.5, 0.1, MARK, "<b>")
    plane.cross(0.5, 0.5, "<i>")
    drawn = plane.picture('a"b', "<title>", "a & b")
    root = ElementTree.fromstring(drawn)
    assert root.attrib["aria-labelledby"] == 'a"b-title' and root[0].text == "<title>" and root[1].text == "a & b"
    assert not any(name in drawn for name in ("<script", "<i>", "<u>"))


def test_bars_stay_in_their_box():
    widths = [ElementTree.fromstring(svg.bar(share, MARK))[0].attrib["width"] for share in (-1, 0.25, 7)]
    assert widths == ["0", "25", "100"]
