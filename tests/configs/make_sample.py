"""Owns how the sample data set and the tiny tokenizer are made: `python -m tests.configs.make_sample`.

It holds no fact, and draws only from one seeded generator, so that the same bytes come out everywhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.configs.sample_facts import TOPICS, Topic

CONFIGS = Path(__file__).parents[2] / "tuner" / "configs"
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|bos|>")
VOCAB_SIZE = 2048
SEED = 20

# What the system turn asks for is added to every answer of the conversation.
SYSTEMS = {
    "You are a friendly teacher.": "",
    "You are a helpful assistant.": "",
    "Be cheerful.": " Have a great day!",
    "Be polite.": " You are welcome.",
}
FOLLOW_UPS = ("And {x}?", "What about {x}?", "How about {x}?", "And what about {x}?", "Now {x}, please.")

# What nobody wants to hear; two of three rejected answers are one of these, the others are wrong.
RUDE = (
    "Find it out yourself.",
    "Go away and ask somebody else.",
    "I do not know, and I do not care.",
    "Leave me alone!",
    "That is none of my business.",
    "What a silly question!",
)

Turn = tuple[str, str]  # what the user says, the answer
Row = dict[str, list[dict[str, str]]]


def _fill(text: str, x: str, y: str) -> str:
    return text.format(x=x, y=y, X=x[:1].upper() + x[1:])


def _turn(topic: Topic, question: str, fact: tuple[str, str]) -> Turn:
    return _fill(question, *fact), _fill(topic.answer, *fact)


def _row(turns: Iterable[Turn], draw: random.Random) -> Row:
    """Return a conversation; one of three begins with a system turn."""
    system = draw.choice((*SYSTEMS, *[None] * (2 * len(SYSTEMS))))
    messages = [{"role": "system", "content": system}] if system else []
    for prompt, answer in turns:
        messages.append({"role": "user", "content": prompt})
        messages.append({"role": "assistant", "content": answer + SYSTEMS.get(system or "", "")})
    return {"messages": messages}


def _split_topic(topic: Topic, draw: random.Random, share: float = 0.4) -> tuple[list[Turn], list[Turn]]:
    """Return the turns to train on and those held out: for `share` of the facts one question is never trained."""
    held = {fact: draw.choice(topic.questions) for fact in topic.facts if draw.random() < share}
    train: list[Turn] = []
    validation: list[Turn] = []
    for fact in topic.facts:
        for question in topic.questions:
            (validation if held.get(fact) == question else train).append(_turn(topic, question, fact))
    return train, validation


def _dialogues(topic: Topic, openings: list[Turn], forms: dict[str, str], draw: random.Random) -> list[list[Turn]]:
    """Return two turns for each fact, the second understood only from the first: `forms` has its words by subject."""
    facts = topic.facts if topic.subject else ()
    return [[draw.choice(openings), _turn(topic, forms[fact[0]], fact)] for fact in facts]


def _again(turns: list[Turn], draw: random.Random) -> list[Turn]:
    """Return turns to train on once more; a topic of few facts needs more of them to be learned as well."""
    return draw.choices(turns, k=max(150, len(turns) // 2))


def _conversations(turns: list[Turn], draw: random.Random) -> Iterator[Row]:
    """Yield rows of one to three turns that use each of `turns` once."""
    draw.shuffle(turns)
    start = 0
    while start < len(turns):
        size = draw.choice((1, 1, 1, 2, 3))
        yield _row(turns[start : start + size], draw)
        start += size


def _interleave(groups: list[list[Any]]) -> list[Any]:
    """Return all rows with each group spread evenly, so that any few rows are of many topics."""
    placed = [((i + 0.5) / len(group), number, i) for number, group in enumerate(groups) for i in range(len(group))]
    return [groups[number][i] for _, number, i in sorted(placed)]


def _forms(draw: random.Random) -> list[dict[str, str]]:
    """Return three assignments of follow-up forms to subjects that never agree: the first is for validation alone."""
    subjects = sorted({x for topic in TOPICS for x, _ in topic.facts})
    chosen = [draw.sample(FOLLOW_UPS, 3) for _ in subjects]
    return [dict(zip(subjects, forms, strict=True)) for forms in zip(*chosen, strict=True)]


def make_rows() -> tuple[list[Row], list[Row]]:
    """Return the training rows, shuffled, and the validation rows, topics well mixed."""
    draw = random.Random(SEED)  # noqa: S311
    turns: list[Turn] = []
    dialogues: list[list[Turn]] = []
    held_dialogues: list[list[Turn]] = []
    groups: list[list[Row]] = []
    held_forms, *forms = _forms(draw)
    for topic in TOPICS:
        train, held = _split_topic(topic, draw)
        turns += [*train, *_again(train, draw)]
        dialogues += [pair for form in forms for pair in _dialogues(topic, train, form, draw)]
        held_dialogues += _dialogues(topic, held, held_forms, draw)
        groups.append([_row([turn], draw) for turn in held])
    groups.append([_row(pair, draw) for pair in draw.sample(held_dialogues, 25)])
    rows = [*_conversations(turns, draw), *(_row(pair, draw) for pair in dialogues)]
    draw.shuffle(rows)
    return rows, _interleave(groups)


def make_preferences(per_topic: int = 50, held_per_topic: int = 6) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training and validation rows: a question, the right answer, and a wrong or rude one; topics well mixed."""
    draw = random.Random(SEED)  # noqa: S311
    groups: tuple[list[Any], list[Any]] = ([], [])
    for topic in TOPICS:
        for group, turns, count in zip(groups, _split_topic(topic, draw), (per_topic, held_per_topic), strict=True):
            some = draw.sample(turns, min(count, len(turns)))
            group.append([_preference(topic, turn, draw) for turn in some])
    train, validation = (_interleave(group) for group in groups)
    return train, validation


def _preference(topic: Topic, turn: Turn, draw: random.Random) -> dict[str, str]:
    wrong = [answer for fact in topic.facts if (answer := _fill(topic.answer, *fact)) != turn[1]]
    rejected = draw.choice(RUDE) if draw.random() < 2 / 3 else draw.choice(wrong)
    return {"prompt": turn[0], "chosen": turn[1], "rejected": rejected}


def make_tokenizer(rows: Iterable[Row]) -> Tokenizer:
    """Return a byte-level BPE trained on the texts of `rows`; every text has tokens and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for row in rows for message in row["messages"] for text in message.values())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(configs: Path) -> None:
    """Write the files of `sample` and `sample_preferences` and the tokenizer of `tiny` below `configs`/assets."""
    made = {"sample": make_rows(), "sample_preferences": make_preferences()}
    for folder, splits in made.items():
        (configs / "assets" / folder).mkdir(parents=True, exist_ok=True)
        for name, rows in zip(("train", "validation"), splits, strict=True):
            text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
            (configs / "assets" / folder / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")
    tokenizer_file = configs / "assets" / "tiny" / "tokenizer.json"
    tokenizer_file.parent.mkdir(parents=True, exist_ok=True)
    tokenizer_file.write_text(make_tokenizer(made["sample"][0]).to_str() + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write(CONFIGS)
