"""One ruler for all tools: how well a model answers rows that nobody trained on, by transformers, in fp32.

`loss` is the mean over the answers' tokens, up to the one that ends a turn. `exact` is the share of answers that greedy
decoding gives to the letter. `preferred` and `dpo_loss` compare a chosen with a rejected answer. The rows' text comes
from the model's own chat template. An adapter is put on the model as it is on disk, without quantization.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH_TOKENS = 1024
"""Padded tokens that go through the model at once."""
BETA = 0.1
"""DPO's beta, for the loss of all tools: TRL's default."""
PAIR = ("chosen", "rejected")


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer as tokens."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    text: str
    """The answer's content."""


class Ruler:
    """The rows held out, and what is measured on them: losses of all, exact answers of the first `exact_rows`."""

    def __init__(self, base: Path, held_out: Path, exact_rows: int = 0) -> None:
        from transformers import AutoTokenizer

        self.base = base
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        rows = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
        self.is_pairs = "chosen" in rows[0]
        if self.is_pairs:
            self.chosen, self.rejected = (
                [self._turn([_user(row)], _assistant(row[answer])) for row in rows] for answer in PAIR
            )
            self.base_margins = self._margins(self._load(base))
        else:
            self.turns = [turn for row in rows for turn in self.turns_of(row["messages"])]
        self.exact_rows = exact_rows

    def turns_of(self, messages: list[dict[str, str]]) -> Iterator[Turn]:
        """Yield each of the assistant's turns with all that comes before it."""
        for position, message in enumerate(messages):
            if message["role"] == "assistant":
                yield self._turn(messages[:position], message)

    def _turn(self, before: list[dict[str, str]], message: dict[str, str]) -> Turn:
        prompt = self.tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=False)
        whole = self.tokenizer.apply_chat_template([*before, message], return_dict=False)
        assert whole[: len(prompt)] == prompt, "the template changes what comes before an answer"
        answer = whole[len(prompt) :]
        ends = [place for place, token in enumerate(answer) if token == self.tokenizer.eos_token_id]
        # What a template has behind the end of a turn is trained by some tools and not by others.
        return Turn(tuple(prompt), tuple(answer[: ends[-1] + 1] if ends else answer), message["content"])

    def num_tokens(self, file: Path) -> int:
        """Return the tokens of a file's rows in the template, those of all pairs of a prompt and an answer."""
        total = 0
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            chats = (
                [row["messages"]] if "messages" in row else [[_user(row), _assistant(row[answer])] for answer in PAIR]
            )
            total += sum(len(self.tokenizer.apply_chat_template(chat, return_dict=False)) for chat in chats)
        return total

    def measure(self, result: Path, snapshots: dict[int, Path]) -> tuple[dict[str, float], dict[int, dict[str, float]]]:
        """Return the figures of a tool's result, and those of the weights that it had after some steps."""
        import torch

        model = self._load(result)
        final = self._figures(model) | self._exact(model)
        curve = {}
        for step, folder in sorted(snapshots.items()):
            weights = {file.stem: torch.load(file) for file in folder.iterdir()}
            _put(model, weights)
            curve[step] = self._figures(model)
        return final, curve

    def _load(self, result: Path) -> Any:
        """Return a model in fp32, or the base with a result's adapter on it."""
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        is_adapter = (result / "adapter_config.json").is_file()
        model = AutoModelForCausalLM.from_pretrained(self.base if is_adapter else result, dtype=torch.float32)
        return (PeftModel.from_pretrained(model, result) if is_adapter else model).eval()

    def _figures(self, model: Any) -> dict[str, float]:
        if not self.is_pairs:
            losses = self._losses(model, self.turns)
            return {"loss": sum(losses) / sum(len(turn.answer) for turn in self.turns)}
        moved = [now - before for now, before in zip(self._margins(model), self.base_margins, strict=True)]
        return {
            "dpo_loss": sum(math.log1p(math.exp(-BETA * margin)) for margin in moved) / len(moved),
            "preferred": sum(margin > 0 for margin in moved) / len(moved),
        }

    def _margins(self, model: Any) -> list[float]:
        """Return by how much a chosen answer is likelier than the rejected one, as logarithms."""
        chosen, rejected = self._losses(model, self.chosen), self._losses(model, self.rejected)
        return [worse - better for better, worse in zip(chosen, rejected, strict=True)]

    def _losses(self, model: Any, turns: list[Turn]) -> list[float]:
        """Return the sum of each answer's losses."""
        import torch

        losses = [0.0] * len(turns)
        for places in _batches([len(turn.prompt) + len(turn.answer) for turn in turns]):
            rows = [(*turns[place].prompt, *turns[place].answer) for place in places]
            longest = max(map(len, rows))
            # Attention looks back only, so what is behind a row's end changes nothing of it.
            ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
            with torch.no_grad():
                logits = model(input_ids=ids).logits
            for place, row, scores in zip(places, ids, logits, strict=True):
                start = len(turns[place].prompt)
                stop = start + len(turns[place].answer)
                loss = torch.nn.functional.cross_entropy(scores[start - 1 : stop - 1], row[start:stop], reduction="sum")
                losses[place] = float(loss)
        return losses

    def _exact(self, model: Any) -> dict[str, float]:
        """Return the share of the first rows that are answered to the letter."""
        import torch

        turns = [] if self.is_pairs else self.turns[: self.exact_rows]
        if not turns:
            return {}
        right = 0
        most = max(len(turn.answer) for turn in turns) + 1
        for places in _batches([len(turn.prompt) + most for turn in turns]):
            prompts = [turns[place].prompt for place in places]
            longest = max(map(len, prompts))
            ids = torch.tensor([[*[0] * (longest - len(ids_of_row)), *ids_of_row] for ids_of_row in prompts])
            mask = torch.tensor(
                [[*[0] * (longest - len(ids_of_row)), *[1] * len(ids_of_row)] for ids_of_row in prompts]
            )
            with torch.no_grad():
                whole = model.generate(
                    input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=most,
                    eos_token_id=self.tokenizer.eos_token_id, pad_token_id=self.tokenizer.eos_token_id,
                )  # fmt: skip
            for place, row in zip(places, whole[:, longest:].tolist(), strict=True):
                right += answered(self.tokenizer.decode, row, self.tokenizer.eos_token_id) == turns[place].text.strip()
        return {"exact": right / len(turns)}


