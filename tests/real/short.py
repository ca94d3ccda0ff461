"""Ten thousand short exercises with exact answers: sums, number bases, dates, and tables that ship inside Python.

Each answer is computed by Python itself. A row follows from its number alone, so the rows are the same everywhere.
"""

from __future__ import annotations

import calendar
import datetime
import html.entities
import itertools
import random
import unicodedata
from collections.abc import Callable
from http import HTTPStatus

from tests.real.text import Row

NAMES = ("Ana", "Ben", "Chen", "Dara", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena", "Mei", "Noor")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "photos", "plates", "seeds", "stamps", "tickets")
WORDS = tuple(
    """
apple bridge candle desert engine forest garden harbor island jacket kitchen lantern market needle orange
palace quarry ribbon saddle temple umbrella valley window yellow zebra anchor basket copper dragon feather
guitar hammer insect jungle kettle ladder mirror number office pepper rabbit silver tunnel violin winter
""".split()  # noqa: SIM905 - a list of words is read as words
)
UNITS = (
    ("kilometres", "metres", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("kilograms", "grams", 1000),
    ("metres", "centimetres", 100),
    ("litres", "millilitres", 1000),
    ("kibibytes", "bytes", 1024),
    ("years", "months", 12),
)


def rows(number: int) -> list[Row]:
    """Return `number` different exercises, always the same ones."""
    kept: dict[str, Row] = {}
    for place in itertools.count():
        rng = random.Random(f"exercise {place}")  # noqa: S311
        make = MAKERS[place % len(MAKERS)]
        question, answer = make(rng)
        kept.setdefault(question, Row(make.__name__, question, question, answer))
        if len(kept) == number:
            break
    return list(kept.values())


def _sum(rng: random.Random) -> tuple[str, str]:
    first, second = rng.randint(2, 999), rng.randint(2, 999)
    return rng.choice(("What is {} + {}?", "Add {} and {}.", "Work out {} plus {}.")).format(first, second), str(
        first + second
    )


def _difference(rng: random.Random) -> tuple[str, str]:
    first, second = sorted((rng.randint(2, 999), rng.randint(2, 999)), reverse=True)
    question = rng.choice(("What is {0} - {1}?", "Subtract {1} from {0}.", "Work out {0} minus {1}."))
    return question.format(first, second), str(first - second)


def _product(rng: random.Random) -> tuple[str, str]:
    first, second = rng.randint(2, 30), rng.randint(2, 99)
    return rng.choice(("What is {} times {}?", "Multiply {} by {}.", "Work out {} * {}.")).format(first, second), str(
        first * second
    )


def _quotient(rng: random.Random) -> tuple[str, str]:
    second, whole, rest = rng.randint(2, 20), rng.randint(2, 60), rng.randint(0, 19)
    rest %= second
    question = f"Divide {second * whole + rest} by {second}. What are the quotient and the remainder?"
    return question, f"The quotient is {whole} and the remainder is {rest}."


def _story(rng: random.Random) -> tuple[str, str]:
    name, other = rng.sample(NAMES, 2)
    things, had, some = rng.choice(THINGS), rng.randint(20, 200), rng.randint(2, 19)
    if rng.random() < 0.5:
        question = (
            f"{name} has {had} {things} and gives {some} of them to {other}. How many {things} does {name} have left?"
        )
        return question, f"{name} has {had - some} {things} left, because {had} - {some} = {had - some}."
    question = f"{name} has {had} {things} and gets {some} more from {other}. How many {things} does {name} have now?"
    return question, f"{name} has {had + some} {things} now, because {had} + {some} = {had + some}."


def _larger(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(range(-500, 500), 2)
    wanted, choose = rng.choice((("larger", max), ("smaller", min)))
    return f"Which is {wanted}: {first} or {second}?", str(choose(first, second))


def _unit(rng: random.Random) -> tuple[str, str]:
    big, small, factor = rng.choice(UNITS)
    number = rng.randint(2, 250)
    return f"How many {small} are {number} {big}?", f"{number} {big} are {number * factor} {small}."


def _base(rng: random.Random) -> tuple[str, str]:
    number = rng.randint(2, 1023)
    base, text = rng.choice((("binary", f"{number:b}"), ("hexadecimal", f"{number:x}"), ("octal", f"{number:o}")))
    if rng.random() < 0.5:
        return f"Write the decimal number {number} in {base}.", text
    return f"Write the {base} number {text} in decimal.", str(number)


def _weekday(rng: random.Random) -> tuple[str, str]:
    day = datetime.date(1990, 1, 1) + datetime.timedelta(days=rng.randrange(20000))
    return f"What day of the week is {day.isoformat()}?", calendar.day_name[day.weekday()]


def _later(rng: random.Random) -> tuple[str, str]:
    day, days = datetime.date(2001, 1, 1) + datetime.timedelta(days=rng.randrange(9000)), rng.randint(2, 60)
    return f"Which date is {days} days after {day.isoformat()}?", (day + datetime.timedelta(days=days)).isoformat()


def _order(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(WORDS, rng.randint(3, 5))
    return f"Sort these words alphabetically: {', '.join(words)}.", ", ".join(sorted(words))


def _letters(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(WORDS, 2)
    if rng.random() < 0.5:
        return f"Which letters do the words {first} and {second} share?", _listed(sorted(set(first) & set(second)))
    return f"Write the words {first} and {second} in capital letters.", f"{first} {second}".upper()


def _listed(letters: list[str]) -> str:
    return ", ".join(letters) if letters else "They share no letter."


def _next(rng: random.Random) -> tuple[str, str]:
    start, step = rng.randint(1, 90), rng.randint(2, 25)
    numbers = [start + step * place for place in range(4)]
    return f"Which number comes next: {', '.join(map(str, numbers))}?", str(start + 4 * step)


def _character(rng: random.Random) -> tuple[str, str]:
    while True:
        character = chr(
            rng.choice((rng.randrange(0x21, 0x250), rng.randrange(0x370, 0x530), rng.randrange(0x2190, 0x2600)))
        )
        name = unicodedata.name(character, None)
        if name:
            break
    if rng.random() < 0.5:
        return f"What is the Unicode name of the character {character}?", name
    return f"What is the Unicode code point of the character {character}?", f"U+{ord(character):04X}"


def _entity(rng: random.Random) -> tuple[str, str]:
    name, code = rng.choice(sorted(html.entities.name2codepoint.items()))
    return f"Which character is the HTML entity &{name};?", chr(code)


def _status(rng: random.Random) -> tuple[str, str]:
    status = rng.choice(_STATUSES)
    return f"What does the HTTP status {status.value} mean?", status.phrase


_STATUSES = [status for status in HTTPStatus if status.value not in (413, 414, 416, 422)]
"""Newer versions of Python name these by newer words."""

MAKERS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _sum,
    _difference,
    _product,
    _quotient,
    _story,
    _larger,
    _unit,
    _base,
    _weekday,
    _later,
    _order,
    _letters,
    _next,
    _character,
    _entity,
    _status,
)
