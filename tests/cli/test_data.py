"""`tuner data`: counts, lengths, samples and bad rows, as training would see them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cli.command import Result, Tuner
from tuner.cli import data as command
from tuner.data import inspection
from tuner.data.inspection import Shown, TemplateDifference
from tuner.models import load
from tuner.models.load import load_tokenizer

SFT, DPO, KTO = "tiny_lora_custom_e1", "tiny_dpo_lora_custom_e1", "tiny_kto_lora_custom_e1"
GOOD = {"instruction": "Why?", "output": "Because."}
PAIR = {"prompt": "What is red?", "chosen": "A colour.", "rejected": "A dog."}

Rows = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("nothing_starts")


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """Return a function that writes rows, texts as they are, to rows.jsonl."""

    def write(*content: Any) -> Path:
        lines = [line if isinstance(line, str) else json.dumps(line) for line in content]
        (tmp_path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return Path("rows.jsonl")

    return write


def shown(tuner: Tuner, name: str, path: Path, *arguments: object) -> dict[str, Any]:
    result = tuner("data", name, "--data", path, "--json", *arguments)
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)["data"]["train"]
    return found


def text(pieces: list[dict[str, Any]], *, trained: bool) -> str:
    return "".join(piece["text"] for piece in pieces if piece["trained"] is trained)


# What is read


def test_the_tokenizer_is_loaded_once_for_both_splits(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(load, "load_tokenizer", lambda model, path: loaded.append(path) or load_tokenizer(model, path))

    assert set(json.loads(tuner("data", "tiny_full_sample_e1", "--json").out)["data"]) == {"train", "validation"}
    assert len(loaded) == 1


def test_every_row_of_a_stream_is_checked_and_the_first_are_counted(tuner: Tuner, rows: Rows) -> None:
    path = rows(*[GOOD] * 1_004, '{"instruction"')
    stream = ("--set", "train_dataloader.dataset.streaming=True", "--set", "max_steps=3")

    refused = tuner("data", SFT, "--data", path, "--all", *stream)
    told = tuner("data", SFT, "--data", path, "--all", *stream, "--set", "bad_rows=1")

    assert refused.code == 2 and "rows.jsonl:1005" in refused.err
    assert "train: 1,000 rows" in told.out and "every row was checked, and the first 1,000 are counted" in told.out


def test_the_output_tells_counts_lengths_and_samples(tuner: Tuner, rows: Rows, tmp_path: Path) -> None:
    result = tuner("data", SFT, "--data", rows(*[GOOD] * 4), "--samples", 2)

    assert (result.code, result.err) == (0, "")
    assert "4 rows of format 'alpaca' (detected)" in result.out
    assert "samples: " in result.out
    assert "█" in result.out
    assert "between [[ and ]]" in result.out
    assert result.out.count("[[Because.<|im_end|>]]") == 2
    assert "rows.jsonl:2: " in result.out
    assert "<|im_start|>user\nWhy?" in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_counts_are_those_of_training(tuner: Tuner, rows: Rows) -> None:
    long = {"instruction": "Why?", "output": "Because. " * 50}
    path = rows(GOOD, long, {"instruction": "x" * 300, "output": "y"})

    found = shown(tuner, SFT, path, "--set", "packing=False", "--set", "max_length=32")

    counts = found["counts"]
    assert (counts["read"], counts["kept"], counts["truncated"], counts["dropped"]) == (3, 2, 1, 1)
    assert counts["tokens"] == sum(sample["num_tokens"] for sample in found["samples"][:2])
    assert counts["trained_tokens"] == sum(sample["num_trained"] for sample in found["samples"])
    assert counts["truncated_tokens"] == found["samples"][1]["num_cut"] > 0
    assert found["sets"] == [{"place": "rows.jsonl", "format": "alpaca", "detected": True, "read": 3}]
    assert found["efficiency"] is None


def test_packing_says_how_full_its_rows_are(tuner: Tuner, rows: Rows) -> None:
    found = shown(tuner, SFT, rows(*[GOOD] * 9), "--all", "--set", "max_length=64")

    counts = found["counts"]
    assert found["efficiency"] == counts["tokens"] / (counts["packed_rows"] * 64)
    assert 0.5 < found["efficiency"] <= 1


def test_the_first_rows_are_enough_unless_all_are_asked_for(
    tuner: Tuner, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_FIRST_ROWS", 3)
    path = rows(*[GOOD] * 5, {"instruction": "Why?"})

    few = tuner("data", SFT, "--data", path)
    every = tuner("data", SFT, "--data", path, "--all")

    assert few.code == 0
    assert "3 rows of format" in few.out
    assert "Only the first 3 rows were read." in few.out
    assert (every.code, every.out) == (2, "")
    assert "rows.jsonl:6" in every.err


def test_overrides_and_validation_are_read_too(tuner: Tuner) -> None:
    result = tuner("data", "tiny_full_sample_e1", "--json", "--set", "train_dataloader.dataset.max_rows=20")

    found = json.loads(result.out)["data"]
    assert found["train"]["counts"]["read"] == 20
    assert found["validation"]["counts"]["read"] > 0
    assert found["validation"]["samples"] == []


# Preferences


def test_a_pair_is_shown_as_prompt_chosen_and_rejected(tuner: Tuner, rows: Rows) -> None:
    path = rows(PAIR, {**PAIR, "rejected": PAIR["chosen"]})

    found = shown(tuner, DPO, path)

    (sample,) = found["samples"]
    assert [*sample["parts"]] == ["prompt", "chosen", "rejected"]
    assert "What is red?" in text(sample["parts"]["prompt"], trained=False)
    assert text(sample["parts"]["chosen"], trained=True) == "A colour.<|im_end|>"
    assert text(sample["parts"]["rejected"], trained=True) == "A dog.<|im_end|>"
    assert (found["counts"]["kept"], found["counts"]["dropped"]) == (1, 1)
    assert [*found["lengths"]] == ["chosen", "rejected"]


def test_feedback_is_shown_with_its_label(tuner: Tuner, rows: Rows) -> None:
    path = rows(*({"prompt": "Why?", "completion": said, "label": said == "So."} for said in ("So.", "No.")))

    samples = shown(tuner, KTO, path)["samples"]

    assert [[*sample["parts"]] for sample in samples] == [["good answer"], ["bad answer"]]
    assert text(samples[0]["parts"]["good answer"], trained=True) == "So.<|im_end|>"


# Bad rows


def bad(tuner: Tuner, path: Path, *arguments: object, name: str = SFT) -> Result:
    result = tuner("data", name, "--data", path, "--all", *arguments)
    assert result.code == 2
    return result


def test_every_bad_row_is_listed_with_its_line(tuner: Tuner, rows: Rows) -> None:
    refused = {"messages": [{"role": "assistant"}]}
    result = bad(tuner, rows(GOOD, {"instruction": "Why?"}, GOOD, {"instruction": 3, "output": "x"}, refused))

    assert result.out == ""
    lines = result.messages
    assert len(lines) == 4
    for line, number in zip(lines, (2, 4, 5), strict=False):
        assert line.startswith("error[bad-data]: ")
        assert f"rows.jsonl:{number}: " in line
    assert lines[-1].startswith("error[bad-data]: 3 rows cannot be trained on.")


def test_a_single_bad_row_is_told_as_training_tells_it(tuner: Tuner, rows: Rows) -> None:
    path = rows(GOOD, {"instruction": "Why?"})

    result = bad(tuner, path)

    assert len(result.messages) == 1
    assert "rows.jsonl:2: " in result.err
    assert "columns are instruction" in result.err


def test_only_the_first_bad_rows_are_listed_but_all_are_counted(
    tuner: Tuner, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_MAX_BAD", 2)
    path = rows(GOOD, *[{"instruction": "Why?"}] * 700)

    result = bad(tuner, path)
    found = json.loads(bad(tuner, path, "--json").out)

    assert len(result.messages) == 3
    assert "700 rows cannot be trained on; the first 2 are listed." in result.err
    assert found["num_bad_rows"] == 700
    assert [row["where"] for row in found["bad_rows"]] == ["rows.jsonl:2", "rows.jsonl:3"]


def test_every_row_that_is_not_trained_on_whole_is_listed(tuner: Tuner, rows: Rows) -> None:
    path = rows(GOOD, {"instruction": "Why?", "output": ""}, {"instruction": "Why?", "output": "Because. " * 50})
    cut = ("--set", "packing=False", "--set", "max_length=32")

    told = tuner("data", SFT, "--data", path, "--bad", *cut).out
    found = shown(tuner, SFT, path, "--bad", *cut)

    assert "rows.jsonl:2: dropped: every answer is empty" in told
    assert "rows.jsonl:3: truncated: longer than max_length = 32 (" in told
    assert [(line["where"], line["what"]) for line in found["changed"]] == [
        ("rows.jsonl:2", "dropped"),
        ("rows.jsonl:3", "truncated"),
    ]
    assert [(change["what"], change["samples"]) for change in found["changes"]] == [("dropped", 1), ("truncated", 1)]


def test_training_and_serving_are_compared_where_it_is_asked(
    tuner: Tuner, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows(GOOD)
    alike = tuner("data", SFT, "--data", path, "--template-check").out
    without_recipe = tuner("data", "--model", "package:tiny", "--data", path, "--template-check").out
    unlike = TemplateDifference("rows.jsonl:1", 2, "answer", 7, "<think>", "Because")
    monkeypatch.setattr(inspection, "template_check", lambda *_: iter([unlike]))

    told = tuner("data", SFT, "--data", path, "--template-check").out
    found = json.loads(tuner("data", SFT, "--data", path, "--template-check", "--json").out)

    assert all("see the same tokens in the first 100 samples" in text for text in (alike, without_recipe))
    assert "rows.jsonl:1, turn 2: the answer differs from token 7 on" in told
    assert "serving:  '<think>'" in told and "training: 'Because'" in told
    assert [answer["turn"] for answer in found["template_check"]] == [2]


def test_all_of_the_rows_that_are_refused_are_listed_where_it_is_asked(tuner: Tuner, rows: Rows) -> None:
    result = bad(tuner, rows(GOOD, *[{"instruction": "Why?"}] * 30), "--bad")

    assert len(result.messages) == 31


def test_a_row_that_the_template_refuses_is_listed(tuner: Tuner, rows: Rows, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
        "{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    )
    (tmp_path / "strict.jinja").write_text(template)
    path = rows(GOOD, {**GOOD, "system": "Be kind."}, GOOD, {**GOOD, "system": "Be brief."})

    result = bad(tuner, path, "--set", "chat_template=strict.jinja")

    assert [line.split("rows.jsonl:")[1][0] for line in result.messages[:-1]] == ["2", "4"]
    assert "no system turns" in result.err


# How samples are printed


SAMPLE = Shown("a.jsonl:1", 3, 1, 0, {"text": [("user: \x1b[31m[bold]:smile:\n", False), ("yes", True)]})


def printed(samples: list[Shown], **options: Any) -> str:
    console = Console(file=io.StringIO(), highlight=False, markup=False, emoji=False, soft_wrap=True, **options)
    command.print_samples(console, samples)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_on_a_terminal_trained_tokens_are_green() -> None:
    text = printed([SAMPLE], force_terminal=True, color_system="standard")

    assert "in green" in text
    assert "\x1b[1;32myes\x1b[0m" in text
    assert "[[" not in text


def test_without_colours_trained_tokens_are_between_marks() -> None:
    assert "[[yes]]" in printed([SAMPLE])
    assert "[[yes]]" in printed([SAMPLE], force_terminal=True, no_color=True, color_system="standard")


WEIGHED = Shown("x:1", 4, 3, 0, {"text": [("no", 0.0), ("some", 0.25), ("more", 0.75), ("all", 1.0)]})


def test_weights_are_shades_or_numbers_before_the_text() -> None:
    coloured, plain = printed([WEIGHED], force_terminal=True, color_system="truecolor"), printed([WEIGHED])

    assert "no[[0.25: some]][[0.75: more]][[all]]" in plain
    styles = [coloured.partition(word)[0].rpartition("\x1b[")[2] for word in ("some", "more", "all")]
    assert len({*styles}) == 3 and "1;32m" in styles[2]


def test_json_has_the_weight_of_each_run_of_tokens(tuner: Tuner, rows: Rows) -> None:
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So it is.", "weight": 0.1}]
    turns[1]["spans"] = [[0, 2, 0], [3, 5, 1]]  # type: ignore[assignment]
    path = rows({"messages": turns})

    pieces = shown(tuner, SFT, path)["samples"][0]["parts"]["text"]

    assert [(piece["text"].strip(), piece["weight"]) for piece in pieces if piece["trained"]] == [
        ("it", 1),
        ("is.<|im_end|>", 0.1),
    ]
    assert "[[0.1:" in tuner("data", SFT, "--data", path).out


def test_a_rows_text_cannot_command_the_terminal() -> None:
    text = printed([SAMPLE])

    assert "\x1b" not in text
    assert r"\x1b[31m[bold]:smile:" in text


def test_a_long_text_is_cut_in_the_middle() -> None:
    text = printed([Shown("a", 3, 1, 0, {"text": [("a" * 5_000 + "the end", False)]})])

    assert len(text) < 1_500
    assert "4,007 characters" in text
    assert "the end" in text


def test_bad_lists_dropped_and_split_rows_beside_bad_ones(tuner: Tuner, rows: Rows) -> None:
    long = {"instruction": "Why?", "output": "Because. " * 400}
    path = rows(GOOD, "{", GOOD | {"output": ""}, long, "]", GOOD | {"instruction": "How?"})

    result = tuner("data", SFT, "--data", path, "--bad", "--max-length", 64)

    assert result.code == 2
    for line, what in ((3, "dropped"), (4, "split")):
        assert f"rows.jsonl:{line}: {what}" in result.out
    assert "rows.jsonl:2" in result.err and "rows.jsonl:5" in result.err and "--set bad_rows=2" in result.err


def test_copies_and_rows_of_another_method_are_told(tuner: Tuner, rows: Rows) -> None:
    path = rows(GOOD | {"label": True}, GOOD | {"output": " because. ", "label": False})

    found = shown(tuner, SFT, path)

    assert [(change["what"], change["samples"]) for change in found["changes"]] == [("copied", 2)]
    assert "--method kto_lora" in found["hints"][0]
