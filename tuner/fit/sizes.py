"""Sizes as people write them: '80GB', '1.5 TiB', '400Gb/s'; `files.sized` prints them.

It knows nothing of models or machines.
"""

from __future__ import annotations

import re

from tuner.errors import UsageError

GIB = 1024**3
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_NUMBER = r"(?P<number>[0-9]{1,15}(\.[0-9]{1,15})?)"
_SIZE = rf"{_NUMBER} *(?P<prefix>[KMGTP]?)(?P<binary>i?)(?P<unit>B?)"
_RATE = rf"((?P<links>[1-9][0-9]{{0,2}}) *x *)?{_NUMBER} *(?P<prefix>[KMGT]?)(?P<unit>[Bb])(it)?(/s|ps)"


def parse_bytes(text: str, where: str) -> int:
    """Return the bytes that `text` means: GB is 10^9, GiB is 2^30; a plain number is in GB.

    Raises:
        UsageError: it is no size, or not above 0.
    """
    match = re.fullmatch(_SIZE, text.strip(), re.IGNORECASE)
    if not match:
        raise UsageError(f"{text!r} is not a size", where=where, fix="Use a size such as 80GB or 80GiB.")
    prefix = match["prefix"].upper() or ("" if match["unit"] else "G")
    size = int(float(match["number"]) * (1024 if match["binary"] else 1000) ** _PREFIXES[prefix])
    if not size:
        raise UsageError(f"{text!r} is not more than 0", where=where, fix="Use a size such as 80GB.")
    return size


def parse_rate(text: str, where: str) -> float:
    """Return bytes per second: 'b' are bits, 'B' are bytes, '8x400Gb/s' are eight links.

    Raises:
        UsageError: it is no rate, or not above 0.
    """
    match = re.fullmatch(_RATE, text.strip())
    rate = float(match["number"]) * 1000.0 ** _PREFIXES[match["prefix"].upper()] if match else 0.0
    if not match or not rate:
        fix = "Use a node's bandwidth such as 400Gb/s, 8x400Gb/s or 50GB/s (b: bits, B: bytes)."
        raise UsageError(f"{text!r} is not a bandwidth", where=where, fix=fix)
    return rate * int(match["links"] or 1) / (8 if match["unit"] == "b" else 1)
