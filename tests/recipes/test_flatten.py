"""A base and the values that differ from it become one file: the same values, the base's comments, nothing else."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.recipes import catalog
from tuner.recipes.recipe_file import read_text, read_value
from tuner.recipes.standalone import flatten, render, render_docstring

BASE = '''"""Old."""

# The größte comment.
model = dict(
    # Inside.
    path=None,
    inner=dict(r=1, names=("ä", "b")),
)

adapter = None  # beside

empty = dict()
'''


def values_of(text: str) -> dict[str, Any]:
    return read_text(text, "flat.py").values


def test_values_are_replaced_where_they_stand_and_everything_else_is_kept() -> None:
    delta = {"model": {"path": "wörld", "inner": {"r": 2}}, "adapter": {"r": 8}}

    text = flatten(BASE, delta, "New.")

    assert (
        text
        == '''"""New."""

# The größte comment.
model = dict(
    # Inside.
    path="wörld",
    inner=dict(r=2, names=("ä", "b")),
)

adapter = dict(r=8)  # beside

empty = dict()
'''
    )


def test_keys_that_the_base_lacks_are_added_to_their_block() -> None:
    delta = {"model": {"new": 1, "inner": {"more": [2]}}, "empty": {"a": 1}, "top": {"b": None}}

    text = flatten(BASE, delta, "New.")

    values = values_of(text)
    assert values["model"] == {"path": None, "inner": {"r": 1, "names": ("ä", "b"), "more": [2]}, "new": 1}
    assert (values["empty"], values["top"]) == ({"a": 1}, {"b": None})
    assert "# Inside." in text


def test_a_block_can_become_a_scalar() -> None:
    assert values_of(flatten(BASE, {"model": {"inner": None}}, "New."))["model"] == {"path": None, "inner": None}
    assert values_of(flatten(BASE, {"model": 3}, "New."))["model"] == 3


def test_nothing_to_change_leaves_all_but_the_docstring() -> None:
    assert flatten(BASE, {}, "Old.") == BASE


@pytest.mark.parametrize("header", ['"""', '"', "\\", "\\\\", 'a\\"""\nimport os\n"""', "two\nlines", "ends in \\"])
def test_no_docstring_breaks_out_of_its_quotes(header: str) -> None:
    tree = ast.parse(render_docstring(header))

    assert len(tree.body) == 1
    assert ast.get_docstring(tree, clean=False) == header.replace('"', "'")


def test_a_long_dict_takes_one_line_for_each_key() -> None:
    value = {f"key_number_{index}": "x" * 20 for index in range(4)}

    lines = render({"block": value}, 0).splitlines()

    assert lines[0] == "dict("
    assert lines[1] == "    block=dict("
    assert lines[2] == '        key_number_0="xxxxxxxxxxxxxxxxxxxx",'
    assert max(map(len, lines)) < 100


@pytest.mark.parametrize("key", ["class", "None", "__debug__", "a b", "", "ﬁ", "1a", 'quo"te', "new\nline"])
def test_a_key_that_is_no_plain_word_is_written_as_text(key: str) -> None:
    text = render({key: {"zero": 1}}, 0)

    assert text.startswith("{")
    compile(text, "flat.py", "eval")
    assert read_value(text, "flat.py") == {key: {"zero": 1}}


def leaves() -> st.SearchStrategy[Any]:
    bound = 10**18
    texts = st.text().filter(lambda text: "\0" not in text)
    return st.none() | st.booleans() | st.integers(-bound, bound) | st.floats(-bound, bound) | texts


KEYS = st.sampled_from(["r", "lr", "class", "Ä", "a b", "model"])
VALUES = st.recursive(
    leaves(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
@settings(deadline=None)
def test_any_value_is_written_so_that_it_reads_the_same(value: Any) -> None:
    assert repr(read_value(render(value, 0), "flat.py")) == repr(value)


BLOCK = st.dictionaries(st.sampled_from(["path", "interval", "new"]), VALUES, max_size=3)


@given(st.dictionaries(st.sampled_from(["adapter", "deepspeed", "new"]), VALUES), BLOCK, BLOCK)
@settings(max_examples=40, deadline=None)
def test_any_delta_over_the_defaults_keeps_every_comment(
    delta: dict[str, Any], model: dict[str, Any], log: dict[str, Any]
) -> None:
    base, delta = catalog.BASE.read_text(encoding="utf-8"), {**delta, "model": model, "log": log}

    text = flatten(base, delta, "Any.")

    lines = text.splitlines()
    assert [line for line in base.splitlines() if line.strip().startswith("#") and line not in lines] == []
    assert read_text(text, "flat.py").values.keys() == read_text(base, "base.py").values.keys() | delta.keys()


def test_a_list_of_blocks_that_is_too_long_for_a_line_gets_one_block_a_line() -> None:
    entries = [{"path": "a" * 50, "weight": 2.0}, {"path": "b" * 50}]

    assert render(entries, 4) == f"[\n        dict(path={entries[0]['path']!r}, weight=2.0),\n".replace("'", '"') + (
        f"        dict(path={entries[1]['path']!r}),\n    ]".replace("'", '"')
    )
    assert render(tuple(entries[:1]), 0).startswith('(dict(path="aaa')
    assert read_value(render(tuple(entries), 0), "flat.py") == tuple(entries)
