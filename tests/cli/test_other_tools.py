"""What people type out of habit is done, or answered with how it is typed here: keys, options, commands."""

from __future__ import annotations

import gc
import json
import re
import tomllib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

import tuner as tuner_package
from tests.cli.command import Tuner
from tests.each import each
from tests.runs.made_records import run_json
from tuner.cli import COMMANDS, chat, other_tools
from tuner.errors import RecipeError
from tuner.importers import aliases
from tuner.recipes import loading
from tuner.recipes.merging import leaves
from tuner.recipes.recipe import Overrides, Recipe
from tuner.recipes.schema import schema_keys

LORA, QLORA, DPO = "tiny_lora_sample_e1", "tiny_qlora_sample_e1", "tiny_dpo_lora_sample_preferences_e1"
if TYPE_CHECKING:
    from tuner.results.chat import Chat

ROWS = "train_dataloader.dataset"
OPTIMIZER = "optim_wrapper.optimizer"

# What is typed after --set; the key it means; its value there.
KEYS: list[tuple[str, str, object]] = [
    ("learning_rate=1e-4", f"{OPTIMIZER}.lr", 1e-4),
    ("optim=adamw_torch_fused", f"{OPTIMIZER}.type", "AdamW"),
    ("optim=paged_adamw_8bit", f"{OPTIMIZER}.type", "PagedAdamW8bit"),
    ("per_device_train_batch_size=2", "train_dataloader.batch_size", 2),
    ("bf16=True", "optim_wrapper.dtype", "bf16"),
    ("torch_dtype=bfloat16", "optim_wrapper.dtype", "bf16"),
    ("lr_scheduler_type=constant_with_warmup", "param_scheduler.type", "constant"),
    ("num_train_epochs=2.0", "train_cfg.max_epochs", 2),
    ("max_steps=-1", "train_cfg.max_steps", None),
    ("gradient_checkpointing=false", "train_cfg.gradient_checkpointing", False),
    ("disable_gradient_checkpointing=true", "train_cfg.gradient_checkpointing", False),
    ("load_best_model_at_end=true", "checkpoint.save_best", "eval_loss"),
    ("report_to=none", "log.trackers", ()),
    ("report_to=wandb,tensorboard", "log.trackers", ("wandb", "tensorboard")),
    ("lora_rank=8", "adapter.r", 8),
    ("model.lora.r=8", "adapter.r", 8),
    ("lora_target=all", "adapter.target_modules", "all-linear"),
    ("lora_target=q_proj,v_proj", "adapter.target_modules", ["q_proj", "v_proj"]),
    ("cutoff_len=128", f"{ROWS}.max_length", 128),
    ("pack_to_max_length=False", f"{ROWS}.packing", False),
    ("SYSTEM=Be kind.", f"{ROWS}.system", "Be kind."),
    ("dataset=mine.jsonl", f"{ROWS}.path", "mine.jsonl"),
    ("model.llm.pretrained_model_name_or_path=./mine", "model.path", "./mine"),
    ("model=./mine", "model.path", "./mine"),
    ("flash_attn=fa2", "model.attn_implementation", "flash_attention_2"),
]


def _loaded(text: str, name: str = LORA) -> Recipe:
    return loading.load(name, Overrides(pairs=[("--set", text)]))


@each(KEYS)
def test_another_tools_word_sets_the_key_that_it_means_without_a_warning(text: str, key: str, value: object) -> None:
    loaded = _loaded(text)

    assert dict(leaves(loaded.values))[key] == value
    assert loaded.origins[key].text == f"--set {text}"
    assert loaded.warnings == ()


def test_the_objectives_words_are_known_too() -> None:
    assert dict(leaves(_loaded("pref_beta=0.3", DPO).values))["objective.beta"] == 0.3
    assert dict(leaves(_loaded("quantization_bit=8", QLORA).values))["quantization.bits"] == 8


