from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tuner.errors import MachineError, TunerError, UsageError
from tuner.machine import slurm
from tuner.machine.launchers import contradiction, filled, resolve, without_variables
from tuner.machine.topology import SUPERVISED, LaunchFlags, Rank, Topology, local


def _resolved(num_gpus: int = 0, environ: dict[str, str] | None = None, **flags: Any) -> Topology:
    return resolve(LaunchFlags(**flags), environ or {}, num_gpus)


def _refusal(num_gpus: int = 0, environ: dict[str, str] | None = None, **flags: Any) -> TunerError:
    with pytest.raises(UsageError) as caught:
        _resolved(num_gpus, environ, **flags)
    assert caught.value.exit_code == 2
    return caught.value


# One machine


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_one_machine_starts_its_ranks_and_supervises_them(num_gpus: int) -> None:
    found = _resolved(num_gpus, {"MASTER_PORT": "29400"})

    assert (found.launcher, found.rank, found.local_rank) == ("local", None, None)
    assert list(found.local_ranks) == list(range(max(num_gpus, 1)))
    assert found.is_supervised
    assert found.leads
    assert found.master_port == 0, "the one that is free when they start"


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ({"nproc_per_node": 3}, {}),
        ({}, {"NPROC_PER_NODE": "3"}),
        ({"nproc_per_node": 3}, {"NPROC_PER_NODE": "3"}),
        ({"nproc_per_node": 3}, {"NPROC_PER_NODE": ""}),
        ({"nproc_per_node": 3, "nnodes": 1, "node_rank": 0}, {"ADDR": "h", "PORT": "1"}),
    ],
)
def test_flag_and_variable_say_the_same(flags: dict[str, Any], environ: dict[str, str]) -> None:
    assert _resolved(8, environ, **flags) == local(3)


def test_a_topology_is_told_in_one_line() -> None:
    assert _resolved(2).describe() == "1 node, 2 processes"
    assert Topology("slurm", 2, 0, 8, 16).describe() == "2 nodes, 16 processes (slurm)"


# Several machines


FLAGS = {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 1234, "nproc_per_node": 8}
VARIABLES = {"NNODES": "2", "NODE_RANK": "1", "ADDR": "10.0.0.1", "PORT": "1234", "NPROC_PER_NODE": "8"}
OTHER_NAMES = {"ADDR": "MASTER_ADDR", "PORT": "MASTER_PORT"}
TWO_NODES = Topology("local", 2, 1, 8, 16, master_addr="10.0.0.1", master_port=1234)


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (FLAGS, {}),
        ({}, VARIABLES),
        (FLAGS, VARIABLES),
        ({}, {OTHER_NAMES.get(name, name): value for name, value in VARIABLES.items()}),
        ({}, VARIABLES | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}),
        ({"nnodes": 2, "master_addr": "10.0.0.1"}, {"NODE_RANK": "1", "PORT": "1234"}),
    ],
)
def test_several_machines_by_flags_variables_or_both(flags: dict[str, Any], environ: dict[str, str]) -> None:
    assert _resolved(8, environ, **flags) == TWO_NODES


def test_an_environment_without_launch_variables_launches_as_none_does() -> None:
    environ = VARIABLES | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "HOME": "/home"}

    assert without_variables(environ) == {"HOME": "/home"}


def test_the_fewest_and_the_most_nodes_are_a_pair() -> None:
    flags = {"node_rank": 2, "master_addr": "h"}
    found = _resolved(8, {}, nnodes="2:3", **flags)

    assert (found.min_nodes, found.num_nodes, found.world_size) == (2, 3, 24)
    assert _resolved(8, {"NNODES": "2:3"}, **flags) == found
    assert _resolved(8, {}, nnodes="3:3", **flags).min_nodes == 0, "all of them are needed"
    fewer = found.among((0, 2))
    assert (fewer.num_nodes, fewer.node_rank, fewer.world_size) == (2, 1, 16)


