"""A recipe is read as data: to the value that mmengine reads, or refused with its line, and never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.each import each
from tests.refused import refused
from tuner.errors import RecipeError
from tuner.recipes import catalog, loading
from tuner.recipes.code_file import mmengine_config
from tuner.recipes.recipe_file import MAX_DEPTH, MAX_NODES, MAX_TEXT, read_file, read_text, read_value

SHIPPED = [
    catalog.BASE,
    *(
        catalog.part_file(kind, name).path
        for kind in catalog.KINDS
        if kind != "recipes"
        for name in catalog.names(kind)
    ),
]
STANDALONE = (
    "tiny_full_sample_e3",
    "internlm2_chat_7b_qlora_oasst1_e3",
    "qwen3_8b_pretrain_dora_custom_e1",
    "gemma2_9b_it_lora_alpaca_e9999",
)
CANARY = "canary"
RUN = f"open('{CANARY}', 'w')"

REFUSED: dict[str, str] = {
    "import os": "'import'",
    "from os import path": "'importfrom'",
    f"{RUN}": "'expr'",
    f"x = {RUN}": "`open('canary', 'w')` is not data",
    f"x = __import__('pathlib').Path('{CANARY}').touch()": "is not data",
    "x = __file__": "no such name is defined above",
    "x = ok.__class__": "`ok.__class__` is not data",
    "__x__ = 1": "not a valid name in a recipe",
    "dict = 1": "not a valid name in a recipe",
    f"x = lambda: {RUN}": "is not data",
    f'x = f"{{{RUN}}}"': "is not data",
    f"x = [{RUN} for y in (1,)]": "is not data",
    f"x = {{y: {RUN} for y in (1,)}}": "is not data",
    f"x = list({RUN} for y in (1,))": "is not data",
    f"x = (y := {RUN})": "is not data",
    "x = [*(1, 2)]": "`*(1, 2)` is not data",
    "x = dict(**dict(a=1))": "`**` is not data",
    "x = dict(dict(a=1))": "is not data",
    "x = dict([('a', 1)], b=2)": "is not data",
    "x = 2 ** 9999999": "is not data",
    "x = 7 % 2": "is not data",
    "x = 'ab' * 9999999": "arithmetic needs numbers, not str",
    "x = 'a' + 'b'": "arithmetic needs numbers, not str",
    "x = True + 1": "arithmetic needs numbers, not bool",
    "x = -'a'": "arithmetic needs numbers, not str",
    "x = not ok": "is not data",
    "x = ok if ok else 2": "is not data",
    "x = 1 < 2": "is not data",
    "x = ok and 1": "is not data",
    "x = [1][0]": "`[1][0]` is not data",
    "x = {1, 2}": "is not data",
    "x = b'bytes'": "`b'bytes'` is not data that a recipe may contain",
    "x = ...": "`...` is not data that a recipe may contain",
    "x = 1j": "`1j` is not data that a recipe may contain",
    "x = 1e999": "out of range",
    "x = 10000000000000000000": "out of range",
    "x = 0x" + "f" * 400: "out of range",
    "x = 1e18 * 1e18": "out of range",
    "x = 1 / 0": "division by zero",
    "x = '\\x00'": "a NUL",
    "x = '\\ud800'": "surrogate",
    "x = {'\\udfff': 1}": "surrogate",
    "x = '\\d'": "invalid escape sequence '\\d'",
    "x = later\nlater = 1": "no such name is defined above",
    "ok = 2": "'ok' is assigned twice",
    "x = y = 1": "'assign'",
    "ok.x = 1": "'assign'",
    "x = {'a': 1, 'a': 2}": "the key 'a' appears twice",
    "x = dict(a=1, a=2)": "the key 'a' appears twice",
    "x = {1: 2}": "`1` is not a text key",
    "x = {ok: 2}": "`ok` is not a text key",
    "x: int = 1": "'annassign'",
    "ok += 1": "'augassign'",
    "del ok": "'delete'",
    "global ok": "'global'",
    "'text'": "'expr'",
    "pass": "'pass'",
    f"assert {RUN}": "'assert'",
    f"if ok: {RUN}": "'if'",
    f"for x in (1,): {RUN}": "'for'",
    f"while ok: {RUN}": "'while'",
    f"with {RUN} as x: pass": "'with'",
    f"try: {RUN}\nfinally: pass": "'try'",
    f"match ok:\n    case 1: {RUN}": "'match'",
    f"class X: {RUN}": "'classdef'",
    f"def f(x={RUN}): return lambda: x": "'functiondef'",
    f"async def f(): await {RUN}": "'asyncfunctiondef'",
    f"raise {RUN}": "'raise'",
    "x = yield 1": "is not data",
    "x = (": "was never closed",
    "x = 1 1": "not valid Python",
}


def typed(value: Any) -> Any:
    """Return a value in a form that keeps 1, 1.0 and True apart, and a list and a tuple."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [typed(item) for item in value]
    return type(value).__name__, repr(value)


