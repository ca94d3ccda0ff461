"""What the ten most used commands print in a terminal of 80 and of 120 columns, line for line.

`make golden` writes the screens anew; read their difference before it is committed.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click import unstyle

from tests.launch.plans import written_run
from tests.machine.gpus import CPU
from tuner import cli, progress
from tuner.machine import hardware
from tuner.runs.records import RunStatus

SCREENS = Path(__file__).parent / "screens"
PACKAGE = Path(cli.__file__).parents[1]
RECIPE = "tiny_lora_sample_e1"
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "help": ("--help",),
    "train-help": ("train", "--help"),
    "train-dry-run": ("train", RECIPE, "--dry-run"),
    "list": ("list", "qwen3_0_6b"),
    "show": ("show", RECIPE, "--lr", "1e-4"),
    "plan-gpu": ("plan", "phi4*", "--gpu", "rtx4090"),
    "plan": ("plan", "qwen3_8b_qlora_alpaca_e1", "--gpu", "h100", "--gpus", "8", "--host-memory", "512GB"),
    "runs": ("runs",),
    "check": ("check", RECIPE),
    "data": ("data", RECIPE, "--samples", "1"),
    "mistake": ("train", RECIPE, "--set", "learning_rat=1e-4", "--dry-run"),
}
FACTS = {
    r"\d{8}_\d{6}": "TIME",
    r"\b\d+ s ago": "N s ago",
    r"(?m)^(  PATH=).*": r"\1...",
    r"tuner-tests-\d+": "tuner-tests",
    r"(configs/[\w/]+\.py):\d+": r"\1:N",
}
"""What differs from one machine, one moment or one key of the package's own files to the next."""

Screen = Callable[..., str]


class Terminal(io.StringIO):
    """What standard output and standard error are both shown on."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Return what shows a command in a terminal of so many columns, on a machine of which nothing is left open."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "detect", lambda _: CPU)
    monkeypatch.setattr(hardware, "available_host_bytes", lambda: CPU.host_memory_bytes)
    monkeypatch.setattr(progress, "AFTER_S", 1e6)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def show(width: int, *arguments: str) -> str:
        terminal = Terminal()
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "argv", ["tuner", *arguments])
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        text = unstyle(terminal.getvalue())
        for path, name in ((tmp_path, "/home/me"), (sys.executable, "python"), (PACKAGE, "tuner")):
            text = text.replace(str(path), name)
        for pattern, replacement in FACTS.items():
            text = re.sub(pattern, replacement, text)
        lines = [line.rstrip() for line in text.splitlines()]
        return "\n".join([f"$ tuner {' '.join(arguments)}", *lines, *([f"[exit code {code}]"] if code else []), ""])

    return show


def two_runs() -> None:
    for name, state, loss in (("20260102_030405", "done", 1.25), ("20260103_040506", "failed", 2.5)):
        run = written_run(Path(f"work_dirs/{RECIPE}/{name}").absolute(), recipe=RECIPE)
        run.log_metrics({"step": 40, "loss": loss, "tokens_per_second": 4321.0, "num_tokens": 10_000.0})
        run.write_status(RunStatus(state=state, exit_code=int(state != "done"), message="the loss is nan at step 41."))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_screen_is_as_it_was_looked_at(screen: Screen, name: str, width: int, request: pytest.FixtureRequest) -> None:
    if name == "runs":
        two_runs()

    shown = screen(width, *COMMANDS[name])

    golden = SCREENS / f"{name}-{width}.txt"
    if request.config.getoption("--update-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8"), "make golden writes the screens anew"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"train-dry-run", "data", "mistake"}))  # which quote paths
def test_no_line_of_a_screen_is_wider_than_the_terminal(name: str, width: int) -> None:
    text = (SCREENS / f"{name}-{width}.txt").read_text(encoding="utf-8")

    assert [line for line in text.splitlines()[1:] if len(line) > width] == []