# What contradicts or does not parse


CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, str], str, str]] = [
    ({"nproc_per_node": 2}, {"NPROC_PER_NODE": "4"}, "--nproc-per-node=2", "NPROC_PER_NODE=4"),
    ({"nnodes": 2}, {"NNODES": "3"}, "--nnodes=2", "NNODES=3"),
    ({"node_rank": 0}, {"NODE_RANK": "1"}, "--node-rank=0", "NODE_RANK=1"),
    ({}, {"ADDR": "a", "MASTER_ADDR": "b"}, "ADDR=a", "MASTER_ADDR=b"),
    ({"master_addr": "a"}, {"MASTER_ADDR": "b"}, "--master-addr=a", "MASTER_ADDR=b"),
    ({}, {"PORT": "1", "MASTER_PORT": "2"}, "PORT=1", "MASTER_PORT=2"),
    ({"master_port": 1}, {"PORT": "2"}, "--master-port=1", "PORT=2"),
]


@pytest.mark.parametrize("launcher", ["local", "none"])
@pytest.mark.parametrize(("flags", "environ", "first", "second"), CONTRADICTIONS)
def test_a_flag_and_a_variable_that_contradict_are_both_named(
    flags: dict[str, Any], environ: dict[str, str], first: str, second: str, launcher: str
) -> None:
    error = _refusal(8, environ, launcher=launcher, **flags)

    assert first in error.what and second in error.what
    assert str(error.where).startswith("--") and error.fix


@pytest.mark.parametrize("name", ["NPROC_PER_NODE", "NNODES", "NODE_RANK", "PORT", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["gpu", "auto", "-1", "2.0", "1e3", " 2", "٣", "99999999999999999999", "2;3"])
def test_a_variable_that_is_no_count_is_named_with_its_value(name: str, text: str) -> None:
    error = _refusal(8, {name: text})

    assert repr(text) in error.what
    assert name in str(error.where)
    assert error.fix


@pytest.mark.parametrize(
    "flags", [{"nproc_per_node": 0}, {"nnodes": 0}, {"nnodes": -1}, {"node_rank": -1}, {"master_port": 65536}]
)
def test_a_flag_out_of_range_is_named(flags: dict[str, int]) -> None:
    ((name, value),) = flags.items()

    error = _refusal(8, {}, **flags)

    assert repr(str(value)) in error.what
    assert "--" + name.replace("_", "-") in str(error.where)


@pytest.mark.parametrize(("flags", "environ"), [({"nproc_per_node": 4}, {}), ({}, {"NPROC_PER_NODE": "4"})])
def test_more_processes_than_gpus_are_refused_as_the_machines_fault(
    flags: dict[str, Any], environ: dict[str, str]
) -> None:
    with refused(MachineError, "--nproc-per-node / NPROC_PER_NODE", "4 processes", "2 visible GPUs"):
        _resolved(2, environ, **flags)


# Inside another launcher


def test_a_rank_alone_in_the_environment_is_no_torchrun() -> None:
    assert _resolved(1, {"RANK": "0"}).world_size == 1


# One process


def test_launcher_none_is_one_rank_whatever_gpus_there_are() -> None:
    assert _resolved(8, {}, launcher="none") == Topology(
        "none", 1, 0, 1, 1, rank=0, local_rank=0, master_addr="127.0.0.1", master_port=0
    )


# Slurm: what srun sets, as a real two-node Slurm 22.05 does


def _task(rank: int, *, nodes: str = "3,1", job: str = "7", **more: str) -> dict[str, str]:
    """Return the variables of one task of `srun -N2 -n4`: 3 tasks on n1, 1 on n2."""
    places = [(node, local) for node, tasks in enumerate(slurm.expand_tasks(nodes)) for local in range(tasks)]
    node, local = places[rank]
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(len(places)),
        "SLURM_STEP_NUM_TASKS": str(len(places)),
        "SLURM_NNODES": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_TASKS_PER_NODE": nodes,
        "SLURM_STEP_TASKS_PER_NODE": nodes,
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_STEP_NODELIST": "n[1-2]",
        **more,
    }