def by_mmengine(path: Path) -> Any:
    return typed(mmengine_config().fromfile(path).to_dict())


@pytest.mark.long
@each(SHIPPED)
def test_a_shipped_file_has_the_value_that_mmengine_reads(path: Path) -> None:
    assert typed(read_file(path).values) == by_mmengine(path)


@pytest.mark.parametrize("name", STANDALONE)
def test_a_standalone_file_has_the_value_that_mmengine_reads(name: str, tmp_path: Path) -> None:
    path = tmp_path / "whole.py"
    path.write_text(loading.load(name).standalone(), encoding="utf-8")

    assert typed(read_file(path).values) == by_mmengine(path)


def numbers() -> st.SearchStrategy[str]:
    bound = 10**18
    literal = st.integers(-bound, bound) | st.floats(-bound, bound)
    operation = st.tuples(literal.map(repr), st.sampled_from(["+", "-", "*", "/", "//"]), literal.map(repr))
    return literal.map(repr) | operation.map(" ".join) | operation.map(lambda parts: f"-({' '.join(parts)})")


def expressions(helpers: list[str]) -> st.SearchStrategy[str]:
    # mmengine replaces {{...}} in a file's text; a recipe's reader does not.
    texts = st.text(max_size=12).filter(lambda text: "\0" not in text and "{{" not in text and "}}" not in text)
    leaf = st.sampled_from(["None", "True", "False", *helpers]) | numbers() | texts.map(repr)

    def containers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        items = st.lists(inner, max_size=3)
        words = st.dictionaries(st.sampled_from(["r", "lr", "Key_1", "größe"]), inner, max_size=3)
        keys = st.dictionaries(texts, inner, max_size=3)
        return (
            items.map(lambda parts: f"[{', '.join(parts)}]")
            | items.map(lambda parts: f"({''.join(f'{part}, ' for part in parts)})" if parts else "()")
            | words.map(lambda pairs: f"dict({', '.join(f'{key}={part}' for key, part in pairs.items())})")
            | keys.map(lambda pairs: "{" + ", ".join(f"{key!r}: {part}" for key, part in pairs.items()) + "}")
        )

    return st.recursive(leaf, containers, max_leaves=12)


@st.composite
def recipes(draw: st.DrawFn) -> str:
    helper = draw(numbers() | st.sampled_from(["'text'", "None", "True"]))
    values = draw(st.lists(expressions(["helper"]), min_size=1, max_size=4))
    return f"helper = {helper}\n" + "".join(f"key_{index} = {value}\n" for index, value in enumerate(values))