@each(
    [
        ("output_dir=out", "--work-dir"),
        ("resume_from_checkpoint=x", "--resume"),
        ("template=qwen", "model.chat_template"),
        ("finetuning_type=lora", "recipe's name"),
        ("adapter=qlora", "recipe's name"),
        ("stage=dpo", "recipe's name"),
        ("val_size=0.1", "val_dataloader"),
        ("bf16=false", "dtype=fp16"),
        ("optim=adafactor", "optimizer.type"),
        ("load_in_4bit=true", "qlora"),
        ("plot_loss=true", "tuner report"),
        ("wandb_project=x", "WANDB_PROJECT"),
        ("zero_stage=3", "--deepspeed zero2"),
    ]
)
def test_a_word_without_a_counterpart_is_refused_by_its_name(text: str, fix: str) -> None:
    try:
        _loaded(text)
    except RecipeError as error:
        assert text.split("=")[0] in error.what
        assert error.where == f"--set {text}"
        assert fix in (error.fix or "")
    else:
        pytest.fail("it was accepted")


def test_every_key_of_the_table_is_one_of_the_schema() -> None:
    known = {".".join(keys) for keys in schema_keys()}

    assert {alias.key for alias in aliases.table().values() if alias.key} <= known


def test_a_word_of_the_table_that_is_a_key_here_means_that_key() -> None:
    own = {keys[-1] for keys in schema_keys() if "architecture" not in keys}
    blocks = {"model", "dataset", "optimizer", "adapter"}
    both = {word for word in aliases.table() if word in own} - blocks

    assert {(aliases.table()[word].key or "").split(".")[-1] for word in both} == both


def test_a_word_means_one_thing() -> None:
    rows = tomllib.loads(aliases._TABLE.read_text(encoding="utf-8"))
    groups = (*rows["flags"].values(), *rows["same"].values(), *rows["values"], *rows["instead"].values())
    words = [word for group in groups for word in group.split()]

    assert len(words) == len(set(words)) == len(aliases.table())


def test_a_word_in_a_recipe_file_is_told_the_key(tuner: Tuner) -> None:
    Path("mine.py").write_text(f"_base_ = '{LORA}'\nlearning_rate = 1e-4\n")
    Path("inner.py").write_text(f"_base_ = '{LORA}'\nadapter = dict(lora_rank=8)\n")

    top, inner = tuner("show", "./mine.py"), tuner("show", "./inner.py")

    assert "./mine.py:2: no key 'learning_rate'. It is called optim_wrapper.optimizer.lr in tuner." in top.err
    assert "./inner.py:2: no key 'adapter.lora_rank'. It is called adapter.r in tuner." in inner.err


# What is typed; what the one message must hold.
TYPED: list[tuple[str, str]] = [
    ("copy-cfg internlm2_7b_full_alpaca_e3", "tuner copy RECIPE"),
    ("test x.py --checkpoint y --work-dir z --launcher none --cfg-options a=1", "tuner eval RUN"),
    ("eval_refcoco x --llava y --visual-encoder z --data-path d", "no benchmarks of images"),
    ("preprocess arxiv src dst --start-date 2020-01-01 --categories cs.AI", "tuner data RECIPE"),
    ("list-dataset-format", "tuner data RECIPE --data FILE"),
    ("convert pth_to_hf x.py run dest --save-format official", "tuner export RUN DEST"),
    ("convert pth_to_hf run dest --cfg-options a=1", "holds its recipe"),
    ("convert split a b", "nothing has to be split"),
    ("convert", "tuner export RUN DEST"),
    (f"train {LORA} --launcher pytorch", "--launcher env"),
    (f"train {LORA} --local_rank 0", "The launcher sets it"),
    ("chat x --llava y --visual-encoder z --visual-select-layer -2 --image i", "tuner chat RUN --image PATH"),
    ("sft --model x", "tuner train RECIPE"),
    ("export work_dirs/x mine.gguf", "tuner export SOURCE mine --as gguf"),
    (f"train {LORA} --num_gpus 8", "--nproc-per-node N"),
    (f"train {LORA} --warmup_steps 8", "--set warmup_steps=VALUE"),
    ("chat x --prompt-template internlm2_chat", "chat template"),
    ("chat --model x", "tuner chat MODEL"),
    ("train --model x --data y --finetuning_type lora", "--method lora"),
    ("train --model x --data y --load_in_4bit", "--method qlora"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "told"), TYPED, ids=[typed for typed, _ in TYPED])
