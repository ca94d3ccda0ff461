"""What MPI's launchers, Kubeflow, Volcano, SkyPilot and Ray set in the environment becomes a rank or a node."""

from __future__ import annotations

from typing import Any

import pytest

from tests.refused import refused
from tuner.errors import MachineError, UsageError
from tuner.machine import variables
from tuner.machine.launchers import resolve
from tuner.machine.topology import DEFAULT_PORT, LaunchFlags, Topology


def _resolved(environ: dict[str, str], launcher: str, num_gpus: int = 0, **flags: Any) -> Topology:
    return resolve(LaunchFlags(launcher, **flags), environ, num_gpus)  # type: ignore[arg-type]


def _refusal(environ: dict[str, str], launcher: str, num_gpus: int = 0, **flags: Any) -> str:
    with pytest.raises(UsageError) as caught:
        _resolved(environ, launcher, num_gpus, **flags)
    assert caught.value.where
    assert caught.value.fix
    return str(caught.value)


def _without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


# mpirun: what Open MPI 4.1 and MPICH 4.0 set


def _open_mpi(rank: int, world: int = 2, local: int | None = None) -> dict[str, str]:
    local = local or world
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(world),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local),
        "OMPI_COMM_WORLD_NODE_RANK": str(rank % local),
        "PMIX_NAMESPACE": "1634992129",
        "PMIX_RANK": str(rank),
    }


def _hydra(rank: int, world: int = 2) -> dict[str, str]:
    places = {"PMI_RANK": rank, "PMI_SIZE": world, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": world}
    return {name: str(value) for name, value in places.items()}


def _mvapich(rank: int, world: int = 2) -> dict[str, str]:
    return {name.replace("OMPI", "MV2"): value for name, value in _open_mpi(rank, world).items() if "COMM" in name}


@pytest.mark.parametrize("family", [_open_mpi, _hydra, _mvapich])
def test_each_process_of_mpirun_knows_its_place(family: Any) -> None:
    ranks = [_resolved(family(rank), "mpi") for rank in (0, 1)]

    assert [(place.rank, place.local_rank, place.leads) for place in ranks] == [(0, 0, True), (1, 1, False)]
    assert {(place.num_nodes, place.nproc_per_node, place.world_size, place.master_addr) for place in ranks} == {
        (1, 2, 2, "127.0.0.1")
    }
    assert len({place.master_port for place in ranks}) == 1
    assert not ranks[0].is_supervised


def test_two_mpiruns_on_one_machine_meet_at_ports_of_their_own() -> None:
    other = _open_mpi(0) | {"PMIX_NAMESPACE": "prterun-host-77@1"}

    assert _resolved(_open_mpi(0), "mpi").master_port != _resolved(other, "mpi").master_port


def test_mpirun_on_two_nodes_meets_at_the_address_that_is_named() -> None:
    place = _open_mpi(3, world=4, local=2)

    named = [_resolved(place | {"MASTER_ADDR": "n1"}, "mpi"), _resolved(place, "mpi", master_addr="n1")]

    assert {(told.num_nodes, told.node_rank, told.local_rank, told.master_addr) for told in named} == {(2, 1, 1, "n1")}
    assert "2 nodes, but no address" in _refusal(place, "mpi")


def test_mpirun_without_its_launcher_would_start_several_runs_and_is_refused() -> None:
    assert "inside mpirun with 2 processes" in _refusal(_open_mpi(0), "local")
    started_by_hand = {"NNODES": "2", "NODE_RANK": "0", "ADDR": "n1"}
    assert _resolved(_open_mpi(0) | started_by_hand, "local").num_nodes == 2, "mpirun may start a node each"


def test_more_processes_of_mpirun_than_gpus_are_refused_unless_each_sees_one_of_its_own() -> None:
    with refused(MachineError, "--launcher mpi", 2, 1):
        _resolved(_open_mpi(1), "mpi", num_gpus=1)
    assert _resolved(_open_mpi(1) | {"CUDA_VISIBLE_DEVICES": "1"}, "mpi", num_gpus=1).local_rank == 0


# One rank, as torchrun, Ray Train and scripts say


RANK = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "n1", "MASTER_PORT": "1234"},
}


def test_a_rank_that_the_environment_names_joins() -> None:
    assert _resolved(RANK, "env") == Topology(
        "env", 2, 1, 2, 4, rank=3, local_rank=1, master_addr="n1", master_port=1234
    )


def test_ranks_on_one_machine_need_not_say_how_many_a_node_has() -> None:
    alone = {key: value for key, value in RANK.items() if key != "LOCAL_WORLD_SIZE"}

    assert _resolved(alone | {"MASTER_ADDR": "127.0.0.1"}, "env").nproc_per_node == 4
    assert _resolved(alone, "env", nproc_per_node=2).num_nodes == 2
    assert "LOCAL_WORLD_SIZE" in _refusal(alone, "env")


