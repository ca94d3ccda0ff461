"""`tuner show`: the final recipe and DeepSpeed config, every value with its origin; and what differs between two."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from tests.cli.command import Result, Tuner
from tests.cli.made_runs import make_run
from tests.machine.gpus import A100, machine
from tuner.recipes import catalog, loading
from tuner.recipes.recipe import Overrides

TINY = "tiny_full_sample_e1"

pytestmark = pytest.mark.usefixtures("nothing_starts")


def _line(result: Result, key: str) -> str:
    (line,) = [line for line in result.out.splitlines() if line.strip().startswith(f"{key} = ")]
    return " ".join(line.split())


def _differences(result: Result) -> dict[str, Any]:
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)["differences"]
    return found


# A recipe with its DeepSpeed config


def test_the_final_config_is_shown_with_origins_and_what_they_beat(tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text('{\n "gradient_clipping": 3.0,\n "steps_per_print": 7\n}')

    result = tuner("show", TINY, "--deepspeed", "my.json", "--set", "max_norm=0.5")

    assert _line(result, "gradient_clipping") == (
        "gradient_clipping = 0.5 # recipe optim_wrapper.clip_grad.max_norm (--set max_norm=0.5), over 3.0 (my.json:2:2)"
    )
    assert _line(result, "steps_per_print") == "steps_per_print = 7 # my.json:3:2"
    assert _line(result, "train_batch_size").endswith("# derived: 2 x 1 x 1 ranks")
    line = next(n for n, text in enumerate(catalog.BASE.read_text().splitlines(), 1) if "max_norm=1.0" in text)
    assert _line(result, "optim_wrapper.clip_grad.max_norm").endswith(
        f"# --set max_norm=0.5, over 1.0 (configs/base.py:{line})"
    )
    assert "WARNING: gradient_clipping = 0.5" in result.err


def test_a_laptop_shows_what_a_cluster_would_get(tuner: Tuner) -> None:
    result = tuner("show", TINY, "--deepspeed", "zero3", "--gpus", "8", "--gpu", "A100-80GB", "--nodes", "2", "--json")

    found = json.loads(result.out)
    assert found["deepspeed"]["train_batch_size"] == 2 * 16
    assert found["deepspeed"]["bf16"]["enabled"] is True
    assert found["machine"].startswith("8 x a100-80g (80 GiB); 2 nodes, 16 processes")
    assert found["deepspeed_origins"]["zero_optimization.reduce_bucket_size"]["from"].startswith("derived: ")
    assert found["level"] == {"name": "deepspeed_zero3", "reason": None}
    settled = [("--set", word) for word in ("loss=chunked", "attn_implementation=varlen", "use_liger_kernel=False")]
    assert found["recipe"] == json.loads(json.dumps(loading.load(TINY, Overrides(pairs=settled)).values))
    assert found["origins"]["train_cfg.loss"]["from"].startswith("derived: ")


@pytest.mark.parametrize(("gpu", "half"), [("v100", "fp16"), ("a100", "bf16"), ("h100", "bf16")])
def test_the_named_gpu_decides_the_compute_type(tuner: Tuner, gpu: str, half: str) -> None:
    found = json.loads(tuner("show", TINY, "--gpu", gpu, "--json").out)

    assert [name for name in ("bf16", "fp16") if found["deepspeed"][name]["enabled"]] == [half]


def test_auto_is_the_level_of_the_named_machines_and_says_why(tuner: Tuner) -> None:
    name = "llama3_1_8b_instruct_full_alpaca_e1"

    small = json.loads(tuner("show", name, "--gpus", "4", "--gpu", "a10", "--json").out)
    large = json.loads(tuner("show", name, "--gpus", "8", "--gpu", "b200", "--json").out)

    assert "nothing fits without offloading" in small["level"]["reason"]
    assert small["level"]["name"] > large["level"]["name"]


def test_without_deepspeed_or_machines_only_the_recipe_is_shown(tuner: Tuner) -> None:
    result = tuner("show", TINY)

    assert result.out.startswith("model.path = ")
    assert "deepspeed.json" not in result.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([TINY, "--gpus", "8"], "Add: --gpu a100-80g."),
        ([TINY, "--gpu", "a10000"], "--gpu: unknown GPU 'a10000'. Did you mean"),
        ([TINY, "--gpus", "0", "--gpu", "a100"], "--gpus"),
        ([TINY, "--deepspeed", "zero4"], "Did you mean 'zero3'?"),
        (["zero2", "--set", "lr=1"], "--set needs a recipe"),
        (["zero2", "--cfg-options", "lr=1"], "--cfg-options needs a recipe"),
        (["zero2", "--reward", "length"], "--reward needs a recipe"),
        (["zero2", "lr=1"], "unexpected argument 'lr=1'"),
        ([TINY, "--diff", "zero2"], "they cannot be compared"),
        ([TINY, "--diff", "tiny_ful_sample_e1"], "Did you mean 'tiny_full_sample_e1'?"),
        (["zero2", "--diff", "nothing.json"], "there is no file 'nothing.json'"),
    ],
)
def test_what_cannot_be_shown_is_one_message(tuner: Tuner, arguments: list[str], told: str) -> None:
    result = tuner("show", *arguments)

    assert result.code == 2
    assert told in result.err
    assert "Traceback" not in result.err


# Origins of values that come as a whole or through several hands


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optimizer={'type':'SGD','lr':0.5}", "optim_wrapper.optimizer.lr", 0.5),
        ("clip_grad={'max_norm':0.25}", "optim_wrapper.clip_grad.max_norm", 0.25),
        ("clip_grad=None", "optim_wrapper.clip_grad", None),
        ("betas=[0.5,0.75]", "optim_wrapper.optimizer.betas", [0.5, 0.75]),
        ("deepspeed={'zero_optimization':{'stage':1}}", "deepspeed.zero_optimization.stage", 1),
    ],
)
def test_a_value_set_as_a_whole_has_the_flag_as_its_origin(tuner: Tuner, override: str, key: str, value: Any) -> None:
    found = json.loads(tuner("show", TINY, "--set", override, "--json").out)

    held: Any = found["recipe"]
    for part in key.split("."):
        held = held[part]
    assert held == value
    assert found["origins"][key]["from"] == f"--set {override}"


def test_a_config_in_a_recipe_keeps_the_line_of_each_value_and_the_flag_of_a_changed_one(
    tuner: Tuner, tmp_path: Path
) -> None:
    text = f"_base_ = '{TINY}'\ndeepspeed = dict(\n    zero_optimization=dict(stage=1,\n        overlap_comm=True))\n"
    (tmp_path / "mine.py").write_text(text)
    override = "deepspeed={'steps_per_print': 9}"

    result = tuner("show", "./mine.py", "--gpu", "t4", "--set", override, "--json")

    origins = json.loads(result.out)["deepspeed_origins"]
    assert origins["zero_optimization.stage"]["from"] == "./mine.py:3"
    assert origins["zero_optimization.overlap_comm"]["from"] == "./mine.py:4"
    assert origins["steps_per_print"]["from"] == f"--set {override}"


# Presets, JSONs, run directories


def test_a_preset_and_a_json_are_shown_as_they_are_written(tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text('{\n "bf16": {"enabled": "auto"}}')

    assert _line(tuner("show", "zero2"), "zero_optimization.stage").endswith("= 2 # preset deepspeed_zero2")
    assert _line(tuner("show", "my.json"), "bf16.enabled") == "bf16.enabled = 'auto' # my.json:2:11"


def test_a_run_directory_shows_what_it_was_run_with(tuner: Tuner, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", TINY, "zero2", "lr=0.125")

    result = tuner("show", run)

    assert f"= 0.125 # {run}/recipe.py:" in _line(result, "optim_wrapper.optimizer.lr")
    assert f"= 2 # {run}/deepspeed.json:" in _line(result, "zero_optimization.stage")
    assert f"# {run}/run.json" in _line(result, "versions.torch")


# --diff


def test_two_recipes_differ_where_they_do_and_say_whose_value_it_is(tuner: Tuner) -> None:
    result = tuner("show", TINY, "--set", "lr=0.125", "--diff", TINY, "--json")

    (found,) = _differences(result).values()
    assert found.keys() == {"optim_wrapper.optimizer.lr"}
    sides = found["optim_wrapper.optimizer.lr"]
    assert (sides["left"]["value"], sides["left"]["from"]) == (0.125, "--set lr=0.125")
    assert sides["left"]["beat"][0] == {key: sides["right"][key] for key in ("value", "from")}


def test_a_block_that_only_one_side_has_is_absent_on_the_other(tuner: Tuner) -> None:
    found = _differences(tuner("show", TINY, "--diff", "tiny_lora_sample_e1", "--json"))["recipe"]

    assert found["adapter.r"]["left"] is None
    assert found["adapter.r"]["right"]["from"].startswith("configs/methods/lora.py:")
    assert found["adapter"]["right"] is None
    blocks = [key.split(".")[0] for key in found]
    assert blocks == sorted(blocks, key=blocks.index), "the keys of a block stand together"


def test_the_text_of_a_diff_has_both_sides_with_their_origins(tuner: Tuner) -> None:
    result = tuner("show", "zero2", "--diff", "deepspeed_zero1")

    assert result.code == 0
    assert [" ".join(line.split()) for line in result.out.splitlines()] == [
        "--- preset deepspeed_zero2",
        "+++ preset deepspeed_zero1",
        "deepspeed.json:",
        "zero_optimization.stage",
        "- 2 # preset deepspeed_zero2",
        "+ 1 # preset deepspeed_zero1",
    ]


def test_the_same_twice_is_no_difference(tuner: Tuner) -> None:
    result = tuner("show", TINY, "--deepspeed", "zero2", "--diff", TINY)

    assert result.code == 0
    assert result.out.splitlines()[2:] == ["recipe: no difference", "deepspeed.json: no difference"]


def test_a_number_is_the_same_however_it_is_written_and_true_is_no_1(tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"zero_optimization": {"reduce_bucket_size": 5e8}, "dump_state": true}')
    (tmp_path / "two.json").write_text('{"zero_optimization": {"reduce_bucket_size": 500000000}, "dump_state": 1}')

    assert _differences(tuner("show", "one.json", "--diff", "two.json", "--json"))["deepspeed"].keys() == {"dump_state"}


def test_one_recipe_under_two_presets(tuner: Tuner) -> None:
    result = tuner("show", TINY, "--deepspeed", "zero2", "--gpu", "a100", "--diff", "zero3", "--json")

    found = _differences(result)
    assert found["recipe"] == {}
    assert found["deepspeed"]["zero_optimization.stage"]["right"]["value"] == 3
    assert found["deepspeed"]["zero_optimization.stage3_prefetch_bucket_size"]["right"]["from"].startswith("derived")
    assert json.loads(result.out)["right"] == "--deepspeed zero3"


def test_two_recipes_under_one_preset(tuner: Tuner) -> None:
    found = _differences(
        tuner("show", TINY, "--set", "train_dataloader.batch_size=5", "--deepspeed", "zero2", "--diff", TINY, "--json")
    )

    assert found["deepspeed"].keys() == {"train_micro_batch_size_per_gpu", "train_batch_size"}


def test_two_runs_differ_in_recipe_config_versions_and_hardware(tuner: Tuner, tmp_path: Path) -> None:
    first = make_run(tmp_path / "one", TINY, "zero2")
    second = make_run(tmp_path / "two", TINY, "zero1", "lr=0.125", hardware=machine(A100))
    facts = json.loads((second / "run.json").read_text())
    facts["versions"]["torch"] = "2.0.0"
    (second / "run.json").write_text(json.dumps(facts))

    found = _differences(tuner("show", first, "--diff", second, "--json"))

    assert found["recipe"].keys() == {"optim_wrapper.optimizer.lr", "deepspeed"}
    assert found["deepspeed"]["bf16.enabled"]["right"]["value"] is True
    assert found["run"]["versions.torch"]["right"] == {"value": "2.0.0", "from": f"{second}/run.json", "beat": []}
    assert "hardware.gpus" in found["run"]


def test_a_run_and_a_recipe_are_compared_in_what_both_have(tuner: Tuner, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", TINY, "zero2", "lr=0.125")

    found = _differences(tuner("show", run, "--diff", TINY, "--json"))

    assert list(found) == ["recipe"]
    of_machine = {"train_cfg.loss", "model.attn_implementation", "model.use_liger_kernel"}
    assert found["recipe"].keys() == of_machine | {"optim_wrapper.optimizer.lr", "deepspeed"}


def test_a_terminal_gets_colours_and_a_pipe_does_not(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("show", "zero2", "--diff", "zero1")
    plain = tuner(*arguments)
    is_plain: Callable[..., bool] = lambda *_: False  # noqa: E731
    monkeypatch.setattr("click.utils.should_strip_ansi", is_plain)

    coloured = tuner(*arguments)

    assert "\x1b" not in plain.out
    assert click.style("--- preset deepspeed_zero2", fg="red") in coloured.out
    assert "\x1b[32m" in coloured.out
