"""The documentation builds into a site without a broken link, and the site asks nothing of the net."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs import generate
from tests.report.browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[1]
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]+src=[\"']?(?:https?:)?//|<link[^>]+rel=[\"']?(?:stylesheet|preconnect|icon)[^>]+"
    r"href=[\"']?(?:https?:)?//|@import[^;]+//|url\([\"']?(?:https?:)?//"
)


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout, as `make docs` does."""
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]  # --quiet counts no warning
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("site")
    ended = build(ROOT, path)
    assert ended.returncode == 0, ended.stderr
    return path


def test_the_site_has_every_page_and_asks_nothing_of_the_net(site: Path) -> None:
    pages = [*site.rglob("*.html")]

    assert {page.stem for page in (ROOT / "docs").rglob("*.md")} <= {page.stem for page in pages}
    for file in (*pages, *site.rglob("*.css")):
        assert not _FETCHED.search(file.read_text(encoding="utf-8")), file


def test_the_navigation_has_each_page_once() -> None:
    pages = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    written = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]

    assert sorted(pages) == sorted([*written, *generate.HOME])


def test_nothing_is_left_to_generate_and_the_home_pages_are_the_readmes(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert "generated: " not in page.read_text(encoding="utf-8"), page
    for name in ("index.html", "zh.html"):
        assert "make quickstart" in (site / name).read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")
@pytest.mark.parametrize(("width", "dark"), [(1300, False), (390, True)])
def test_the_site_can_be_read_by_everybody(site: Path, tmp_path: Path, width: int, dark: bool) -> None:
    tab = Browser(tmp_path / "chromium")
    try:
        for name in ("index", "start", "plan", "catalog", "reference/keys", "moving/xtuner"):
            tab.open(site / f"{name}.html", width, 900, dark=dark)
            assert tab.inaccessible() == [], name
    finally:
        tab.close()


@pytest.mark.parametrize("broken", ["[a](nowhere.md)", "[a](start.md#nowhere)"])
def test_a_link_or_an_anchor_that_leads_nowhere_is_an_error(broken: str, tmp_path: Path) -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings = text.partition("nav:\n  - Home")[0].replace("hooks: [docs/generate.py]", "")
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A\n\n{broken}\n")
    shutil.copy(ROOT / "docs" / "start.md", tmp_path / "docs")

    ended = build(tmp_path, tmp_path / "site")

    assert ended.returncode != 0
    assert "nowhere" in ended.stderr
