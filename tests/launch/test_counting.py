"""Rows of local files are counted as the readers of training read them, or not at all."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import trl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.launch.plans import made
from tests.models import vision
from tuner.data import mixing, readers, sources
from tuner.data.formats import image_places
from tuner.data.image_encoder import ImageEncoder
from tuner.data.prepare import prepare
from tuner.errors import DataError
from tuner.launch import row_counts
from tuner.launch.steps import Certainty
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import Dataset, MixtureEntry, Rows

FILES = {
    "lines.jsonl": '{"a": 1}\n\n  \n{"a": 2}\r\n{"a": 3}',
    "upper.JSONL": '{"a": 1}\n',
    "mark.jsonl": '\ufeff\n{"a": 1}\n',
    "spaces.jsonl": '{"a": "\u2028"}\n\u2003\n\x1c\n{"a": 2}\n',
    "lines.txt": "one\n\n\x0btwo\rstill two\nthree",
    "array.json": '\ufeff [{"a": 1},\n{"a": [1, 2]}, {"a": 3}]\n',
    "empty.json": "[ ]",
    "lines.json": '{"a": 1}\n{"a": 2}\n',
    "records.csv": 'a,b\n1,2\n\n"two\nlines",""""\r\n5,6',
    "mark.csv": "\ufeff\na,b\n1,2\n",
    "header.csv": "a,b\n",
    "long.csv": f"a\n{'x' * 200_000}\n",
}


def rows_of(place: object, **more: Any) -> Rows:
    return Rows(path=str(place), **more)


def counted(place: object) -> tuple[int | None, str]:
    found = row_counts._counted(rows_of(place))
    return found.rows, found.why


@pytest.mark.parametrize("name", FILES)
def test_a_row_here_is_a_row_to_the_readers_of_training(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(FILES[name].encode())

    assert counted(file) == (len(list(readers.rows_of_file(file))), "")


@given(text=st.text(st.sampled_from('a,"\n\r\t \ufeff\x0b\x1c\u2028\u00a0{}[]1'), max_size=30))
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".csv"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_has_as_many_rows_as_the_readers_find_or_is_not_counted(tmp_path: Path, kind: str, text: str) -> None:
    file = tmp_path / f"any{kind}"
    file.write_bytes(text.encode())
    bad: list[DataError] = []
    try:
        number = len(list(readers.rows_of_file(file, bad.append))) + len(bad)
    except DataError:
        assert kind == ".csv"
        number = None

    assert counted(file)[0] == number


@pytest.mark.parametrize("val_split", [None, 0.2])
def test_a_limit_of_one_data_set_is_counted_as_it_is_read(tmp_path: Path, val_split: float | None) -> None:
    for name, rows in (("a", 40), ("b", 90)):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n' * rows)
    shares = (
        MixtureEntry(path=str(tmp_path / "a.jsonl"), max_rows=5),
        MixtureEntry(path=str(tmp_path / "b.jsonl"), max_rows=60),
    )
    dataset = Dataset(path=None, mixture=shares, max_length=16, packing=False, val_split=val_split)

    assert row_counts.num_rows(dataset) == 65
    train = dataset.model_copy(update={"held_out": False})
    taken = [
        row_counts._less_held_out(source, at, train, "pretrain").taken
        for at, source in enumerate(row_counts._weighted(train))
    ]
    assert sum(filter(None, taken)) == len(list(mixing.find(train).read()))


def test_a_part_of_a_split_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 9)

    assert row_counts._counted(rows_of(tmp_path / "a.jsonl", split="train[:3]")).rows is None


def test_a_pattern_means_all_its_files(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}\n{}\n")

    assert counted(tmp_path / "*.jsonl") == (4, "")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("rows.jsonl.gz", "{}", "rows.jsonl.gz is not plain text"),
        ("rows.parquet", "{}", "rows.parquet is not plain text"),
        ("half.json", "[{}, {", "cannot be read directly"),
        ("deep.json", "[" * 100_000, "cannot be read directly"),
        ("half.csv", 'a\n"b', "cannot be read directly"),
    ],
)
def test_what_is_not_counted_is_told_with_the_reason(tmp_path: Path, name: str, content: str, why: str) -> None:
    file = tmp_path / name
    file.write_text(content)

    number, told = counted(file)

    assert number is None
    assert why in told


def test_a_folder_without_splits_means_all_its_data_files(tmp_path: Path) -> None:
    for name in ("one.jsonl", "two.jsonl", "deeper/three.jsonl", ".hidden/four.jsonl", "README.md"):
        (tmp_path / "rows" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "rows" / name).write_text('{"text": "one"}\n{"text": "two"}\n')

    count, why = counted(tmp_path / "rows")

    assert (count, why) == (len(list(sources.find(str(tmp_path / "rows")).read())), "")


@pytest.mark.parametrize("other", ["test.jsonl", "validation.jsonl", "dev.csv"])
def test_the_file_called_train_is_the_training_data_of_a_folder(tmp_path: Path, other: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / other).write_text('{"text": "three"}\n')

    assert counted(tmp_path) == (2, "")
    assert len(list(sources.find(str(tmp_path)).read())) == 2


