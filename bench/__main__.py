"""`python -m bench NAME ...`: run one of the suite's measurements; a name alone with --help says what it takes."""

from __future__ import annotations

import sys
from importlib import import_module

SUITE = ("steps",)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in SUITE:
        sys.exit(f"usage: python -m bench {{{','.join(SUITE)}}} ...")
    name = sys.argv.pop(1)
    import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()
