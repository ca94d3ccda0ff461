"""A small model that says what a test has written: each token follows from the one before it alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tuner import assets

CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
END = "<|im_end|>"
DICE = ("alpha", "beta", "gamma", "delta", "omega", "sigma")
SCRIPTS: Mapping[str, Sequence[str]] = {
    "[count]": ("one", " two", " three", " four", END),
    "[smile]": ("a smile: \N{SLIGHTLY SMILING FACE}", END),
    "[call]": ("<tool_call>", CALL, "</tool_call>", END),
    "[broken]": ("<tool_call>broken", "</tool_call>", END),
    "[textcall]": ('<tool_call>"text"', "</tool_call>", END),
    "[evil]": ("<evil>", "a" * 60, END),
    "[loop]": (" tick", " tock", " tick"),
}
"""What follows the last word of a question; `[dice]` is followed by one of `DICE`, all as probable."""
CONTEXT = 8192
HIDDEN = 256

# The prompt ends with the question's last token. Some questions show what a stranger's template may do.
TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool['function']['name'] + ' ' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'developer' %}{{- raise_exception('no such role') }}{%- endif %}
    {%- set content = message['content'] %}
    {%- if '[nested]' in content %}
        {%- for i in range(99999) %}{%- for j in range(99999) %}{%- endfor %}{%- endfor %}
    {%- endif %}
    {%- if '[slow]' in content %}
        {%- for i in range(1000) %}{%- for j in range(1000) %}{%- endfor %}{%- endfor %}
    {%- endif %}
    {%- if '[power]' in content %}{{- 7 ** (7 ** (content | length + 2)) }}{%- endif %}
    {%- if not (loop.last and add_generation_prompt) %}
        {{- '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' + messages[-1]['content'] }}{%- endif %}
"""
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\[\w+\]",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "evil": {"open": "<evil>", "close_pattern": "(a|aa)+[^a<]", "content": "text"},  # takes years
        "content": {"close": END, "content": "text"},
    },
}


def write_scripted(folder: Path) -> Path:
    """Write the model with its tokenizer, chat template and response template."""
    tokenizer = AutoTokenizer.from_pretrained(assets.asset("package:tiny"))
    words = {word for script in SCRIPTS.values() for word in script} | {*SCRIPTS, "[dice]", *DICE}
    tokenizer.add_tokens(sorted(words - {END, "a smile: \N{SLIGHTLY SMILING FACE}"}))
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSES
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in (model.model.layers[0].self_attn.o_proj.weight, model.model.layers[0].mlp.down_proj.weight):
            weight.zero_()  # the layer adds nothing: the next token depends on the last one alone
        signs = torch.randint(0, 2, (len(tokenizer), HIDDEN)) * 2.0 - 1
        model.model.embed_tokens.weight.copy_(signs)
        model.lm_head.weight.zero_()
        for before, after in _steps(tokenizer):
            model.lm_head.weight[after] += signs[before] * 20 / HIDDEN
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.save_pretrained(folder)
    return folder


def _steps(tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, int]]:
    texts = ["".join((question, *script)) for question, script in SCRIPTS.items()]
    texts += [f"[dice]{word}{END}" for word in DICE]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return sorted({step for ids in rows for step in pairwise(ids)})
