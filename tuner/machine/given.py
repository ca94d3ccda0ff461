"""What flags and variables say of where a run is launched, side by side: they may repeat each other, not contradict.

It decides nothing; what follows from it is `topology`'s work.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.errors import UsageError
from tuner.machine import slurm

VARIABLES = {
    "--nproc-per-node": ("NPROC_PER_NODE",),
    "--nnodes": ("NNODES",),
    "--node-rank": ("NODE_RANK",),
    "--master-addr": ("ADDR", "MASTER_ADDR"),
    "--master-port": ("PORT", "MASTER_PORT"),
}
"""The variables that say the same as a flag."""
_MAX_COUNT = 1 << 20

Said = dict[str, dict[str, str]]
"""By flag, all that says the same: its name and its value."""


def of(flags: Mapping[str, object], environ: Mapping[str, str], cluster: Said | None = None) -> Said:
    """Return by flag all that says the same: the flag itself (None: not given), its variables, and a cluster's."""
    said: Said = {}
    for name, variables in VARIABLES.items():
        flag = flags[name.removeprefix("--").replace("-", "_")]
        said[name] = {} if flag in (None, "") else {name: str(flag)}
        said[name] |= {variable: environ[variable] for variable in variables if environ.get(variable)}
        said[name] |= (cluster or {}).get(name, {})
    return said


def text(said: Said, name: str) -> str | None:
    """Return what is said of a flag.

    Raises:
        UsageError: two contradict each other.
    """
    if len(set(said[name].values())) > 1:
        shown = " and ".join(f"{key}={value}" for key, value in said[name].items())
        raise UsageError(f"{shown} contradict each other", where=name, fix="Keep one of them.")
    return next(iter(said[name].values()), None)


def count(said: Said, name: str, *, minimum: int = 1, maximum: int = _MAX_COUNT) -> int | None:
    """Return the count that is said of a flag.

    Raises:
        UsageError: as `text`, or it is no count in these limits.
    """
    found = text(said, name)
    if found is None:
        return None
    if not slurm.COUNT.fullmatch(found) or not minimum <= int(found) <= maximum:
        fix = f"Write a whole number from {minimum} to {maximum}."
        raise UsageError(f"{found!r} is not a count that fits", where=where(name, *said[name]), fix=fix)
    return int(found)


def where(name: str, *others: str) -> str:
    """Return a flag with the variables that say the same."""
    return " / ".join(dict.fromkeys((name, *VARIABLES[name], *others)))