def test_folders_hub_data_and_large_files_are_left_to_the_worker(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as stream:
        stream.truncate(8 * 1024**2 + 1)

    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.jsonl").write_text("{}\n")
    assert counted(tmp_path) == (None, f"{tmp_path} is a folder")
    assert counted(large) == (None, f"{large} is larger than 8 MiB")
    assert counted("owner/data") == (None, "owner/data is on the hub")
    assert counted("hf://datasets/owner/data/*.jsonl") == (None, "hf://datasets/owner/data/*.jsonl is on the hub")


@pytest.mark.parametrize("name", ["rows.parquet", "state.json", "my_test.jsonl"])
def test_a_folder_of_plain_files_is_counted_and_one_with_other_rows_or_splits_is_not(tmp_path: Path, name: str) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / ".hidden.jsonl").write_text("{}\n")
    for file in ("a.jsonl", "more/trained.jsonl"):
        (tmp_path / file).write_text('{"text": "a"}\n' * 3)
    rows = load("tiny_full_custom_e1", Overrides(data=str(tmp_path))).config.train_dataloader.dataset

    (tmp_path / "notes.md").write_text("Not rows.")
    assert counted(tmp_path) == (6, "") and len(list(mixing.find(rows).read())) == 6
    (tmp_path / name).write_text("{}\n")
    assert counted(tmp_path)[0] is None


PAIR = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
JUDGED = '{"prompt": "a", "completion": "b", "label": true}\n'


@pytest.mark.parametrize(
    ("content", "more", "answers"),
    [
        (PAIR, {}, 2),
        (JUDGED, {}, 1),
        (PAIR.replace("chosen", "better"), {"columns": {"chosen": "better"}}, 2),
        ("{}\n", {"format": "preference"}, 2),
        ("{}\n", {"format": "feedback"}, 1),
        (PAIR, {"format": "mine.py:rows"}, None),
        (PAIR, {"format": "no such format"}, None),
        ('{"other": 1}\n', {}, None),
        ("torn\n", {}, None),
        ("7\n", {}, None),
    ],
)
def test_kto_has_two_answers_in_a_row_of_preference_data(
    tmp_path: Path, content: str, more: dict[str, Any], answers: int | None
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content * 9)

    assert row_counts._answers_a_row(rows_of(file, **more), "kto") == answers


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_the_kind_of_row_is_told_from_arrays_and_records_too(tmp_path: Path, name: str) -> None:
    text = f"[{PAIR}]" if name == "rows.json" else "prompt,chosen,rejected\na,b,c\n"
    (tmp_path / name).write_text(text)

    assert row_counts._answers_a_row(rows_of(tmp_path / name), "kto") == 2


@pytest.mark.parametrize("data", ["a.jsonl", "a.jsonl,b.jsonl:0.3", "a.jsonl:2.5,b.jsonl,a.jsonl:0.7", "folder"])
def test_rows_that_are_held_out_are_no_rows_of_an_epoch(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, count in (("a", 95), ("b", 210), ("folder/c", 61)):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}\n' * count)
    config = load("tiny_full_custom_e1", Overrides(data=data, val_split=0.1, seed=3)).config
    loaders = filter(None, (config.train_dataloader, config.val_dataloader))
    read = [len(list(mixing.find(loader.dataset).read())) for loader in loaders]

    assert sum(size.taken or 0 for size in row_counts.dataset_sizes(config)) == read[0]
    assert row_counts.num_held_out(config.train_dataloader.dataset, config.objective.type) == read[1]
    assert row_counts.num_rows(config.train_dataloader.dataset) == sum(read)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_tokens_of_rows_with_images_are_estimated_from_their_sizes_and_the_chat_template(
    kind: str, tmp_path: Path
) -> None:
    folder = vision.make(kind, tmp_path / "model")
    rows: list[dict[str, Any]] = []
    for number in range(20):
        side = 640 if number == 7 else 32  # the processor of this Qwen2.5-VL makes images of at most 4,096 pixels
        PIL.Image.new("RGB", (side * (1 + number % 3), 64)).save(tmp_path / f"{number}.png")
        turns = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A square."}]
        rows.append({"messages": turns, "images": [f"{number}.png"]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load(None, Overrides(model=str(folder), data=str(tmp_path / "rows.jsonl"), val_split=0)).config
    config = config.with_values({"train_dataloader.dataset.image_max_pixels": 64 * 80})

    (size,) = row_counts.dataset_sizes(config)

    dataset = config.train_dataloader.dataset
    encoder = ImageEncoder.of(vision.processor(folder), dataset)
    assert size.tokens == pytest.approx(prepare(dataset, encoder, objective="sft").counts.tokens, rel=0.07)


def test_tokens_of_images_are_estimated_for_a_model_that_is_not_here(tmp_path: Path) -> None:
    file = BytesIO()
    PIL.Image.new("RGB", (56, 84)).save(file, "PNG")
    row = {"question": "<image>?" * 8, "answer": "A" * 33, "images": [image_places.data_uri(file.getvalue())] * 8}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    recipe = "qwen2_5_vl_3b_instruct_lora_custom_e1"
    config = load(recipe, Overrides(data=str(tmp_path / "rows.jsonl"))).config

    (size,) = row_counts.dataset_sizes(config)

    assert size.tokens == 8 * 2 * 3 + (8 + 1 + 33) // 4, "a token is 28 x 28 pixels, or 4 bytes of text"


def test_rows_that_the_chat_template_splits_by_answer_are_counted_as_their_samples(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": turns * number}) + "\n" for number in (1, 2, 3)))
    keys = (f"train_dataloader.dataset.path={path}", "train_dataloader.dataset.packing=False", "global_batch_size=1")
    qwen3 = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"

    whole = made(*keys, recipe="tiny_full_custom_sft_e1").steps
    split = made(*keys, f"model.chat_template={qwen3}", recipe="tiny_full_custom_sft_e1").steps

    assert (whole.total.value, whole.total.certainty) == (3, Certainty.UNLESS_DROPPED)
    assert (split.rows.value, split.samples.value, split.total.value) == (3, 6, 6)
    assert split.total.certainty is Certainty.ABOUT
