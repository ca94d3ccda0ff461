"""What every test shares: caches of its own, and no variable of a launcher."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
import pytest_randomly
from hypothesis import HealthCheck, settings

from tests.real import model
from tests.real.__main__ import MISSING
from tuner import hooks

gc.disable()  # while the libraries are imported and tests collected: next to nothing of that is garbage
# How fast inputs are made says how busy the machine is. Each run of the suite tries other examples.
settings.register_profile("any-machine", suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=30)
settings.load_profile("any-machine")


def _seed_torch(seed: int) -> None:
    """Seed torch, if it is imported, before a test is set up, called and torn down."""
    if torch := sys.modules.get("torch"):
        # Without a GPU, torch.manual_seed notes the whole stack for later: 1 to 4 ms (torch 2.13).
        seed_all = torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed
        seed_all(seed % 2**63)


# DeepSpeed's, which it stands in for, imports torch for every test and calls torch.manual_seed.
pytest_randomly.entrypoint_reseeds = [_seed_torch]
ROOT = Path(__file__).parents[1]
_CACHE = Path(tempfile.gettempdir()) / f"tuner-tests-{os.getuid()}"
# Before any library reads them; prepared data is keyed by content, so one cache serves every run of the suite.
os.environ |= {"HF_HOME": str(_CACHE / "hf"), "TUNER_CACHE": str(_CACHE / "tuner"), "HF_HUB_OFFLINE": "1"}
# ORPO's trainer stands among TRL's experiments, which warn; a rank quiets it before it imports them.
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
# Several tests at once on a few cores: threads of one that wait for each other take twenty times as long (measured).
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # for processes that set the number of threads themselves
# What a test writes need not outlive a power failure, and the disk takes milliseconds each time.
os.fsync = lambda _: None
# accelerate reads those of twenty packages for each trainer, and each takes milliseconds.
metadata.metadata = functools.cache(metadata.metadata)
# Under nohup, or in the background of a script, they are ignored, and what a test starts would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="Write the screens of tests/golden anew.")


def pytest_collection_finish() -> None:
    """What the libraries made when they were imported stays: no collection of garbage looks at it again."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What is there at the end of a module mostly stays: each full collection would look at it again."""
    if nextitem and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no model that a plan has no formula for: each takes seconds. A module that wants it overrides this."""
    monkeypatch.setattr(hooks, "measurement_of", lambda *_: hooks.Measurement(None, "this test measures nothing"))
    monkeypatch.setattr(hooks, "trial_of", lambda *_: hooks.Trial(None, "this test tries nothing"))


@pytest.fixture(autouse=True)
def a_fresh_process() -> Iterator[None]:
    """Put back what a command leaves of its process: the signals, and the variables that quiet the libraries.

    Under Slurm `tuner train` blocks a signal until its process becomes a rank; here it becomes none.
    """
    mask, handler = signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGTERM)
    variables = dict(os.environ)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGTERM, handler)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's own folder, in which it is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def real() -> Path:
    """Return the folder of `make real`: a pretrained model in smollm2, and files of real rows."""
    folder = model.folder()
    done = subprocess.run([sys.executable, "-m", "tests.real", str(folder)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == MISSING:
        pytest.skip(f"skipped: {done.stderr.strip().splitlines()[-1]}")
    assert not done.returncode, done.stderr
    return folder


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return what mounts a small file system in memory with the given options; root passes permission bits, not it."""
    folders: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / "mounted"
        folder.mkdir()
        if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]).returncode:
            pytest.skip("mounting needs root")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", folder], check=True)