def test_another_tools_command_line_is_answered_with_ours(tuner: Tuner, typed: str, told: str) -> None:
    result = tuner(*typed.split())

    assert (result.code, result.out) == (2, "")
    assert len(result.messages) == 1
    assert told in result.err


@each(
    [
        ("list-cfg", "list"),
        ("list-cfg -p internlm2", "list internlm2"),
        ("list-cfg --pattern=internlm2", "list internlm2"),
        (f"copy-cfg {LORA} made", f"copy {LORA} made/{LORA}_copy.py"),
        (f"log-dataset {LORA} --show masked_text", f"data {LORA}"),
        (f"check-custom-dataset {LORA}", f"data {LORA} --all --bad"),
        ("convert pth_to_hf x.py run dest --fp32", "export run dest --dtype fp32 --max-shard-size 2GB"),
        ("convert pth_to_hf run dest --safe-serialization", "export run dest --max-shard-size 2GB"),
        (
            "convert merge base run dest --device cpu --json",
            "export run dest --merge --base base --json --max-shard-size 2GB",
        ),
        ("convert pth_to_hf run dest --max-shard-size --fp32", "export run dest --dtype fp32 --max-shard-size"),
        (
            "convert merge --max-shard-size=20KB base run dest",
            "export run dest --merge --base base --max-shard-size 20KB",
        ),
    ]
)
def test_a_command_of_xtuners_that_one_of_ours_does_just_so_is_done(typed: str, ours: str) -> None:
    assert other_tools.same(typed.split()) == ours.split()


def test_what_is_done_for_xtuners_command_is_told(tuner: Tuner) -> None:
    done = tuner("copy-cfg", LORA, ".")

    assert (done.code, done.err) == (0, f"Running: tuner copy {LORA} {LORA}_copy.py\n")
    assert Path(f"{LORA}_copy.py").is_file()


def test_the_flags_of_xtuners_train_are_taken_as_they_are(tuner: Tuner, nothing_starts: None) -> None:
    flags = "--deepspeed deepspeed_zero2 --seed 3 --work-dir out --launcher none --cfg-options lr=1e-4 max_epochs=2"
    done = tuner("train", LORA, *flags.split(), "--dry-run", "--ignore-fit")

    assert done.code == 0, done.err


def test_no_command_of_ours_is_taken_for_another_tools() -> None:
    assert not other_tools.commands().keys() & COMMANDS.keys()


# A file of another tool's, by its name; what the one message must hold.
FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown.yaml": ("anything: x\n", ("unknown.yaml:1: no key 'anything'",)),
    "accelerate.yaml": ("distributed_type: DEEPSPEED\n", ("accelerate", "--deepspeed ./accelerate.yaml")),
    "misprint.yaml": ("stage: sft\nfinetuning_type: [lora\n", ("not valid YAML", "misprint.yaml:")),
}


@pytest.mark.parametrize("command", ["train", "plan", "copy"])
@pytest.mark.parametrize("name", FILES)
def test_a_yaml_file_that_is_no_recipe_is_told_as_what_it_is(tuner: Tuner, name: str, command: str) -> None:
    text, told = FILES[name]
    Path(name).write_text(text)

    result = tuner(command, f"./{name}")

    assert (result.code, result.out, len(result.messages)) == (2, "", 1)
    assert [part for part in told if part not in result.err] == []


IMPORTED = {
    "lora_sft.yaml": ("model_name_or_path: x\nfinetuning_type: lora\n", "LLaMA-Factory"),
    "axolotl.yml": ("base_model: x\nsequence_len: 8\n", "Axolotl"),
    "trl.yaml": ("model_name_or_path: x\ndataset_name: a/b\n", "TRL"),
    "mine_copy.py": ("from xtuner.model import SupervisedFinetune\nmodel = dict(type=SupervisedFinetune)\n", "XTuner"),
}


def test_a_config_of_xtuner_as_a_base_is_refused_with_its_import(tuner: Tuner) -> None:
    Path("theirs.py").write_text(IMPORTED["mine_copy.py"][0])
    Path("mine.py").write_text('_base_ = "theirs.py"\n')

    result = tuner("show", "./mine.py")

    assert result.code == 2
    assert "tuner import theirs.py" in result.err


