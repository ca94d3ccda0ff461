"""Questions and answers about Python, from the documentation that ships inside Python: docstrings and `pydoc` topics.

The answers are the documentation's own words. Nothing is drawn at random: a row's place and the wording of its question
follow from the hash of its name, so one version of Python always makes the same rows.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

# Of the standard library: what imports on every platform, and is in every Python from 3.11 on.
MODULES = tuple(
    """
builtins abc argparse array ast asyncio base64 bdb binascii bisect bz2 calendar cmath cmd code codecs codeop
collections collections.abc colorsys compileall concurrent.futures configparser contextlib contextvars copy
copyreg csv ctypes dataclasses datetime decimal difflib dis doctest email email.headerregistry email.message
email.policy email.utils enum errno faulthandler filecmp fileinput fnmatch fractions ftplib functools gc
getopt getpass gettext glob graphlib gzip hashlib heapq hmac html html.parser http http.client http.cookiejar
http.cookies http.server imaplib importlib importlib.abc importlib.machinery importlib.metadata
importlib.resources importlib.util inspect io ipaddress itertools json json.decoder json.encoder keyword
linecache locale logging logging.config logging.handlers lzma mailbox marshal math mimetypes mmap modulefinder
multiprocessing multiprocessing.managers multiprocessing.pool multiprocessing.shared_memory netrc numbers
operator optparse os os.path pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint
profile pstats py_compile pyclbr queue quopri random re reprlib runpy sched secrets select selectors shelve
shlex shutil signal smtplib socket socketserver sqlite3 ssl stat statistics string stringprep struct
subprocess symtable sys sysconfig tabnanny tarfile tempfile textwrap threading time timeit token tokenize
trace traceback tracemalloc types typing unicodedata unittest unittest.mock urllib.error urllib.parse
urllib.request urllib.robotparser uuid venv warnings wave weakref webbrowser wsgiref.handlers wsgiref.headers
wsgiref.simple_server wsgiref.util xml.dom.minidom xml.dom.pulldom xml.etree.ElementTree xml.sax
xml.sax.handler xml.sax.saxutils xmlrpc.client xmlrpc.server zipapp zipfile zipimport zlib
""".split()  # noqa: SIM905 - a list of words is read as words
)

QUESTIONS = {
    "function": (
        "What does Python's `{name}` do?",
        "In Python, what is the function `{name}` for?",
        "Explain the function `{name}` of Python's standard library.",
        "I found a call to `{name}` in some Python code. What does it do?",
        "How does Python's documentation describe `{name}`?",
        "When would I call `{name}` in Python?",
    ),
    "method": (
        "What does the method `{name}` do in Python?",
        "In Python, what happens when I call `{name}`?",
        "Explain Python's method `{name}`.",
        "How does Python's documentation describe the method `{name}`?",
        "What is `{name}` for in Python?",
    ),
    "class": (
        "What is the class `{name}` in Python?",
        "What do I use Python's `{name}` for?",
        "Explain the class `{name}` of Python's standard library.",
        "What does an object of Python's class `{name}` represent?",
        "How does Python's documentation describe `{name}`?",
    ),
    "exception": (
        "What does the exception `{name}` mean in Python?",
        "When does Python raise `{name}`?",
        "My Python program stopped with `{name}`. What does it mean?",
    ),
    "module": (
        "What is Python's module `{name}` for?",
        "What does the module `{name}` of Python's standard library offer?",
        "Give me an overview of Python's module `{name}`.",
    ),
    "topic": (
        "What does Python's language reference say about this: {name}?",
        "Explain this subject of the Python language: {name}.",
        "I am learning Python. What should I know about this subject: {name}?",
    ),
}
SHORTEST, LONGEST = 40, 700
ALIKE = 0.7
_ROLE = re.compile(r":(?:py:)?\w+:(?=`)")
_BROKEN = re.compile(r"(?<=\w)- (?=\w)(?!(?:and|or|to)\b)")
"""A compound such as user-defined that a line's end broke; "high- and low-water" is none."""
_CREDIT = re.compile(r"(?i)copyright|written by|author|contributed|@")
_LISTED = re.compile(r"\s|[-*+#>|]|\d+[.)]|:\w+|@\w+")
_CALL = re.compile(r"[\w.]+\(.*\)( *(->|=>|:|-- ?) *.*)?$|[\w.]+\([^)]*$")
_UNDERLINE = re.compile(r"([*=\-~^])\1{2,}$")
_ENTRY = re.compile(r"(?:(?:class|static|async)\s+)?((?:\w+\.)+\w+)\(.*\)$")


@dataclass(frozen=True)
class Row:
    """One question with its answer. `kind` names the wording of the question, `name` the subject."""

    kind: str
    name: str
    question: str
    answer: str


