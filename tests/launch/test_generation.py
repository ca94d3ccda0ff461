"""What a run that generates with vLLM needs, checked before a rank starts; vLLM itself needs a GPU and is not here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.each import each
from tests.launch.plans import made
from tests.machine.gpus import A100, CPU, machine
from tests.refused import refused
from tuner.errors import TunerError
from tuner.fit.estimate import CONTEXT_BYTES
from tuner.launch import preflight
from tuner.launch.checks import inputs
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import libraries
from tuner.machine.hardware import Hardware

VLLM = "objective.generation.engine=vllm"


def run_of(folder: Path, *sets: str, hardware: Hardware = CPU, objective: str = "grpo") -> ResolvedRun:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) + "\n" for n in range(64)))
    sets = (f"train_dataloader.dataset.path={rows}", "objective.rewards=['math']", *sets)
    return made(*sets, recipe=f"tiny_{objective}_full_custom_e1", hardware=hardware)


def problems(run: ResolvedRun) -> list[str]:
    found = []
    for check in (inputs.vllm, inputs.server):
        found += [finding if isinstance(finding, str) else f"{finding.where}: {finding.what}" for finding in check(run)]
    return found


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for an installed vLLM: its version is all that the checks read."""
    monkeypatch.setattr(libraries, "version_of", lambda name: "0.24.0+cu129" if name == "vllm" else "1.0")


@pytest.fixture
def address() -> Iterator[str]:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    server = HTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_vllm_needs_its_package_and_a_gpu(tmp_path: Path) -> None:
    found = problems(run_of(tmp_path, VLLM))

    assert [part for part in ("needs the package vllm", "needs NVIDIA GPUs") if part not in str(found)] == []


@pytest.mark.usefixtures("installed")
def test_a_copy_of_the_model_in_vllm_needs_ranks_that_divide(tmp_path: Path) -> None:
    run = run_of(tmp_path, VLLM, "objective.generation.tensor_parallel_size=3", hardware=machine(A100, A100))

    assert problems(run) == [
        "objective.generation.tensor_parallel_size: "
        "2 ranks cannot be divided into groups of 3 that share a copy of the model in vLLM"
    ]
    assert problems(run_of(tmp_path, VLLM, "generation.tensor_parallel_size=2", hardware=machine(A100, A100))) == []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("objective", "num_told"), [("gmpo", 1), ("grpo", 0), ("rloo", 0)])
def test_a_loss_that_leaves_out_vllms_correction_is_a_warning(objective: str, num_told: int, tmp_path: Path) -> None:
    assert len(problems(run_of(tmp_path, VLLM, hardware=machine(A100), objective=objective))) == num_told


@each(("0.21.9", "0.31.1", "1.0.0"))
def test_a_vllm_that_trl_does_not_know_is_a_warning(version: str) -> None:
    assert not inputs.VLLM[0] <= libraries.numbers(version) <= inputs.VLLM[1]


@pytest.mark.usefixtures("installed")
def test_a_server_has_to_answer_before_a_rank_starts(tmp_path: Path, address: str) -> None:
    def found(server: str) -> list[str]:
        return problems(run_of(tmp_path, VLLM, f"generation.server={server}", hardware=machine(A100)))

    assert found(address) == []
    assert "answers 404" in str(found(f"{address}/other"))
    assert "does not answer: [Errno 111] Connection refused" in str(found("http://127.0.0.1:9"))


def test_a_server_without_its_protocol_is_a_mistake(tmp_path: Path) -> None:
    with refused(TunerError, "--set generation.server=node-1:8000"):
        run_of(tmp_path, VLLM, "generation.server=node-1:8000")


def test_the_engine_of_the_ranks_needs_nothing(tmp_path: Path) -> None:
    assert not any("vLLM" in warning for warning in preflight.foresee(run_of(tmp_path)))


@pytest.mark.parametrize("rewards", ["[{}]", "{}"], ids=["a list", "one"])
def test_the_plan_counts_a_reward_model_beside_each_rank(tmp_path: Path, rewards: str) -> None:
    block = dict(type="model", path="Qwen/Qwen3-0.6B")  # a base of known size
    run = run_of(tmp_path, f"objective.rewards={rewards.format(block)}", hardware=machine(A100))
    assert run.fit is not None

    assert run.fit.peak.gpu["rewards"] == pytest.approx(2 * 0.596e9 + CONTEXT_BYTES, rel=0.01)
    assert "rewards" not in run_of(tmp_path, hardware=machine(A100)).fit.peak.gpu  # type: ignore[union-attr]


def test_the_plan_counts_what_vllm_holds_of_each_gpu(tmp_path: Path) -> None:
    def held(*sets: str) -> float | None:
        run = run_of(tmp_path, VLLM, *sets, hardware=machine(A100))
        assert run.fit is not None
        return run.fit.peak.gpu.get("vllm")

    assert held() == 0.3 * A100.memory_bytes
    assert held("generation.gpu_memory_utilization=0.5") == 0.5 * A100.memory_bytes
    assert held("generation.enable_sleep_mode=True") is None
    assert held("generation.server=http://node-1:8000") is None
