"""Bad input of every kind, generated: texts that are nearly right, damaged in the ways in which files and people do.

Each strategy gives what its door in `doors` takes. Most of what they give is refused; a few texts are taken, by chance.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from hypothesis import strategies as st

from tuner import assets
from tuner.recipes.schema import schema_keys

Strategy = st.SearchStrategy[Any]

ODD_TEXTS = (
    "",
    " ",
    ".",
    "..",
    "/",
    "~",
    "~nobody",
    "../" * 8 + "etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "/proc/self/mem",
    "a\0b",
    "a/\0b",
    "a\nb",
    "\r",
    "\x1b[2J",
    "\ud800",
    "\u202e\u200b",
    "tіny_full_sample_e1",  # a Cyrillic i
    "ｔｉｎｙ_full_sample_e1",
    "x" * 5_000,
    "_" * 400,
    "%s%n{0.__class__}",
    "${HOME}",
    "$(touch canary)",
    "`touch canary`",
    "; touch canary",
    "| touch canary",
    "-",
    "--",
    "--help",
    "=",
    "http://user:pw@127.0.0.1:9/x.json",
    "file:///etc/passwd",
    "hf://",
    "package:",
    "package:../../../base.py",
    "CON",
    "None",
    "nan",
    "__class__",
    "*",
    "[",
    "**/*" * 30,
)
ODD_NUMBERS = (
    "nan",
    "-nan",
    "inf",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 5_000,
    "1" + "0" * 30,
    "0x" + "f" * 40,
    "²",
    "٣",
)
ODD_VALUES = (
    *ODD_NUMBERS,
    "__import__('os').system('touch canary')",
    "open('canary', 'w')",
    "lambda: 0",
    "[i for i in range(9)]",
    "f'{1}'",
    "().__class__.__bases__[0]",
    "'a' * 99999999",
    "[0] * 99999999",
    "9 ** 9 ** 9",
    "1 << 99999",
    "[" * 40 + "]" * 40,
    "(" * 300 + ")" * 300,
    "{'a': 1, 'a': 2}",
    "{1: 2}",
    "dict(**{})",
    "'\\ud800'",
    "'\\x00'",
    "b''",
    "...",
    "1j",
    "'",
    "\\",
    "dict(",
    "none of it",
)
SEPARATORS = (
    *("", " ", ",", ":", "=", "\n", "\t", "\ufeff", "\0", "\x0c", "\u2028", "//", "/*", "#", '"', "'", "\\", "{", "}"),
    *("[", "]", "(", ")", "..", "*", "**", ";", "import os", "import os;", "_base_", "null", "NaN", "-", "9" * 400),
)

_CHANCE = st.randoms(use_true_random=True)
anything = st.text(st.characters(exclude_categories=()), max_size=30) | st.sampled_from(ODD_TEXTS)


def damaged(texts: Strategy) -> Strategy:
    """Return texts with one to three parts cut out, doubled, swapped or replaced by what has a meaning somewhere."""

    def damage(text: str, chance: Random) -> str:
        for _ in range(chance.randint(1, 3)):
            start, end = sorted(chance.choices(range(len(text) + 1), k=2))
            end = min(end, start + chance.choice((0, 1, 2, 40)))
            text = text[:start] + chance.choice((*SEPARATORS, text[start:end] * 2, text[start:end][::-1])) + text[end:]
        return text

    return st.builds(damage, texts, _CHANCE)


def _lines(chance: Random) -> str:
    """Return a recipe of some lines, most of them right."""
    keys = chance.choices(_KEYS, k=chance.randint(1, 4))
    values = [chance.choice((*ODD_VALUES, "None", "1", "'a'", "dict()", "[]", "True", "2e-5")) for _ in keys]
    lines = [f"_base_ = {chance.choice(_BASES)!r}"] if chance.random() < 0.8 else []
    for key, value in zip(keys, values, strict=True):
        first, *rest = key
        for name in reversed(rest):
            value = f"dict({name}={value})"
        lines.append(f"{first} = {value}")
    return "\n".join(lines) + "\n"


_KEYS = sorted(schema_keys())
_DOTTED = [".".join(keys) for keys in _KEYS]
_BASES = (
    "tiny_full_sample_e1",
    "tiny_qlora_sample_e1",
    "tiny_dpo_lora_sample_preferences_e1",
    "./hostile.py",
    "../x",
    "",
)

recipes = _CHANCE.map(_lines) | damaged(_CHANCE.map(_lines)) | anything

overrides = st.builds(
    lambda key, equals, value: f"{key}{equals}{value}",
    st.sampled_from(_DOTTED) | damaged(st.sampled_from(_DOTTED)) | anything,
    st.sampled_from(("=", "=", "=", "==", " = ", "", "\n=")),
    st.sampled_from(ODD_VALUES) | anything,
)

_PRESETS = [path.read_text(encoding="utf-8") for path in sorted((assets.PACKAGE / "deepspeed_presets").glob("*.json"))]
_ODD_JSON = (*ODD_NUMBERS, "[]", "{}", "null", '""', '"auto"', "true", "-1", "1.5", "[[[[]]]]", '{"a":1,"a":2}', "NaN")


def _other_value(text: str, chance: Random) -> str:
    config = json.loads(text)
    block, place = config, chance.choice(list(config))
    while isinstance(block[place], dict) and block[place] and chance.random() < 0.8:
        block, place = block[place], chance.choice(list(block[place]))
    block[place if chance.random() < 0.6 else chance.choice(("stgae", "a.b", "", "__class__", " "))] = "@"
    return json.dumps(config).replace('"@"', chance.choice(_ODD_JSON))


configs = damaged(st.sampled_from(_PRESETS)) | st.builds(_other_value, st.sampled_from(_PRESETS), _CHANCE) | anything

_TURN = '{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}'
_ROWS = (
    '{"instruction": "Why?", "output": "Because."}',
    f'{{"messages": [{_TURN}]}}',
    f'{{"messages": [{_TURN}], "tools": "[]", "system": "s"}}',
    f'{{"messages": [{_TURN}, {{"role": "assistant", "tool_calls": [{{"function": {{"arguments": "{{}}"}}}}]}}]}}',
    '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}',
    '{"conversations": [{"from": "function_call", "value": "{\\"name\\": \\"f\\", \\"arguments\\": {}}"}]}',
    '{"text": "### Human: a### Assistant: b"}',
    '{"prompt": "a", "chosen": "b", "rejected": "c"}',
    '{"prompt": "a", "completion": "b", "label": true}',
    '{"chat": {"turn_1": {"Human": "a", "MOSS": "b"}}, "meta_instruction": "m"}',
    '{"prompt": "a", "response_0": "b", "response_1": "c", "better_response_id": 0}',
)
_DEEP = "[" * 20_000 + "]" * 20_000
_ODD_CELLS = (
    *_ODD_JSON,
    '"\\ud800"',
    '"\\u0000"',
    _DEEP,
    f'"{_DEEP}"',
    '"[1,"',
    '"{\\"a\\": 1}"',
    "9",
    "[null]",
    '[{"a": []}]',
)


def _other_cell(text: str, chance: Random) -> str:
    """Return a row with one of its values replaced, at any depth."""
    row = json.loads(text)
    block: Any = row
    while True:
        places = list(block) if isinstance(block, dict) else list(range(len(block)))
        place = chance.choice(places)
        if not (isinstance(block[place], dict | list) and block[place] and chance.random() < 0.8):
            break
        block = block[place]
    block[place] = "@"
    return json.dumps(row).replace('"@"', chance.choice(_ODD_CELLS))


def _file(name: str, lines: list[str], chance: Random) -> tuple[str, bytes]:
    """Return a file of rows, its bytes now and then in another encoding or with one of them changed."""
    whole = {".jsonl": "\n".join(lines), ".json": f"[{','.join(lines)}]", ".csv": "\n".join(("a,b", *lines))}
    encoding = chance.choice(("utf-8", "utf-8", "utf-8", "utf-16", "utf-16-le", "utf-32"))
    content = bytearray(whole.get(name, lines[0]).encode(encoding, "surrogatepass"))
    for _ in range(chance.choice((0, 0, 1, 8))):
        content[chance.randrange(len(content))] = chance.randrange(256)
    return name, bytes(content[: chance.choice((None, None, chance.randrange(len(content)) + 1))])


_KINDS = (".jsonl", ".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow", ".jsonl.gz", ".json.zst", ".csv.bz2")
rows = st.builds(
    _file,
    st.sampled_from(_KINDS),
    st.lists(
        st.builds(_other_cell, st.sampled_from(_ROWS), _CHANCE)
        | damaged(st.sampled_from(_ROWS))
        | st.sampled_from(("null", "1", "[]", '""', "{}", "\0", "{", '{"a": 1} x', '"a","b","c"', '"a')),
        min_size=1,
        max_size=3,
    ),
    _CHANCE,
)

names = anything | damaged(
    st.sampled_from(("tiny_full_sample_e1", "deepspeed_zero2", "zero3", "checkpoint-5", "chatml"))
)

_MANIFEST = '{"facts": {"step": 5, "world_size": 2}, "files": {"model.safetensors": {"bytes": 7, "xxh3_128": "0"}}}'
manifests = (
    damaged(st.just(_MANIFEST))
    | st.builds(_other_cell, st.just(_MANIFEST), _CHANCE)
    | st.builds(lambda name: _MANIFEST.replace('"model.safetensors"', json.dumps(name)), anything)
    | st.just(_DEEP)
)

_COUNTS = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "PORT", "MASTER_PORT")
_TEXTS = ("ADDR", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
_SLURM = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_RESTART_COUNT"),
)
_NODES = ("n[1-", "n[1-9999999999]", "n[3-1]", "n1,n2", "2(x99999999999)", "2(x")
_WORDS = st.sampled_from((*ODD_NUMBERS, "8; rm", "-1", "0", "1", "2", *_NODES))
variables = st.dictionaries(
    st.sampled_from((*_COUNTS, *_TEXTS, *_SLURM)),
    (_WORDS | anything).filter(lambda text: "\0" not in text),
    min_size=1,
) | st.fixed_dictionaries({name: _WORDS for name in _SLURM})

bombs = st.tuples(
    st.sampled_from((".jsonl.gz", ".json.gz", ".csv.gz", ".parquet", ".arrow")), st.integers(9, 31), st.integers(1, 3)
)
"""The kind of a file, MiB of its last row, rows: some kilobytes each."""
_STATEMENTS = (
    "{% for i in range(99999) %}{{ i }}{% endfor %}",
    "{{ range(10 ** 9) }}",
    "{{ 'x' * 10 ** 9 }}",
    "{{ 'x' * 10 ** 13 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 1 // 0 }}",
    "{{ messages.a.b() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no') }}",
    "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% include 'a' %}",
    "{{",
    "{% for %}",
)
chat_templates = st.builds(
    "".join, st.lists(st.sampled_from(_STATEMENTS) | damaged(st.sampled_from(_STATEMENTS)), min_size=1, max_size=2)
)