def number_of(text: str) -> int:
    """Return a number that follows from a text alone, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def rows() -> list[Row]:
    """Return every row that this Python's documentation makes, in an order that its names decide.

    No two rows ask the same or have nearly the same answer.
    """
    made = sorted(itertools.chain(_of_topics(), _of_docstrings()), key=lambda row: number_of(row.name))
    return _distinct(made)


def _of_topics() -> Iterator[Row]:
    for name in sorted(topics):
        for title, paragraphs in _sections(topics[name]):
            yield from _row("topic", title, paragraphs)
        for entry, body in _entries(topics[name]):
            yield from _row("method", entry, re.split(r"\n\s*\n", inspect.cleandoc(body)))


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each heading of a topic with the prose below it, without tables, grammar and code."""
    paragraphs = re.split(r"\n\s*\n", text.strip("\n"))
    title, prose = None, list[str]()
    for paragraph in paragraphs:
        lines = paragraph.splitlines()
        if len(lines) == 2 and _UNDERLINE.match(lines[1]):
            if title:
                yield title, prose
            title, prose = lines[0].strip(), []
        else:
            prose.append(paragraph)
    if title:
        yield title, prose


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield each method that a topic describes with its description, which is indented."""
    blocks = re.split(r"\n(?=\S)", text)
    for block in blocks:
        head, _, body = block.partition("\n")
        if (match := _ENTRY.match(head)) and body.startswith("\n   "):
            yield match[1], body


def _of_docstrings() -> Iterator[Row]:
    seen = set[int]()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        yield from _row("module", module_name, _paragraphs(module))
        for name, value in _public(module):
            if id(value) in seen:  # the same thing under another name, such as typing.Text, which is str
                continue
            seen.add(id(value))
            full = name if module_name == "builtins" else f"{module_name}.{name}"
            if inspect.isclass(value):
                yield from _row("exception" if issubclass(value, BaseException) else "class", full, _paragraphs(value))
                for method, function in _methods(value):
                    yield from _row("method", f"{full}.{method}", _paragraphs(function))
            elif callable(value):
                yield from _row("function", full, _paragraphs(value))


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield what a module offers and what is its own: what it imports is another module's."""
    names = getattr(module, "__all__", None) or vars(module)
    for name in sorted(set(names)):
        value = getattr(module, name, None)
        home = getattr(value, "__module__", None) or ""
        if not name.startswith("_") and (home.lstrip("_") == module.__name__ or name in getattr(module, "__all__", ())):
            yield name, value


def _methods(value: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, member in sorted(vars(value).items()):
        function = getattr(member, "__func__", member)
        if not name.startswith("_") and callable(function) and not inspect.isclass(function):
            yield name, function


def _paragraphs(value: object) -> list[str]:
    text = getattr(value, "__doc__", None)
    return re.split(r"\n\s*\n", inspect.cleandoc(text)) if isinstance(text, str) else []


def _row(kind: str, name: str, paragraphs: Sequence[str]) -> Iterator[Row]:
    """Yield the row of a subject if its documentation has an answer of a sensible length."""
    answer = _answer(paragraphs)
    if SHORTEST <= len(answer) <= LONGEST:
        wordings = QUESTIONS[kind]
        yield Row(kind, name, wordings[number_of(f"wording {name}") % len(wordings)].format(name=name), answer)


def _answer(paragraphs: Sequence[str]) -> str:
    """Return the first paragraphs of prose, as many as fit, each on one line."""
    kept: list[str] = []
    for paragraph in paragraphs:
        text = _prose(paragraph)
        if text is None or len("\n\n".join([*kept, text])) > LONGEST:
            if kept:
                break
            continue
        kept.append(text)
    while kept and kept[-1].endswith(":"):  # what it introduces was code or a table
        kept.pop()
    return "\n\n".join(kept)


def _prose(paragraph: str) -> str | None:
    """Return a paragraph of whole sentences on one line, or None for code, a list, a table or a signature."""
    lines = paragraph.strip("\n").splitlines()
    while lines and _CALL.match(lines[0]):
        lines = lines[1:]
    if not lines or any(_LISTED.match(line) for line in lines) or "::=" in paragraph:
        return None
    text = _ROLE.sub("", _BROKEN.sub("-", " ".join(line.strip() for line in lines)))
    sentences = (text[:1].isalpha() or text[:1] in "\"'`(") and text[-1] in ".!?:)"
    return text if sentences and "  " not in text.replace(".  ", ". ") and not _CREDIT.search(text) else None


def _distinct(made: Iterable[Row]) -> list[Row]:
    """Return the rows without those that ask the same, or answer nearly the same, as one before."""
    kept: list[Row] = []
    asked, answered = set[str](), list[frozenset[str]]()
    for row in made:
        words = frozenset(re.findall(r"\w+", row.answer.lower()))
        if row.name in asked or any(_alike(words, other) for other in answered):
            continue
        kept.append(row)
        asked.add(row.name)
        answered.append(words)
    return kept


def _alike(words: frozenset[str], other: frozenset[str]) -> bool:
    shorter, longer = sorted((len(words), len(other)))
    return shorter >= ALIKE * longer and len(words & other) >= ALIKE * len(words | other)
