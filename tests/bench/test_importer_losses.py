"""The comparison of an imported config with its own tool: what both are asked to do, and what a line says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import importer_losses, tools
from bench.importer_losses import CONDITIONS, EXAMPLES, MODEL, PLAIN, ROWS, SAME_LOSS, WARM
from bench.jobs import make_model, of_catalog
from tuner.importers import tools as importers

ROW = {"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]}


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder like that of `make real`, with a small random model; the peers seem to be installed."""
    monkeypatch.setattr(tools, "PEERS", tmp_path / "peers")
    for name in EXAMPLES:
        (tmp_path / "peers" / name).mkdir(parents=True)
        (tmp_path / "peers" / name / ".installed").touch()
    make_model(tmp_path / MODEL, of_catalog("tiny"))
    (tmp_path / f"{ROWS}.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "cell").mkdir()
    return tmp_path


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("tool", EXAMPLES)
def test_tuner_imports_each_config_with_the_steps_and_the_warm_up_of_the_condition(
    tool: str, condition: str, real: Path
) -> None:
    importer_losses.command(tool, condition, real, 20, real / "cell")

    imported = importers.import_config([str(real / "cell" / "train.yaml")])

    schedule = imported.values["param_scheduler"]
    key, warm_up = {"llamafactory": ("warmup_ratio", 0.1), "axolotl": ("warmup_steps", 10)}[tool]
    assert imported.values["train_cfg"]["max_steps"] == 20 and imported.obstacle is None
    assert schedule.get(key, 0) == (warm_up if condition == WARM else 0)
    batch = imported.values["train_dataloader"]["batch_size"], imported.values["optim_wrapper"]["accumulative_counts"]
    assert batch == {"llamafactory": (1, 8), "axolotl": (4, 1) if condition == SAME_LOSS else (2, 2)}[tool]
    assert imported.values["optim_wrapper"]["optimizer"]["lr"] == EXAMPLES[tool]["learning_rate"]


def test_with_the_same_loss_nothing_follows_the_end_of_the_last_turn(real: Path) -> None:
    from transformers import AutoTokenizer

    importer_losses.command("llamafactory", SAME_LOSS, real, 20, real / "cell")

    model = json.loads((real / "cell" / "train.yaml").read_text())["model_name_or_path"]
    text = AutoTokenizer.from_pretrained(model).apply_chat_template(ROW["messages"], tokenize=False)
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>")


def test_a_line_has_the_largest_difference_and_its_step() -> None:
    line = importer_losses.row("axolotl", PLAIN, [4.0, 3.5, 3.0], [4.0, 3.25, 3.1])

    assert line["largest difference"] == "0.2500 (step 2)"
    assert (line["config of"], line["step 2"]) == ("Axolotl", "3.5000 / 3.2500")


def test_a_tool_that_trained_other_steps_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        importer_losses.row("axolotl", PLAIN, [4.0, 3.5], [4.0])
