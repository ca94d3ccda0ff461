"""A Modelfile for Ollama: the model's chat template as one of Go, its stop tokens, context and sampling.

Ollama renders templates of Go, and the model has one of Jinja. What the latter writes around turns is taken over where
every conversation that is tried becomes the same text.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tuner.errors import DataError
from tuner.worker.generation import prompt_text

_MOST_CONTEXT = 8192
"""Ollama sets memory aside for all of num_ctx; whoever wants more of the model's context writes more."""
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""Names in transformers' generation config, and Ollama's."""
_NO_TEMPLATE = """\
# The chat template cannot be translated for Ollama. The GGUF holds it; if Ollama does not recognize it,
# add TEMPLATE: https://docs.ollama.com/modelfile#template"""
_SYSTEM = {"role": "system", "content": "SYSTEM0"}
_TURNS = [
    {"role": "user", "content": "USER1"},
    {"role": "assistant", "content": "ANSWER1"},
    {"role": "user", "content": "USER2"},
    {"role": "assistant", "content": "ANSWER2"},
    {"role": "user", "content": "USER3"},
]
_TALKS = (_TURNS[:1], _TURNS[:3], _TURNS)

Talk = list[dict[str, str]]


def modelfile(weights: str, tokenizer: Any, generation: Any, context_tokens: int | None) -> str:
    """Return a Modelfile.

    Args:
        weights: The name of the GGUF file beside it.
        tokenizer: Of the model, or None.
        generation: The model's generation config, or None.
        context_tokens: The most of a prompt with its answer, or None where the model does not say it.
    """
    lines = [f"FROM ./{weights}"]
    if tokenizer and tokenizer.chat_template:
        template = go_template(tokenizer)
        lines.append(f'TEMPLATE """{template.text()}"""' if template else _NO_TEMPLATE)
    if tokenizer and generation:
        lines += [f"PARAMETER stop {json.dumps(token, ensure_ascii=False)}" for token in _stops(tokenizer, generation)]
        lines += _sampling(generation)
    if context_tokens:
        if context_tokens > _MOST_CONTEXT:
            lines.append(f"# The model's context has {context_tokens} tokens; a larger num_ctx needs more memory.")
        lines.append(f"PARAMETER num_ctx {min(context_tokens, _MOST_CONTEXT)}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class GoTemplate:
    """What is written before a conversation without a system prompt, and around the turns of each role.

    After the user's turn stands what asks for the answer.
    `system_opens_turn`: a system prompt is the beginning of the user's first turn, as Gemma and Llama 2 have it.
    """

    head: str
    around: dict[str, tuple[str, str]]
    system_opens_turn: bool = False

    def render(self, talk: Talk) -> str:
        """Return what Ollama makes of a conversation that ends with the user's turn."""
        has_system = talk[0]["role"] == "system"
        text = "" if has_system else self.head
        for number, message in enumerate(talk):
            before, after = self.around[message["role"]]
            is_open = self.system_opens_turn and has_system and number == 1
            text += ("" if is_open else before) + message["content"] + after
        return text

    def text(self) -> str:
        """Return the template in Ollama's words."""
        before = {role: _said(before) for role, (before, _) in self.around.items()}
        if self.system_opens_turn:
            before["user"] = f"{{{{ if not (and $.System (eq $number 1)) }}}}{before['user']}{{{{ end }}}}"
        turns = "{{ else ".join(
            f'if eq $turn.Role "{role}" }}}}{before[role]}{{{{ $turn.Content }}}}{_said(after)}'
            for role, (_, after) in self.around.items()
        )
        head = f"{{{{ if not .System }}}}{_said(self.head)}{{{{ end }}}}" if self.head else ""
        every = f"{{{{ range $number, $turn := .Messages }}}}{{{{ {turns}{{{{ end }}}}{{{{ end }}}}"
        return head + every


def _said(text: str) -> str:
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def go_template(tokenizer: Any) -> GoTemplate | None:
    """Return the chat template as Ollama's, without the token of the beginning, which llama.cpp adds.

    None where the template is not made of pieces around turns.
    """
    texts = [_without_bos(prompt_text(tokenizer, talk), tokenizer) for talk in _TALKS]
    ended = prompt_text(tokenizer, _TURNS[:2], asks=False)
    before, to_answer, to_user, asks = re.split("USER1|ANSWER1|USER2", texts[1])
    after_answer = ended.rpartition("ANSWER1")[2]
    before_user = to_user.removeprefix(after_answer)
    around = {"user": (before_user, asks), "assistant": (to_answer.removeprefix(asks), after_answer)}
    talks, opens = [*_TALKS], False
    with suppress(DataError):  # some templates refuse a system prompt
        with_system = [[_SYSTEM, *talk] for talk in _TALKS]
        texts += [_without_bos(prompt_text(tokenizer, talk), tokenizer) for talk in with_system]
        talks += with_system
        before_system, to_turn, _ = re.split("SYSTEM0|USER1", texts[len(_TALKS)])
        opens = not to_turn.endswith(before_user)
        around["system"] = (before_system, to_turn.removesuffix(before_user))
    found = GoTemplate(before.removesuffix(before_user), around, opens)
    return found if all(found.render(talk) == text for talk, text in zip(talks, texts, strict=True)) else None


def writes_bos(tokenizer: Any) -> bool:
    """Return whether the chat template writes the token of the beginning, which llama.cpp can add instead."""
    return bool(tokenizer.bos_token) and prompt_text(tokenizer, _TURNS[:1]).startswith(tokenizer.bos_token)


def _without_bos(text: str, tokenizer: Any) -> str:
    return text.removeprefix(tokenizer.bos_token) if tokenizer.bos_token else text


def _stops(tokenizer: Any, generation: Any) -> list[str]:
    ends = generation.eos_token_id
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]


def _sampling(generation: Any) -> list[str]:
    if generation.do_sample is False:
        return ["PARAMETER temperature 0"]
    found = {ollamas: getattr(generation, name) for name, ollamas in _PARAMETERS.items()}
    return [f"PARAMETER {name} {value:g}" for name, value in found.items() if value is not None]
