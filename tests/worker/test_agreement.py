"""Ranks whose nodes hold other rows, files, versions or variables are refused before the first step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tuner.errors import MachineError
from tuner.worker import agreement
from tuner.worker.agreement import Facts


def gather(monkeypatch: pytest.MonkeyPatch, *everywhere: tuple[str, Facts]) -> None:
    """Let the ranks, each with its host, have these facts; a stand-in for the exchange between them."""
    monkeypatch.setattr(agreement, "_gathered", lambda _: list(everywhere))


def test_equal_ranks_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    gather(monkeypatch, ("a", {"torch": "2.13.0", "NCCL_ALGO": None}), ("b", {"torch": "2.13.0"}))

    agreement.require({})


def test_the_node_that_differs_is_named_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    first, same, other = {"torch": "1", "NCCL_ALGO": None}, {"torch": "1"}, {"torch": "2", "NCCL_ALGO": "Ring"}
    gather(monkeypatch, ("node-0", first), ("node-1", same), ("node-2", other))

    with pytest.raises(MachineError) as refused:
        agreement.require({})

    assert refused.value.where == "node-2"
    assert refused.value.what == (
        "the nodes differ: torch: 2 on node-2 (rank 2), 1 on node-0 (rank 0); "
        "NCCL_ALGO: Ring on node-2 (rank 2), not there on node-0 (rank 0)"
    )


def test_variables_of_a_node_are_only_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gather(monkeypatch, ("a", {"NCCL_SOCKET_IFNAME": "eth0"}), ("b", {"NCCL_SOCKET_IFNAME": "ib0", "UCX_TLS": "rc"}))

    assert agreement.differing_variables() == ["NCCL_SOCKET_IFNAME", "UCX_TLS"]


def test_a_variable_is_either_compared_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    run = SimpleNamespace(resolved_recipe=Path("none"), deepspeed=Path("none"))

    assert agreement.environment(run, needs_bitsandbytes=False)["NCCL_ALGO"] == "Ring"
    assert "NCCL_SOCKET_IFNAME" in agreement.own_variables()
    assert "NCCL_ALGO" not in agreement.own_variables()


READ = ("config.json", "model.safetensors.index.json", "model-1-of-1.safetensors", "preprocessor_config.json")


OF_OTHER_TOOLS = ("trainer_state.json", "training_args.bin", "consolidated.safetensors", "README.md")


@pytest.mark.parametrize("name", [*READ, *OF_OTHER_TOOLS])
def test_a_model_is_known_by_its_configs_its_index_and_its_sizes_and_not_by_files_of_other_tools(
    tmp_path: Path, name: str
) -> None:
    for file in READ:
        (tmp_path / file).write_text("{}")
    before = agreement.model_files(str(tmp_path), None)

    (tmp_path / name).write_text("{ }")

    now = agreement.model_files(str(tmp_path), None)
    differing = [key for key, value in now.items() if value != before.get(key)]
    assert differing == [f"{name} of the model"] * (name in READ)


def test_a_model_of_the_hub_is_known_by_its_commit_however_much_of_it_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, more in (("a", "model.safetensors"), ("b", "tokenizer.json")):
        (tmp_path / node / "c0ffee").mkdir(parents=True)
        for file in ("config.json", more):
            (tmp_path / node / "c0ffee" / file).write_text("{}")

    def on(node: str) -> Facts:
        config = str(tmp_path / node / "c0ffee" / "config.json")
        monkeypatch.setattr(agreement, "hf_hub_download", lambda *_, **__: config)
        return agreement.model_files("some/model", None)

    assert on("a") == on("b") == {"the commit of the model": "c0ffee"}


def test_a_patch_release_of_python_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(resolved_recipe=Path("none"), deepspeed=Path("none"))
    before = agreement.environment(run, needs_bitsandbytes=False)

    monkeypatch.setattr("platform.python_version", lambda: "3.11.99")

    assert agreement.environment(run, needs_bitsandbytes=False) == before


def test_a_model_of_the_hub_that_is_not_here_is_not_compared() -> None:
    assert agreement.model_files("nobody/nothing", None) == {}


@pytest.mark.parametrize("needed", [True, False])
def test_bitsandbytes_is_compared_where_a_run_needs_it(needed: bool) -> None:
    run = SimpleNamespace(resolved_recipe=Path("none"), deepspeed=Path("none"))

    assert ("bitsandbytes" in agreement.environment(run, needs_bitsandbytes=needed)) == needed
