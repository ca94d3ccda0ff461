"""Sizes and rates as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tuner.errors import UsageError
from tuner.files import sized
from tuner.fit.sizes import parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("80 GB", 80 * 10**9),
        ("80gb", 80 * 10**9),
        ("80G", 80 * 10**9),
        ("80", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1.5TiB", 3 * 2**39),
        ("512MB", 512 * 10**6),
        ("1B", 1),
    ],
)
def test_a_size_is_read_in_the_unit_it_names(text: str, size: int) -> None:
    assert parse_bytes(text, "--gpu-memory") == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-80GB", "80 QB", "eighty", "1e3GB", "nan", "inf", "8 0GB", "0x10", "80GB80", "٣GB ", "9" * 400]
)
def test_what_is_no_size_is_refused_with_its_flag(text: str) -> None:
    with refused(UsageError, "--host-memory", repr(text)):
        parse_bytes(text, "--host-memory")


@pytest.mark.parametrize("text", ["0", "0GB", "0.0001B"])
def test_no_memory_at_all_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not more than 0"):
        parse_bytes(text, "--gpu-memory")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400Gb/s", 50e9),
        ("400Gbps", 50e9),
        ("400Gbit/s", 50e9),
        ("50GB/s", 50e9),
        ("8x400Gb/s", 400e9),
        ("8 x 50 GB/s", 400e9),
    ],
)
def test_small_b_means_bits_and_an_x_means_links(text: str, rate: float) -> None:
    assert parse_rate(text, "--interconnect") == rate


@pytest.mark.parametrize("text", ["400", "400GB", "0Gb/s", "-1Gb/s", "fast", "0x400Gb/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="bandwidth"):
        parse_rate(text, "--interconnect")


@given(st.integers(min_value=1, max_value=10**6))
def test_a_size_reads_back_what_was_printed(count: int) -> None:
    assert parse_bytes(sized(count * 2**30).replace(" ", ""), "") == count * 2**30


@pytest.mark.parametrize(("num_bytes", "text"), [(-(2**31), "-2.0 GiB"), (43 * 2**20, "43.0 MiB"), (512, "0.5 KiB")])
def test_a_small_size_is_told_in_a_small_unit(num_bytes: int, text: str) -> None:
    assert sized(num_bytes) == text
