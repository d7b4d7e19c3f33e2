"""Hold the settings of a request as plain data, and build the method they name."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from expunge.errors import InputError
from expunge.methods import METHODS, Choose, Method
from expunge.methods.lookup import method_class
from expunge.methods.readings import readings
from expunge.storage.codec import decode, encode
from expunge.training.schedules import replay
from expunge.training.tuning import Tuning
from expunge.validate import check_whole, shown

CHOOSE = "choose"
EPOCHS = 5  # of fine-tuning: the recipe's schedule, compressed
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Settings:
    """How the samples are to be forgotten; `given` are settings of the method as they were written, name=value.

    `method` None: that of the last request in the folder, with its settings unless others are given; in a new folder one is chosen.
    """

    method: str | None = None
    given: tuple[str, ...] = ()
    batch_size: int = 128
    device: str | None = None
    threads: int | None = None
    """Of torch on a CPU: results are the same to the bit for one number of them."""
    sums: Literal["class", "rows"] | None = None
    """How stored sums that were used are grouped."""
    sums_threads: int | None = None
    """Those that the store was built with: its sums, and those of the samples taken from them, have no others."""


def check_settings(settings: Settings) -> None:
    """Raise where a field is of another type, or a count none that torch takes; more threads than these end the process."""
    if not isinstance(settings, Settings):
        raise InputError("settings", "must be requests.Settings, such as Settings('fisher-mask', ('ratio=0.05',))", shown(settings))
    check_whole("batch_size", settings.batch_size, minimum=1)
    for name in ("threads", "sums_threads"):
        if (threads := getattr(settings, name)) is not None:
            check_whole("threads", threads, minimum=1, maximum=1024)
    try:
        decode(Settings, encode(settings))
    except TypeError as error:
        raise InputError("settings", "must have fields of the types that Settings names", str(error)) from error


def following(settings: Settings, earlier: Settings | None) -> Settings:
    """With the method of the request before, where none is given; its settings too, unless some are."""
    if settings.method is not None:
        return settings
    if earlier is None:
        return replace(settings, method=CHOOSE)
    return replace(settings, method=earlier.method, given=settings.given or earlier.given)


def build_method(settings: Settings, recipe: Tuning | None) -> Method:
    """The method by name, with the settings given; what it trains by comes from the task's recipe where there is one.

    Choose takes the recipe's peak rate; Retrain the recipe itself; others its schedule compressed to 5 epochs.
    """
    name = settings.method or CHOOSE
    build = _reading(name)
    assigned = [_assigned(text) for text in settings.given]
    values = dict(assigned)
    if len(values) < len(assigned):
        raise InputError("set", "must give every setting once", " ".join(settings.given))
    names = {field.name for field in fields(build) if field.init} if isinstance(build, type) else None
    if recipe is not None and "tuning" not in values:
        values = _from_recipe(name, build, recipe) | values
    try:
        return build(**values)
    except TypeError as error:
        known = f"; it has {', '.join(sorted(names))}" if names else ""
        strange = ", ".join(key for key in values if names and key not in names)
        raise InputError("set", f"must be settings of {name}{known}", strange or str(error)) from error


def _reading(name: str) -> Any:
    if name == CHOOSE:
        return Choose
    known = {key if text == "text" else f"{key}-{text}": build for key, kind in METHODS.items() for text, build in readings(kind).items()}
    if name in known:
        return known[name]
    if ":" not in name:
        raise InputError("method", f"must be {CHOOSE}, one of {', '.join(METHODS)}, or of your own, path/to/file.py:Class", name)
    try:
        return method_class(name)
    except InputError as error:
        raise InputError("method", error.rule, error.found) from error


def _assigned(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InputError("set", "must be NAME=VALUE, such as ratio=0.05", text)
    if name == "tuning" and value != "None":
        raise InputError("set", "tuning can only be None here, for no training; recipe() of the task says how to train", text)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, value  # a word, such as kind=expected


def _from_recipe(name: str, build: Any, recipe: Tuning) -> dict[str, Any]:
    if name == CHOOSE:
        schedule = recipe.schedule
        peak = max(schedule.rate(schedule.epochs * step / 200) for step in range(200))
        return {"rate": peak} if recipe.optimizer is None and peak > 0 else {}
    from inspect import signature

    if "tuning" not in signature(build).parameters or getattr(build(), "tuning", None) is None:
        return {}
    return {"tuning": recipe if name == "retrain" else replace(recipe, schedule=replay(recipe.schedule, EPOCHS))}


def written(settings: Settings) -> str:
    """Method and settings as they are given in the shell."""
    return " ".join([settings.method or CHOOSE, *sorted(settings.given)])


def is_described(method: Method, content: Mapping[str, Any]) -> bool:
    """Whether a method is the one that a settings file describes; where in memory its functions are does not count."""
    return ADDRESS.sub("", described(method)["repr"]) == ADDRESS.sub("", str(content["repr"]))


def described(method: Method) -> Mapping[str, Any]:
    """The method for the settings file: its class, and its repr, in which all settings stand."""
    return {
        "class": f"{type(method).__module__}.{type(method).__qualname__}",
        "repr": shown(method) if len(repr(method)) < 200 else repr(method),
    }
