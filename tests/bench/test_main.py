"""`python -m bench all` runs each measurement with the same few arguments; one that fails does not stop the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import __main__ as suite
from bench.jobs import make_model, of_catalog


def test_all_runs_each_of_them_and_gathers_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}

    def run(name: str, arguments: list[str]) -> str | None:
        asked[name] = arguments
        return None if name == "data" else f"table of {name}\n"

    monkeypatch.setattr(suite, "run", run)
    monkeypatch.setattr(
        "sys.argv",
        ["bench", "all", "--quick", "--rounds", "2", "--json", str(tmp_path), "--markdown", str(tmp_path / "all.md")],
    )

    code = suite.main()

    assert code == 1 and list(asked) == list(suite.SUITE)
    assert asked["start"] == [*suite.SUITE["start"], "--rounds", "2", "--json", str(tmp_path / "start.json")]
    text = (tmp_path / "all.md").read_text()
    assert "## steps\n\ntable of steps" in text and "## data\n\nThis failed" in text


def test_what_one_measurement_takes_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(suite, "run", lambda name, arguments: asked.extend((name, *arguments)) or "")
    monkeypatch.setattr("sys.argv", ["bench", "start", "--ranks", "2"])

    suite.main()

    assert asked == ["start", "--ranks", "2"]


def test_a_table_takes_the_place_of_the_one_before_on_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "## Start\n\n<!-- table: start -->\n\nold\n\n<!-- end -->\n\n<!-- table: save -->\nother\n<!-- end -->\n"
    )
    monkeypatch.setattr(suite, "run", lambda name, arguments: "What it is.\n\na machine\n\n| a\\1 |\n")
    monkeypatch.setattr("sys.argv", ["bench", "start", "--page", str(page)])

    suite.main()

    text = page.read_text()
    assert "<!-- table: start -->\n\na machine\n\n| a\\1 |\n\n<!-- end -->" in text
    assert "old" not in text and "What it is." not in text and "other" in text


def test_a_model_of_the_catalog_is_made_with_random_weights(tmp_path: Path) -> None:
    wanted = of_catalog("tiny")

    made = make_model(tmp_path / "model", wanted)

    config = json.loads((made / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"]) == (wanted["model_type"], wanted["hidden_size"])
    assert (made / "model.safetensors").is_file() and (made / "tokenizer.json").is_file()
