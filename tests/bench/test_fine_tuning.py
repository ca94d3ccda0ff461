"""Each tool gets the same task: at its own defaults nothing of ours, at equal settings the same values in its words."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bench import tools
from bench.fine_tuning import ADAPTER, BATCH, EQUAL, OWN, TOOLS, Asked, Task

CHAT = {"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]}
PAIR = {"prompt": "How?", "chosen": "So.", "rejected": "No."}
SETTINGS = ("rate", "batch", "warm-up", "decay", "r", "alpha", "dropout")
NAMES = {
    "tuner": ("optimizer.lr", "train_dataloader.batch_size", "warmup_ratio", "weight_decay"),
    "trl": ("learning_rate", "per_device_train_batch_size", "warmup_steps", "weight_decay"),
    "llamafactory": ("learning_rate", "per_device_train_batch_size", "warmup_steps", "weight_decay"),
    "axolotl": ("learning_rate", "micro_batch_size", "warmup_steps", "weight_decay"),
}
ADAPTERS = {
    "tuner": ("adapter.r", "adapter.lora_alpha", "adapter.lora_dropout"),
    "trl": ("lora_r", "lora_alpha", "lora_dropout"),
    "llamafactory": ("lora_rank", "lora_alpha", "lora_dropout"),
    "axolotl": ("lora_r", "lora_alpha", "lora_dropout"),
}


@pytest.fixture(autouse=True)
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "PEERS", tmp_path / "peers")
    for name in ("trl", "llamafactory", "axolotl"):
        (tmp_path / "peers" / name).mkdir(parents=True)
        (tmp_path / "peers" / name / ".installed").touch()


def asked(tool: str, folder: Path, settings: str, method: str = "lora", row: dict[str, Any] = CHAT) -> Asked:
    (folder / "data.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"dtype": "bfloat16"}')
    task = Task(folder / "model", folder / "data.jsonl", 3, method, settings, 42, cpu=True)
    (folder / "cell").mkdir()
    return TOOLS[tool](task, folder / "cell")


def options(training: Asked) -> dict[str, Any]:
    """Return what a tool is told, wherever it reads that from."""
    words = training.command.argv
    if words[-1].endswith(".yaml"):
        return dict(json.loads(Path(words[-1]).read_text()))
    texts = dict(word.split("=", 1) for word in words if "=" in word)
    texts |= {name[2:]: value for name, value in itertools.pairwise(words) if name.startswith("--")}
    return {name: float(value) if value.replace(".", "").replace("e-", "").isdigit() else value
            for name, value in texts.items()}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("row", "rate"), [(CHAT, 2e-4), (PAIR, 1e-5)])
def test_the_equal_settings_reach_each_tool_in_its_own_words(
    tool: str, row: dict[str, Any], rate: float, tmp_path: Path
) -> None:
    values = options(asked(tool, tmp_path, EQUAL, row=row))

    read = [values[name] for name in (*NAMES[tool], *ADAPTERS[tool])]
    wanted = [rate, BATCH, 0, 0, *(ADAPTER[name] for name in ("r", "lora_alpha", "lora_dropout"))]
    assert dict(zip(SETTINGS, read, strict=True)) == dict(zip(SETTINGS, wanted, strict=True))


@pytest.mark.parametrize("tool", ["tuner", "trl", "llamafactory"])
def test_at_its_own_defaults_a_tool_is_told_no_setting_that_it_has_a_default_for(tool: str, tmp_path: Path) -> None:
    training = asked(tool, tmp_path, OWN)

    assert not options(training).keys() & {*NAMES[tool], *ADAPTERS[tool]}
    assert (
        training.beside == {"tuner": "nothing", "trl": "`--use_cpu True`", "llamafactory": "`dataset_info.json`"}[tool]
    )


def test_full_training_gets_no_adapter(tmp_path: Path) -> None:
    values = options(asked("axolotl", tmp_path, EQUAL, "full"))

    assert not {"adapter", "lora_r", "lora_alpha"} & values.keys() and values["learning_rate"] == 2e-5


def test_at_equal_settings_llamafactory_gets_a_model_that_says_fp32(tmp_path: Path) -> None:
    model = options(asked("llamafactory", tmp_path, EQUAL))["model_name_or_path"]

    assert json.loads((Path(model) / "config.json").read_text()) == {"dtype": "float32"}
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == {"dtype": "bfloat16"}


def test_trl_trains_on_the_answer_alone_at_equal_settings(tmp_path: Path) -> None:
    asked("trl", tmp_path, EQUAL)

    row = json.loads((tmp_path / "cell" / "rows" / "train.jsonl").read_text())
    assert row == {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}


def test_pairs_become_conversations_for_tools_that_would_not_apply_the_template(tmp_path: Path) -> None:
    asked("llamafactory", tmp_path, OWN, row=PAIR)

    row = json.loads((tmp_path / "cell" / "rows.jsonl").read_text())
    assert row["messages"] == CHAT["messages"][:1]
    assert row["rejected"] == {"role": "assistant", "content": "No."}


def test_a_tool_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "PEERS", tmp_path / "none")

    with pytest.raises(tools.Unmeasured, match="not installed"):
        asked("trl", tmp_path, OWN)
