"""Give every method one mark: its colour and form by name, the filling by reading, the same in every figure, legend and table.

Forms differ between all of our methods, so that marks stay apart without colours. The table is written out: a method that is added
moves no other. A user's method has one of the other marks, by a digest of its name.
"""

from __future__ import annotations

import hashlib
from itertools import product

from expunge.report.svg import COLOURS, FORMS, Filling, Mark

MARKS = {  # colour, form
    "retrain": (6, "star"),
    "finetune": (1, "circle"),
    "random-mask": (2, "square"),
    "tf-idf-mask": (4, "hourglass"),
    "fisher-noise": (3, "diamond"),
    "activation-mask": (5, "down"),
    "fisher-mask": (0, "up"),
    "mask-classifier": (6, "cross"),
    "newton-noise": (3, "dome"),
    "influence": (4, "left"),
    "ssd": (0, "right"),
    "gradient-ascent": (1, "house"),
    "mu-mis": (5, "hexagon"),
    "jit": (4, "tee"),
    "neg-grad-plus": (2, "plus"),
    "random-labels": (4, "bow"),
    "salun": (5, "spark"),
    "bad-teacher": (2, "dash"),
    "scrub": (3, "pillar"),
}
FILLINGS: dict[str, Filling] = {"text": "full", "released": "open"}  # other readings: "dotted"
OTHERS = sorted({*product(range(COLOURS), FORMS)} - {*MARKS.values()})


def mark(name: str, reading: str = "text") -> Mark:
    """The mark of a method by its name in cells."""
    place = int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "big")
    colour, form = MARKS.get(name) or OTHERS[place % len(OTHERS)]
    return Mark(colour, form, FILLINGS.get(reading, "dotted"))
