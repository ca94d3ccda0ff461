"""A Modelfile says the model's chat template in Ollama's words, or says that it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GenerationConfig

from tests.data.conftest import make_tokenizer
from tests.each import each
from tuner import assets
from tuner.data.text_encoder import prompt_text
from tuner.errors import DataError
from tuner.results.gguf import go_template, modelfile, writes_bos

TEMPLATES = sorted((assets.CONFIGS / "chat_templates").glob("*.jinja"))
CHATML = next(path for path in TEMPLATES if path.stem == "chatml").read_text(encoding="utf-8")
IN_WORDS = [
    *({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because of\nthat."}),
    *({"role": "user", "content": 'And "how"?'}, {"role": "assistant", "content": "So."}),
    {"role": "user", "content": "When?"},
]


@each(TEMPLATES)
def test_what_ollama_renders_is_what_the_chat_template_renders(path: Path) -> None:
    tokenizer = make_tokenizer(path.read_text(encoding="utf-8"))
    template = go_template(tokenizer)
    if template is None:  # <s> before every turn but the first, and a system prompt in the last one
        assert path.stem in ("llama2", "mistral")
        return

    for count in (1, 3, 5):
        for head in ([], [{"role": "system", "content": "Be kind."}] if "system" in template.around else []):
            talk = [*head, *IN_WORDS[:count]]
            expected = prompt_text(tokenizer, talk).removeprefix(tokenizer.bos_token or "")
            assert template.render(talk) == expected


def test_chatml_in_ollamas_words() -> None:
    told = modelfile("mine.gguf", make_tokenizer(CHATML), GenerationConfig(eos_token_id=[1], do_sample=False), 40960)

    assert told.splitlines()[0] == "FROM ./mine.gguf"
    assert (
        "{{ range $number, $turn := .Messages }}"
        '{{ if eq $turn.Role "user" }}{{ "<|im_start|>user\\n" }}{{ $turn.Content }}'
        '{{ "<|im_end|>\\n<|im_start|>assistant\\n" }}{{ else if eq $turn.Role "assistant" }}{{ $turn.Content }}'
    ) in told
    assert 'PARAMETER stop "' in told
    assert "PARAMETER temperature 0\n" in told
    assert "40960 tokens" in told and told.endswith("PARAMETER num_ctx 8192\n")


def test_sampling_is_the_models_in_ollamas_names() -> None:
    generation = GenerationConfig(do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.05)

    told = modelfile("mine.gguf", make_tokenizer(CHATML), generation, None)

    for line in ("temperature 0.7", "top_k 20", "repeat_penalty 1.05"):
        assert f"PARAMETER {line}\n" in told
    assert "num_ctx" not in told


def test_a_default_system_prompt_is_written_where_no_other_is_given() -> None:
    default = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}"

    template = go_template(make_tokenizer(default + CHATML))

    assert template is not None
    assert template.text().startswith(
        '{{ if not .System }}{{ "<|im_start|>system\\nBe brief.<|im_end|>\\n" }}{{ end }}'
    )


def test_a_template_that_refuses_a_system_prompt_goes_without() -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"

    template = go_template(make_tokenizer(refuses + CHATML))

    assert template is not None and "system" not in template.text()


def test_a_template_that_counts_turns_is_left_to_the_user() -> None:
    counts = make_tokenizer("{{ messages | length }}" + CHATML)

    assert go_template(counts) is None
    assert 'TEMPLATE "' not in modelfile("mine.gguf", counts, None, None)


def test_a_template_that_refuses_every_conversation_is_told() -> None:
    with pytest.raises(DataError, match="never"):
        go_template(make_tokenizer("{{ raise_exception('never') }}"))


@pytest.mark.parametrize(("start", "expected"), [("{{ bos_token }}", True), ("", False)])
def test_whether_the_template_writes_the_beginning(start: str, expected: bool) -> None:
    tokenizer = make_tokenizer(start + CHATML)
    tokenizer.bos_token = "<s>"

    assert writes_bos(tokenizer) is expected
