"""The documentation builds into a site without a broken link, asks nothing of the net, and can be searched."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import click
import pytest

from tests.report.browser import CHROMIUM, Browser
from tuner import __version__

ROOT = Path(__file__).parents[1]
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]+src=[\"']?(?:https?:)?//|<link[^>]+rel=[\"']?(?:stylesheet|preconnect|icon)[^>]+"
    r"href=[\"']?(?:https?:)?//|@import[^;]+//|url\([\"']?(?:https?:)?//"
)


def build(root: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a folder, as `make docs` does."""
    argv = [Path(sysconfig.get_path("scripts"), "zensical"), "build", "--clean", "--strict"]
    return subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=300)


def built(root: Path, settings: str = SETTINGS) -> Path:
    """Return the site of this checkout's pages, built in an empty folder."""
    (root / "mkdocs.yml").write_text(settings, encoding="utf-8")
    shutil.copytree(ROOT / "docs", root / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    ended = build(root)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return root / "build" / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("site"))


def test_the_site_has_every_page_and_asks_nothing_of_the_net(site: Path) -> None:
    pages = [*site.rglob("*.html")]

    assert {page.stem for page in (ROOT / "docs").rglob("*.md")} <= {page.stem for page in pages}
    for file in (*pages, *site.rglob("*.css")):
        assert not _FETCHED.search(file.read_text(encoding="utf-8")), file
    assert not [*site.rglob("*.py")] or {file.name for file in site.rglob("*.py")} == {"train.py"}


def test_the_navigation_has_each_page_once() -> None:
    pages = re.findall(r": ([\w/-]+\.md)$", SETTINGS, re.MULTILINE)
    written = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]

    assert sorted(pages) == sorted(written)


def test_the_site_names_the_version_of_the_package() -> None:
    assert f"\ncopyright: tuner {__version__}," in SETTINGS


@pytest.mark.long  # a site more is built
def test_with_a_repository_address_the_header_and_each_page_link_to_it_and_no_star_is_counted(tmp_path: Path) -> None:
    (line,) = re.findall(r"^# (repo_url: .*)$", SETTINGS, re.MULTILINE)

    page = built(tmp_path, SETTINGS.replace(f"# {line}", line)) / "start.html"

    text = page.read_text(encoding="utf-8")
    assert f'href="{line.removeprefix("repo_url: ")}"' in text
    assert "Edit this page" in text
    assert 'data-md-component="source"' not in text  # the component that asks GitHub


def test_without_a_repository_address_no_page_has_a_link_to_edit_it(site: Path) -> None:
    assert "Edit this page" not in (site / "start.html").read_text(encoding="utf-8")


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")


@pytest.mark.long
@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1300, False), (390, True)])
def test_the_site_can_be_read_by_everybody(site: Path, tmp_path: Path, width: int, dark: bool) -> None:
    tab = Browser(tmp_path / "chromium")
    try:
        for name in ("index", "start", "plan", "catalog", "reference/keys", "moving/xtuner", "glossary"):
            tab.open(site / f"{name}.html", width, 900, dark=dark)
            assert tab.inaccessible() == [], name
    finally:
        tab.close()


@pytest.mark.long
@needs_chromium
@pytest.mark.parametrize("word", ["max_seq_length", "gradient_checkpointing", "deepspeed_config", "cutoff_len"])
def test_the_search_finds_another_tools_word_in_the_glossary(address: str, tmp_path: Path, word: str) -> None:
    tab = Browser(tmp_path / "chromium")
    try:
        tab.open(f"{address}/index.html", 1280, 900)
        tab.wait_for("document.querySelector('.md-search__button') !== null")
        tab.value("document.querySelector('.md-search__button').click()")
        tab.wait_for("document.activeElement.tagName != 'BODY' && document.activeElement.tagName != 'BUTTON'")
        tab.call("Input.insertText", text=word)
        tab.wait_for(f"({_LINKS})().some(link => link.includes('glossary.html?h={word}'))")
        assert tab.complaints == []
    finally:
        tab.close()


_LINKS = """() => {
  const roots = [document];
  for (const root of roots)
    for (const one of root.querySelectorAll('*')) if (one.shadowRoot) roots.push(one.shadowRoot);
  return roots.flatMap(root => [...root.querySelectorAll('a')].map(link => link.href));
}"""
"""The search draws its results inside a shadow root."""


@pytest.mark.parametrize("broken", ["[a](nowhere.md)", "[a](start.md#nowhere)"])
def test_a_link_or_an_anchor_that_leads_nowhere_is_an_error(broken: str, tmp_path: Path) -> None:
    (tmp_path / "mkdocs.yml").write_text(SETTINGS.partition("nav:\n  - Home")[0], encoding="utf-8")
    for folder in ("overrides", "assets"):
        shutil.copytree(ROOT / "docs" / folder, tmp_path / "docs" / folder)
    (tmp_path / "docs" / "index.md").write_text(f"# A\n\n{broken}\n")
    (tmp_path / "docs" / "start.md").write_text("# B\n")

    ended = build(tmp_path)

    assert ended.returncode != 0
    message = click.unstyle(ended.stdout + ended.stderr)
    assert re.search(r"(page|anchor) does not exist", message) and "index.md:3" in message