@pytest.mark.parametrize("command", ["plan", "copy"])
@pytest.mark.parametrize("name", IMPORTED)
def test_a_training_config_of_another_tool_is_imported(tuner: Tuner, name: str, command: str) -> None:
    text, tool = IMPORTED[name]
    Path(name).write_text(text)

    assert f"{name} of {tool} is imported" in tuner(command, f"./{name}").err


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_training_yaml_is_no_deepspeed_config(tuner: Tuner, command: str) -> None:
    Path("lora_sft.yaml").write_text("finetuning_type: lora\n")

    result = tuner(command, "lora_sft.yaml")

    assert "LLaMA-Factory" in result.out + result.err
    assert "DeepSpeed config is JSON" not in result.out + result.err


@pytest.mark.parametrize("name", ["xtuner", "not_installed_here"])
def test_code_whose_imports_are_missing_is_one_message(tuner: Tuner, name: str) -> None:
    Path("mine.py").write_text(f"import {name}\nlog = dict(interval=len({name}.__name__))\n")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # mmengine leaves its copy of a file open when that fails
        result = tuner("show", "./mine.py", "--allow-code")
        gc.collect()

    assert (result.code, result.out, len(result.messages)) == (2, "", 1)
    assert "Traceback" not in result.err
    assert ("is not data" if name == "xtuner" else "No module named 'not_installed_here'") in result.err


def test_with_json_a_mistake_is_one_object_on_standard_error(tuner: Tuner) -> None:
    wrong = tuner("show", LORA, "--set", "lr=-1", "--json")
    unknown = tuner("plan", LORA, "--gpsu", "3", "--json")

    assert (wrong.code, wrong.out, unknown.code, unknown.out) == (2, "", 2, "")
    error = json.loads(wrong.err)["error"]
    assert (error["code"], error["exit_code"], error["where"]) == ("bad-recipe", 2, "--set lr=-1")
    assert "greater than 0" in error["what"]
    assert "--gpsu" in json.loads(unknown.err)["error"]["what"]


def test_events_need_someone_who_watches_the_ranks(tuner: Tuner) -> None:
    result = tuner("train", LORA, "--json", "--launcher", "none")

    assert (result.code, json.loads(result.err)["error"]["where"]) == (2, "--json")


def test_the_recipe_of_a_run_is_named_by_the_run_or_its_folder_never_recipe(tmp_path: Path) -> None:
    text = f"_base_ = '{LORA}'\n"
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "recipe.py").write_text(text)
    (tmp_path / "first/run.json").write_text(run_json(name="mine"))
    (tmp_path / "other.py").write_text(text)

    named = [loading.load(str(tmp_path / file)).name for file in ("first/recipe.py", "second/recipe.py", "other.py")]

    assert named == ["mine", "second", "other"]


@pytest.mark.parametrize("word", ["/exit", "/quit", "exit", "quit", "EXIT", "quit()"])
def test_a_chat_ends_at_every_word_for_it(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter([word])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))

    chat._talk(cast("Chat", None))  # nothing is asked

    assert next(lines, "all were read") == "all were read"


def test_a_chat_tells_its_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["/help", "exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))

    chat._talk(cast("Chat", None))

    assert "/reset: clear the conversation" in capsys.readouterr().out


def test_the_quickstart_ends_with_how_tuner_is_called_next() -> None:
    text = (Path(tuner_package.__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    target = text.split("quickstart: install\n")[1].split("\n\n")[0]

    assert "source $(BIN)/activate" in target.splitlines()[-1]


def test_what_is_installed_by_name_is_this_project_and_not_another_of_the_index() -> None:
    root = Path(tuner_package.__file__).parents[1]
    pages = [root / "README.md", root / "README_zh-CN.md", *(root / "docs").rglob("*.md")]
    code = [path for path in (root / "tuner").rglob("*.py") if "configs" not in path.parts]

    assert '\nname = "tuner-deepspeed"\n' in (root / "pyproject.toml").read_text(encoding="utf-8")
    texts = {str(path): path.read_text(encoding="utf-8") for path in (*pages, *code)}
    assert [name for name, text in texts.items() if re.search(r"pip install '?tuner[\['\s]", text)] == []