def _user(row: dict[str, str]) -> dict[str, str]:
    return {"role": "user", "content": row["prompt"]}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def answered(decode: Callable[[list[int]], str], tokens: list[int], end: int) -> str:
    """Return the text of an answer up to its end."""
    return decode(tokens[: tokens.index(end)] if end in tokens else tokens).strip()


def _batches(lengths: list[int]) -> Iterator[list[int]]:
    """Yield the places of rows that go through the model together: of about one length, none padded far."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[place] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _put(model: Any, weights: dict[str, Any]) -> None:
    """Give a model the weights that it had after a step; each must have its place."""
    named = dict(model.named_parameters())
    unknown = sorted(set(weights) - set(named))
    assert not unknown, f"the result has no place for {unknown[:3]}"
    for name, value in weights.items():
        named[name].data.copy_(value)


def main() -> None:
    """Print the figures of a result as JSON: BASE HELD_OUT RESULT SNAPSHOTS EXACT_ROWS TRAINED_ROWS."""
    base, held_out, result, snapshots, exact_rows, rows = sys.argv[1:]
    ruler = Ruler(Path(base), Path(held_out), int(exact_rows))
    folders = {int(folder.name): folder for folder in Path(snapshots).glob("*")}
    after, curve = ruler.measure(Path(result), folders)
    print(json.dumps({"after": after, "curve": curve, "tokens": ruler.num_tokens(Path(rows))}))


if __name__ == "__main__":
    main()
