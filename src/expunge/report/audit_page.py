"""Write an audit as one self-contained page: the verdict for a person who decides, below it every number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from expunge import __version__
from expunge.audit.findings import Measure
from expunge.audit.intervals import Interval
from expunge.audit.judging import clears, percent
from expunge.audit.report import LIMITS, Audit, capital
from expunge.report.audit_figures import figures
from expunge.report.page import FOLDER
from expunge.report.page_tables import Cell, Column, Table

MEANING = {
    "not distinguished": "As far as these tests see. They do not show that nothing is left.",
    "partly": "No. The network can be told from one that never saw the data.",
    "cosmetic": "No. The answers changed, but what was to be forgotten is still inside and can be brought back.",
    "damaged": "The question does not arise: the network lost what it was to keep.",
    "cannot tell": "Unknown. What is missing for an answer is named below.",
}
SIDES = {
    "utility": "What must stay known",
    "answers": "Answers on the forget data",
    "where": "Where forgotten samples go",
    "inside": "What is inside",
    "rounded": "After rounding the weights",
    "likeness": "Likeness to retrained networks",
    "shadows": "Attacks by shadow networks",
}


def audit_page(audit: Audit) -> str:
    """The HTML of an audit."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.tests["table"] = lambda part: isinstance(part, Table)
    return environment.get_template("audit.html").render(
        audit=audit,
        answers=answers(audit),
        reasons=reasons(audit),
        figures=figures(audit),
        tables=[table for side, title in SIDES.items() if (table := measures(audit, side, title)) is not None],
        runs=runs(audit),
        version=__version__,
    )


def answers(audit: Audit) -> list[tuple[str, Sequence[str]]]:
    """What was asked, what was done, does it hold, how sure, what this does not say."""
    seeds = f"{audit.retrained} retrained networks" if audit.retrained != 1 else "1 retrained network"
    data = ", ".join(f"{count:,} {name}" for name, count in audit.sizes.items())
    sure = [f"Beside {seeds if audit.retrained else 'no retrained network'}, on {data} samples."]
    powers = [test for test in audit.verdict.tests if clears(test) and test.detectable is not None]
    if powers:
        best, worst = (pick(powers, key=lambda test: test.detectable or 0) for pick in (min, max))
        sure.append(
            f"With probability {audit.policy.power}, {best.measure} shows {percent(best.detectable or 0)} of what the original knew; "
            f"the weakest test, {worst.measure}, {percent(worst.detectable or 0)}."
        )
    if audit.shadows is not None:
        sure.append(f"Attacked {audit.by_shadows()}; each shadow forgot by {audit.shadows.method}.")
    sure += [f"Missing: {missing}." for missing in audit.verdict.missing]
    return [
        ("What was asked", [f"To forget {audit.asked()}."]),
        ("What was done", [audit.done or "Not told to the audit, which looks at the networks alone."]),
        ("Does it hold?", [MEANING[audit.verdict.word], f"{capital(audit.verdict.sentence)}."]),
        ("How sure", sure),
        ("What this does not say", LIMITS),
    ]


def reasons(audit: Audit) -> Table:
    rows = [
        [Cell(reason.words), Cell(f"{reason.value:.3g}", reason.value), _ends(reason.low, reason.high)] for reason in audit.verdict.reasons
    ]
    return Table("Reasons", [Column("reason"), Column("value"), Column("95 % interval")], rows)


def measures(audit: Audit, side: str, title: str) -> Table | None:
    chosen = [measure for measure in audit.measures if measure.side == side]
    if not chosen:
        return None
    columns = [Column("measure"), Column("before"), Column("after"), *([Column("retrained")] if audit.retrained else [])]
    columns += [*([Column("never trained")] if side == "shadows" else []), Column("samples")]
    rows = [
        [
            Cell(f"{measure.name}: {measure.words}"),
            _cell(measure.before),
            _cell(measure.after),
            *([_others(measure)] if audit.retrained else []),
            *([_cell(measure.shadows)] if side == "shadows" else []),
            Cell(f"{measure.n:,}", measure.n),
        ]
        for measure in chosen
    ]
    return Table(title, columns, rows, folded=side == "where" and len(rows) > 20)


def runs(audit: Audit) -> list[Table]:
    """The tests, the policy and settings, and the digests."""
    tests = [
        [
            Cell(test.measure),
            Cell(test.side),
            Cell(test.found),
            *(_number(value) for value in (test.before, test.after, test.reference, test.margin)),
            *(Cell("" if share is None else percent(share), share) for share in (test.left, test.detectable)),
        ]
        for test in audit.verdict.tests
    ]
    titles = ("test", "side", "found", "before", "after", "retrained", "margin", "left of what was known", "detectable share")
    numbers = [
        [Cell(f"{name}.{field}"), Cell(str(value))]
        for name in ("policy", "settings")
        for field, value in asdict(getattr(audit, name)).items()
    ]
    digests = [[Cell(f"weights, {name}"), Cell(digest)] for name, digest in audit.weights.items()]
    digests += [[Cell(f"data, {name}"), Cell(digest or "shows no tensors")] for name, digest in audit.data.items()]
    return [
        *([Table("Tests against retrained networks", [Column(title) for title in titles], tests)] if tests else []),
        Table("Policy and settings", [Column("name"), Column("value")], numbers, folded=True),
        Table("Digests", [Column("of"), Column("SHA-256")], digests, folded=True),
    ]


def _cell(interval: Interval | None) -> Cell:
    if interval is None:
        return Cell("–")
    return Cell(f"{interval.value:.3f}", interval.value, details=[f"{interval.low:.3f} to {interval.high:.3f}"])


def _others(measure: Measure) -> Cell:
    values = measure.floor or measure.retrained
    if len(values) < 2:
        return _cell(values[0] if values else None)
    mean = sum(interval.value for interval in values) / len(values)
    ends = [interval.value for interval in values]
    return Cell(f"{mean:.3f}", mean, details=[f"{min(ends):.3f} to {max(ends):.3f}, {len(ends)} values"])


def _number(value: float) -> Cell:
    return Cell(f"{value:.3f}", value)


def _ends(low: float, high: float) -> Cell:
    return Cell(f"{low:.3g} to {high:.3g}", low)
