"""What every test shares: caches of its own, and no variable of a launcher."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_CACHE = Path(tempfile.gettempdir()) / f"tuner-tests-{os.getuid()}"
# Before any library reads them; prepared data is keyed by content, so one cache serves every run of the suite.
os.environ |= {"HF_HOME": str(_CACHE / "hf"), "TUNER_CACHE": str(_CACHE / "tuner"), "HF_HUB_OFFLINE": "1"}
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
