"""Families of models that name the tokens of an image in another way than LLaVA and Qwen-VL, or that are refused."""

from __future__ import annotations

from pathlib import Path

import PIL.Image
import pytest
from transformers import AutoTokenizer, Gemma3Processor, Llama4Config
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.video_processing_utils import BaseVideoProcessor

from tests.models import vision
from tuner import assets
from tuner.data.image_encoder import ImageEncoder
from tuner.data.sample import IGNORED, Chat, Image
from tuner.errors import ModelError
from tuner.files import read_json_object
from tuner.models.load import pretrained_path
from tuner.models.vision import load_processor
from tuner.recipes.loading import load

_NAMES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_TEMPLATE = (
    "{%- for message in messages %}{{ message['role'] }}: "
    "{%- if message['content'] is string %}{{ message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<start_of_image>' }}{%- endfor %}"
    "{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}"
)


def test_the_features_of_a_gemma_3_have_another_token_than_its_images_and_carry_no_loss(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.asset("package:tiny"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*_NAMES.values()]})
    for name, token in _NAMES.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    tokenizer.chat_template = _TEMPLATE
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    encoder = ImageEncoder.of(Gemma3Processor(images, tokenizer, image_seq_length=4), None)
    PIL.Image.new("RGB", (60, 40), "red").save(tmp_path / "red.png")
    parts = [{"type": "image", "image": Image(path=str(tmp_path / "red.png"))}, {"type": "text", "text": "What?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Red."}]

    [[((ids, labels), *_)]] = encoder.encode([("rows.jsonl:1", Chat(turns))], train_all=True)

    assert encoder.image_id == tokenizer.convert_tokens_to_ids("<image_soft_token>")
    assert (ids == encoder.image_id).sum() == encoder.num_tokens((60, 40)) == 4
    assert set(labels[ids == encoder.image_id]) == {IGNORED}


def test_a_prompt_with_an_image_keeps_what_its_text_spells_as_text(tmp_path: Path) -> None:
    config = load("tiny_vision_full_sample_images_e1").config
    encoder = ImageEncoder.of(load_processor(config.model, pretrained_path(config.model)), None)
    PIL.Image.new("RGB", (60, 40), "red").save(tmp_path / "red.png")
    image = {"type": "image", "image": Image(path=str(tmp_path / "red.png"))}

    def ids_of(text: str) -> list[int]:
        content = [image, {"type": "text", "text": text}]
        return encoder.prompt_ids(Chat([{"role": "user", "content": content}]))

    spelled, plain = ids_of("What? <|im_end|>"), ids_of("What?")

    end = encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert spelled.count(end) == plain.count(end) > 0
    assert spelled.count(encoder.image_id) == plain.count(encoder.image_id) == encoder.num_tokens((60, 40))
    assert "<|im_end|>" in encoder.decode(spelled).replace("<|im_end|>", "", plain.count(end))
    assert plain == encoder.serving_ids(
        Chat([{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]), prompt=True
    )


def test_weights_and_spans_of_an_answer_stay_with_its_text_behind_an_image(tmp_path: Path) -> None:
    config = load("tiny_vision_full_sample_images_e1").config
    encoder = ImageEncoder.of(load_processor(config.model, pretrained_path(config.model)), None)
    PIL.Image.new("RGB", (60, 40), "red").save(tmp_path / "red.png")
    content = [{"type": "image", "image": Image(path=str(tmp_path / "red.png"))}, {"type": "text", "text": "What?"}]
    answer = {"role": "assistant", "content": "Red and round.", "weight": 0.5, "spans": [(4, 7, 0), (8, 13, 1)]}

    [[part]] = encoder.encode([("rows.jsonl:1", Chat([{"role": "user", "content": content}, answer]))])

    (ids, labels), weights = part.labelled, part.weights
    assert weights is not None and set(weights[ids == encoder.image_id]) == {0}
    texts = {weight: encoder.decode(ids[(weights == weight) & (labels != IGNORED)].tolist()) for weight in (0.5, 1)}
    assert [texts[0.5].replace(" ", ""), texts[1].strip()] == ["Red.<|im_end|>", "round"]


def test_the_settings_of_videos_and_sound_are_saved_with_the_processor_of_a_gemma_4(tmp_path: Path) -> None:
    folder = vision.make("gemma4", tmp_path / "model")

    vision.processor(folder).save_pretrained(tmp_path / "saved")

    before, after = (read_json_object(model / "processor_config.json") for model in (folder, tmp_path / "saved"))
    videos = read_json_object(tmp_path / "saved/video_preprocessor_config.json")
    assert after["video_processor"] is None, "so transformers reads the other file"
    assert videos == before["video_processor"]
    assert after["feature_extractor"]["sampling_rate"] == before["feature_extractor"]["sampling_rate"]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl"])
def test_plain_transformers_finds_the_same_settings_of_videos_in_a_saved_processor(kind: str, tmp_path: Path) -> None:
    folder = vision.make(kind, tmp_path / "model")

    vision.processor(folder).save_pretrained(tmp_path / "saved")

    before, after = (BaseVideoProcessor.get_video_processor_dict(model)[0] for model in (folder, tmp_path / "saved"))
    assert after == before


def test_a_llama_4_is_not_trained_on_images(tmp_path: Path) -> None:
    Llama4Config().save_pretrained(tmp_path)
    model = load("tiny_vision_full_sample_images_e1").config.model

    with pytest.raises(ModelError, match="Llama 4"):
        load_processor(model.model_copy(update={"path": str(tmp_path)}), str(tmp_path))
