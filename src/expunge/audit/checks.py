"""Raise for networks and data that an audit would be wrong about."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from expunge.data.batches import Data
from expunge.data.objective import Objective
from expunge.data.overlap import check_disjoint
from expunge.errors import InputError, UncheckedWarning
from expunge.model.checks import check_module
from expunge.runtime.callers import level_of_caller
from expunge.runtime.display import counted
from expunge.validate import shown

TWINS = 0.01  # datasets hold pictures twice; more of them are an overlap


def listed_networks(argument: str, networks: Any) -> list[nn.Module]:
    """None, one network or several, as a list."""
    if networks is None:
        return []
    if isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList):
        return [networks]
    if not isinstance(networks, Sequence | nn.ModuleList | Iterator):
        raise InputError(argument, "must be a network, or a list of networks", shown(networks))
    listed = [*networks]
    for network in listed:
        check_module(network, argument)
    return listed


def check_sets(sets: Mapping[str, Data], objective: Objective, progress: bool = False) -> None:
    """No sample may be in two of forget, remain and test. Test samples that equal a remain sample by content are twins up to 1 %."""
    check_disjoint(sets["forget"], sets["remain"], objective, progress)
    for name in ("forget", "remain"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncheckedWarning)
            twins = _twins(sets, name, objective, progress)
        if twins:
            warnings.warn(
                f"test: {counted(twins, 'sample')} equal to one of {name} in inputs and label; left in",
                UncheckedWarning,
                stacklevel=level_of_caller(),
            )


def _twins(sets: Mapping[str, Data], name: str, objective: Objective, progress: bool) -> int:
    try:
        check_disjoint(sets[name], sets["test"], objective, progress)
    except InputError as error:
        if error.argument not in ("remain", "forget"):
            raise
        if not error.rule.startswith(("must not hold samples of the forget", "must not be the forget")):
            raise InputError("test" if error.argument == "remain" else name, error.rule, error.found) from error
        found = str(error.found)
        equal = int(found.split()[0]) if found.split()[0].isdigit() and "equal" in found else None
        if equal is not None and hasattr(sets["test"], "__len__") and equal <= TWINS * len(sets["test"]):
            return equal
        raise InputError("test", f"must not hold samples of the {name} set: they are not unseen", error.found) from error
    return 0
