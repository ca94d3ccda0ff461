"""What a model learns from a fine-tuning run of each tool, and what that takes: held-out loss, steps, time, memory.

    python -m bench learn                                          # docs-135, LoRA, each tool at its own defaults
    python -m bench learn --data docs-1000 --method full --tool trl axolotl --settings equal
    python -m bench learn --tool tuner --set lora_dropout=0        # options in the tool's own names
    python -m bench learn --only-show --draw docs/images --page docs/learning.md

The model and the rows are those of `make real`. Each tool trains in a cell of its own, and one ruler (bench/ruler.py)
measures every result in fp32: the loss of the answers' tokens in held-out rows, and for short answers the share that
greedy decoding gives to the letter. Seconds are the whole command's, of the wall and in brackets of the processor;
memory is that of the largest process. The seconds in which the measurement itself writes weights for the curve are
subtracted.

Each cell is a line of --results as soon as it ends. A cell that has a line there is not run again, unless --again is
set.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import curves
from bench.fine_tuning import EQUAL, EQUAL_SETTINGS, METHODS, OWN, TOOLS, Task
from bench.table import Table, Unmeasured, arguments, failed, machine, summary, versions
from bench.tools import NAMES, ROOT, surroundings, ticks
from tuner import assets
from tuner.machine import hardware

DATA = ("docs-135", "docs-1000", "short-10000", "pairs")
EXACT_ROWS = {"short-10000": 100}
"""Rows held out that are also answered, for data with short answers."""
FIRST_SEED = 42
MODEL = "smollm2"


@dataclass(frozen=True)
class Cell:
    """One run of one tool. `max_rows` and `max_seconds` cut it short, and the table says so."""

    data: str
    method: str
    settings: str
    tool: str
    epochs: int = 3
    seed: int = FIRST_SEED
    max_rows: int | None = None
    max_seconds: float | None = None
    held_out_rows: int | None = None
    """The result is measured on the first of the rows held out; None: on all."""
    changes: tuple[str, ...] = ()
    """KEY=VALUE in the tool's own names."""

    def __str__(self) -> str:
        return " ".join(
            str(value) for value in (self.data, self.method, self.settings, NAMES[self.tool], *self.changes)
        )


class Results:
    """The file of lines: one for each cell that was run; the last one of a cell counts."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        self.records: dict[Cell, dict[str, Any]] = {}
        for record in map(json.loads, lines):
            self.records[_cell(record["cell"])] = record

    def add(self, cell: Cell, record: dict[str, Any]) -> None:
        """Write a cell's line at once: what comes later may be cut off."""
        self.records[cell] = {"cell": asdict(cell), **record}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(self.records[cell]) + "\n")

    def before(self, held_out: str) -> dict[str, float] | None:
        """Return the untrained model's figures on these rows, if a line has them."""
        known = (record["before"] for record in self.records.values() if record.get("held_out") == held_out)
        return next(known, None)


def _cell(values: dict[str, Any]) -> Cell:
    return Cell(**values | {"changes": tuple(values["changes"])})


