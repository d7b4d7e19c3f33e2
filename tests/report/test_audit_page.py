"""The page of an audit: the five answers, every measure, pictures; opened in a real browser too."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import expunge
from expunge.audit.findings import Measure, ShadowsUsed
from expunge.audit.intervals import Interval
from expunge.audit.shadow_measures import SHADOW_NAMES
from expunge.report.audit_files import check_owner, write_audit
from expunge.report.audit_page import audit_page
from tests.audit.small import Filter, parts, trained

ANSWERS = ("What was asked", "What was done", "Does it hold?", "How sure", "What this does not say")


@cache
def audit(references: int = 2) -> expunge.audit.Audit:
    settings = expunge.audit.Settings(rounds=2, steps=4, batch_size=64)
    clean = [trained(21 + number, without=True) for number in range(references)]
    return expunge.audit(trained(0), Filter(trained(0)), *parts(), clean, settings=settings, done="A filter <b>on</b> the answers.")


def test_the_answers_come_first_and_every_measure_is_there():
    page = audit_page(audit())
    assert [page.index(f"<dt>{answer}</dt>") for answer in ANSWERS] == sorted(page.index(f"<dt>{answer}</dt>") for answer in ANSWERS)
    assert page.index("Verdict: cosmetic") < page.index("<h2>All measures")
    for measure in audit().measures:
        assert measure.name.replace("'", "&#39;") in page, measure.name
    assert "A filter &lt;b&gt;on&lt;/b&gt; the answers." in page
    assert "erased" not in page and "compliant" not in page
    assert len(re.findall(r'<svg[^>]*role="img"', page)) == 3 + 2 + 1 + 3  # losses, re-learning, probes, where


def with_shadows(references: int = 2) -> expunge.audit.Audit:
    """Its page does not depend on how shadows came to their numbers."""
    made, interval = audit(references), Interval(0.71, 0.66, 0.76)
    rows = [Measure(name, "shadows", f"of {name}", 100, interval, interval, shadows=Interval(0.5, 0.4, 0.6)) for name in SHADOW_NAMES]
    return replace(made, measures=(*made.measures, *rows), shadows=ShadowsUsed(64, "FisherMask(ratio=0.02)", 100, 60))


@pytest.mark.parametrize("references", [0, 2])
def test_attacks_by_shadows_have_a_table_and_stand_beside_those_never_trained(references):
    page = audit_page(with_shadows(references))
    table = page[page.index("Attacks by shadow networks") :].partition("</table>")[0]
    titles = re.findall(r'<th scope="col"[^>]*>([^<]+)</th>', table)
    assert titles == ["measure", "before", "after", *(["retrained"] if references else []), "never trained", "samples"]
    assert all(f"{name}: of {name}" in table for name in SHADOW_NAMES) and "0.400 to 0.600" in table
    assert "Attacked by 64 shadows, on 100 forgotten and 60 never seen samples; each shadow forgot by FisherMask(ratio=0.02)." in page
    assert "never trained</th>" not in audit_page(audit(references)) and "Attacked by" not in audit_page(audit(references))


def test_without_retrained_networks_nothing_stands_in_their_place():
    page = audit_page(audit(0))
    assert '<th scope="col" data-sort>retrained</th>' not in page and "no retrained network" in page


def test_files_are_those_of_an_audit_alone(tmp_path):
    write_audit(tmp_path, audit(), {"out": "x"})
    assert expunge.audit.load_audit(tmp_path) == audit()
    check_owner(tmp_path)
    (tmp_path / "result.json").unlink()
    with pytest.raises(expunge.InputError, match="out: must be a folder where `expunge audit` replaces no file but its own"):
        check_owner(tmp_path)


@pytest.mark.slow
def test_it_opens_in_a_browser_without_errors_or_requests(browser, tmp_path):
    write_audit(tmp_path, with_shadows(), {})
    address = Path(tmp_path / "audit.html").as_uri()
    browser.open(address)
    assert browser.ask("document.title") == "expunge: audit"
    assert browser.told("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled") == []
    asked = {event["request"]["url"] for event in browser.told("Network.requestWillBeSent")}
    assert {each for each in asked if not each.startswith("data:")} == {address}
    assert browser.ask("document.querySelector('#verdict-heading').textContent") == "Verdict: cosmetic"
    assert browser.ask("[...document.querySelectorAll('.facts dt')].map(each => each.textContent)") == [*ANSWERS]
    assert browser.ask("[...document.querySelectorAll('svg.plane')].every(each => each.getBoundingClientRect().height > 50)")
    assert "Attacks by shadow networks" in browser.ask("document.querySelector('#measures').innerText")
    assert browser.ask("document.documentElement.scrollWidth <= window.innerWidth")
    ids = browser.ask("[...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(ids) == len({*ids})
