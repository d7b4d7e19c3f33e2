"""The page in a real browser: from disk, without a network, with and without scripts, in both themes, on a phone, on paper."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
TABLE = 'document.querySelector("#table1 table")'


def column(browser, place):
    """What the method rows of the first table say there."""
    return browser.ask(f"[...{TABLE}.querySelector('tbody.sorted').rows].map(row => row.cells[{place}].firstChild.textContent.trim())")


def test_it_opens_from_disk_without_errors_or_requests(browser, address):
    browser.open(address)
    assert address.startswith("file://")
    assert browser.ask("document.title") == "expunge: results"
    assert browser.told("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled") == []
    asked = {event["request"]["url"] for event in browser.told("Network.requestWillBeSent")}
    assert {each for each in asked if not each.startswith("data:")} == {address}


def test_a_click_on_a_heading_sorts_and_the_references_stay(browser, address):
    browser.open(address)
    given = column(browser, 0)
    first = f"{TABLE}.querySelectorAll('th[data-sort]')[4]"
    browser.ask(f"{first}.querySelector('button').click()")
    up = [float(text.split()[0]) for text in column(browser, 4)]
    assert up == sorted(up) and len(set(up)) > 1 and browser.ask(f"{first}.getAttribute('aria-sort')") == "ascending"
    browser.ask(f"{first}.querySelector('button').click()")
    assert [float(text.split()[0]) for text in column(browser, 4)] == up[::-1]
    assert browser.ask(f"{first}.getAttribute('aria-sort')") == "descending"
    assert browser.ask(f"{TABLE}.querySelector('tbody').rows[0].cells[0].textContent") == "before"
    browser.ask(f"{TABLE}.querySelector('th[data-sort] button').click()")
    assert column(browser, 0) == sorted(given, key=str.lower)
    assert browser.ask(f"{TABLE}.querySelectorAll('[aria-sort]').length") == 1


def test_empty_cells_come_last_both_ways(browser, address):
    browser.open(address)
    for _ in range(2):
        browser.ask(f"{TABLE}.querySelectorAll('th[data-sort] button')[2].click()")
        assert column(browser, 2)[-1] == "–"


def test_the_keyboard_reaches_the_skip_link_and_sorts(browser, address):
    browser.open(address)
    browser.press("Tab", 9)
    assert browser.ask("document.activeElement.className") == "skip"
    browser.ask(f"{TABLE}.querySelector('th[data-sort] button').focus()")
    browser.press("Enter", 13, "\r")
    assert browser.ask(f"{TABLE}.querySelector('th[data-sort]').getAttribute('aria-sort')") == "ascending"
    browser.press("Tab", 9)
    assert (
        browser.ask("document.activeElement.matches(':focus-visible') && getComputedStyle(document.activeElement).outlineStyle") == "solid"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_until_chosen(browser, address, scheme):
    browser.open(address, scheme=scheme)
    browser.ask("localStorage.clear()")
    browser.open(address, scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    of = {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}
    assert browser.ask(paper) == of[scheme]
    other = "dark" if scheme == "light" else "light"
    browser.ask(f"document.getElementById('theme-{other}').click()")
    assert browser.ask(paper) == of[other]
    browser.open(address, scheme=scheme)
    assert browser.ask(paper) == of[other], "the choice is remembered"
    browser.ask("localStorage.clear()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_can_be_told_from_the_paper(browser, address, scheme):
    """WCAG: 4.5 for text, 3 for marks."""
    browser.open(address, scheme=scheme)

    def luminance(variable):
        colour = browser.ask(
            f"(() => {{ const it = document.createElement('i'); it.style.color = 'var(--{variable})'; document.body.append(it);"
            " const told = getComputedStyle(it).color; it.remove(); return told; })()"
        )
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(one, other):
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for ground in ("paper", "raised"):
        assert min(contrast(each, ground) for each in ("ink", "soft", "link", "warn")) >= 4.5
    assert min(contrast(f"c{place}", "paper") for place in range(7)) >= 3


def test_without_scripts_all_is_there_and_the_theme_still_changes(browser, address):
    browser.open(address, scripts=False)
    assert browser.ask("document.querySelectorAll('th button').length") == 0
    assert browser.ask("document.querySelectorAll('svg[role=img]').length") > 10
    x, y = browser.ask("(({x, y}) => [x + 5, y + 5])(document.getElementById('theme-dark').getBoundingClientRect())")
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"


@pytest.mark.parametrize("which", ["made up", "of the repository"])
def test_no_table_scrolls_in_a_window_of_1280(browser, address, which):
    browser.open(address if which == "made up" else (ROOT / "docs" / "results.html").as_uri())
    browser.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.ask("document.documentElement.scrollWidth") <= 1280
    wide = "[...document.querySelectorAll('.box')].filter(box => box.scrollWidth > box.clientWidth)"
    assert browser.ask(f"{wide}.map(box => box.getAttribute('aria-label'))") == []


def test_the_summary_comes_before_the_prose(browser, address):
    browser.open(address)
    assert browser.ask("document.querySelector('main > section').id") == "summary"
    assert browser.ask("document.querySelector('#summary table').getBoundingClientRect().top") < 500


@pytest.mark.parametrize("width", [320, 375, 768])
def test_a_narrow_window_scrolls_tables_and_not_the_page(browser, address, width):
    browser.open(address, width=width, height=700)
    browser.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    beside = "document.querySelector('.theme').getBoundingClientRect().left > 40"
    assert browser.ask(beside) is (width > 640), "on a phone the choice of colours leaves the heading its line"
    boxes = "[...document.querySelectorAll('.box')]"
    assert browser.ask(f"{boxes}.some(box => box.scrollWidth > box.clientWidth)")
    assert browser.ask(f"{boxes}.every(box => box.tabIndex === 0 && box.getAttribute('aria-label'))")
    assert browser.ask("[...document.querySelectorAll('svg.plane')].every(each => each.getBoundingClientRect().right <= innerWidth)")


def test_it_prints_on_light_paper(browser, address):
    browser.open(address, scheme="dark")
    assert browser.printed().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.ask("[...document.querySelectorAll('.box')].every(box => getComputedStyle(box).overflowX === 'visible')")
