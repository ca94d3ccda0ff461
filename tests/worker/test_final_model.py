"""What a user publishes can be read by others: its chat template, and where its answers end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.data.conftest import make_tokenizer
from tuner import assets
from tuner.data.text_encoder import TextEncoder
from tuner.worker.checkpointing import save_final_model

CHATML = (assets.CONFIGS / "chat_templates" / "chatml.jinja").read_text(encoding="utf-8")
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 400}


pytestmark = pytest.mark.usefixtures("one_rank")


def saved(folder: Path, template: str | None, ends: int | list[int] | None) -> LlamaForCausalLM:
    """Save a small model as training does, below ZeRO-3, and load what a user would."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.generation_config.eos_token_id = ends
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped),
        model=model,
        deepspeed=SimpleNamespace(zero_optimization_stage=lambda: 2, autotp_size=lambda: 0, has_moe_layers=False),
    )
    save_final_model(trainer, TextEncoder(make_tokenizer(template)), folder)
    return LlamaForCausalLM.from_pretrained(folder)


def test_the_saved_chat_template_has_no_mark_that_others_do_not_know(tmp_path: Path) -> None:
    saved(tmp_path, CHATML, None)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert "{%- generation" in CHATML and "{%- generation" not in tokenizer.chat_template
    asked = [{"role": "user", "content": "Why?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("known", [None, 1, [1], [1, 3]])
def test_generation_stops_where_the_trained_answers_end(tmp_path: Path, known: int | list[int] | None) -> None:
    loaded = saved(tmp_path, CHATML, known)

    end = make_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert end == 3
    assert loaded.generation_config.eos_token_id == ([end] if known is None else [1, end])


def test_a_model_without_a_chat_template_keeps_its_own_end(tmp_path: Path) -> None:
    assert saved(tmp_path, None, 1).generation_config.eos_token_id == 1
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 1
