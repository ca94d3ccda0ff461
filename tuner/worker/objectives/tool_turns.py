"""How completions go on after results of tools: which seeds they draw from, and what ranks do that are done.

TRL's loop calls the tools of a rank's completions and lets the model go on, until no completion ends with a call. Ranks
take different numbers of these turns. At ZeRO-3 each generation gathers the weights from all ranks, so a rank that is
done takes part with a stand-in. Seen with TRL 1.16.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import StoppingCriteriaList, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from tuner.data import masks
from tuner.data.formats.cells import SURROGATE
from tuner.data.rendering import text_of
from tuner.data.sample import Chat, Message
from tuner.data.text_encoder import TextEncoder
from tuner.machine.libraries import replaced
from tuner.rewards.tool_calls import Rollouts, calls_in
from tuner.rewards.tool_templates import plain
from tuner.worker import compat
from tuner.worker.objectives.completions import ADDED, PROMPT_IDS
from tuner.worker.trainer_types import MixedIn

_MARK = "\n[cut: {} tokens left out]"
"""Ends a result that is too long."""
_BEFORE: tuple[Message, Message] = ({"role": "user", "content": "question"}, {"role": "assistant", "content": ""})
"""A conversation before results: the tokens between its end and the next answer are what a result adds."""


def shorten(encoder: TextEncoder, max_tokens: int, text: str) -> str:
    """Return a text cut to some tokens, with a mark at its end that counts what was left out."""
    text = SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)  # no tokenizer accepts half of a pair

    def ids_of(piece: str) -> list[int]:
        ids: list[int] = encoder.library_object(
            piece, add_special_tokens=False, split_special_tokens=True, verbose=False
        )["input_ids"]
        return ids

    ids = ids_of(text)
    if len(ids) <= max_tokens:
        return text
    num_kept = max(0, max_tokens - len(ids_of(_MARK.format(len(ids)))))
    kept = encoder.decode(ids[:num_kept], exact=True).rstrip("\N{REPLACEMENT CHARACTER}")  # half of a character
    return kept + _MARK.format(len(ids) - num_kept)


def parsed(parse: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what a tokenizer finds in a completion.

    Raises:
        ValueError: it is no call that can be answered, so that TRL takes it as text. TRL expects no other error: a list
            in a thousand lists would end the run.
    """
    try:
        call = parse(*arguments, **options)
        copy.deepcopy(call)  # it recurses deepest: pickle and json take what it takes
        text = json.dumps(call, ensure_ascii=False)
    except Exception as error:  # of regular expressions, of JSON, of what the model has nested
        raise ValueError(str(error)) from error
    if SURROGATE.search(text):
        raise ValueError("it spells half of a surrogate pair, which no tokenizer accepts")
    return call


