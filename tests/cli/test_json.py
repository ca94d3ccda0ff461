"""What commands print for programs: each object says the version of its shape, and so does an error."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.cli.command import Tuner
from tests.launch.plans import written_run
from tuner import cli
from tuner.files import JSON_VERSION
from tuner.report.live import Server


def test_no_command_prints_json_by_itself() -> None:
    """Only `say_json` and the events of a run do, so no answer is without its version."""
    printing = set()
    for file in Path(cli.__file__).parent.glob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
        if "dump_json" in names:
            printing.add(file.stem)

    assert printing == {"say"}


def test_a_list_has_the_version_in_each_item(tuner: Tuner) -> None:
    found = json.loads(tuner("explain", "--json").out)

    assert len(found) > 20 and {document["version"] for document in found} == {JSON_VERSION}


@pytest.mark.parametrize(
    "arguments",
    [
        ("copy", "no_such_recipe"),
        ("new", "model", "mine", "--from", "nowhere"),
        ("new", "dataset", "mine", "--from", "nowhere.jsonl"),
        ("report", "nowhere"),
        ("export", "nowhere", "dest"),
        ("completion", "tcsh"),
        ("submit", "tiny_lora_sample_e1"),
        ("plan", "--gpu", "no-such-gpu"),
    ],
    ids=" ".join,
)
def test_an_error_is_one_object_with_a_version_and_nothing_else_is_printed(tuner: Tuner, arguments: str) -> None:
    done = tuner(*arguments, "--json")
    found = json.loads(done.err)

    assert done.out == "" and done.code != 0
    assert found["version"] == JSON_VERSION
    assert found["error"]["exit_code"] == done.code and found["error"]["code"] and found["error"]["what"]


def test_a_served_report_tells_its_address_in_a_first_line(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written_run(tmp_path / "run")
    monkeypatch.setattr(Server, "serve_forever", lambda *_, **__: None)
    done = tuner("report", run.path, "--watch", "--json")
    (line,) = done.out.splitlines()

    assert json.loads(line)["address"].startswith("http://") and json.loads(line)["runs"] == [str(run.path)]


def test_a_job_that_is_not_submitted_has_its_script_and_no_number(tuner: Tuner) -> None:
    done = tuner("submit", "tiny_lora_sample_e1", "--gpus-per-node", "0", "--dry-run", "--json")
    found = json.loads(done.out)

    assert found["job"] is None and found["log"] is None
    assert found["script"].startswith("#!/bin/bash\n")
