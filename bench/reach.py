"""How much of the code does a plain fine-tuning run pass through? Modules loaded and functions entered.

    python -m bench.reach                                   # SFT of the small model, three steps, launcher and rank
    python -m bench.reach train tiny_lora_sample_e1 --set max_steps=3

It starts the command with a profiler in each of its Python processes, and counts what is defined in `tuner/`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMAND = ("train", "tiny_full_sample_e1", "--set", "max_steps=3")
_PROFILER = """
import os, sys, threading

seen, root = set(), os.environ["REACH_ROOT"]  # accelerate clears the environment for a moment
log = open(os.environ["REACH_LOG"], "a", buffering=1)

def profile(frame, event, _):
    code = frame.f_code
    if event == "call" and code not in seen:
        seen.add(code)
        if code.co_filename.startswith(root):
            log.write(f"{code.co_filename}\\t{code.co_qualname}\\n")

sys.setprofile(profile)
threading.setprofile(profile)
"""


def entered(command: tuple[str, ...]) -> set[tuple[str, str]]:
    """Return (file below tuner/, qualified name) of each code object that the processes of a command enter."""
    package = ROOT / "tuner"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_PROFILER, encoding="utf-8")
        log = folder / "log"
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((name, str(ROOT))),
            "REACH_LOG": str(log),
            "REACH_ROOT": f"{package}/",
        }
        subprocess.run([sys.executable, "-m", "tuner", *command, "--work-dir", f"{name}/run"], env=env, check=True)
        lines = log.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("\t") for line in lines)
    return {(str(Path(file).relative_to(package)), function) for file, function in pairs}


def main() -> None:
    """Print the counts, and in which rooms the functions are."""
    codes = entered(tuple(sys.argv[1:]) or COMMAND)
    modules = {file for file, function in codes if function == "<module>"}
    functions = {(file, function) for file, function in codes if not function.rpartition(".")[2].startswith("<")}
    bodies = {(file, function) for file, function in functions if not _is_class(file, function)}
    rooms = Counter(Path(file).parts[0].removesuffix(".py") for file, _ in bodies)
    print(f"{len(modules)} modules loaded, {len(bodies)} functions entered")
    print(", ".join(f"{room} {count}" for room, count in rooms.most_common()))


def _is_class(file: str, name: str) -> bool:
    """Return whether a qualified name is that of a class: its body runs when the module is loaded."""
    text = (ROOT / "tuner" / file).read_text(encoding="utf-8")
    return f"class {name.rpartition('.')[2]}" in text


if __name__ == "__main__":
    main()
