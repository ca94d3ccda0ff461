"""Whatever comes in by any door is taken or refused in one readable message; nothing is written, started or asked."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.hostile import strategies, watch
from tests.hostile.doors import DOORS, Door
from tuner import files
from tuner.runs import checkpoints

_EXAMPLES = 60
_LONG_S = 3.0
"""Of other input in each run of the suite."""


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.kind)
def test_generated_input_is_taken_or_refused_in_one_message(door: Door, tmp_path: Path) -> None:
    examples = round(_EXAMPLES * min(1, 5 * door.share))

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(door.strategy)
    def any_input(made: object) -> None:
        door.refuses(tmp_path, made)

    any_input()


@pytest.mark.long
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.kind)
@pytest.mark.filterwarnings("default::UserWarning")  # PEFT's, of keys that it does not know
def test_seconds_of_generated_input_are_taken_or_refused_in_one_message(door: Door, tmp_path: Path) -> None:
    end = time.monotonic() + _LONG_S
    while time.monotonic() < end:

        @seed(random.getrandbits(32))
        @settings(max_examples=25, database=None, deadline=None, suppress_health_check=[*HealthCheck])
        @given(door.strategy)
        def any_input(made: object) -> None:
            door.refuses(tmp_path, made)

        any_input()


@pytest.mark.parametrize("text", strategies.ODD_TEXTS, ids=lambda text: ascii(text)[:30])
def test_a_name_that_is_no_name_is_refused_everywhere(text: str, tmp_path: Path) -> None:
    named = next(door for door in DOORS if door.kind == "name or path")

    assert named.refuses(tmp_path, text)


@pytest.mark.parametrize("value", strategies.ODD_VALUES, ids=lambda value: value[:30])
def test_a_number_that_is_none_is_refused_as_an_override(value: str, tmp_path: Path) -> None:
    override = next(door for door in DOORS if door.kind == "--set")

    assert override.refuses(tmp_path, f"lr={value}")


@pytest.mark.parametrize("name", ["../../secret", "@", "link"])
def test_a_manifest_vouches_for_files_of_its_own_folder_alone(name: str, tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "checkpoints" / "checkpoint-5"
    secret.write_text("mine")
    folder.mkdir(parents=True)
    (folder / "link").symlink_to(secret)
    (folder / "weights").write_text("mine")
    entry = {"bytes": 4, "xxh3_128": files.xxh3_128(secret)}
    manifest = folder / checkpoints.MANIFEST

    manifest.write_text(json.dumps({"files": {"weights": entry}}))
    assert checkpoints.inspect(folder) is None
    manifest.write_text(json.dumps({"files": {name.replace("@", str(secret)): entry}}))
    assert "points outside of the checkpoint" in str(checkpoints.inspect(folder))


def test_the_watch_sees_files_processes_and_connections(tmp_path: Path) -> None:
    import socket
    import subprocess

    with watch.effects() as seen:
        (tmp_path / "a").write_text("")
        (tmp_path / "b").mkdir()
        subprocess.run([sys.executable, "-c", ""], check=True)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
        Path(__file__).read_text(encoding="utf-8")

    assert [event.split()[0] for event in seen] == ["open", "os.mkdir", "subprocess.Popen", "socket.bind"]
