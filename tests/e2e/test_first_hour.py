"""The first hour of five people, in the commands that they type: only the first of them trains.

One has a JSONL and a model folder; one comes from XTuner, one from LLaMA-Factory; one sits at a Slurm login node; one
writes programs. What each habit is answered with, in one table: tests/cli/test_other_tools.py.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.runs import environment, ok, train
from tests.e2e.warm import Ended, warm
from tests.tiny_model import tiny
from tuner import assets

pytestmark = pytest.mark.e2e

QUICK = {
    "train_dataloader.dataset.max_length": 128,
    "accumulative_counts": 1,
    "train_dataloader.batch_size": 4,
    "log.interval": 1,
    "warmup_ratio": 0.0,
    "lr": 3e-3,
    "dtype": "fp32",
}


def sets(**more: object) -> list[str]:
    return [word for key, value in {**QUICK, **more}.items() for word in ("--set", f"{key}={value}")]


def rows(folder: Path, asset: str, count: int) -> Path:
    lines = Path(assets.asset(f"package:{asset}/train.jsonl")).read_text(encoding="utf-8").splitlines()[:count]
    file = folder / f"{asset}.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@dataclass(frozen=True)
class Person:
    """Somebody in a folder, who types `tuner ...` and reads."""

    folder: Path

    @property
    def importing(self) -> str:
        """What PYTHONPATH says where the person's own modules are to be found."""
        return os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))

    def types(self, line: str, code: int = 0, **env: str) -> str:
        """Run `tuner LINE` to its end, expect an exit code, and return all that it printed."""
        done = self._run(line, **env)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def reads(self, line: str, code: int = 0, **env: str) -> Any:
        """Return the JSON that `tuner LINE --json` printed: a mistake stands on standard error."""
        done = self._run(f"{line} --json", **env)
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stderr if code == 2 else done.stdout)

    def _run(self, line: str, **env: str) -> Ended:
        return warm().run(shlex.split(line), cwd=self.folder, env=environment(**env))


@pytest.fixture
def person(tmp_path: Path) -> Person:
    return Person(tmp_path)


