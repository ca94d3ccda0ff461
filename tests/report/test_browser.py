"""The report in a real Chromium: it draws its curves, complains of nothing, asks nobody, and fits a phone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.report import made
from tests.report.browser import CHROMIUM, Browser
from tuner.report import page
from tuner.report.live import Server
from tuner.runs import metrics
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)"),
    pytest.mark.xdist_group("browser"),
]

DRAWN = """[...document.querySelectorAll('.curves figure')].map(one =>
    one.querySelectorAll('.u-legend .u-series:not(.smooth)').length - 1)"""
SMOOTHED = (
    """[...document.querySelectorAll('.curves figure')].map(one => one.querySelectorAll('.u-series.smooth').length)"""
)
INKED = """[...document.querySelectorAll('.uplot canvas')]
    .map(one => one.getContext('2d').getImageData(0, 0, one.width, one.height).data)
    .filter(pixels => new Set(new Uint32Array(pixels.buffer)).size > 50).length"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CUT = """[...document.querySelectorAll('.uplot')].filter(one =>
    one.getBoundingClientRect().right > one.closest('figure').getBoundingClientRect().right).length"""


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
    first = made.trained(home / "a" / "first", name="<script>document.title = 'taken'</script>")
    several = [first, made.trained(home / "<b>b" / "second", num_steps=90, seed=3), made.failed(home / "c")]
    page.write([first.path], first.report)
    page.write([run.path for run in several], home / "all.html")
    return {"one": first.report, "several": home / "all.html"}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["one", "several"])
def test_the_page_is_whole(name: str, width: int, dark: bool, browser: Browser, reports: dict[str, Path]) -> None:
    browser.complaints.clear()
    browser.asked.clear()
    browser.open(reports[name], width, 900, dark=dark)

    # Seven quantities: the loss and the margin have a dotted curve for each of the two runs with a validation.
    assert browser.value(DRAWN) == ([2, 2, 1, 1, 1, 1, 1] if name == "one" else [5, 4, 2, 2, 2, 2, 3])
    # Loss, margin, gradient norm, speed and utilisation are noisy; the failed run is too short to be smoothed.
    assert browser.value(SMOOTHED) == ([1, 1, 1, 0, 1, 1, 0] if name == "one" else [2, 2, 2, 0, 2, 2, 0])
    assert browser.value(INKED) == 7
    assert browser.value(OVERFLOW) == 0 and browser.value(CUT) == 0
    assert browser.complaints == []
    assert browser.asked == [reports[name].as_uri()], "one file, and nothing else"
    assert browser.value("document.title").startswith(("<script>document.title", "3 runs"))
    luminance = sum(map(int, browser.value(colour("body", "backgroundColor"))[4:-1].split(",")))
    assert luminance < 150 if dark else luminance > 600


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
@pytest.mark.parametrize("name", ["one", "several"])
def test_the_page_is_accessible(name: str, width: int, dark: bool, browser: Browser, reports: dict[str, Path]) -> None:
    browser.open(reports[name], width, 900, dark=dark)

    assert browser.inaccessible() == []


def test_a_value_is_told_where_the_mouse_is(browser: Browser, reports: dict[str, Path]) -> None:
    browser.open(reports["several"], 1280, 900)
    browser.value("document.querySelector('#chart-loss').scrollIntoView()")
    place = "(box => [box.x + box.width / 4, box.y + box.height / 2])"
    x, y = browser.value(f"{place}(document.querySelector('#chart-loss .u-over').getBoundingClientRect())")
    for shift in (0, 2):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + shift, y=y)

    text = "document.querySelector('#chart-loss').parentElement.querySelector('.u-legend').innerText"
    browser.wait_for(f"!{text}.includes('last')")
    told = browser.value(text)
    assert "a/first" in told and "<b>b/second" in told, "names of folders are text"
    step = int(told.split()[1])
    losses = dict(zip(*metrics.curves(RunDirectory(reports["one"].parent), ["loss"])["loss"], strict=True))
    assert step not in (0, 300) and f"{losses[step]:.4f}"[:6] in told


ROWS = (
    "[...document.querySelectorAll('#runs_table tr')].filter(row => !row.hidden).map(row => row.cells[0].textContent)"
)
SHOWN = """[...document.querySelector('#chart-loss').parentElement.querySelectorAll('.u-series:not(.smooth) .u-label')]
    .map(label => label.textContent).slice(1)"""


def press(browser: Browser, key: str, code: int, text: str = "") -> None:
    for kind in ("keyDown", "keyUp"):
        more = {"text": text} if text and kind == "keyDown" else {}
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)


def test_runs_are_sorted_and_filtered_by_values_of_their_recipes_with_the_keyboard_alone(
    browser: Browser, tmp_path: Path
) -> None:
    rates = {"high": "1e-4", "low": "1e-6", "middle": "9e-6"}
    runs = [made.trained(tmp_path / name, f"lr={lr}", num_steps=20).path for name, lr in rates.items()]
    page.write(runs, tmp_path / "all.html")
    browser.open(tmp_path / "all.html", 1280, 900)
    assert browser.value(ROWS) == ["high", "low", "middle"]

    browser.value("document.querySelector('th[data-key$=\".lr\"] button').focus()")
    press(browser, "Enter", 13, "\r")
    assert browser.value(ROWS) == ["low", "middle", "high"]
    press(browser, "Enter", 13, "\r")
    assert browser.value(ROWS) == ["high", "middle", "low"]

    browser.value("document.querySelector('#filter').focus()")
    browser.call("Input.insertText", text="state=done lr<1e-5")
    assert browser.value(ROWS) == ["middle", "low"]
    assert browser.value("document.querySelector('#shown').textContent") == "2 of 3 runs"
    assert browser.value(SHOWN) == ["low", "middle"]
    browser.call("Input.insertText", text=" rl=1")
    assert browser.value("document.querySelector('#shown').textContent") == "No column ends in rl."


@pytest.fixture
def served() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def serve(*paths: Path) -> Server:
        servers.append(Server(paths))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_page_that_is_watched_shows_what_is_new_without_being_loaded_again(
    served: Callable[..., Server], browser: Browser, tmp_path: Path
) -> None:
    run, later = made.trained(tmp_path / "one", num_steps=40), tmp_path / "later"
    run.write_status(RunStatus(state="running"))
    server = served(run.path, later)
    browser.complaints.clear()
    browser.asked.clear()
    browser.open(server.url, 1280, 900)
    browser.value("window.marked = 'never loaded again'")
    assert browser.value(SHOWN) == ["one"]

    run.log_metrics({"step": 41, "loss": 0.125})
    run.log_metrics({"step": 41, "eval_loss": 0.25})
    with run.metrics.open("a") as file:
        file.write('{"step": 42, "lo')  # it is being written
    run.ranks.mkdir()
    run.log_warning("<b>the disk</b> is slow")
    made.trained(later, num_steps=50)

    browser.wait_for(f"{SHOWN}.length == 4")
    assert sorted(browser.value(SHOWN)) == ["later", "later (validation)", "one", "one (validation)"]
    label = browser.value("document.querySelector('#chart-loss').getAttribute('aria-label')")
    assert "one: 0.12500 at step 41;" in label and "one (validation): 0.25000 at step 41" in label
    assert browser.value("document.querySelector('#warnings li').textContent") == "<b>the disk</b> is slow"

    shutil.rmtree(later)
    browser.wait_for("document.querySelector('#runs_table').textContent.includes('damaged')")
    assert browser.value("window.marked") == "never loaded again"
    assert browser.complaints == []
    assert {address.partition("?")[0] for address in browser.asked} == {server.url, f"{server.url}news"}
    assert browser.inaccessible() == []

    server.shutdown()
    server.server_close()
    browser.wait_for("document.querySelector('#live').textContent.startsWith('Connection lost')")
