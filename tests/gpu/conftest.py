"""Tests on real NVIDIA GPUs, skipped where there are too few of them."""

from __future__ import annotations

import os

import pytest

from tuner.machine import hardware
from tuner.machine.hardware import Hardware


@pytest.fixture(scope="session")
def machine() -> Hardware:
    """Return this machine, which has a GPU."""
    found = hardware.detect(os.environ)
    if not found.gpus:
        pytest.skip("no NVIDIA GPU is visible")
    return found


@pytest.fixture(scope="session")
def two_gpus(machine: Hardware) -> Hardware:
    if len(machine.gpus) < 2:
        pytest.skip("it needs two GPUs, and one is visible")
    return machine
