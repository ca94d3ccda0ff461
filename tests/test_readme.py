"""The README shows commands that work: each one is planned or run as it stands there; the Chinese one says the same."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.launch.plans import written_run
from tuner.cli import COMMANDS, tuner
from tuner.recipes import catalog

README = Path(__file__).parents[1] / "README.md"
CHINESE = README.with_name("README_zh-CN.md")


def code_lines(page: Path) -> list[str]:
    """Return the indented lines of a page, without the comments after them."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [line[4:].split("  #")[0].rstrip() for line in lines if line.startswith("    ")]


def blocks(page: Path) -> list[str]:
    """Return the headings, paragraphs, table rows and pieces of code of a page."""
    return re.split(r"\n\n|\n(?=\|)", page.read_text(encoding="utf-8"))


def facts(block: str) -> list[str]:
    """Return what no translation changes: names in backquotes, links to files, figures; their order may."""
    same_links = block.replace(CHINESE.name, README.name)
    return sorted(re.findall(r"`[^`]+`|\]\([^)]+\)|\d+(?:\.\d+)*", same_links))


def result_of_a_run(folder: Path) -> None:
    """Make the folder of an adapter of the README's model."""
    folder.mkdir(parents=True)
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 64, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**told, "base_model_name_or_path": "Qwen/Qwen3-8B"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")


TUNER = [line for line in code_lines(README) if re.match(r"(?:[A-Z_]+=\S+ |srun \.\.\. )*tuner ", line)]


def test_the_readme_shows_the_missions_commands_and_every_command() -> None:
    assert len(TUNER) >= 7
    assert {line.split("tuner ")[1].split()[0] for line in TUNER} == set(COMMANDS)


@pytest.mark.parametrize("line", TUNER)
def test_a_command_of_the_readme_works(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_ds.json").write_text('{"zero_optimization": {"stage": 2}} // mine')
    for name in ("my.jsonl", "prefs.jsonl", "more.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    for name in ("my-model", "my-qwen"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    result_of_a_run(tmp_path / "runs" / "sft" / "final")
    CliRunner().invoke(tuner, ["copy", "tiny_full_sample_e1", "mine.py"])
    written_run(tmp_path / "work_dirs" / "RECIPE" / "TIME")
    before, _, after = line.partition("tuner ")
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "1"}
    slurm |= {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_STEP_NODELIST": "n1"}
    env = slurm if before.startswith("srun") else dict(pair.split("=") for pair in before.split())
    arguments = [word if word != "mine.py" or "copy" not in after else "copied.py" for word in shlex.split(after)]

    # What would start processes is planned, or asked for help alone: tests/e2e and tests/cli start them.
    help_alone = dict.fromkeys(
        ("smoke", "tune", "import", "doctor", "chat", "serve", "eval", "export", "convert"), "--help"
    )
    unstarted = {"train": "--dry-run", "submit": "--dry-run", **help_alone}.get(arguments[0])
    plan = [unstarted] if unstarted and unstarted not in arguments else []
    result = CliRunner().invoke(tuner, [*arguments, *plan], env=env)

    assert result.exit_code == 0, result.exception


@pytest.mark.parametrize("preset", catalog.presets())
def test_the_readme_says_when_to_take_each_preset(preset: str) -> None:
    assert f"| `{preset}` |" in README.read_text(encoding="utf-8")


def test_both_readmes_show_the_same_commands_and_code_in_the_same_order() -> None:
    assert TUNER
    assert code_lines(CHINESE) == code_lines(README)


def test_both_readmes_name_the_same_files_tests_and_figures_block_by_block() -> None:
    assert "::test_" in README.read_text(encoding="utf-8")
    assert [facts(block) for block in blocks(CHINESE)] == [facts(block) for block in blocks(README)]


def test_both_readmes_have_the_same_sections_and_all_text_of_the_chinese_one_is_chinese() -> None:
    english, chinese = ([block for block in blocks(page) if block.startswith("## ")] for page in (README, CHINESE))
    text = [block for block in blocks(CHINESE) if not block.startswith(("#", "    ", "|---"))]

    assert len(chinese) == len(english) > 1
    assert [block for block in text if not re.search("[\u4e00-\u9fff]", block)] == []
