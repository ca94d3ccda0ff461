"""JSON of a model's folder with other types and sizes than libraries count on: one line, before a library reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Tuner
from tests.cli.conftest import tuner as tuner
from tests.each import each
from tests.hostile.test_trust import model_with_code
from tests.launch.plans import made
from tuner import model_folder
from tuner.errors import ModelError
from tuner.launch.checks import model_files
from tuner.pretrained import explained, tensors_of

_ANY = (5, "x", [], [5])
ODD: dict[str, dict[str, tuple[Any, ...]]] = {
    "config.json": {
        "num_attention_heads": (0, -1, "x", 2.5, True, {}),
        "hidden_size": (-128, 0, 2**40),
        "vocab_size": ("x", 0),
        "num_hidden_layers": (10**9, 0, -1, "x"),
        "head_dim": (0, "x"),
        "max_position_embeddings": ("x", -1),
        "quantization_config": ("x", 5, [], {"quant_method": []}, {"quant_method": 5}),
        "torch_dtype": (5, [], "torch.bfloat16"),
        "dtype": ("auto",),
        "architectures": ({}, "x", [5], [[]]),
        "auto_map": _ANY,
        "model_type": (5, [], {}),
        "rope_scaling": _ANY,
        "text_config": _ANY,
        "vision_config": (*_ANY, {"depth": "x"}, {"hidden_size": -1}),
        "layer_types": (5, [5], {}),
        "eos_token_id": ("x", ["x"], -2, {}),
        "tie_word_embeddings": ("x", []),
        "per_layer_config": ([1], {"0": 1}),
    },
    "generation_config.json": {
        "eos_token_id": ("x", ["x"], -5, {}),
        "temperature": ("x", -1, float("nan")),
        "stop_strings": (5, [5]),
        "bad_words_ids": (5, [5]),
        "do_sample": ("x",),
    },
    "tokenizer_config.json": {
        "chat_template": (5, [5], [{}], [{"name": "default"}], {"a": 1}),
        "added_tokens_decoder": (5, [], {"1": 5}),
        "tokenizer_class": (5, []),
        "model_max_length": ("x", []),
        "eos_token": (5, []),
    },
    "adapter_config.json": {
        "peft_type": (5, []),
        "r": (0, -1, "x"),
        "target_modules": (5, {}, [5]),
        "base_model_name_or_path": (5, []),
        "rank_pattern": (5, []),
    },
}


def put(model: Path, name: str, **values: object) -> Path:
    """Lay values over those of a JSON file in a model's folder."""
    file = model / name
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**before, **values}), encoding="utf-8")
    return model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_with_code(tmp_path / "model")


def test_an_odd_value_in_a_model_folder_is_one_line_for_every_command(model: Path) -> None:
    assert model_folder.problem_of(model) is None

    @each((name, key, value) for name, keys in ODD.items() for key, odd in keys.items() for value in odd)
    def refused(name: str, key: str, value: object) -> None:
        file = model / name
        before = file.read_text(encoding="utf-8") if file.exists() else None
        put(model, name, **{key: value})
        problem = model_folder.problem_of(model)
        file.unlink() if before is None else file.write_text(before, encoding="utf-8")
        assert problem
        assert (str(file) in problem, key in problem, "\n" in problem) == (True, True, False)

    refused()


@pytest.mark.parametrize("name", [*ODD, "special_tokens_map.json"])
@pytest.mark.parametrize("text", ["[]", "5", "null", "{", "[" * 50_000, '{"a": "\udcff"}'])
def test_a_file_that_is_no_json_object_is_one_line(model: Path, name: str, text: str) -> None:
    (model / name).write_text(text, encoding="utf-8", errors="surrogateescape")

    with pytest.raises(ModelError, match=name), explained(str(model)):
        raise AssertionError("a library would read it")


@pytest.mark.parametrize(("key", "value"), [("num_attention_heads", 0), ("model_type", []), ("vision_config", "x")])
@pytest.mark.parametrize("command", ["show", "plan", "check", "data"])
def test_no_command_shows_a_traceback_for_a_config_with_odd_values(
    model: Path, tuner: Tuner, command: str, key: str, value: object
) -> None:
    put(model, "config.json", **{key: value})
    more = ("--gpu", "h100", "--gpus", "1") if command == "plan" else ()

    done = tuner(command, "tiny_full_sample_e1", "--model", model, *more)

    assert done.code == 2
    assert key in done.err + done.out
    assert "Traceback" not in done.err + done.out


@pytest.mark.parametrize(
    ("method", "recipe", "is_refused"),
    [
        ("zzz", "tiny_lora_sample_e1", True),
        ("gptq", "tiny_lora_sample_e1", False),
        ("gptq", "tiny_full_sample_e1", True),
        ("gptq", "tiny_qlora_sample_e1", True),
        ("fp8", "tiny_full_sample_e1", False),
        ("fp8", "tiny_qlora_sample_e1", True),
    ],
)
def test_a_foreign_quantization_that_cannot_be_trained_is_found_before_a_start(
    model: Path, method: str, recipe: str, is_refused: bool
) -> None:
    put(model, "config.json", quantization_config={"quant_method": method})

    found = [
        finding for finding in model_files.architecture(made(recipe=recipe, model=str(model))) if method in str(finding)
    ]

    assert bool(found) == is_refused


def test_a_published_config_is_not_refused(model: Path) -> None:
    put(model, "generation_config.json", eos_token_id=[1, 2], pad_token_id=-1, top_k=-1, temperature=1, max_length=20)
    put(model, "tokenizer_config.json", model_max_length=10**30, chat_template=[{"name": "default", "template": "a"}])
    put(model, "tokenizer_config.json", auto_map={"AutoTokenizer": ["a.B", None]}, unk_token={"content": "u"})
    put(model, "config.json", intermediate_size=[8, 8], torch_dtype={"text_config": "bfloat16"}, rope_scaling=None)

    assert model_folder.problem_of(model) is None


HEADER = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [2], %s}}'
FILES = {
    "nothing": b"",
    "no header": b"\x08\0\0\0\0\0\0\0garbage!",
    "a header that ends late": (2**60).to_bytes(8, "little") + b"{}",
    "a header that is a list": b"\x02\0\0\0\0\0\0\0[]",
    "overlapping tensors": HEADER % b'"data_offsets": [4, 12]',
    "offsets outside of the file": HEADER % b'"data_offsets": [8, 9000000000000]',
    "offsets that go back": HEADER % b'"data_offsets": [16, 8]',
    "offsets that are none": HEADER % b'"data_offsets": ["x"]',
}


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_of_tensors_is_one_line(model: Path, kind: str) -> None:
    content, file = FILES[kind], model / "model.safetensors"
    is_whole = content.startswith(b"{")
    file.write_bytes(len(content).to_bytes(8, "little") + content + b"\0" * 16 if is_whole else content)

    with pytest.raises(ModelError, match="damaged"), tensors_of(file):
        raise AssertionError("it is opened")
    assert list(model_files.missing_weights(model)) or list(model_files.missing_layers(model, 2))
