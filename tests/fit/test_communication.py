"""Traffic and step time against cases worked out by hand, and against rings that are simulated link by link."""

from __future__ import annotations

import pytest

from tuner.fit.gpu_catalog import GPUS
from tuner.fit.levels import Costs
from tuner.fit.step_time import Cluster, Operations, Traffic, seconds, step_time, zero_traffic

PARAMETERS = 1_000_000_000
BYTES = 2.0 * PARAMETERS
NONE, ZERO1, ZERO2, ZERO3 = Costs(0), Costs(1), Costs(2), Costs(3, overlap=True)
HIERARCHICAL = ZERO3._replace(hpz=8)


def ring(num_ranks: int, gpus_per_node: int, size: float, passes: int) -> tuple[float, float]:
    """Simulate `passes` ring passes of a tensor over all ranks; return bytes a rank sends, bytes a node's network does.

    In one pass (a gather or a scatter) each rank sends N - 1 of the tensor's N pieces to its neighbour.
    """
    sent = [0.0] * num_ranks
    network = [0.0] * (num_ranks // gpus_per_node)
    for _ in range(passes):
        for _ in range(num_ranks - 1):
            for rank in range(num_ranks):
                sent[rank] += size / num_ranks
                if rank // gpus_per_node != (rank + 1) % num_ranks // gpus_per_node:
                    network[rank // gpus_per_node] += size / num_ranks
    assert len(set(sent)) == 1
    return sent[0], max(network)


@pytest.mark.parametrize(("num_ranks", "gpus_per_node"), [(2, 2), (8, 8), (16, 8), (64, 8)])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_traffic_is_what_simulated_rings_carry(num_ranks: int, gpus_per_node: int, accumulation: int) -> None:
    passes = {
        ZERO1: 2,
        ZERO2: accumulation + 1,
        ZERO3: 3 * accumulation,
    }
    for level, count in passes.items():
        sent, network = ring(num_ranks, gpus_per_node, BYTES, count)
        volume = zero_traffic(level, BYTES, 0.0, num_ranks, accumulation)

        assert volume.total_bytes == pytest.approx(sent), level
        if num_ranks > gpus_per_node:
            assert volume.between_bytes == pytest.approx(network), level


def test_zero3_carries_half_again_as_much_as_plain_data_parallelism() -> None:
    """ZeRO, 2020, section 7.2.2: 3 against 2 times the parameters, at one micro-batch a step."""
    plain, sharded = (zero_traffic(level, BYTES, 0.0, 64, 1).total_bytes for level in (NONE, ZERO3))

    assert sharded / plain == pytest.approx(1.5)


def test_by_hand_seven_billion_on_eight_gpus() -> None:
    volume = zero_traffic(ZERO3, 14e9, 0.0, 8, 1)

    assert volume.gather_bytes == pytest.approx(2 * 14e9 * 7 / 8)
    assert volume.reduce_bytes == pytest.approx(14e9 * 7 / 8)


def test_frozen_weights_are_gathered_at_stage_3_alone_and_never_reduced() -> None:
    assert zero_traffic(ZERO2, 1e6, 14e9, 8, 4).total_bytes == pytest.approx(5 * 1e6 * 7 / 8)

    sharded = zero_traffic(ZERO3, 1e6, 14e9, 8, 4)
    assert sharded.gather_bytes == pytest.approx(4 * 2 * (14e9 + 1e6) * 7 / 8)
    assert sharded.reduce_bytes == pytest.approx(4 * 1e6 * 7 / 8)


def test_hierarchical_partitioning_keeps_the_backward_gather_inside_the_node() -> None:
    flat, inside = (zero_traffic(level, BYTES, 0.0, 16, 1) for level in (ZERO3, HIERARCHICAL))

    assert inside.between_bytes == pytest.approx(flat.between_bytes - BYTES * 15 / 16)
    assert inside.inside_bytes == pytest.approx(BYTES * 7 / 8)


def test_one_rank_sends_nothing() -> None:
    assert all(zero_traffic(level, BYTES, 0.0, 1, 4).total_bytes == 0 for level in (NONE, ZERO1, ZERO3))


GPU = GPUS["h100-80g"]


def nodes(num: int, network_bytes_s: float = 50e9) -> Cluster:
    """Return nodes of eight GPUs."""
    return Cluster(num, GPU, 8, network_bytes_s)


def computing(compute_s: float, forward_share: float = 1 / 3, micro_batches: int = 1) -> Operations:
    """Return operations that take so many seconds of matrix products, and nothing else."""
    flops = compute_s * GPU.matmul_flops
    return Operations(flops, forward_share * flops, micro_batches=micro_batches)


def test_a_collective_is_as_slow_as_its_slowest_link() -> None:
    volume = Traffic(gather_bytes=40e9, reduce_bytes=5e9)

    assert seconds(volume, nodes(1, 1.0)) == pytest.approx(0.1)
    assert seconds(volume, nodes(2)) == pytest.approx(0.9)
    assert seconds(volume, nodes(2, 900e9)) == pytest.approx(0.1)


def test_zero3_hides_its_traffic_behind_what_is_computed_and_no_more_than_that() -> None:
    volume = Traffic(gather_bytes=100e9)
    hidden, shown = (step_time(level, volume, computing(3.0), nodes(2)) for level in (ZERO3, ZERO1))
    bound = step_time(ZERO3, volume, computing(0.5), nodes(2))

    assert (hidden.compute_s, hidden.communication_s, hidden.total_s) == pytest.approx((3.0, 2.0, 3.0))
    assert shown.total_s == pytest.approx(5.0)
    assert bound.total_s == pytest.approx(2.0)


@pytest.mark.parametrize(("costs", "hidden_s"), [(ZERO1, 0.5), (ZERO2, 1.0)])
def test_overlap_at_zero_1_and_2_hides_gradients_behind_the_backward_passes_that_they_come_from(
    costs: Costs, hidden_s: float
) -> None:
    """By hand: 3 s of products, 2 of them backward, in 4 micro-batches; ZeRO-1 sends with the last one alone."""
    volume = Traffic(gather_bytes=50e9, reduce_bytes=50e9)
    alone, overlapped = (
        step_time(variant, volume, computing(3.0, micro_batches=4), nodes(2))
        for variant in (costs, costs._replace(overlap=True))
    )

    assert alone.total_s == pytest.approx(5.0)
    assert alone.total_s - overlapped.total_s == pytest.approx(hidden_s)


def test_across_slow_nodes_zero3_stops_paying_and_hierarchical_partitioning_starts() -> None:
    """By hand: 7B in 16 bits on 8 nodes of 8 GPUs, 50 GB/s a node, 2,048 tokens a micro-batch at 400 TFLOPs."""
    computed = computing(8 * 7e9 * 2048 / 400e12)
    flat, inner = (
        step_time(level, zero_traffic(level, 14e9, 0.0, 64, 1), computed, nodes(8)) for level in (ZERO3, HIERARCHICAL)
    )

    assert flat.communication_s == pytest.approx(3 * 14e9 * 63 / 64 / 50e9)
    assert inner.communication_s == pytest.approx(2 * 14e9 * 63 / 64 / 50e9 + 14e9 * 7 / 8 / 450e9)
    assert inner.total_s < flat.total_s