BATCH_SHELL = {name: value for name, value in _task(0).items() if "_STEP_" not in name}


def _slurm(environ: dict[str, str], num_gpus: int = 0, **flags: Any) -> Topology:
    return _resolved(num_gpus, environ, launcher="slurm", **flags)


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [("3,1", [(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 1)]), ("2(x2)", [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)])],
)
def test_each_task_knows_its_place(nodes: str, wanted: list[tuple[int, int, int]]) -> None:
    found = [_slurm(_task(rank, nodes=nodes)) for rank in range(4)]

    assert [(task.node_rank, task.local_rank, task.nproc_per_node) for task in found] == wanted
    assert [task.rank for task in found] == [0, 1, 2, 3]
    assert {(task.world_size, task.num_nodes, task.job, task.master_addr) for task in found} == {(4, 2, "7", "n1")}
    assert len({task.master_port for task in found}) == 1


def test_the_batch_shell_and_a_single_task_may_start_ranks() -> None:
    alone = _task(0) | {"SLURM_STEP_NUM_TASKS": "1"}

    assert _resolved(2, BATCH_SHELL).world_size == 2
    assert _resolved(2, alone).world_size == 2


@pytest.mark.parametrize(("num_gpus", "local_ranks"), [(8, [0, 1, 2]), (1, [0, 0, 0])])
def test_the_local_rank_is_the_device_that_the_task_sees(num_gpus: int, local_ranks: list[int]) -> None:
    found = [_slurm(_task(rank), num_gpus).local_rank for rank in range(3)]

    assert found == local_ranks, "--gpus-per-task=1 shows each task one GPU, its device 0"


def test_more_tasks_than_gpus_on_a_node_are_refused() -> None:
    with pytest.raises(
        MachineError, match=r"srun: .*3 processes on a node with 2 visible GPUs. Use srun --ntasks-per-node=2"
    ):
        _slurm(_task(0), 2)


def test_tasks_that_share_the_one_gpu_of_a_node_are_refused() -> None:
    with refused(MachineError, "srun", 3, 1, "--ntasks-per-node=1"):
        _slurm(_task(0, SLURM_GPUS_ON_NODE="1"), 1)
    assert _slurm(_task(0, SLURM_GPUS_ON_NODE="3"), 1).nproc_per_node == 3, "each sees its own"


def test_a_requeued_job_meets_no_socket_of_its_last_attempt() -> None:
    ports = {_slurm(_task(0, SLURM_RESTART_COUNT=str(count))).master_port for count in range(4)}

    assert len(ports) == 4


def test_the_same_geometry_as_sruns_is_no_contradiction() -> None:
    assert _slurm(_task(0, NNODES="2"), nproc_per_node=3).world_size == 4


def test_a_port_and_an_address_by_flag_win_over_slurms() -> None:
    found = _slurm(_task(3), master_addr="ib0", master_port=4321)

    assert (found.master_addr, found.master_port) == ("ib0", 4321)


def test_a_step_within_a_larger_job_counts_its_own_tasks() -> None:
    step = _task(0, nodes="1") | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n2"}

    found = _slurm(step)

    assert (found.world_size, found.num_nodes, found.master_addr) == (1, 1, "n2")


# What no launcher can start

