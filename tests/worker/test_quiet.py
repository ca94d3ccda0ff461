"""Libraries are quieted, unless the user asked them to speak."""

from __future__ import annotations

import json
import os
import subprocess
import sys

CODE = """
import json, os, warnings
from tuner.worker.quiet import quiet_libraries
quiet_libraries()
import transformers
warnings.warn("heard")
heard = [os.environ["TRANSFORMERS_VERBOSITY"], transformers.logging.get_verbosity(), os.environ["DS_LOG_LEVEL"]]
print(json.dumps(heard))
"""


def _quieted(**variables: str) -> tuple[list[object], str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONWARNINGS", "DS_LOG_LEVEL")}
    kept.pop("TRANSFORMERS_VERBOSITY", None)
    done = subprocess.run([sys.executable, "-c", CODE], env={**kept, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_libraries_tell_errors_alone() -> None:
    assert _quieted() == (["error", 40, "error"], "")


def test_deepspeed_does_not_report_that_there_is_no_gpu() -> None:
    code = "from tuner.worker.quiet import quiet_libraries\nquiet_libraries()\nimport deepspeed"
    kept = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}

    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )

    assert (done.returncode, done.stdout) == (0, "")


def test_what_the_user_asked_to_hear_is_heard() -> None:
    asked = {"TRANSFORMERS_VERBOSITY": "info", "DS_LOG_LEVEL": "debug", "PYTHONWARNINGS": "default::UserWarning"}

    found, told = _quieted(**asked)

    assert found == ["info", 20, "debug"]
    assert "UserWarning: heard" in told


def _spins(**variables: str) -> str:
    imports = "import os; from tuner.worker.quiet import quiet_libraries"
    code = f"{imports}; quiet_libraries(); print(os.getenv('GOMP_SPINCOUNT'))"
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "DS_ACCELERATOR")}
    done = subprocess.run([sys.executable, "-c", code], env={**kept, **variables}, capture_output=True, text=True)
    return done.stdout.strip()


def test_idle_threads_of_a_command_sleep_soon_unless_the_user_says_how_they_wait() -> None:
    assert _spins() == "1000"
    assert _spins(GOMP_SPINCOUNT="5") == "5"
    assert _spins(OMP_WAIT_POLICY="ACTIVE") == "None"
    assert _spins(DS_ACCELERATOR="cuda") == "None"
