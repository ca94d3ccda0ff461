"""Open MPI's mpirun over a real ssh between hosts: one is cut off."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Host
from tests.cluster.test_hostfile import SSHD, reachable
from tests.cluster.test_meeting import TRAINS_S
from tests.e2e.runs import environment, quick, wait_until, written_lines
from tuner.launch.checks.host import KEEPALIVE

pytestmark = pytest.mark.skipif(
    not (SSHD and shutil.which("ssh") and shutil.which("mpirun")), reason="no mpirun, or no sshd and ssh"
)


def test_mpirun_ends_after_a_cut_with_the_options_that_tuner_asks_for(hosts: list[Host], tmp_path: Path) -> None:
    log, run = tmp_path / "log.txt", tmp_path / "run"
    mca = {"oob_tcp_if_include": "eth0", **KEEPALIVE}
    with reachable(hosts, tmp_path / "ssh") as ssh, log.open("w") as stream:
        words = ["mpirun", "--allow-run-as-root", "-np", 2, "--host", "h0:1,h1:1", "-mca", "plm_rsh_agent", ssh]
        words += [word for name, value in mca.items() for word in ("-mca", name, value)]
        words += ["-x", "PATH", "-x", "PYTHONPATH", "-x", f"MASTER_ADDR={hosts[0].address}"]
        words += [sys.executable, "-m", "tuner", "train", quick(tmp_path, "full"), "--work-dir", run, "--launcher"]
        words += ["mpi", "--deepspeed", "zero2", "--set", "max_steps=100000", "--set", "checkpoint.interval=100"]
        path = os.environ.get("PYTHONPATH", "")
        mpirun = subprocess.Popen(
            hosts[0].inside(*words), env=environment(PYTHONPATH=path), stdout=stream, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            wait_until(lambda: written_lines(run / "metrics.jsonl") >= 3 or mpirun.poll() is not None, TRAINS_S)
            assert mpirun.poll() is None, log.read_text()
            hosts[1].cut()
            cut_s = time.monotonic()

            assert mpirun.wait(180) != 0
            print(f"ended after {time.monotonic() - cut_s:.0f} s")
        finally:
            subprocess.run(hosts[0].inside("pkill", "-9", "mpirun"), check=False)
    assert re.search(r"lost communication with a remote daemon|Remote daemon:.* on node h1", log.read_text())
    assert "oob_tcp_keepalive_time" not in log.read_text(), "nothing to warn of"