@given(recipes())
@settings(max_examples=20, deadline=None)  # mmengine takes 20 ms for each, and every run has others
def test_any_data_has_the_value_that_mmengine_reads(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    try:
        values = read_text(text, "generated.py").values
    except RecipeError as error:
        assert "out of range" in str(error) or "division by zero" in str(error)
        reject()
    path = tmp_path_factory.getbasetemp() / "generated.py"
    path.write_text(text, encoding="utf-8")

    assert typed(values) == by_mmengine(path)


@pytest.mark.parametrize("code", REFUSED, ids=lambda code: code[:40])
def test_code_is_refused_with_its_line_and_not_run(code: str) -> None:
    with refused(RecipeError, "my.py:2") as caught:
        read_text(f"ok = 1\n{code}\n", "my.py")

    assert REFUSED[code] in caught.value.what
    assert not Path(CANARY).exists()


def test_the_canary_dies_where_the_code_is_run() -> None:
    Path("code.py").write_text(f"x = {RUN}.close()\n")

    loading.load("code.py", allow_code=True)

    assert Path(CANARY).exists()


def test_a_nul_byte_is_refused() -> None:
    with refused(RecipeError, "my.py:1"):
        read_text("x = \0", "my.py")


def test_a_decorated_function_is_refused() -> None:
    with refused(RecipeError, "my.py:2", "functiondef"):
        read_text("@ok\ndef f(): pass", "my.py")


def test_a_container_cannot_be_used_a_second_time() -> None:
    for container in ("[1]", "(1,)", "dict(a=1)", "{}"):
        with refused(RecipeError, "my.py:2"):
            read_text(f"x = {container}\ny = x", "my.py")


def test_each_key_knows_its_line() -> None:
    text = '"""Doc."""\nmodel = dict(\n path="x",\n inner={\n  "deep": [\n   1,\n  ],\n },\n)\n'

    source = read_text(text, "my.py")

    assert source.lines == {("model",): 2, ("model", "path"): 3, ("model", "inner"): 4, ("model", "inner", "deep"): 5}
    assert source.where(("model", "inner", "deep")) == "my.py:5"
    assert source.where(("model", "unknown", "deeper")) == "my.py:2"
    assert source.where(("other",)) == "my.py"


def test_helpers_are_the_names_that_an_expression_uses() -> None:
    source = read_text("used = 2\nunused = 3\nx = dict(a=used * 4)", "my.py")

    assert source.helpers == {"used"}
    assert source.values == {"used": 2, "unused": 3, "x": {"a": 8}}


def test_values_keep_their_order() -> None:
    assert list(read_text("b = 1\na = dict(z=1, y=2)", "my.py").values) == ["b", "a"]
    assert list(read_text("a = dict(z=1, y=2)", "my.py").values["a"]) == ["z", "y"]


def test_only_the_first_statement_may_be_a_docstring() -> None:
    assert read_text('"""Doc."""', "my.py").values == {}
    with refused(RecipeError, "my.py:2", "expr"):
        read_text('x = 1\n"""Doc."""', "my.py")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        (" -3 ", -3),
        ("(0.9, 0.999)", (0.9, 0.999)),
        ("0.9, 0.999", (0.9, 0.999)),
        ("['a', 'b']", ["a", "b"]),
        ("dict(a=2 * 3)", {"a": 6}),
        ("1 # one", 1),
    ],
)
def test_one_value_is_read_as_in_a_recipe(text: str, value: object) -> None:
    assert typed(read_value(text, "--set")) == typed(value)


@pytest.mark.parametrize("text", ["", " ", "1)\nother = (2", "x = 1", "1; 2", "name", "\ud800", "\0", "# one"])
def test_what_is_not_one_value_is_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        read_value(text, "--set")


def test_what_is_just_below_the_limits_is_read() -> None:
    depth = MAX_DEPTH + 1
    text = f"a = '{'a' * MAX_TEXT}'\nb = {'[' * depth}{']' * depth}\nc = [{'1,' * (MAX_NODES - depth - 2)}]\n"

    assert len(read_text(text, "my.py").values["c"]) == MAX_NODES - depth - 2


def test_a_file_that_is_not_utf8_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "my.py"
    path.write_bytes(b"x = '\xff'")

    with refused(RecipeError, "my.py:1:6"):
        read_file(path)


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "my.py"
    path.write_bytes(b"\xef\xbb\xbfx = 1\r\ny = 2\r\n")

    assert read_file(path).values == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("name", "reason"), [("missing.py", "there is no file"), (".", "is a directory"), ("a\0b.py", "null byte")]
)
def test_what_cannot_be_opened_is_refused_with_the_reason(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"'my.py'.*{reason}|{reason}.*'my.py'"):
        read_file(tmp_path / name, "my.py")


def test_an_endless_file_is_refused() -> None:
    with refused(RecipeError, None, "/dev/zero"):
        read_file(Path("/dev/zero"))