class ToolTurns(MixedIn):
    """Mixed into TRL's trainer for GRPO, before what says how completions are generated."""

    # TRL's
    tools: list[Any]
    chat_template: str | None
    eos_token_ids: list[int]

    _turn: int
    _numbers: Sequence[int]
    _is_stand_in = False
    _written: tuple[list[Any], list[list[int]], Sequence[Sequence[int]]] | None = None
    """While tools are called: messages and tokens of the completions so far, and their prompts."""

    def __init__(self, *, rollouts: Rollouts | None = None, encoder: TextEncoder | None = None, **others: Any) -> None:
        if rollouts:
            # TRL looks whether there are some; a completion's own functions come from its rollout.
            others["tools"] = [*map(_Named, rollouts.names)]
        with plain(others["processing_class"]) if rollouts else nullcontext("") as values:
            super().__init__(**others)
        if values and self.chat_template:  # one of TRL's in the place of the model's
            self.chat_template = values + self.chat_template
        self.rollouts, self.encoder = rollouts, encoder
        if rollouts:
            self.tools = list(rollouts.schemas)
            rollouts.is_asked_to_stop = lambda: self.consensus is not None and self.consensus.is_asked_to_stop
            tokenizer = self.processing_class
            tokenizer.parse_response = partial(parsed, tokenizer.parse_response)
            self.add_callback(_CloseTools(rollouts))

    def begun(self, inputs: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Begin the environments, and add what they show to the last message of the prompts."""
        self._turn = 0
        if self.rollouts is None:
            return inputs
        rows = [{key: value for key, value in row.items() if key not in ADDED} for row in inputs]
        shown = self.rollouts.begin(rows)
        return [row if text is None else self._shown(row, text) for row, text in zip(inputs, shown, strict=True)]

    def _shown(self, row: Mapping[str, Any], text: str) -> dict[str, Any]:
        assert self.encoder is not None, "it comes with the rollouts"
        *earlier, last = row["prompt"]
        messages = [*earlier, {**last, "content": f"{last['content']}{text}"}]
        return {**row, "prompt": messages, PROMPT_IDS: self.encoder.prompt_ids(Chat(messages))}

    # -- turns

    def _tool_call_loop(
        self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, *others: Any, **more: Any
    ) -> Any:
        assert self.rollouts is not None, "there are tools"
        self._sync_tool_dicts = [self.rollouts.table(index) for index in range(len(prompts))]
        self._async_tool_dicts: list[dict[str, Any]] = [{} for _ in prompts]
        with replaced(self, _written=(completions, completion_ids, prompt_ids), _turn=0):
            result = super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *others, **more)
            while self._is_any_writing(False):
                self._stand_in()
        self._note(completions)
        return result

    def _generate_single_turn(self, prompt_ids: Any, *others: Any, **more: Any) -> Any:
        if self._written is not None and not self._is_stand_in:
            self._turn += 1
            self._is_any_writing(True)
        return super()._generate_single_turn(prompt_ids, *others, **more)

    def written_numbers(self) -> Sequence[int]:
        if self._written is None:
            return self._numbers
        completions, completion_ids, _ = self._written
        # TRL goes on with those that end with a result, unless nothing more fits.
        length = self.max_completion_length
        return [
            number
            for number, messages, ids in zip(self._numbers, completions, completion_ids, strict=True)
            if messages[-1]["role"] == "tool" and len(ids) < length
        ]

    def _is_any_writing(self, writes: bool) -> bool:
        """Return whether any rank goes on with completions; every rank asks before each turn."""
        if self.accelerator.num_processes == 1:
            return writes
        flag = torch.tensor(int(writes), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum"))

    def _stand_in(self) -> None:
        """Take part in a turn of other ranks."""
        if not is_deepspeed_zero3_enabled():
            self.leave_together()
            return
        with replaced(self, _is_stand_in=True):
            self._generate_single_turn([[self.eos_token_ids[0]] * 2], None, {}, 1)

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        if not self._is_stand_in:
            with super()._seeded():
                yield
            return
        model = self.accelerator.unwrap_model(self.model_wrapped)
        ends = StoppingCriteriaList([lambda ids, *_, **__: torch.ones(len(ids), dtype=torch.bool, device=ids.device)])
        with replaced(model, generate=partial(model.generate, stopping_criteria=ends)):
            yield

    # -- results

    def _get_tool_suffix_ids(self, tool_messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of results between two answers; the special tokens that they spell stay text."""
        tokenizer = self.processing_class
        calls = [{"type": "function", "function": {"name": tool_messages[0]["name"], "arguments": {}}}]
        user, assistant = _BEFORE
        before: list[Message] = [user, {**assistant, "tool_calls": calls}]
        messages = masks.quoted(tokenizer, Chat([*before, *map(dict, tool_messages)])).messages
        template = self.chat_template or tokenizer.get_chat_template()

        def ids_of(conversation: Sequence[Any], *, prompt: bool) -> list[int]:
            text, _ = text_of(template, conversation, names=tokenizer.special_tokens_map, prompt=prompt)
            return masks.encode_rendered(tokenizer, text)

        first, all_ids = ids_of(messages[:2], prompt=False), ids_of(messages, prompt=True)
        # The model ends its turn with a token of its own; what the template writes behind it belongs to the result.
        ends = [at for at, token in enumerate(first) if token in self.eos_token_ids]
        length = ends[-1] + 1 if ends else len(first)
        assert all_ids[:length] == first[:length], "TRL has chosen a template that keeps its beginnings"
        return all_ids[length:]

    def _note(self, completions: Sequence[Any]) -> None:
        """List calls that reached no tool, and measure how many completions end with a call."""
        assert self.rollouts is not None, "there are tools"
        calls = [list(calls_in(messages)) for messages in completions]
        for call in (call for calls_of_completion in calls for call in calls_of_completion):
            if call["result"] is not None and not isinstance(call["arguments"], Mapping):
                self.rollouts.list_wrong(call["tool"], call["arguments"])
        ends = [
            bool(calls_of_completion) and calls_of_completion[-1]["result"] is None for calls_of_completion in calls
        ]
        of_all = self.accelerator.gather(torch.tensor(ends, device=self.accelerator.device).float())
        mode = "train" if self.model.training else "eval"
        compat.metrics_of(self, mode)["tools/unanswered"].append(of_all.mean().item())

    def scores_of(self, logs: Mapping[str, Any], number: int) -> dict[str, Any]:
        calls = {"calls": list(calls_in(logs["completion"][number]))} if self.rollouts else {}
        return {**calls, **super().scores_of(logs, number)}


class _Named:
    """Stands for a tool where TRL counts them."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, **_: Any) -> None:
        raise AssertionError("a completion has functions of its own")


class _CloseTools(TrainerCallback):  # type: ignore[misc]
    """Closes environments and ends the processes of tools after the last step."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.rollouts.close()
