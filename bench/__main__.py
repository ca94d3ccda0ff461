"""The suite: `python -m bench NAME ...`, where NAME is one of the measurements below or `all`.

    python -m bench all [--quick] [--rounds N] [--json DIR] [--markdown FILE] [--page docs/performance.md]
    python -m bench start --ranks 2        # what one takes beside these: python -m bench.start --help

Each measurement is a module with the same name and a `main`: it takes turns with its peers, prints one Markdown table,
and says on standard error what it is at. `--quick` tries each of them at a size whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

# The name of each measurement, and the arguments that make it quick.
SUITE: dict[str, tuple[str, ...]] = {
    "steps": ("--tiny", "--ranks", "1", "--dtypes", "bf16", "--methods", "full", "--steps", "6", "--rounds", "1"),
    "start": ("--tiny", "--ranks", "1", "--rounds", "1"),
    "counts": ("--levels", "2", "--methods", "full", "--peers", "loop", "tuner"),
    "data": ("--rows", "2000", "--rounds", "1"),
    "scale": ("--tiny", "--steps", "6"),
    "save": ("--tiny", "--ranks", "1", "--methods", "full", "--rounds", "1"),
    "light": ("--rounds", "1"),
    "simulate": ("--layers", "2"),
    "short": ("--rounds", "1"),
    "learn": ("--tiny", "--tool", "tuner"),
    "importer_losses": ("--tiny", "--steps", "3", "--condition", "without warm-up"),
    "runs": ("--runs", "20", "--lines", "5000", "--rounds", "1"),
}


def run(name: str, arguments: list[str]) -> str | None:
    """Run one measurement; return its table, or None where it failed."""
    done = subprocess.run([sys.executable, "-m", f"bench.{name}", *arguments], stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    return None if done.returncode else done.stdout


def placed(page: str, name: str, text: str) -> str:
    """Return a page with a measurement's machine and rows in its place; the page says itself what is compared."""
    _, _, table = text.strip().partition("\n\n")
    place = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return place.sub(lambda found: f"{found[1]}\n{table.strip()}\n\n{found[2]}", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=(*SUITE, "all"))
    parser.add_argument("--quick", action="store_true", help="small and once: does it run?")
    parser.add_argument("--rounds", type=int, help="turns of each")
    parser.add_argument("--json", type=Path, metavar="DIR", help="write each table there as NAME.json")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write all tables there, one below the other")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put each table in its place on this page")
    given, more = parser.parse_known_args()
    texts, failed = [], []
    for name in SUITE if given.name == "all" else (given.name,):
        arguments = [*(SUITE[name] if given.quick else ()), *more]
        arguments += ["--rounds", str(given.rounds)] if given.rounds else []
        arguments += ["--json", str(given.json / f"{name}.json")] if given.json else []
        text = run(name, arguments)
        texts.append(f"## {name}\n\n{text or 'This failed; the reason was on standard error.'}")
        failed += [] if text else [name]
        if text and given.page:
            page = placed(given.page.read_text(encoding="utf-8"), name, text)
            given.page.write_text(page, encoding="utf-8")
        if given.markdown:  # after each, so that an hour's figures do not wait for the last
            given.markdown.write_text("\n".join(texts), encoding="utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
