"""Writes the tables in `docs/recipes.md` from the parts themselves: `python -m tests.docs.recipes --write`.

A table stands between `<!-- its name -->` and `<!-- end -->`; all other text of the file is written by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.worker.families import METHODS, examples
from tuner.cli import parts
from tuner.data.formats import FORMATS
from tuner.data.sample import KINDS
from tuner.machine.libraries import KERNELS, KERNELS_OF
from tuner.recipes import catalog
from tuner.recipes.architecture_constraints import KEEPS_APART
from tuner.recipes.xtuner_names import SPELLINGS

TARGET = Path(__file__).parents[2] / "docs" / "recipes.md"
_TABLE = re.compile(r"<!-- (?P<name>[a-z ]+) -->\n.*?<!-- end -->", re.DOTALL)


def render(text: str) -> str:
    """Return the page with every table in it made anew."""
    return _TABLE.sub(lambda found: f"<!-- {found['name']} -->\n{TABLES[found['name']]()}<!-- end -->", text)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(cell: object) -> str:
    return str(cell).replace("|", "\\|").replace("\n", " ")


def _code(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _models() -> str:
    rows = []
    for name in catalog.names("models"):
        count = parts.parameters(name)
        path = parts.values("models", name)["model"]["path"]
        rows.append((f"`{name}`", path, f"{count:,}" if count else "", catalog.summary("models", name)))
    return _table(("model", "path", "parameters", ""), rows)


def _families() -> str:
    rows = (
        (
            f"`{kind}`",
            f"`{part}`" if part else "a folder of yours",
            ", ".join(METHODS),
            "packed" if kind in KEEPS_APART else "padded",
            " ".join(KERNELS[name] for name in KERNELS_OF.get(kind, ())),
        )
        for kind, part in examples().items()
    )
    return _table(("model_type", "such as", "trained", "rows", "faster on GPUs with"), rows)


def _methods() -> str:
    return _table(
        ("method", ""), ((f"`{name}`", catalog.summary("methods", name)) for name in catalog.names("methods"))
    )


def _objectives() -> str:
    rows = (
        (f"`{name}`", catalog.summary("objectives", name), _code(_formats_for(name)))
        for name in catalog.names("objectives")
    )
    return _table(("objective", "", "row formats"), rows)


def _formats_for(objective: str) -> list[str]:
    return [name for name, known in FORMATS.items() if known.kind in KINDS[objective]]


def _datasets() -> str:
    rows = []
    for name in catalog.names("datasets"):
        blocks = [*parts.data_sets(name)]
        paths = dict.fromkeys(block["path"] for block in blocks if block.get("path"))
        formats = dict.fromkeys(block["format"] for block in blocks if block.get("format"))
        suits = [objective for objective in KINDS if formats and parts.suits(objective, name)]
        rows.append(
            (f"`{name}`", ", ".join(paths), _code(formats), ", ".join(suits), catalog.summary("datasets", name))
        )
    return _table(("data set", "path", "format", "for", ""), rows)


def _recipes() -> str:
    rows = (
        (f"`{name}`", f"`{parts.values('recipes', name)['_base_']}`", catalog.summary("recipes", name))
        for name in catalog.names("recipes")
    )
    return _table(("recipe", "builds on", ""), rows)


def _formats() -> str:
    rows = (
        (f"`{name}`", known.needs, ", ".join(objective for objective in KINDS if known.kind in KINDS[objective]))
        for name, known in FORMATS.items()
    )
    return _table(("format", "a row has", "for"), rows)


def _spellings() -> str:
    rows = ((_code(word.written.split(", ")), word.says) for word in SPELLINGS)
    return _table(("in the name", "what it means"), rows)


def _chat_templates() -> str:
    return _code(sorted(file.stem for file in (catalog.CONFIGS / "chat_templates").glob("*.jinja"))) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "models": _models,
    "families": _families,
    "chat templates": _chat_templates,
    "methods": _methods,
    "objectives": _objectives,
    "datasets": _datasets,
    "recipes": _recipes,
    "formats": _formats,
    "spellings": _spellings,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite docs/recipes.md")
    text = render(TARGET.read_text(encoding="utf-8"))
    if parser.parse_args().write:
        TARGET.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