def run(cell: Cell, real: Path, before: dict[str, float] | None, curve: bool = True) -> dict[str, Any]:
    """Train with one tool; return what it took and how well its result answers, with `curve` also after some steps.

    Raises:
        Unmeasured: the tool is not installed, or failed.
    """
    with tempfile.TemporaryDirectory(prefix=f"{cell.tool}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        rows, held_out = folder / "train.jsonl", folder / "held-out.jsonl"
        rows.write_text(first_lines(real / f"{cell.data}.jsonl", cell.max_rows), encoding="utf-8")
        held_out.write_text(first_lines(real / f"{cell.data}.val.jsonl", cell.held_out_rows), encoding="utf-8")
        changes = dict(change.split("=", 1) for change in cell.changes)
        cpu = not hardware.detect({}).gpus
        task = Task(real / MODEL, rows, cell.epochs, cell.method, cell.settings, cell.seed, cpu, changes)
        asked, clock = TOOLS[cell.tool](task, folder), folder / "clock.jsonl"
        env = surroundings(asked.command, 1, cell.tool)
        env |= {"BENCH_CLOCK": str(clock)} | ({"BENCH_SNAPSHOTS": str(folder / "snapshots")} if curve else {})
        env |= {"BENCH_STOP_S": str(cell.max_seconds)} if cell.max_seconds else {}
        wall, cpu_s, peak = took(asked.command.argv, env, folder)
        if not clock.is_file():
            raise Unmeasured("it ended well, but took no step")
        steps = ticks(clock)
        aside = sum(step.aside_wall for step in steps), sum(step.aside_cpu for step in steps)
        measured = measure(
            real / MODEL, held_out, asked.result, folder / "snapshots", EXACT_ROWS.get(cell.data, 0), rows
        )
        if before is None:
            base = measure(real / MODEL, held_out, real / MODEL, folder / "none", EXACT_ROWS.get(cell.data, 0), rows)
            before = base["after"]
        between = steps[-1].wall - steps[0].wall - sum(step.aside_wall for step in steps[:-1])
        return {
            "held_out": fingerprint(held_out.read_text(encoding="utf-8")),
            "tokens": measured["tokens"],
            "steps": len(steps),
            "max_steps": steps[-1].max_steps,
            "before": before,
            "after": measured["after"],
            "curve": measured["curve"],
            "wall_s": round(wall - aside[0], 1),
            "cpu_s": round(cpu_s - aside[1], 1),
            "training_s": round(between * len(steps) / max(1, len(steps) - 1), 1),
            "peak_bytes": peak,
            "beside": asked.beside,
            "threads": int(env["OMP_NUM_THREADS"]),
            "machine": machine(),
            "versions": versions(),
            "commit": commit(),
        }


def took(argv: list[str], env: dict[str, str], folder: Path) -> tuple[float, float, int]:
    """Run a command; return its seconds of the wall and of the processor, and the most memory that one process held.

    This process stays small, because the kernel counts what a process held before it became the command.

    Raises:
        Unmeasured: it failed.
    """
    began = time.perf_counter()
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    if process.returncode:
        raise failed(argv[0], (folder / "output.txt").read_text(errors="replace"))
    return wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def measure(base: Path, held_out: Path, result: Path, snapshots: Path, exact_rows: int, rows: Path) -> dict[str, Any]:
    """Return what the ruler says, in a process of its own."""
    argv = [sys.executable, "-m", "bench.ruler", base, held_out, result, snapshots, exact_rows, rows]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, env=env)
    if done.returncode:
        raise failed("bench.ruler", done.stderr)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def first_lines(file: Path, number: int | None) -> str:
    """Return the first lines of a file, or all."""
    with file.open(encoding="utf-8") as lines:
        return "".join(itertools.islice(lines, number))


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def commit() -> str:
    """Return which tuner was measured, empty where it is no checkout."""
    argv = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()


