"""Traffic and step time against cases worked out by hand, and against rings that are simulated link by link."""

from __future__ import annotations

import pytest

from tuner.fit.levels import Level
from tuner.fit.step_time import Cluster, Traffic, flops_of_step, seconds, step_time, zero_traffic

PARAMETERS = 1_000_000_000
BYTES = 2.0 * PARAMETERS
NONE, ZERO1, ZERO2, ZERO3 = Level(0), Level(1), Level(2), Level(3, overlap=True)
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


def test_flops_are_six_a_parameter_and_token_eight_with_recomputing_and_four_when_frozen() -> None:
    assert flops_of_step(7e9, 1.0, 1e6, recompute=False) == pytest.approx(6 * 7e9 * 1e6)
    assert flops_of_step(7e9, 1.0, 1e6, recompute=True) == pytest.approx(8 * 7e9 * 1e6)
    assert flops_of_step(7e9, 0.0, 1e6, recompute=False) == pytest.approx(4 * 7e9 * 1e6)


def test_layers_that_no_gradient_reaches_take_a_forward_pass_alone() -> None:
    kept = flops_of_step(8.0, 0.25, 1.0, recompute=False, attention=4.0, backward_share=0.25)
    recomputed = flops_of_step(8.0, 0.25, 1.0, recompute=True, attention=4.0, backward_share=0.25)

    of_forward, of_two_parameters = 2 * 8 + 4, 2 * 2 + 2 * 2 + 2 * 1
    assert kept == of_forward + of_two_parameters
    assert recomputed == kept + 2 * 2 + 1


def test_a_collective_is_as_slow_as_its_slowest_link() -> None:
    volume = Traffic(gather_bytes=40e9, reduce_bytes=5e9)

    assert seconds(volume, Cluster(1, 1e14, 450e9, 1.0)) == pytest.approx(0.1)
    assert seconds(volume, Cluster(2, 1e14, 450e9, 50e9)) == pytest.approx(0.9)
    assert seconds(volume, Cluster(2, 1e14, 450e9, 900e9)) == pytest.approx(0.1)


def test_zero3_hides_its_traffic_behind_arithmetic_and_zero1_does_not() -> None:
    cluster, volume = Cluster(2, 1e14, 450e9, 50e9), Traffic(gather_bytes=100e9)
    hidden = step_time(ZERO3, volume, 3e14, cluster)
    shown = step_time(ZERO1, volume, 3e14, cluster)
    bound = step_time(ZERO3, volume, 1e14, cluster)

    assert (hidden.compute_s, hidden.communication_s, hidden.total_s) == (3.0, 2.0, 3.0)
    assert shown.total_s == 5.0
    assert bound.total_s == 2.0


def test_across_slow_nodes_zero3_stops_paying_and_hierarchical_partitioning_starts() -> None:
    """By hand: 7B in 16 bits on 8 nodes of 8 GPUs, 50 GB/s a node, 2,048 tokens a micro-batch at 400 TFLOPs."""
    cluster, flops = Cluster(8, 400e12, 450e9, 50e9), 8 * 7e9 * 2048
    flat, inner = (
        step_time(level, zero_traffic(level, 14e9, 0.0, 64, 1), flops, cluster) for level in (ZERO3, HIERARCHICAL)
    )

    assert flat.communication_s == pytest.approx(3 * 14e9 * 63 / 64 / 50e9)
    assert inner.communication_s == pytest.approx(2 * 14e9 * 63 / 64 / 50e9 + 14e9 * 7 / 8 / 450e9)
    assert inner.total_s < flat.total_s
