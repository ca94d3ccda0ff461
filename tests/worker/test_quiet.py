"""Libraries are quieted, unless the user asked them to speak."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.e2e.warm import warm

SAYS = """
import json, os, sys, warnings
from tuner.worker.quiet import quiet_libraries
quiet_libraries()
import transformers
warnings.warn("heard")
heard = [os.environ["TRANSFORMERS_VERBOSITY"], transformers.logging.get_verbosity(), os.environ["DS_LOG_LEVEL"]]
print(json.dumps(heard))
"""
LOOKS_FOR_A_GPU = """
from deepspeed.accelerator import real_accelerator
real_accelerator.ds_accelerator = None  # as if nobody had asked for it
print(real_accelerator.get_accelerator()._name)
"""
SPINS = """
import os
from tuner.worker.quiet import quiet_libraries
quiet_libraries()
print(os.getenv("GOMP_SPINCOUNT"))
"""
SET_BY_USERS = ("PYTHONWARNINGS", "DS_LOG_LEVEL", "TRANSFORMERS_VERBOSITY", "GOMP_SPINCOUNT", "DS_ACCELERATOR")


def _environ(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in SET_BY_USERS}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", **variables}


def test_libraries_tell_errors_alone() -> None:
    done = warm().run([], code=SAYS, env=_environ())

    assert (json.loads(done.stdout), done.stderr) == (["error", 40, "error"], "")


def test_deepspeed_does_not_report_that_there_is_no_gpu() -> None:
    done = warm().run([], code=LOOKS_FOR_A_GPU, env=_environ())

    assert (done.stdout, done.stderr) == ("cpu\n", "")


def test_what_the_user_asked_to_hear_is_heard() -> None:
    asked = {"TRANSFORMERS_VERBOSITY": "info", "DS_LOG_LEVEL": "debug", "PYTHONWARNINGS": "default::UserWarning"}

    # Python and transformers read them when they start: a process of its own.
    done = subprocess.run([sys.executable, "-c", SAYS], env=_environ(**asked), capture_output=True, text=True)

    assert json.loads(done.stdout) == ["info", 20, "debug"]
    assert "UserWarning: heard" in done.stderr


def _spins(**variables: str) -> str:
    return warm().run([], code=SPINS, env=_environ(**variables)).stdout.strip()


def test_idle_threads_of_a_command_sleep_soon_unless_the_user_says_how_they_wait() -> None:
    assert _spins() == "1000"
    assert _spins(GOMP_SPINCOUNT="5") == "5"
    assert _spins(OMP_WAIT_POLICY="ACTIVE") == "None"
    assert _spins(DS_ACCELERATOR="cuda") == "None"