def tiny(folder: Path) -> Path:
    """Write a small random model and few rows in the places of the real ones, to try the measurement itself."""
    from bench.jobs import make_model, of_catalog

    make_model(folder / MODEL, of_catalog("tiny"))
    for name, split, num_rows in (("", "train", 64), (".val", "validation", 16)):
        with Path(assets.asset(f"package:sample/{split}.jsonl")).open(encoding="utf-8") as lines:
            (folder / f"{DATA[0]}{name}.jsonl").write_text("".join(itertools.islice(lines, num_rows)), encoding="utf-8")
    return folder


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield what is asked for; tools take turns within a setting."""
    seeds = range(FIRST_SEED, FIRST_SEED + options.rounds)
    limits = options.max_rows, options.max_seconds, options.held_out_rows
    each = itertools.product(options.data, options.method, options.settings, seeds, options.tool)
    for data, method, settings, seed, tool in each:
        yield Cell(data, method, settings, tool, options.epochs, seed, *limits, tuple(options.set))


def table(records: Iterable[dict[str, Any]]) -> Table:
    """Return all that was measured, with the machine that it was measured on."""
    records = sorted(records, key=_place)
    what = f"{summary(__doc__)} The equal settings: {EQUAL_SETTINGS}."
    places = sorted({_where(record) for record in records if "machine" in record})
    return Table("learn", what, [row(record) for record in records], " ".join(places))


def _place(record: dict[str, Any]) -> tuple[int, ...]:
    """Return where a record stands in the table: tools of one setting together."""
    orders = {"data": DATA, "method": METHODS, "settings": (OWN, EQUAL), "tool": tuple(TOOLS)}
    return tuple(order.index(record["cell"][name]) for name, order in orders.items())


def _where(record: dict[str, Any]) -> str:
    here, libraries = record["machine"], record["versions"]
    gpus = ", ".join(here["gpus"]) or "no GPU"
    threads = f"{record['threads']} thread{'s' * (record['threads'] > 1)}"
    where = f"{here['processor']}, {here['cores']} cores, {here['memory_gb']} GB, {gpus}; {threads}; "
    return where + ", ".join(f"{name} {version}" for name, version in libraries.items()) + "."


def row(record: dict[str, Any]) -> dict[str, Any]:
    """Return one line of the table."""
    cell = _cell(record["cell"])
    name = NAMES[cell.tool] + "".join(f" `{change}`" for change in cell.changes)
    shortened = [f"first {cell.max_rows:,} rows"] if cell.max_rows else []
    shortened += [f"measured on {cell.held_out_rows:,}"] if cell.held_out_rows else []
    shown: dict[str, Any] = {
        "data": ", ".join([cell.data, *shortened]),
        "method": cell.method,
        "settings": cell.settings + (f", seed {cell.seed}" if cell.seed != FIRST_SEED else ""),
        "tool": name,
        "epochs": cell.epochs,
    }
    if "failed" in record:
        return shown | {"steps": record["failed"]}
    before, after = record["before"], record["after"]
    shown["steps"] = record["steps"]
    if record["steps"] < record["max_steps"]:
        shown["steps"] = f"{record['steps']:,} of {record['max_steps']:,}"
    for figure in after:
        if figure in curves.FIGURES:
            shown[curves.FIGURES[figure]] = f"{before[figure]:.3f} → {after[figure]:.3f}"
    shown["the whole command, s"] = f"{record['wall_s']:,.0f} ({record['cpu_s']:,.0f})"
    shown["training, s / 1,000 tokens"] = f"{1000 * record['training_s'] / trained_tokens(record):.2f}"
    shown["memory, GB"] = f"{record['peak_bytes'] / 1e9:.1f}"
    shown["what was set"] = "the equal settings" if cell.settings == EQUAL else record["beside"]
    return shown


def trained_tokens(record: dict[str, Any]) -> float:
    """Return the tokens of the rows in the chat template, of all epochs, or of the part that was trained."""
    part = record["steps"] / record["max_steps"] if record["max_steps"] else 1
    return float(record["tokens"] * record["cell"]["epochs"] * part)


def main() -> None:
    parser = arguments(__doc__, rounds=1, has_tiny=True)
    parser.add_argument("--real", type=Path, default=ROOT / "build" / "real", metavar="FOLDER", help="of `make real`")
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA[:1]))
    parser.add_argument("--method", nargs="+", choices=METHODS, default=["lora"])
    parser.add_argument("--settings", nargs="+", choices=(OWN, EQUAL), default=[OWN], help="own: the tool's defaults")
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option in the tool's own names"
    )
    parser.add_argument("--max-rows", type=int, metavar="N", help="train on the first N rows alone")
    parser.add_argument("--max-seconds", type=float, metavar="S", help="stop after the step at which training took S")
    parser.add_argument("--held-out-rows", type=int, metavar="N", help="measure on the first N rows held out alone")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "learning.jsonl", metavar="FILE")
    parser.add_argument("--again", action="store_true", help="run cells that have a line in --results too")
    parser.add_argument("--no-curve", action="store_true", help="measure the results alone, not the steps before")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="write the curves there, learning-DATA-METHOD.svg")
    parser.add_argument("--only-show", action="store_true", help="run nothing; show what is in --results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="learn-") as scratch:
        if options.tiny:
            options.real, options.results, options.epochs = tiny(Path(scratch)), Path(scratch) / "results.jsonl", 1
        results = Results(options.results)
        for cell in () if options.only_show else cells(options):
            if cell in results.records and not options.again:
                continue
            if not (options.real / MODEL).is_dir():
                sys.exit(f"no model in {options.real}: `make real` prepares it, or name its folder with --real")
            print(f"learn: {cell}", file=sys.stderr, flush=True)
            try:
                held_out = fingerprint(first_lines(options.real / f"{cell.data}.val.jsonl", cell.held_out_rows))
                results.add(cell, run(cell, options.real, results.before(held_out), not options.no_curve))
            except Unmeasured as reason:
                results.add(cell, {"failed": str(reason)})
        table(results.records.values()).show(options.json)
        if options.draw:
            curves.draw(results.records.values(), options.draw)


if __name__ == "__main__":
    main()
