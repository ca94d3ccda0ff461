"""What other launchers left in the environment does not reach the ranks, and is named."""

from __future__ import annotations

import pytest

from tuner.machine import variables

LEFT = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "FSDP_SHARDING_STRATEGY": "1",
    "PARALLELISM_CONFIG_TP_SIZE": "2",
    "DEEPSPEED_TIMEOUT": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
}
THE_USERS = {
    **{"PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0"},
    **{"HF_HOME": "/cache", "HF_TOKEN": "x", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "4", "MASTER_ADDR": "n1"},
    **{"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCHDYNAMO_VERBOSE": "1"},
    **{"ACCELERATE_LOG_LEVEL": "debug", "DS_ACCELERATOR": "cpu", "PYTORCH_CUDA_ALLOC_CONF": "x", "PET_NNODES": "2"},
}


def test_what_other_launchers_left_is_taken_out_and_all_else_stays() -> None:
    assert variables.without_leftovers({**LEFT, **THE_USERS}) == THE_USERS


@pytest.mark.parametrize("name", LEFT)
def test_each_is_named_with_the_reason(name: str) -> None:
    told = variables.leftovers_warning({name: LEFT[name], **THE_USERS}, "local")

    assert told and told.startswith(f"ignored for the ranks: {name} in the environment, set by another launcher: ")


def test_an_environment_of_the_users_own_is_worth_no_word() -> None:
    assert variables.leftovers_warning(THE_USERS, "local") is None