NONE, SLURM = {"launcher": "none"}, {"launcher": "slurm"}
IN_TORCHRUN = ({"TORCHELASTIC_RUN_ID": "x"}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
REFUSED: list[tuple[dict[str, Any], dict[str, str], tuple[str, ...]]] = [
    ({"nnodes": 2}, {"NODE_RANK": "0"}, ("2 nodes, but no address", "--master-addr / ADDR")),
    ({"nnodes": 4}, {"ADDR": "h"}, ("--node-rank / NODE_RANK", "0 to 3")),
    ({"nnodes": 2, "node_rank": 2}, {"ADDR": "h"}, ("node rank 2 of 2 nodes",)),
    ({"nnodes": 2, "node_rank": 7}, {"ADDR": "h"}, ("node rank 7 of 2 nodes",)),
    ({"nnodes": 1, "node_rank": 1}, {"ADDR": "h"}, ("node rank 1 of 1 nodes",)),
    *(
        ({"nnodes": pair, "node_rank": 0}, {"ADDR": "h"}, ("--nnodes",))
        for pair in ("3:2", "0:2", ":2", "2:", "1:2:3", "a:b", "1:99999999")
    ),
    *(
        ({"launcher": name}, environ, ("inside torchrun", "--launcher env"))
        for name in ("local", "none")
        for environ in IN_TORCHRUN
    ),
    *(({"launcher": name}, _task(1), ("inside srun with 4 tasks", "--launcher slurm")) for name in ("local", "none")),
    *((NONE | {name: 2}, {}, ("2 with --launcher none",)) for name in ("nproc_per_node", "nnodes", "node_rank")),
    *((NONE, {name: "2"}, ("2 with --launcher none",)) for name in ("NPROC_PER_NODE", "NNODES", "NODE_RANK")),
    (SLURM, {}, ("not inside srun",)),
    (SLURM, BATCH_SHELL, ("srun ... tuner train",)),
    (SLURM | {"nproc_per_node": 2}, _task(0), ("srun --ntasks-per-node=2",)),
    (SLURM, _task(0, NPROC_PER_NODE="2"), ("srun --ntasks-per-node=2",)),
    (SLURM | {"nnodes": 3}, _task(0), ("srun --nodes=3",)),
    (SLURM, _task(0, NNODES="3"), ("srun --nodes=3",)),
    *((SLURM | {"master_port": port}, _task(0), ("--master-port",)) for port in (0, -5, 65536)),
    *(
        (SLURM, _task(0, **{f"SLURM_{name}": "x"}), (f"SLURM_{name} is 'x'",))
        for name in ("PROCID", "NODEID", "LOCALID")
    ),
    (SLURM, _task(0, SLURM_STEP_TASKS_PER_NODE="2(y3)"), ("'2(y3)'",)),
]


@pytest.mark.parametrize(("flags", "environ", "told"), REFUSED)
def test_what_no_launcher_can_start_is_refused(
    flags: dict[str, Any], environ: dict[str, str], told: tuple[str, ...]
) -> None:
    text = str(_refusal(8, environ, **flags))

    assert [part for part in told if part not in text] == []


# Node lists


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a-b.example.org", "a-b.example.org"),
        ("n2,n[1,3]", "n2"),
        ("rack[3-4]-n[08-09]", "rack3-n08"),
        ("n[1-2]-ib,m1", "n1-ib"),
    ],
)
def test_the_first_host_of_a_list_with_dots_several_brackets_and_words_behind_them(nodelist: str, host: str) -> None:
    assert slurm.first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",n1"])
def test_a_list_without_a_host_is_refused(nodelist: str) -> None:
    with refused(UsageError, "SLURM_STEP_NODELIST"):
        slurm.first_host(nodelist)


_PREFIX = st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z-]", fullmatch=True)


@given(
    prefix=_PREFIX, numbers=st.lists(st.integers(0, 999), min_size=1, max_size=6, unique=True), width=st.integers(1, 4)
)
def test_the_first_of_any_numbered_list(prefix: str, numbers: list[int], width: int) -> None:
    names = [f"{number:0{width}d}" for number in numbers]

    assert slurm.first_host(f"{prefix}[{','.join(names)}]") == f"{prefix}{names[0]}"
    assert slurm.first_host(f"{prefix}[{names[0]}-9999],other[1-2]") == f"{prefix}{names[0]}"
    assert slurm.first_host(",".join(f"{prefix}{name}" for name in names)) == f"{prefix}{names[0]}"


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1, max_size=8))
def test_tasks_a_node_are_what_slurm_compressed(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in groups)

    assert slurm.expand_tasks(text) == [tasks for tasks, nodes in groups for _ in range(nodes)]


