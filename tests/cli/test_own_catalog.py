"""A user's own catalog through the commands: listed with its folder, told where it is wrong, written by `tuner new`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import PIL.Image
import pytest

from tests.cli.command import Tuner
from tuner import assets

pytestmark = pytest.mark.usefixtures("nothing_starts")

ROW = '{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}\n'
PAIR = '{"prompt": "Why?", "chosen": "So.", "rejected": "No."}\n'


@pytest.fixture(autouse=True)
def in_a_folder_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUNER_CATALOG", raising=False)
    (tmp_path / "rows.jsonl").write_text(2 * ROW)
    (tmp_path / "pairs.jsonl").write_text(PAIR)
    shutil.copytree(assets.CONFIGS / "assets" / "tiny", tmp_path / "base-7b")
    return tmp_path


def part(kind: str, file: str, text: str, folder: str = "tuner_configs") -> None:
    path = Path(folder, kind, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_own_parts_are_listed_with_their_folder_and_wrong_ones_are_told_with_file_and_line(tuner: Tuner) -> None:
    part("datasets", "tickets.py", '"""Our tickets."""\n\ntrain_dataloader = dict(dataset=dict(path="rows.jsonl"))\n')
    part("datasets", "alpaca.py", '"""Our alpaca."""\n\ntrain_dataloader = dict(dataset=dict(path="rows.jsonl"))\n')
    part("models", "broken.py", 'model = dict(\n    pth="x",\n)\n')
    part("models", "torn.py", "model = dict(\n")
    part("model", "acme.py", 'model = dict(path="x")\n')
    part("deepspeed_presets", "house.json", '{"zero_optimization": {"stage": 5}}')

    result = tuner("list")

    assert result.code == 0
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert {"tickets Our tickets. (tuner_configs)", "alpaca Our alpaca. (tuner_configs)"} <= {*lines}
    assert any("house (tuner_configs)" in line for line in lines)
    assert "qwen3_8b" in result.out
    for told in (
        "tuner_configs/models/broken.py:2: no key 'model.pth'.",
        "tuner_configs/models/torn.py:1: not valid Python: '(' was never closed.",
        "tuner_configs/model: 'model' is not a kind of part. Did you mean 'models'?",
        "tuner_configs/deepspeed_presets/house.json:1",
        "NOTE: tuner_configs/datasets/alpaca.py shadows the dataset 'alpaca' of tuner.",
    ):
        assert result.err.count(told) == 1, told
    names = tuner("list", "tiny_lora_*").out.split()
    assert "tiny_lora_tickets_e3" in names


def test_as_json_each_part_has_its_origin_and_what_is_wrong_with_it(tuner: Tuner) -> None:
    part("datasets", "alpaca.py", '"""Our alpaca."""\n\ntrain_dataloader = dict(dataset=dict(path="rows.jsonl"))\n')
    part("datasets", "alpaca_zh.py", "train_dataloader = dict(\n")
    part("models", "broken.py", 'model = dict(pth="x")\n')
    part("chat_templates", "acme.jinja", "{{ messages }}")

    found = json.loads(tuner("list", "--json").out)

    alpaca, broken = found["datasets"]["alpaca"], found["models"]["broken"]
    assert (alpaca["origin"], alpaca["file"]) == ("tuner_configs", "tuner_configs/datasets/alpaca.py")
    assert (alpaca["shadows"], alpaca["paths"]) == (["tuner"], ["rows.jsonl"])
    assert broken["error"]["where"] == "tuner_configs/models/broken.py:1"
    assert found["models"]["qwen3_8b"]["origin"] == "tuner"
    assert found["datasets"]["alpaca_enzh"]["error"]["where"] == "tuner_configs/datasets/alpaca_zh.py:1"
    assert found["own"]["chat_templates"]["acme"]["file"] == "tuner_configs/chat_templates/acme.jinja"


def test_a_folder_given_after_catalog_holds_for_one_command(tuner: Tuner, tmp_path: Path) -> None:
    part("datasets", "tickets.py", 'train_dataloader = dict(dataset=dict(path="rows.jsonl"))\n', "team")

    shown = tuner("show", "tiny_lora_tickets_e1", "--catalog", "team")
    job = tuner("submit", "tiny_lora_tickets_e1", "--catalog", "team", "--gpus-per-node", "0", "--dry-run")

    assert "'rows.jsonl'" in shown.out
    assert "--catalog=team" in job.out, job.err
    assert tuner("show", "tiny_lora_tickets_e1").code == 2
    assert "--catalog: there is no folder 'nowhere'." in tuner("list", "--catalog", "nowhere").err


def test_a_run_of_own_parts_reads_its_run_directory_alone(tuner: Tuner) -> None:
    part("models", "acme.py", 'model = dict(path="package:tiny", chat_template="acme")\narchitecture = "tiny"\n')
    part("chat_templates", "acme.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}")
    part("deepspeed_presets", "house.json", '{"zero_optimization": {"stage": 1, "reduce_bucket_size": 12345}}')

    dry = tuner("train", "acme_lora_sample_e1", "--deepspeed", "house", "--dry-run")
    tuner("copy", "acme_lora_sample_e1", "mine.py", "--set", "deepspeed=house")
    shutil.rmtree("tuner_configs")

    assert "zero_optimization.reduce_bucket_size = 12345" in " ".join(dry.out.split())
    assert "tuner_configs/deepspeed_presets/house.json:1" in dry.out
    again = tuner("train", "./mine.py", "--dry-run")
    assert again.code == 0, again.err
    assert "zero_optimization.reduce_bucket_size = 12345" in " ".join(again.out.split())


# tuner new


def test_a_new_model_is_planned_at_once(tuner: Tuner) -> None:
    result = tuner("new", "model", "acme_7b", "--from", "base-7b")

    assert result.out.splitlines()[0] == "Wrote tuner_configs/models/acme_7b.py."
    assert tuner("plan", "acme_7b_qlora_custom_e1", "--gpu", "a100-80g").code == 0
    assert " ".join(tuner("list", "--models", "acme").out.split()) == (
        "models: acme_7b base-7b: llama, 0.8M parameters. (tuner_configs)"
    )
    text = Path("tuner_configs/models/acme_7b.py").read_text()
    assert '    path="base-7b",\n' in text
    assert "# The tokenizer's own chat template is used." in text


def test_a_config_json_alone_is_enough_and_names_its_hub_id(tuner: Tuner) -> None:
    facts = json.loads(Path("base-7b/config.json").read_text()) | {"_name_or_path": "acme/acme-7b"}
    Path("config.json").write_text(json.dumps(facts))

    tuner("new", "model", "acme_7b", "--from", "config.json")
    tuner("new", "model", "acme_chat", "--from", "config.json", "--path", "acme/acme-7b-chat")

    shown = json.loads(tuner("list", "--json", "--models", "acme").out)["models"]
    assert [model["path"] for model in shown.values()] == ["acme/acme-7b", "acme/acme-7b-chat"]


@pytest.mark.parametrize(
    ("file", "objectives", "next_step"),
    [
        ("rows.jsonl", ["sft", "pretrain", "grpo", "rloo", "distill"], "tiny_lora_my_rows_e1"),
        ("pairs.jsonl", ["dpo", "orpo", "reward", "kto"], "tiny_dpo_lora_my_rows_e1"),
    ],
)
def test_a_new_data_set_is_read_at_once(tuner: Tuner, file: str, objectives: list[str], next_step: str) -> None:
    result = tuner("new", "dataset", "my_rows", "--from", file)

    assert result.out.splitlines() == ["Wrote tuner_configs/datasets/my_rows.py.", f"Next: tuner data {next_step}"]
    assert tuner("data", next_step).code == 0
    listed = json.loads(tuner("list", "--json", "--datasets", "my_rows").out)["datasets"]["my_rows"]
    assert set(objectives) <= set(listed["objectives"])


def test_rows_with_images_are_read_with_their_images(tuner: Tuner) -> None:
    Path("pictures").mkdir()
    PIL.Image.new("RGB", (8, 8)).save("pictures/a.png")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Red."}]
    Path("seen.json").write_text(json.dumps([{"image": "a.png", "conversations": turns}]), encoding="utf-8")

    missing = tuner("new", "dataset", "seen", "--from", "seen.json")
    result = tuner("new", "dataset", "seen", "--from", "seen.json", "--image-folder", "pictures")

    assert missing.code == 2 and "image_folder" in missing.err
    assert result.out.splitlines()[1] == "Next: tuner data tiny_vision_lora_seen_e1"
    assert tuner("data", "tiny_vision_lora_seen_e1").code == 0


def test_columns_of_other_names_are_named_once(tuner: Tuner) -> None:
    Path("asked.jsonl").write_text('{"asked": "Why?", "told": "So."}\n')

    refused = tuner("new", "dataset", "asked", "--from", "asked.jsonl")
    tuner("new", "dataset", "asked", "--from", "asked.jsonl", "--column", "prompt=asked", "--column", "completion=told")

    assert refused.code == 2
    assert "With tuner new, use --column OURS=THEIRS or --format NAME." in refused.err
    assert 'columns=dict(prompt="asked", completion="told")' in Path("tuner_configs/datasets/asked.py").read_text()
    assert tuner("data", "tiny_lora_asked_e1").code == 0


def test_nothing_is_written_over_and_a_wrong_source_writes_nothing(tuner: Tuner) -> None:
    tuner("new", "model", "acme", "--from", "base-7b")
    before = Path("tuner_configs/models/acme.py").read_text()
    Path("bad.json").write_text('{"model_type": "llama", "hidden_size": 64}')

    again = tuner("new", "model", "acme", "--from", "base-7b")
    named = tuner("new", "model", "Acme-7B", "--from", "base-7b")
    wrong = tuner("new", "model", "bad", "--from", "bad.json")
    gone = tuner("new", "dataset", "gone", "--from", "gone.jsonl")

    assert [finished.code for finished in (again, named, wrong, gone)] == [2, 2, 2, 2]
    assert "tuner_configs/models/acme.py exists" in again.err
    assert "'Acme-7B' is not a valid name for a part" in named.err
    assert "without num_hidden_layers, num_attention_heads, vocab_size" in wrong.err
    assert [*Path("tuner_configs").rglob("*.py")] == [Path("tuner_configs/models/acme.py")]
    assert Path("tuner_configs/models/acme.py").read_text() == before


def test_a_new_part_of_a_named_catalog_holds_from_everywhere(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner("new", "dataset", "alpaca", "--from", "rows.jsonl", "--catalog", "team/parts")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    result = tuner("data", "tiny_lora_alpaca_e1", "--catalog", "../team/parts")

    assert result.code == 0, result.err
