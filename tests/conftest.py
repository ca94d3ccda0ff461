"""What every test shares: caches of its own, and no variable of a launcher."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_CACHE = Path(tempfile.gettempdir()) / f"tuner-tests-{os.getuid()}"
# Before any library reads them; prepared data is keyed by content, so one cache serves every run of the suite.
os.environ |= {"HF_HOME": str(_CACHE / "hf"), "TUNER_CACHE": str(_CACHE / "tuner"), "HF_HUB_OFFLINE": "1"}
# ORPO's trainer stands among TRL's experiments, which warn; a rank is hushed before it imports them.
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
# Several tests at once on a few cores: threads of one that wait for each other take twenty times as long (measured).
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _name in (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "NPROC_PER_NODE",
    "NNODES",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
):
    os.environ.pop(_name, None)
