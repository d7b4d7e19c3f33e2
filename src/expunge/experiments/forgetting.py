"""Plan the table of forgetting: how near each method comes to the retrained network in what it gives, in what it still knows, in cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from expunge.experiments.cells import LIMITS, REFERENCE
from expunge.experiments.paper import ORIGINAL
from expunge.experiments.planned_cells import CATEGORY, CONTROL, SHARES, Entry, cells
from expunge.experiments.profiles import Profile

RESET = "reset-and-distil"
NEWER = ("assd", "potion", "lfssd", "msg", "sfron", "lotus", "mu-mis", "jit")  # than the paper
NEWER_WITHOUT_REMAIN = ("mu-mis", "jit")
RANDOM_SHARE = 0.05
SMALL_RATIO = 0.005  # of FisherMask where nothing protects the remain data

Row = tuple[str, str, Mapping[str, Any], Mapping[str, Any], str]  # method, reading, its settings, changes of its tuning, in words


def planned(profile: Profile) -> Iterator[Entry]:
    """All scenarios on the first model, a class on every one. Settings were chosen on other seeds, classes and validation data."""
    model, *others = profile.models
    yield from _section(profile, model, "a class", CATEGORY, _OF_CLASS, evidence=True)
    for other in others:
        yield from _section(profile, other, "a class", CATEGORY, _ON_OTHER_MODELS, evidence=True)
    samples = {"kind": "subset", "fraction": RANDOM_SHARE}
    yield from _section(profile, model, f"{100 * RANDOM_SHARE:g} % of the samples", samples, _OF_SAMPLES, evidence=True)
    yield from _section(profile, model, "poison", {"kind": "poisoned", **profile.poison}, _OF_POISON)
    for share in SHARES:
        scenario = {"kind": "mislabelled", "fraction": share}
        yield from _section(profile, model, f"{100 * share:.0f} % wrong labels", scenario, _OF_WRONG_LABELS)
    yield from _section(profile, model, "a class, no remain data", {**CATEGORY, "remain_count": 0}, _WITHOUT_REMAIN)
    few = {**CATEGORY, "remain_fraction": profile.remain_fraction}
    yield from _section(profile, model, f"a class, {100 * profile.remain_fraction:g} % remain data", few, _WITH_FEW_REMAIN)


def _section(
    profile: Profile, model: str, section: str, scenario: Mapping[str, Any], rows: tuple[Row, ...], evidence: bool = False
) -> Iterator[Entry]:
    asked = dict(profile.evidence) if evidence else None
    whole = {name: value for name, value in scenario.items() if name not in LIMITS}  # the networks are those of all remain data
    for cell in cells(profile, model, whole, REFERENCE, "text"):
        # With evidence w* has cells of its own; else it is read off those of the retrained network.
        untouched = replace(cell, method={"name": ORIGINAL, "reading": "text"}, evidence=asked) if evidence else cell
        yield Entry(untouched, model, section, ORIGINAL)
    for name, reading, settings, tuning, words in rows:
        for cell in cells(profile, model, whole if name == REFERENCE else scenario, name, reading):
            changed = None if tuning == NO_TUNING else {**(cell.tuning or {}), **tuning} or None
            if changed is not None and "weight_decay" in tuning:
                changed["weight_decay"] = max(tuning["weight_decay"], cell.recipe["weight_decay"])
            yield Entry(replace(cell, method={**cell.method, **settings}, tuning=changed, evidence=asked), model, section, name, words)


def _plain(name: str, reading: str = "text") -> Row:
    return (name, reading, {}, {}, "")


def _reset(reset: Any, epochs: int, words: str, **tuning: Any) -> Row:
    return (RESET, "text", {"reset": reset}, {"schedule": "one-cycle", "epochs": epochs, **tuning}, words)


NO_TUNING: Mapping[str, Any] = {"schedule": None}
BY_FISHER = {"ratio": 0.6}
DISTILLED = {"distillation": {"temperature": 4.0, "weight": 0.9}}
_USUAL = (_plain(REFERENCE), _plain("finetune"), _plain("fisher-mask", "released"))
_OF_CLASS = (
    *_USUAL,
    ("fisher-mask", "released", {}, DISTILLED, "distilled"),
    _plain(CONTROL),
    *(_plain(name) for name in NEWER),
    _reset(0.35, 5, "last third"),
    _reset(BY_FISHER, 5, "60 % by Fisher"),
)
_ON_OTHER_MODELS = (_plain(REFERENCE), _plain("finetune"), _reset(0.35, 5, "last third"), _reset(BY_FISHER, 5, "60 % by Fisher"))
_OF_SAMPLES = (*_USUAL, _reset(0.35, 5, "last third"), _reset(0.65, 8, "last two thirds"))
_OF_POISON: tuple[Row, ...] = (
    _plain(REFERENCE),
    _plain("finetune"),
    ("fisher-mask", "released", {"ratio": 0.2}, {}, ""),
    _reset(0.35, 5, "last third"),
    _reset(1.0, 8, "all weights"),
)
_OF_WRONG_LABELS = (*_USUAL, _reset(0.35, 10, "last third"), _reset(1.0, 10, "all weights", weight_decay=1e-3))
_WITHOUT_REMAIN = (
    _plain(REFERENCE),
    ("fisher-mask", "released", {"ratio": SMALL_RATIO}, NO_TUNING, "0.5 %"),
    *(_plain(name) for name in NEWER_WITHOUT_REMAIN),
    _plain(CONTROL),
)
_WITH_FEW_REMAIN: tuple[Row, ...] = (
    _plain(REFERENCE),
    _plain("finetune"),
    _plain("fisher-mask", "released"),
    ("fisher-mask", "released", {}, DISTILLED, "distilled"),
)
