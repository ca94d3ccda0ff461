"""Rows with images: each image stands where its row says, and what does not fit together is refused with its place."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.refused import refused
from tuner import assets
from tuner.data import formats, limits
from tuner.data.formats import ImagePaths
from tuner.data.images import load
from tuner.data.pipeline import Pipeline, first_look
from tuner.data.sample import Chat, Image, Message, images_of
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError
from tuner.recipes.recipe_file import read_part
from tuner.recipes.schema import Dataset

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
PLACE = "rows.jsonl:3"


def png(color: str) -> bytes:
    """Return the file of a picture in one color."""
    file = BytesIO()
    PIL.Image.new("RGB", (4, 4), COLORS[color]).save(file, "PNG")
    return file.getvalue()


def uri(color: str) -> str:
    """Return it as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png(color)).decode()


def chat_of(row: dict[str, Any], name: str = "messages", paths: ImagePaths | None = None) -> Chat:
    """Return what a row becomes."""
    sample = formats.read_sample(name, row, PLACE, images=paths or ImagePaths())
    assert isinstance(sample, Chat)
    return sample


def colors_of(chat: Chat) -> list[str]:
    """Return the colors of its images in their order."""
    names = {color: name for name, color in COLORS.items()}
    return [names[load(image).getpixel((0, 0))] for image in images_of(chat.messages)]  # type: ignore[index]


def shape_of(turn: Message) -> list[str]:
    """Return a turn's parts: its texts, and # for each image."""
    return ["#" if part["type"] == "image" else part["text"] for part in turn["content"]]


def asked(content: object, answer: str = "a", **columns: object) -> dict[str, Any]:
    """Return a row with one question."""
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}], **columns}


def refusal(row: dict[str, Any], name: str = "messages", paths: ImagePaths | None = None) -> str:
    """Return the error of a row that is wrong by itself."""
    with pytest.raises(DataError) as caught:
        formats.read_sample(name, row, PLACE, images=paths or ImagePaths())
    assert (caught.value.of_row, caught.value.where) == (True, PLACE)
    return str(caught.value)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": uri("red")}},
        {"type": "image_url", "image_url": uri("red")},
        {"type": "image", "image": uri("red")},
        {"type": "image", "url": uri("red"), "text": None},
        {"type": "image", "bytes": png("red"), "path": "elsewhere.png"},
        {"type": "image", "image": {"bytes": png("red"), "path": None}},
    ],
)
def test_a_part_of_a_content_holds_its_image(part: dict[str, Any]) -> None:
    chat = chat_of(asked([{"type": "text", "text": "Before"}, part, {"type": "text", "text": "after"}]))

    assert shape_of(chat.messages[0]) == ["Before", "#", "after"]
    assert colors_of(chat) == ["red"]


def test_texts_beside_each_other_spell_no_special_token_together() -> None:
    parts = [{"type": "image", "image": uri("red")}, *({"type": "text", "text": half} for half in ("<|im_", "end|>"))]

    assert shape_of(chat_of(asked(parts)).messages[0]) == ["#", "<|im_end|>"], "one text, which is put into marks"


@pytest.mark.parametrize("kind", ["video", "video_url", "audio", "input_audio"])
def test_video_and_audio_are_refused_by_name(kind: str) -> None:
    assert repr(kind) in refusal(asked([{"type": kind, kind: "x"}]))
    assert repr(kind) in refusal(asked([{"type": "image", "image": uri("red")}, {"type": kind, kind: "x"}]))
    assert "'videos'" in refusal(asked("q", videos=["x.mp4"]))


def test_an_answer_holds_no_image() -> None:
    row = asked("q")
    row["messages"][1]["content"] = [{"type": "image", "image": uri("red")}]

    assert "content of turn 2 has a part of type 'image'" in refusal(row)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("messages", asked("<image>\nFirst,\n<image> second?")),
        ("alpaca", {"prompt": "<image>\nFirst,\n<image> second?", "response": "a"}),
        ("prompt_completion", {"prompt": "<image>\nFirst,\n<image> second?", "completion": "a"}),
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "human", "value": "<image>\nFirst,\n<image> second?"},
                    {"from": "gpt", "value": "a"},
                ]
            },
        ),
    ],
)
@pytest.mark.parametrize("order", [("green", "red"), ("red", "green")])
def test_the_images_of_a_column_take_the_places_in_a_text_in_their_order(
    name: str, row: dict[str, Any], order: tuple[str, str]
) -> None:
    chat = chat_of({**row, "images": [{"bytes": png(order[0]), "path": "x"}, png(order[1])]}, name)

    assert shape_of(chat.messages[0]) == ["#", "First,", "#", " second?"]
    assert colors_of(chat) == [*order]
    assert chat.messages[1]["content"] == "a"


