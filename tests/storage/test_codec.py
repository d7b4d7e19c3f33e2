"""Dataclasses to JSON and back: what comes back is what went, and what is not of its type is named."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import pytest

from expunge.storage.codec import Amount, Count, Number, Share, Within, decode, encode
from expunge.storage.documents import parse_json


@dataclass(frozen=True)
class Part:
    share: Share
    kind: Literal["text", "released"] = "text"


@dataclass(frozen=True)
class Whole:
    name: str
    part: Part | None
    parts: tuple[Part, ...] = ()
    by_name: Mapping[str, Sequence[Share | None]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    limit: Annotated[int, Within(1)] = 1
    seconds: Amount = 0.0
    flag: bool = False
    derived: ClassVar = ("size",)

    @property
    def size(self) -> int:
        return len(self.parts)


WHOLE = Whole("a", Part(0.5), (Part(0), Part(1.0, "released")), {"x": (0.25, None)}, {"deep": [1, {"y": None}]}, 3, 2.5, True)


def test_what_goes_comes_back():
    content = json.loads(json.dumps(encode(WHOLE)))
    assert content["size"] == 2 and content["parts"][1] == {"share": 1.0, "kind": "released"}
    assert decode(Whole, content) == WHOLE


def test_what_is_missing_has_its_default():
    assert decode(Whole, {"name": "a", "part": None}) == Whole("a", None)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"name": 3}, "name is 3"),
        ({"part": {"share": 1.5}}, "share is 1.5"),
        ({"part": {"share": True}}, "share is True"),
        ({"part": {"share": 0.5, "kind": "other"}}, "kind is other"),
        ({"part": {"share": 0.5, "more": 1}}, "part has no more"),
        ({"part": {}}, "part has share, which is missing"),
        ({"part": [0.5]}, r"part is \[0.5\]"),
        ({"parts": "text"}, "parts is text"),
        ({"by_name": {"x": 0.5}}, "by_name is 0.5"),
        ({"by_name": {1: []}}, "by_name is 1"),
        ({"limit": 0}, "limit is 0"),
        ({"limit": 2.0}, "limit is 2.0"),
        ({"seconds": 1e101}, "seconds is 1e[+]101"),
        ({"flag": 1}, "flag is 1"),
        ({"unknown": 1}, "content has no unknown"),
    ],
)
def test_what_is_not_of_its_type_is_named(changes, named):
    with pytest.raises(TypeError, match=f"^{named}$"):
        decode(Whole, {**encode(WHOLE), **changes})


def test_types_without_a_class():
    assert decode(Count, 3) == 3 and decode(Share | None, None) is None
    with pytest.raises(TypeError, match="^ratio is half$"):
        decode(Share | None, "half", "ratio")


@dataclass(frozen=True)
class Losses:
    values: tuple[Number, ...]
    best: Number | None = None


def test_infinite_numbers_are_text_in_standard_json():
    losses = Losses((1.5, math.inf, -math.inf, 1e300, 0), math.inf)
    text = json.dumps(encode(losses), allow_nan=False)
    assert decode(Losses, parse_json(text)) == losses and '"-Infinity"' in text
    assert decode(Losses, {"values": [], "best": None}) == Losses(())


@pytest.mark.parametrize("value", [math.nan, {"a": [math.nan]}, Losses((1.0, math.nan))])
def test_nan_is_refused(value):
    with pytest.raises(ValueError, match="NaN"):
        encode(value)


@pytest.mark.parametrize("wrong", ["NaN", "infinity", "", True, None, math.nan])
def test_text_that_is_no_infinity_is_named(wrong):
    with pytest.raises(TypeError, match="^values is "):
        decode(Losses, {"values": [wrong]})


def test_numbers_that_must_be_finite_stay_so():
    for kind in (float, Share, Amount, Count):
        with pytest.raises(TypeError, match="^value is Infinity$"):
            decode(kind, "Infinity", "value")
