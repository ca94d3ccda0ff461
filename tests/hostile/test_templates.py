"""Chat templates come with models: rendered in transformers' sandbox, and whatever they do is their own fault."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.data.conftest import CHATML, Settings, conversation, make_tokenizer
from tests.data.conftest import cache as cache
from tests.data.conftest import jsonl as jsonl
from tests.refused import refused
from tuner import assets
from tuner.data import limits, templates
from tuner.data.prepare import prepare
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError

OPEN = "__globals__['__builtins__']['open']('canary', 'w')"
ESCAPES = {
    "the globals of a function": f"{{{{ cycler.__init__.{OPEN} }}}}",
    "the globals of a macro": f"{{% macro m() %}}{{% endmacro %}}{{{{ m.__class__.__init__.{OPEN} }}}}",
    "every class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an attribute by a filter": "{{ (''|attr('__class__')).__mro__ }}",
    "a format string": "{{ '{0.__class__.__mro__}'.format('') }}",
    "a function of the environment": f"{{{{ raise_exception.{OPEN} }}}}",
    "the template itself": f"{{{{ self.__init__.{OPEN} }}}}",
    "a file": "{% include '/etc/passwd' %}",
    "a template from a file": "{% import 'os' as os %}{{ os.system('touch canary') }}",
    "a list that is changed": "{{ messages.append(1) }}",
    "a loop of a billion": "{% for i in range(10**9) %}{% endfor %}",
    "a division by zero": "{{ 1 // 0 }}",
    "a missing key": "{{ messages[0]['content']['a'].b.c }}",
    "itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "no template": "{% for %}",
    "deeply nested": "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_hostile_template_is_refused_and_reaches_nothing(name: str, here: Path) -> None:
    with pytest.raises(DataError, match="chat template"):
        templates.choose_template(make_tokenizer(ESCAPES[name] + CHATML))
    assert list(here.iterdir()) == []


def test_a_template_that_turns_hostile_with_a_row_is_told_with_the_row(jsonl: object, tmp_path: Path) -> None:
    trap = "{% if 'now' in messages[0]['content'] %}{{ ''.__class__.__mro__ }}{% endif %}"
    path = jsonl([conversation("Why?", "Because."), conversation("now", "what?")])  # type: ignore[operator]

    with refused(DataError, f"{path.name}:2"):
        prepare(Settings(str(path)), TextEncoder(make_tokenizer(trap + CHATML)), objective="sft")  # type: ignore[arg-type]


def test_what_a_row_says_is_never_taken_for_a_template(jsonl: object) -> None:
    said = "{{ ''.__class__ }}{% for i in range(9) %}x{% endfor %}{# no #}"
    tokenizer = make_tokenizer()
    path = jsonl([conversation(said, said)])  # type: ignore[operator]

    found = prepare(Settings(str(path), max_length=400, packing=False), TextEncoder(tokenizer), objective="sft")  # type: ignore[arg-type]

    assert tokenizer.decode(found.dataset[0]["input_ids"]).count(said) == 2


_RUNS = re.compile(
    r"\b(render_jinja_template|apply_chat_template|get_training_chat_template|_?compile_jinja\w*|from_string)\("
)
"""What renders or compiles a chat template in transformers, TRL and jinja2."""
_MAY = {
    *("data/rendering.py", "data/compat_templates.py", "data/token_estimate.py"),
    *("rewards/reward_process.py", "rewards/tool_templates.py"),
}
"""The one function, what tells it the date, an estimate that loads no library, within the same limits, a process of its
own that a deadline ends, and TRL's check of a template with calls, which `worker.encoders` gives the same limits."""


def test_one_function_runs_chat_templates() -> None:
    files = assets.PACKAGE.rglob("*.py")
    found = {str(file.relative_to(assets.PACKAGE)) for file in files if _RUNS.search(file.read_text(encoding="utf-8"))}

    assert found == _MAY


@contextmanager
def deadlines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Yield the seconds of processor time that code inside is given, each time that its clock begins anew."""
    begun: list[float] = []
    begin = signal.setitimer

    def noted(which: int, seconds: float, interval: float = 0.0) -> None:
        begun.extend([seconds] if seconds else [])
        begin(which, seconds, interval)

    with monkeypatch.context() as patched:
        patched.setattr(signal, "setitimer", noted)
        yield begun


def test_choosing_a_template_takes_no_longer_than_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TEMPLATE_S", 0.5)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    # Every probe but the first.
    tokenizer = make_tokenizer("{% if messages | length > 2 or tools %}" + endless + "{% endif %}" + CHATML)

    with deadlines(monkeypatch) as begun:
        templates.choose_template(tokenizer)

    assert begun == [0.5] * 3, "for the marks, for tools, and once for all the probes"


def test_compiling_a_template_is_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TEMPLATE_S", 0.5)

    with deadlines(monkeypatch) as begun, pytest.raises(DataError, match=r"takes more than 0\.5 s"):
        templates.choose_template(make_tokenizer("{% set n = 9 ** (9 ** 9) %}" + CHATML))

    assert begun == [0.5]