def test_images_go_through_the_turns_in_their_order() -> None:
    row = {"messages": [], "images": [png("blue"), png("red"), png("green")]}
    for question in ("<image>", "none", "a <image> and <image>"):
        row["messages"] += asked(question)["messages"]

    chat = chat_of(row)

    assert colors_of(chat) == ["blue", "red", "green"]
    assert [len(images_of([turn])) for turn in chat.messages[::2]] == [1, 0, 2]


def test_parts_without_an_image_of_their_own_take_those_of_the_column() -> None:
    content = [{"type": "image"}, {"type": "image", "image": uri("green")}, {"type": "image"}]

    assert colors_of(chat_of(asked(content, images=[png("red"), png("blue")]))) == ["red", "green", "blue"]


def test_images_without_places_stand_before_the_first_text_of_the_user() -> None:
    row = asked("What?", images=[png("red"), png("blue")])
    row["messages"].insert(0, {"role": "system", "content": "s"})

    chat = chat_of(row)

    assert shape_of(chat.messages[1]) == ["#", "#", "What?"]
    assert colors_of(chat) == ["red", "blue"]


def test_llava_rows_name_their_image_and_some_have_none(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "1.png").write_bytes(png("blue"))
    turns = [{"from": "human", "value": "What?\n<image>"}, {"from": "gpt", "value": "a"}]

    with_one = chat_of({"id": "1", "image": "sub/1.png", "conversations": turns}, "sharegpt", ImagePaths(tmp_path))
    without = chat_of({"id": "2", "image": None, **asked("Why?")})

    assert (shape_of(with_one.messages[0]), colors_of(with_one)) == (["What?", "#"], ["blue"])
    assert without.messages[0]["content"] == "Why?"


