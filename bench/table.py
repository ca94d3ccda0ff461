"""One way to say what was measured: turns, medians, the machine, and a table as Markdown and as JSON.

Every measurement of the suite prints its table to standard output and nothing else there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

LIBRARIES = ("torch", "deepspeed", "transformers", "trl", "accelerate", "peft", "datasets", "tuner")
NOT_INSTALLED = "not installed"
_WRAPPERS = ("ChildFailedError", "CalledProcessError")
"""Errors that only say that a process below has failed."""
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Spent:
    """Seconds of the wall, and of the processor; where they drift apart between peers, the machine was not quiet."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.3f} ({self.cpu:.3f})"

    def over(self, floor: Spent) -> str:
        """Return both as multiples of the floor's."""
        return f"{self.wall / floor.wall:.2f} ({self.cpu / floor.cpu:.2f})"


def median(found: Iterable[Spent]) -> Spent:
    walls, cpus = zip(*((spent.wall, spent.cpu) for spent in found), strict=True)
    return Spent(statistics.median(walls), statistics.median(cpus))


def in_turns(
    names: Iterable[str], rounds: int, measure: Callable[[str], list[Measured]]
) -> dict[str, list[Measured] | str]:
    """Measure A B C A B C, so that a busy moment hits all of them; return what each gave, all rounds together.

    A peer that raises `Unmeasured` has its message in the place of figures, and is not tried again.
    """
    found: dict[str, list[Measured] | str] = {name: [] for name in names}
    for number in range(rounds):
        for name, figures in found.items():
            if isinstance(figures, str):
                continue
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            try:
                figures += measure(name)
            except Unmeasured as reason:
                found[name] = str(reason)
    return found


def spent(command: list[str], **options: Any) -> Spent:
    """Run a command, and return what it took together with all that it waited for.

    Raises:
        Unmeasured: it failed.
    """
    began, before = time.perf_counter(), _of_children()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    found = Spent(time.perf_counter() - began, _of_children() - before)
    if done.returncode:
        raise failed(command[0], done.stdout)
    return found


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Unmeasured(Exception):
    """A peer has no figure here; the message is its row."""


def failed(tool: str, said: str) -> Unmeasured:
    """Return the reason why a tool has no figure, its own last error, and leave what it said on standard error."""
    print(f"{tool} failed:\n{said[-6000:]}", file=sys.stderr, flush=True)
    lines = [line for line in re.findall(r"\w*(?:Error|Exception): .*", said) if not line.startswith(_WRAPPERS)]
    return Unmeasured(f"failed: {lines[-1][:200]}" if lines else "failed")


@dataclass
class Table:
    """Rows of one measurement. A cell may be text, a number or `Spent`; a column that a row lacks is empty."""

    name: str
    what: str
    """What is compared, at which equal settings: one paragraph."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    where: str = ""
    """The machine and the versions of rows that another run has measured; empty: this machine, now."""

    def add(self, row: dict[str, Any]) -> None:
        """Take a row, and leave it on standard error at once: what comes later may be cut off."""
        self.rows.append(row)
        print(grid([row]), file=sys.stderr, flush=True)

    def markdown(self) -> str:
        """Return the paragraph, the machine, and the rows."""
        return f"{self.what}\n\n{self.where or machine_line()}\n\n{grid(self.rows)}\n"

    def to_json(self) -> str:
        rows = [{name: _plain(value) for name, value in row.items()} for row in self.rows]
        facts = {"name": self.name, "what": self.what, "machine": machine(), "versions": versions(), "rows": rows}
        return json.dumps(facts, indent=2) + "\n"

    def show(self, file: Path | None) -> None:
        """Print the table, and write it down as JSON where a file is given."""
        print(self.markdown(), flush=True)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.to_json(), encoding="utf-8")


def grid(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table, in the order in which columns first come."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_text(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _text(value: Any) -> str:
    text = f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def machine() -> dict[str, Any]:
    """Return what the figures depend on; the load tells of a machine that others used when it began."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "gpus": [gpu.name for gpu in _gpus()],
        "load": round(os.getloadavg()[0], 1),
    }


def processor() -> str:
    """Return the processor's name as the kernel has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> tuple[Any, ...]:
    from tuner.machine import hardware

    return tuple(hardware.detect(os.environ).gpus)


def versions(distributions: Iterable[str] = LIBRARIES) -> Mapping[str, str]:
    found = {"python": platform.python_version()}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine_line() -> str:
    facts = machine()
    gpus = ", ".join(facts["gpus"]) or "no GPU"
    where = f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gb']} GB, {gpus}"
    return f"{where}; load {facts['load']}; " + ", ".join(f"{name} {version}" for name, version in versions().items())


def summary(doc: str | None) -> str:
    """Return the paragraph of a module's docstring below its command, for `Table.what`."""
    return " ".join((doc or "").split("\n\n")[2].split())


def arguments(doc: str | None, rounds: int, *, has_tiny: bool = False) -> argparse.ArgumentParser:
    """Return a parser with what every measurement takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="how often each takes its turn; %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    if has_tiny:
        parser.add_argument("--tiny", action="store_true", help="a small random model: to try the measurement itself")
    return parser
