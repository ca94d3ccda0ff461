"""The README shows commands that work: each one is planned or run as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tuner.cli import COMMANDS, tuner
from tuner.recipes import catalog

README = Path(__file__).parents[1] / "README.md"
LINES = [
    line.strip().split("  #")[0] for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("    ")
]
TUNER = [line for line in LINES if re.match(r"(?:[A-Z_]+=\S+ |srun \.\.\. )*tuner ", line)]


def test_the_readme_shows_the_missions_commands_and_every_command() -> None:
    assert len(TUNER) >= 7
    assert {line.split("tuner ")[1].split()[0] for line in TUNER} == set(COMMANDS)


@pytest.mark.parametrize("line", TUNER)
def test_a_command_of_the_readme_works(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_ds.json").write_text('{"zero_optimization": {"stage": 2}} // mine')
    (tmp_path / "my.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    CliRunner().invoke(tuner, ["copy", "tiny_full_sample_e1", "mine.py"])
    before, _, after = line.partition("tuner ")
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "1"}
    slurm |= {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_STEP_NODELIST": "n1"}
    env = slurm if before.startswith("srun") else dict(pair.split("=") for pair in before.split())
    arguments = [word if word != "mine.py" or "copy" not in after else "copied.py" for word in shlex.split(after)]

    # What would start processes is planned, or asked for help alone: tests/e2e and tests/cli start them.
    unstarted = {"train": "--dry-run", "smoke": "--help", "doctor": "--help"}.get(arguments[0])
    plan = [unstarted] if unstarted and unstarted not in arguments else []
    result = CliRunner().invoke(tuner, [*arguments, *plan], env=env)

    assert result.exit_code == 0, result.exception


@pytest.mark.parametrize("preset", catalog.presets())
def test_the_readme_says_when_to_take_each_preset(preset: str) -> None:
    assert f"| `{preset}` |" in README.read_text(encoding="utf-8")