@pytest.mark.long
def test_ones_own_model_and_data_go_from_a_folder_to_a_merged_model(person: Person, tmp_path: Path) -> None:
    model, sft, dpo, out = (tmp_path / name for name in ("my-qwen", "sft", "dpo", "out"))
    shutil.copytree(tiny(), model)

    first = ok(
        train(
            model, sft, "--data", rows(tmp_path, "sample", 60), "--val-split", "0.1", "--epochs", "1", *sets(), ranks=1
        )
    )
    assert "(LoRA, SFT; --method chooses another)" in first.text
    assert "validation: 10 % of the training rows are held out, by seed 42" in first.text
    assert first.json("run.json")["name"] == "my-qwen_lora"
    assert [line for line in first.metrics if "eval_loss" in line]

    chat = warm().run(["chat", sft, "--max-new-tokens", "4"], env=environment(), input="Why?\n")
    assert chat.returncode == 0, chat.stderr

    # At once a run's result as a model, and the reference of DPO: the first step's loss is that of two equal models.
    prefs = rows(tmp_path, "sample_preferences", 12)
    preferred = ["--model", sft, "--data", prefs, "--deepspeed", "zero3"]
    second = ok(train("tiny_dpo_lora_custom_e1", dpo, *preferred, *sets(max_steps=2), ranks=1))
    assert second.losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert second.losses[1] != pytest.approx(math.log(2), abs=1e-4)
    assert {file.name for file in (dpo / "final").iterdir()} >= {"adapter_model.safetensors", "tokenizer.json"}
    assert not (dpo / "final" / "ref").exists()
    told = json.loads((dpo / "final" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(model)

    person.types(f"export {dpo} {out} --merge")
    merged, base = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (out, model))
    assert any(not torch.equal(merged[name], base[name]) for name in base)


def test_who_comes_from_xtuner_finds_the_names_the_presets_and_the_own_words(person: Person) -> None:
    name = "internlm2_chat_7b_qlora_oasst1_e3"

    assert "internlm2_chat_7b" in person.types("list-cfg -p internlm2")
    assert name in person.types("list 'internlm2_chat_7b_qlora_oasst1*'").splitlines()
    assert f"{name}_copy.py" in person.types(f"copy-cfg {name} .")
    person.types(f"copy {name} mine.py")

    asked = "--deepspeed deepspeed_zero2 --cfg-options train_cfg.max_epochs=1 optim_wrapper.optimizer.lr=1e-4 --dry-run"
    told = person.reads(f"train ./mine.py {asked}", NPROC_PER_NODE="8")
    assert told["deepspeed"]["zero_optimization"]["stage"] == 2
    assert (told["batch"]["ranks"], told["batch"]["global_batch"], told["batch"]["epochs"]) == (8, 128, 1)
    assert "chat template" in person.types("chat work_dirs/x --prompt-template internlm2_chat", code=2)


def test_who_comes_from_llama_factory_uses_its_words_and_trains_the_alpaca_file(person: Person) -> None:
    (person.folder / "lora_sft.yaml").write_text("model_name_or_path: x\nfinetuning_type: lora\n")
    rows = [{"instruction": f"What is {at}?", "input": "", "output": str(at)} for at in range(40)]
    (person.folder / "alpaca.json").write_text(json.dumps(rows))

    assert "LLaMA-Factory" in person.types("train lora_sft.yaml", code=2)
    words = "--set learning_rate=1e-4 --set lora_rank=4 --set cutoff_len=64 --set num_train_epochs=2.0"
    told = person.types(f"show --model {tiny()} --data alpaca.json {words}")
    for line, word in (
        ("optim_wrapper.optimizer.lr = 0.0001 ", "learning_rate=1e-4"),
        ("adapter.r = 4 ", "lora_rank=4"),
        ("train_dataloader.dataset.max_length = 64 ", "cutoff_len=64"),
        ("train_cfg.max_epochs = 2", "num_train_epochs=2.0"),
    ):
        assert any(printed.startswith(line) and f"# --set {word}" in printed for printed in told.splitlines()), line
    told = person.types(f"train {tiny()} --data alpaca.json --template qwen", code=2)
    assert "chat template" in told


def test_who_sits_at_a_slurm_login_node_plans_and_submits_for_gpus_that_are_not_there(person: Person) -> None:
    name = "internlm2_chat_7b_qlora_oasst1_e3"

    assert "zero3" in person.types("plan llama2_7b_full_alpaca_e3 --gpus 8 --gpu a100-80g --host-memory 1TB")
    checked = person.types(f"check {name} --deepspeed zero2 --gpus 8 --gpu a100-80g")
    assert "no problems" in checked
    job = "--nodes 2 --gpus-per-node 8 --gpu a100-80g --mem 500G --partition main --time 8:00:00"
    script = person.types(f"submit {name} {job} --dry-run")
    assert "#SBATCH --ntasks-per-node=8" in script and "srun --kill-on-bad-exit=1" in script
    assert "2 nodes, 16 processes (slurm)" in script
    assert "not inside srun" in person.types(f"train {name} --launcher slurm", code=2)
    assert not (person.folder / "work_dirs").exists(), "nothing was written"


ROWS = """
def rows_of(row):
    return {"messages": [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]}]}
"""
RECIPE = """
_base_ = "tiny_lora_custom_e1"
train_dataloader = dict(dataset=dict(path="qa.jsonl", format="my_rows:rows_of", max_length=128))
"""


def test_who_writes_programs_reads_json_exit_codes_and_brings_a_function(person: Person) -> None:
    (person.folder / "my_rows.py").write_text(ROWS)
    (person.folder / "mine.py").write_text(RECIPE)
    (person.folder / "qa.jsonl").write_text("".join(json.dumps({"q": f"{at}?", "a": "yes"}) + "\n" for at in range(30)))

    assert "lora" in person.reads("list")["methods"]
    shown = person.reads("show ./mine.py --set lr=1e-3")
    assert shown["recipe"]["optim_wrapper"]["optimizer"]["lr"] == 1e-3
    assert person.reads("check ./mine.py", PYTHONPATH=person.importing)["ok"] is True
    counted = person.reads("data ./mine.py", PYTHONPATH=person.importing)["data"]["train"]["counts"]
    assert (counted["read"], counted["bad"]) == (30, 0)
    told = person.reads("train ./mine.py --dry-run", PYTHONPATH=person.importing)
    assert told["batch"]["rows"] == 30
    wrong = person.reads("show ./mine.py --set lr=-1", code=2)["error"]
    assert (wrong["code"], wrong["where"]) == ("bad-recipe", "--set lr=-1")