def test_a_flag_may_name_another_meeting_place_than_the_launchers() -> None:
    found = _resolved(RANK, "env", master_port=4321, master_addr="ib0")

    assert (found.master_addr, found.master_port) == ("ib0", 4321), "Ray's own process group holds its port"


# One node


KUBEFLOW = {
    **{"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1"},
    **{"PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400"},
}
PODS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
SKYPILOT = {
    **{"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
}
VOLCANO = {"VK_TASK_INDEX": "1", "VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "j-worker-0.j,j-worker-1.j"}


@pytest.mark.parametrize(
    ("environ", "address", "port"),
    [
        (KUBEFLOW, "job-node-0-0.job", 29400),
        (KUBEFLOW | {"RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "job-node-0-0.job"}, "job-node-0-0.job", 29400),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, "job-node-0-0.job", 29400),
        (PODS, "job-master-0", 23456),
        (PODS | VOLCANO, "job-master-0", 23456),
        (VOLCANO, "j-worker-0.j", DEFAULT_PORT),
        (SKYPILOT, "10.0.0.1", DEFAULT_PORT),
        (SKYPILOT | {"MASTER_PORT": "8008"}, "10.0.0.1", 8008),
    ],
)
def test_a_node_of_a_cluster_starts_its_ranks_with_what_the_cluster_says(
    environ: dict[str, str], address: str, port: int
) -> None:
    found = _resolved(environ, "env", num_gpus=8)

    assert found == Topology("local", 2, 1, 8, 16, master_addr=address, master_port=port)
    assert found.is_supervised


def test_a_flag_may_say_what_a_cluster_does_not_but_not_contradict_it() -> None:
    assert _resolved(PODS, "env", nproc_per_node=4).world_size == 8
    assert "--nnodes=3 and PET_NNODES=2" in _refusal(KUBEFLOW, "env", 8, nnodes=3)


WRONG_ON_A_NODE: list[tuple[dict[str, str], str]] = [
    (KUBEFLOW | SKYPILOT | {"SKYPILOT_NUM_NODES": "4"}, "PET_NNODES=2 and SKYPILOT_NUM_NODES=4"),
    (KUBEFLOW | {"MASTER_ADDR": "other"}, "MASTER_ADDR=other and PET_MASTER_ADDR=job-node-0-0.job"),
    ({"PET_NODE_RANK": "1"}, "PET_NODE_RANK are set, but no number of nodes"),
    ({"RANK": "1", "MASTER_ADDR": "m"}, "not WORLD_SIZE"),
    (KUBEFLOW | {"PET_NNODES": "1:4"}, "PET_NNODES=1:4"),
    ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "h:1"}, "PET_RDZV_ENDPOINT=h:1"),
    (VOLCANO | {"VC_MASTER_HOSTS": "j-master-0.j"}, "VC_MASTER_HOSTS, VC_WORKER_HOSTS"),
    (KUBEFLOW | {"PET_NODE_RANK": "2"}, "node rank 2 of 2 nodes"),
    (KUBEFLOW | {"PET_NNODES": "two"}, "PET_NNODES"),
    ({}, "no environment variable sets the number of this rank or node"),
    *((_without(RANK, name), f"not {name}") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
]
WRONG_UNDER_MPI: list[tuple[dict[str, str], str]] = [
    *((_without(_open_mpi(1), name), f"not {name}") for name in list(_open_mpi(0))[:4]),
    (_hydra(1) | {"PMI_RANK": "2"}, "PMI_RANK=2"),
    (_hydra(1) | {"PMI_SIZE": "x"}, "PMI_SIZE=x"),
    (_hydra(1) | {"MPI_LOCALNRANKS": "3"}, "MPI_LOCALNRANKS=3"),
    (_open_mpi(0) | {"NPROC_PER_NODE": "4"}, "4 processes per node, but mpirun started 2"),
    ({}, "mpirun -np 2 tuner train"),
    ({"PMIX_RANK": "0"}, "--launcher slurm"),  # srun --mpi=pmix does not say how many
]


@pytest.mark.parametrize(
    ("launcher", "environ", "shown"),
    [*(("env", *case) for case in WRONG_ON_A_NODE), *(("mpi", *case) for case in WRONG_UNDER_MPI)],
)
def test_variables_that_are_half_set_or_contradict_are_one_message_naming_them(
    launcher: str, environ: dict[str, str], shown: str
) -> None:
    assert shown in _refusal(environ, launcher, 8)


# Who tells of a mistake that all make


@pytest.mark.parametrize(
    ("environ", "speaks"),
    [
        ({}, True),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, False),
        (_open_mpi(0), True),
        (_open_mpi(1), False),
        (_hydra(1), False),
        ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "1"}, True),
    ],
)
def test_the_first_task_of_a_launcher_speaks(environ: dict[str, str], speaks: bool) -> None:
    assert variables.speaks(environ) is speaks
