"""A step waits for a GPU a few times, however many tensors are trained, and starts fewer operations than a loop.

`tests.worker.counting` counts both on a CPU, with the code of a rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, masking_utils

from bench.clock.bench_counts import counted
from tests.e2e.runs import environment
from tests.e2e.warm import warm
from tests.worker.counting import FUSED, LEVELS
from tuner.worker import compat, compat_update
from tuner.worker.trainers import TunerTrainer

MOST_WAITS = 8
MOST_MORE = 45
"""Operations more than a loop has where LoRA is PEFT's: the head, the ranks' sums, and copies of rows."""


@pytest.mark.e2e
@pytest.mark.long  # ten trainings; what spares each wait is tested below
def test_a_step_waits_a_few_times_whatever_it_trains_and_starts_fewer_operations_than_a_loop(tmp_path: Path) -> None:
    code = "from tests.worker.counting import main; main()"
    ended = warm().run([tmp_path], env=environment(), cwd=Path(__file__).parents[2], code=code)
    assert ended.returncode == 0, ended.stderr
    found = dict(map(json.loads, ended.stdout.splitlines()))

    for name, counts in found.items():
        if not name.endswith("loop"):
            assert sum(counts["waits"].values()) <= MOST_WAITS, (name, counts)
    for level in ("none", "zero3"):
        deep, shallow = found[f"{level}-lora-2"], found[f"{level}-lora-1"]
        assert deep["trained"] == 2 * shallow["trained"]
        assert deep["waits"] == shallow["waits"], level
    for level in LEVELS:
        more = found[f"{level}-lora-2"]["operations"] - found[f"{level}-loop"]["operations"]
        assert more < (0 if level in FUSED else MOST_MORE), (level, more)


def test_transformers_masks_of_rows_whose_samples_are_known_are_the_same_and_read_nothing() -> None:
    packed = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])
    single = torch.arange(6)[None].expand(2, -1)
    find = masking_utils.find_packed_sequence_indices
    wanted = find(packed)
    assert find(single) is None

    counted.reset()
    counted.start()
    counted.keep((packed, single), of_python=False)  # they lie on the GPU
    with compat.knowing(are_packed=True):
        found = masking_utils.find_packed_sequence_indices(packed)
    with compat.knowing(are_packed=False):
        assert masking_utils.find_packed_sequence_indices(single) is None
    counted.stop()

    assert not counted.waits
    assert torch.equal(found, wanted)
    assert masking_utils.find_packed_sequence_indices is find


def test_an_engine_that_trains_is_not_walked_and_one_with_a_module_that_does_not_is() -> None:
    module, walked = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()), []
    engine: Any = SimpleNamespace(module=module, train=lambda mode=True: walked.append(module.train(mode)))
    compat_update.spare_walks(engine)
    module[0].weight.grad = torch.ones(2, 2)

    engine.train()
    assert not walked
    module[1].eval()
    engine.train()
    engine.zero_grad()

    assert len(walked) == 1 and module[1].training
    assert module[0].weight.grad is None


@pytest.mark.parametrize(
    ("config", "steps_per_print", "is_timed", "waits"),
    [({}, None, False, False), ({}, 10, True, False), ({"timers": {}}, None, True, True)],
)
def test_samples_a_second_are_measured_without_a_wait_unless_a_config_has_timers(
    config: dict[str, Any], steps_per_print: int | None, is_timed: bool, waits: bool
) -> None:
    engine: Any = SimpleNamespace(config=config, steps_per_print=lambda: steps_per_print)
    engine.tput_timer = SimpleNamespace(config=compat_update.DeepSpeedThroughputTimerConfig())

    compat_update.spare_timer(engine)

    timer = engine.tput_timer.config
    assert (timer.enabled, timer.synchronized) == (is_timed, waits)


def test_the_flops_of_a_micro_batch_are_the_trainers_and_its_weights_are_counted_once() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    trainer: Any = SimpleNamespace(model=model, _num_counted=None)
    inputs = {"input_ids": torch.zeros(2, 5, dtype=torch.long)}
    wanted = Trainer.floating_point_ops(trainer, inputs)
    assert TunerTrainer.floating_point_ops(trainer, inputs) == wanted > 0

    model.num_parameters = lambda **_: pytest.fail("counted again")

    assert TunerTrainer.floating_point_ops(trainer, inputs) == wanted
