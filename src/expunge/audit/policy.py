"""Hold the thresholds of the verdict, which a user can replace by a file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from expunge.errors import InputError
from expunge.storage.codec import decode
from expunge.storage.documents import excerpt, read_json
from expunge.validate import check_number, check_whole, make_plain

FILE = Path(__file__).with_name("policy.json")


@dataclass(frozen=True)
class Policy:
    """When a difference counts. What the original network knew is its distance from the retrained networks, by each measure.

    With `seeds` retrained networks or more, a network is told from them outside the prediction interval of their values, at the `level` of
    all tests together, and by `smallest_share` of what the original knew at least; with fewer, by `share_without_seeds` of it. A test has
    power if it shows `detectable` of it, or less, with probability `power`.
    """

    level: float
    """Of all tests of a verdict together: how often a network that was never trained on the data may be told from others."""
    power: float
    detectable: float
    smallest_share: float
    seeds: int
    share_without_seeds: float
    cosmetic_share: float
    """A network whose answers show less than this share, and whose inside shows more, has hidden it."""
    known_accuracy: float
    """Without a retrained network: a class is known where its accuracy is surely above this. A network that never saw it has 0."""
    known_area: float
    """Without one: samples are known where the area under the curve of the loss attack is surely so far from 0.5."""
    read_back: float
    """A class is inside where the original's own classifier reads this share of it and of the others; with no retrained network, surely."""
    neighbours: float = field(default=0.65, kw_only=True)
    """Forgotten samples go where the original had them next: this share of the way from the retrained networks to it."""
    utility_loss: float
    """A network is damaged that surely lost so much of the accuracy on other test samples."""
    class_loss: float
    """And one that surely lost so much of a class that was to stay."""
    samples: int
    """Fewer samples than these make no interval worth a verdict."""
    shadow_area: float = 0.03
    """Without one: samples are known where the area under the curve of an attack by shadows is surely so far above that of shadows never
    trained on them."""
    shadows: int = 8
    """Fewer shadows than these make no interval."""

    def __post_init__(self) -> None:
        for name in ("level", "power"):
            check_number(f"policy.{name}", getattr(self, name), 0, 1, ends="()")
        shares = ("detectable", "smallest_share", "share_without_seeds", "cosmetic_share", "known_accuracy", "read_back", "neighbours")
        for name in (*shares, "utility_loss", "class_loss"):
            check_number(f"policy.{name}", getattr(self, name), 0, 1, ends="(]")
        for name in ("known_area", "shadow_area"):
            check_number(f"policy.{name}", getattr(self, name), 0, 0.5, ends="[)")
        check_whole("policy.seeds", self.seeds, minimum=3, maximum=10**6)
        check_whole("policy.samples", self.samples, minimum=5, maximum=10**9)
        check_whole("policy.shadows", self.shadows, minimum=6, maximum=10**5)
        make_plain(self)


def load_policy(path: str | os.PathLike[str] = FILE) -> Policy:
    """A policy from a file of JSON with all its numbers, such as the package's own, audit/policy.json."""
    try:
        return decode(Policy, read_json(path), "the policy")
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("policy", f"must be a file of JSON with the numbers of a Policy ({excerpt(error)})", os.fspath(path)) from error
