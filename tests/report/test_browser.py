"""The report in a real Chromium: it draws its curves, complains of nothing, asks nobody, and fits a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report import made
from tests.report.browser import CHROMIUM, Browser
from tuner.report import page

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)"),
    pytest.mark.xdist_group("browser"),
]

DRAWN = """[...document.querySelectorAll('.js-plotly-plot')].map(one =>
    one.querySelectorAll('.scatterlayer .js-line').length)"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CUT = """[...document.querySelectorAll('.js-plotly-plot')].filter(one =>
    one.querySelector('.main-svg').getBoundingClientRect().right > one.closest('figure').getBoundingClientRect().right)
    .length"""


def colour(selector: str, of: str) -> str:
    return f"getComputedStyle(document.querySelector({selector!r})).{of}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made_one = Browser(tmp_path_factory.mktemp("chromium"))
    yield made_one
    made_one.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("a_long_name_" * 8)
    one = made.trained(home / "a" / "first", name="<script>document.title = 'taken'</script>")
    several = [one, made.trained(home / "<b>b" / "second", num_steps=90, seed=3), made.failed(home / "c")]
    page.write([one.path], one.report)
    page.write([run.path for run in several], home / "all.html")
    return {"one": one.report, "several": home / "all.html"}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["one", "several"])
def test_the_page_is_whole(name: str, width: int, dark: bool, browser: Browser, reports: dict[str, Path]) -> None:
    browser.complaints.clear()
    browser.asked.clear()
    browser.open(reports[name], width, 900, dark=dark)

    # Seven quantities: the loss and the margin have a dotted curve for each of the two runs with a validation.
    assert browser.value(DRAWN) == ([2, 2, 1, 1, 1, 1, 1] if name == "one" else [5, 4, 2, 2, 2, 2, 3])
    assert browser.value(OVERFLOW) == 0 and browser.value(CUT) == 0
    assert browser.complaints == []
    assert browser.asked == [reports[name].as_uri()], "one file, and nothing else"
    assert browser.value("document.title").startswith(("<script>document.title", "3 runs"))
    luminance = sum(map(int, browser.value(colour("body", "backgroundColor"))[4:-1].split(",")))
    assert luminance < 150 if dark else luminance > 600
    assert browser.value(colour(".xtick text", "fill")) == browser.value(colour(".soft", "color"))


def test_a_value_is_told_where_the_mouse_is(browser: Browser, reports: dict[str, Path]) -> None:
    browser.open(reports["several"], 1280, 900)
    place = "(box => [box.x + box.width / 4, box.y + box.height / 2])"
    x, y = browser.value(f"{place}(document.querySelector('#chart-loss .nsewdrag').getBoundingClientRect())")
    for shift in (0, 2):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + shift, y=y)

    text = "document.querySelector('#chart-loss .hoverlayer').textContent"
    browser.wait_for(f"{text} != ''")
    assert "a/first" in browser.value(text) and "<b>b/second" in browser.value(text), "names of folders are text"