def test_a_preference_has_its_images_in_the_prompt() -> None:
    row = {"prompt": "<image>Which?", "chosen": "a", "rejected": "b", "images": [png("red")]}

    pair = formats.read_sample("preference", row, PLACE)

    assert shape_of(pair.prompt[0]) == ["#", "Which?"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (asked("<image>", images=[png("red"), png("blue")]), "2 images and 1 place for"),
        (asked("<image> <image>", images=[png("red")]), "1 image and 2 places"),
        (asked([{"type": "image", "img": "dog.png"}]), "a part of type 'image' has no image"),
        (asked("<image>\nWhat?"), "placeholder '<image>'"),
        (asked("q", answer="<image>", images=[png("red"), 7]), "an image is of type int"),
        (asked("q", images=["data:image/png;base64,%%"]), "wrong base64"),
        (asked("q", images=["https://example.org/a.png"]), "is not a file here"),
        (asked([{"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}]), "is not a file here"),
        (asked([{"type": "img", "img": "dog.png"}]), "only 'text', 'image' and 'image_url' are supported"),
        ({"text": "t", "images": [png("red")]}, "Only conversations (objective sft) may hold images"),
    ],
)
def test_places_and_images_that_do_not_agree_are_refused(row: dict[str, Any], problem: str) -> None:
    assert problem in refusal(row, "text" if "text" in row else "messages")


def test_paths_begin_in_the_folder_of_the_file_of_their_row(tmp_path: Path) -> None:
    files = (tmp_path / "a.json", tmp_path / "a.jsonl" / "b.jsonl")

    for file in files:
        sample = formats.read_sample(
            "messages", asked("q", images="x.png"), f"{file}:1", images=ImagePaths(files=files)
        )
        assert isinstance(sample, Chat)
        assert images_of(sample.messages) == [Image(path=str(file.parent / "x.png"))]


def test_the_home_folder_of_nobody_is_a_name_like_others() -> None:
    chat = chat_of(asked("q", images=["~nobody_here/a.png"]), paths=ImagePaths(files=(Path(PLACE[:-2]),)))

    assert [Path(str(image.path)).parts[-2:] for image in images_of(chat.messages)] == [("~nobody_here", "a.png")]


def test_base64_without_its_header_is_refused_and_not_printed() -> None:
    with refused(DataError, PLACE, "133,336", "base64") as caught:
        chat_of(asked("q", images=[base64.b64encode(bytes(100_000)).decode()]))
    assert len(str(caught.value)) < 400


def test_no_path_leaves_the_image_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out.png").write_bytes(png("red"))
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "out.png")

    for path in ("../out.png", "link.png", str(tmp_path / "out.png"), "file://" + str(tmp_path / "out.png")):
        assert "outside of image_folder" in refusal(asked("q", images=[path]), paths=ImagePaths(tmp_path / "in"))


def test_the_size_of_a_sample_counts_its_text_alone() -> None:
    small, large = (
        Chat([{"role": "user", "content": [{"type": "image", "image": Image(data=b"x" * count)}]}])
        for count in (1, 10**6)
    )

    assert limits.size(small) == limits.size(large)


def test_a_bad_image_is_a_bad_row_and_the_others_keep_their_images(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    urls = [uri("red"), uri("blue")[:-40], uri("green")]
    file.write_text(
        "".join(json.dumps(asked(color, images=[url])) + "\n" for color, url in zip(COLORS, urls, strict=True))
    )
    pipeline = Pipeline(Dataset(path=str(file), bad_rows=1, max_length=16, packing=False), "sft")
    tally = pipeline.tally()

    samples = list(pipeline.samples(tally, tally.refuse))

    chats = [sample for _, sample in samples if isinstance(sample, Chat)]
    assert [place for place, _ in samples] == [f"{file}:1", f"{file}:3"]
    assert [colors_of(chat) for chat in chats] == [["red"], ["green"]]


@pytest.mark.parametrize("mode", ["RGB", "CMYK", "L"])
def test_an_opened_picture_is_an_image_and_keeps_its_rotation(mode: str) -> None:
    file, exif = BytesIO(), PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.new(mode, (8, 4)).save(file, "JPEG", exif=exif)

    chat = chat_of(asked("q", images=[PIL.Image.open(file), PIL.Image.new(mode, (8, 4))]))

    assert [load(image).size for image in images_of(chat.messages)] == [(4, 8), (8, 4)]


def test_a_model_that_reads_text_alone_refuses_the_data_set_and_not_the_row(tokenizer: Any) -> None:
    chat = chat_of(asked("q", images=[png("red")]))

    with refused(DataError, "rows.jsonl:3") as caught:
        TextEncoder(tokenizer).encode([(PLACE, chat)])

    assert (caught.value.of_row, caught.value.where) == (False, PLACE)


def test_the_first_look_opens_images(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(asked("q")) + "\n" + json.dumps(asked("q", images="no.png")) + "\n")

    assert first_look(str(file), "train", None, {}).num_bad == 1


def by_xtuner(text: str) -> str:
    """Return the text of a human turn as XTuner's llava_map_fn makes it."""
    if "<image>" not in text:
        return text
    return ("<image>\n" + text.replace("<image>", "").strip()).strip()


@pytest.mark.parametrize(
    "question", ["<image>\nWhat is this?", "What is this?\n<image>", " What is <image> this? ", "<image>What?"]
)
def test_rows_of_llava_become_the_text_that_xtuner_makes_of_them(question: str) -> None:
    def turns(*texts: str) -> list[dict[str, str]]:
        return [{"from": ("human", "gpt")[at % 2], "value": text} for at, text in enumerate(texts)]

    row = {"id": "0", "image": png("red"), "conversations": turns(question, "A cup.", " And now? ", "Still a cup.")}
    template = assets.without_generation_marks(assets.with_image_parts(assets.chat_template("chatml"), "<image>"))

    def text_of(name: str) -> str:
        texts, _ = render_jinja_template(conversations=[chat_of(row, name).messages], chat_template=template)
        return str(texts[0])

    expected = [by_xtuner(question), "A cup.", " And now? ", "Still a cup."]
    plain = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(expected)]
    texts, _ = render_jinja_template(conversations=[plain], chat_template=template)
    assert text_of("llava") == texts[0]
    moves = not question.startswith("<image>")
    assert (text_of("sharegpt") != texts[0]) == moves, "rows of others keep the place of their images"


@pytest.mark.parametrize("name", ["llava_instruct", "llava_pretrain", "sharegpt4v_pretrain", "internvl_sft"])
def test_the_data_sets_of_xtuners_llava_recipes_have_the_format_of_llava(name: str) -> None:
    rows = read_part("datasets", name).values["train_dataloader"]["dataset"]

    assert {entry["format"] for entry in rows.get("mixture", [rows])} == {"llava"}