# The port of a job


@given(st.integers(1, 2**31), st.integers(0, 1000))
def test_a_jobs_port_is_free_for_anyone_and_not_one_the_system_hands_out(job: int, step: int) -> None:
    port = slurm.port(str(job), str(step))

    assert 1024 < port < 32768
    assert port == slurm.port(str(job), str(step))


def test_jobs_that_follow_each_other_clash_no_more_than_chance() -> None:
    ports = [slurm.port(str(job), "0") for job in range(100_000, 101_000)]

    clashes = sum(left == right for left, right in combinations(ports, 2))
    expected = comb(1000, 2) / 20_000
    assert clashes < 2 * expected
    assert all(ports[at] != ports[at + 1] for at in range(999)), "neighbours share a node most of all"


def test_jobs_equal_modulo_a_round_number_do_not_clash() -> None:
    ports = {slurm.port(str(1234 + 10_000 * times), "0") for times in range(50)}

    assert len(ports) > 45


def test_two_steps_of_one_job_have_ports_of_their_own() -> None:
    assert slurm.port("7", "0") != slurm.port("7", "1")


# Ranks and batches


def test_a_worker_reads_its_rank_and_whether_it_is_watched() -> None:
    environ = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}

    assert Rank.of({}) == Rank(0, 0, 1, supervised=False)
    assert Rank.of(environ) == Rank(3, 1, 4, supervised=False)
    assert Rank.of(environ | {SUPERVISED: "1"}).supervised
    assert Rank.of(environ | {"SLURM_STEP_ID": "0"}).of_srun
    assert not Rank.of(environ | {"SLURM_STEP_ID": "0", SUPERVISED: "1"}).of_srun


# What a file says of the launch

FILE = LaunchFlags(nproc_per_node=4, nnodes=2, node_rank=1, master_addr="a", master_port=29400, file="accelerate.yaml")


def _of_file(environ: dict[str, str], file: LaunchFlags = FILE, **flags: Any) -> tuple[Topology, str | None]:
    found = resolve(filled(LaunchFlags(**flags), file, environ), environ, 0)
    return found, contradiction(file, found)


def test_a_file_says_of_the_launch_what_nothing_else_says() -> None:
    found, told = _of_file({})

    assert (found.num_nodes, found.node_rank, found.nproc_per_node) == (2, 1, 4)
    assert (found.master_addr, found.master_port) == ("a", 29400)
    assert told is None


@pytest.mark.parametrize(
    ("environ", "flags", "said"),
    [
        ({"NPROC_PER_NODE": "2"}, {}, "processes on a machine = 2, not 4"),
        ({}, {"nproc_per_node": 2}, "processes on a machine = 2, not 4"),
        ({"NNODES": "1"}, {}, "machines = 1, not 2"),
        ({"NODE_RANK": "0"}, {}, "machine rank = 0, not 1"),
        ({"ADDR": "b", "PORT": "29500"}, {}, "address = b, not a as accelerate.yaml says, port = 29500, not 29400"),
        ({}, {"launcher": "none"}, "processes on a machine = 1, not 4 as accelerate.yaml says, machines = 1, not 2"),
    ],
)
def test_a_flag_a_variable_and_a_launcher_win_over_a_file_in_one_line(
    environ: dict[str, str], flags: dict[str, Any], said: str
) -> None:
    _, told = _of_file(environ, **flags)

    assert told is not None and said in told
    assert "\n" not in told and "accelerate.yaml" in told


def test_the_nodes_of_a_variable_are_not_numbered_by_a_file() -> None:
    with refused(UsageError, "--node-rank / NODE_RANK"):
        _of_file({"NNODES": "4", "ADDR": "b"})
