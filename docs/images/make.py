"""Makes the README's pictures of a real run: the terminal as SVG, and a screenshot of the run's report.

    python docs/images/make.py            # trains SmolLM2-135M-Instruct with LoRA on 135 rows: minutes on two cores
    python docs/images/make.py RUN        # the report of a run that is there already

The model and the rows are those of `make real`. The screenshot needs Chromium (or Chrome) on PATH. What the terminal
shows is what the command printed, to the letter; the number of steps that it announces is the number that it trains.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WIDTH = 120
"""Columns of the terminal."""
TRAIN = (
    "tuner", "train", "./SmolLM2-135M-Instruct", "--data", "python.jsonl", "--val", "python.val.jsonl",
    "--max-steps", "60", "--set", "log.interval=10",
)  # fmt: skip
"""With --max-steps the number of steps is exact before the data is tokenized."""
HELD_OUT = 20
"""Rows that are validated on, before and after."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = "1280,1300"
"""Pixels of the report that are shown."""
_ANNOUNCED = re.compile(r"\bsteps: (?:about )?([\d,]+)")
_SHOWN = re.compile(r"\bstep ([\d,]+)/([\d,]+)")


def lay_out(folder: Path) -> None:
    """Put the model and the rows where the command names them."""
    sys.path.insert(0, str(ROOT))
    from tests.real import files, model

    real = model.folder()
    subprocess.run([sys.executable, "-m", "tests.real"], cwd=ROOT, check=True)
    (folder / "SmolLM2-135M-Instruct").symlink_to(model.prepare(real))
    rows, held_out = (
        path.read_text(encoding="utf-8").splitlines(keepends=True) for path in files.paths(real, "docs-135")
    )
    (folder / "python.jsonl").write_text("".join(rows), encoding="utf-8")
    (folder / "python.val.jsonl").write_text("".join(held_out[:HELD_OUT]), encoding="utf-8")


def record(run: Path) -> None:
    """Train, and write what the terminal showed."""
    shown = [*TRAIN, "--output-dir", run.name]
    # FORCE_COLOR: the output goes through a pipe, so that a progress bar does not draw over itself.
    env = {**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", *shown],
        cwd=run.parent,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed = Text.from_ansi(done.stdout)
    if done.returncode or not steps_agree(printed.plain):
        sys.exit(done.stdout)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text("$ " + " ".join(shown), style="bold"))
    console.print(printed)
    svg = console.export_svg(title="tuner")
    # An image in a page may load nothing: the font would be fetched from a CDN, in vain.
    (HERE / "terminal.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")


def steps_agree(printed: str) -> bool:
    """Return whether a run made the number of steps that it had announced."""
    announced, shown = _ANNOUNCED.findall(printed), _SHOWN.findall(printed)
    return bool(announced and shown) and {announced[0]} == {total for _, total in shown} == {shown[-1][0]}


def photograph(run: Path) -> None:
    """Write a screenshot of a run's report."""
    subprocess.run([sys.executable, "-m", "tuner", "report", run], check=True)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"None of {', '.join(BROWSERS)} is on PATH.")
    flags = ["--headless", "--hide-scrollbars", f"--window-size={SIZE}", f"--screenshot={HERE / 'report.png'}"]
    if os.getuid() == 0:
        flags.append("--no-sandbox")  # Chromium does not start as root otherwise, as in a container
    # uPlot draws after the page has loaded.
    subprocess.run(
        [browser, *flags, "--virtual-time-budget=10000", f"file://{run / 'report.html'}"],
        check=True,
        capture_output=True,
    )


def main() -> None:
    """Make both pictures, or that of the report alone."""
    if len(sys.argv) > 1:
        photograph(Path(sys.argv[1]).absolute())
        return
    folder = Path(tempfile.gettempdir()) / "pictures"  # the report shows where the run is
    folder.mkdir()
    try:
        lay_out(folder)
        record(folder / "my-run")
        photograph(folder / "my-run")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
