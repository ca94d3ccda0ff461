"""Products by the names that people and drivers give them."""

from __future__ import annotations

import pytest

from tests.refused import refused
from tuner.errors import UsageError
from tuner.fit.gpu_catalog import GPUS, find, like


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_is_found_by_its_own_name_in_any_spelling(name: str) -> None:
    assert (
        find(name) == find(name.upper()) == find(name.replace("-", " ")) == find(name.replace("-", "_")) == GPUS[name]
    )


@pytest.mark.parametrize(
    ("name", "memory_gib", "product"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40g"),
        ("NVIDIA A100-PCIE-40GB", 40, "a100-40g"),
        ("NVIDIA H100 80GB HBM3", 80, "h100-80g"),
        ("NVIDIA H100 PCIe", 80, "h100-pcie"),
        ("NVIDIA H200", 140, "h200"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("NVIDIA GeForce RTX 3090", 24, "rtx3090"),
        ("NVIDIA RTX A6000", 48, "a6000"),
        ("NVIDIA L40S", 45, "l40s"),
        ("Tesla V100-SXM2-32GB", 32, "v100-32g"),
        ("Tesla T4", 15, "t4"),
        ("NVIDIA A10G", 22, "a10g"),
    ],
)
def test_a_drivers_name_is_the_product(name: str, memory_gib: int, product: str) -> None:
    assert like(name, memory_gib * 2**30) == GPUS[product]


def test_a_product_that_nobody_listed_is_no_product() -> None:
    assert like("NVIDIA GB9999", 2**40) is None


def test_an_unknown_name_is_refused_with_the_nearest_and_a_way_out() -> None:
    with refused(UsageError, "--gpu", "a100-80g", "--gpu-memory"):
        find("a100-80gbb")


def test_a_short_name_counts_on_the_products_smallest_memory() -> None:
    assert find("a100").memory_bytes == min(gpu.memory_bytes for name, gpu in GPUS.items() if name.startswith("a100-"))


def test_the_figures_are_those_of_the_data_sheets() -> None:
    a100, h100 = GPUS["a100-80g"], GPUS["h100-80g"]

    assert (a100.peak_flops, a100.memory_bytes / 2**30, a100.link_bytes_s) == (312e12, 80, 300e9)
    assert (h100.peak_flops, h100.compute_capability, h100.link_bytes_s) == (989e12, (9, 0), 450e9)
