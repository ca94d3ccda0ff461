"""ROLL's pipeline of rollouts and rewards becomes the objective grpo; what has no counterpart is listed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.importers.keys import OF_TOOL
from tuner.importers import roll
from tuner.importers.document import ForeignConfig
from tuner.importers.translation import Outcome, Translation

RULE, JUDGE = (
    "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker",
    "rewards.x.LLMJudgeRewardWorker",
)
PIPELINE = {
    **OF_TOOL["roll"],
    "reward_pretrain": None,
    "max_steps": 500,
    "rewards": {
        "math_rule": {"worker_cls": RULE, "tag_included": ["aime"], "world_size": 8, "infer_batch_size": 1},
        "llm_judge": {"worker_cls": JUDGE, "judge_prompt": "x"},
    },
    "actor_infer": {
        "generating_args": {"max_new_tokens": "${response_length}", "top_p": 0.99, "top_k": 100, "temperature": 0.9,
                            "num_beams": 1, "num_return_sequences": "${num_return_sequences_in_group}"},
        "strategy_args": {"strategy_name": "vllm", "strategy_config": {"gpu_memory_utilization": 0.6}},
        "device_mapping": "list(range(0,8))",
    },
}  # fmt: skip


def translated(pipeline: Mapping[str, Any], changes: Mapping[str, Any] = {}) -> Translation:
    """Translate a pipeline with other values; None takes a key away."""
    values = {key: value for key, value in {**pipeline, **changes}.items() if value is not None}
    document = roll.with_defaults(ForeignConfig(yaml.safe_load(yaml.safe_dump(values)), "zero3.yaml"))
    translation = Translation(document, roll.TOOL)
    translation.run()
    return translation


def values_of(translation: Translation) -> dict[str, Any]:
    return {".".join(keys): chosen.value for keys, chosen in translation.chosen.items()}


def test_the_guides_pipeline_is_translated() -> None:
    translation = translated(PIPELINE)
    values = values_of(translation)

    assert (translation.objective, translation.obstacle) == ("grpo", None)
    expected = {
        "num_generations": 8,
        "max_completion_length": 4096,
        "delta": 1.4,
        "mask_truncated_completions": True,
        "temperature": 0.9,
        "top_p": 0.99,
        "top_k": 100,
        "rewards": [{"type": "math", "column": "ground_truth"}],
    }
    assert {key: values[f"objective.{key}"] for key in expected} == expected
    assert values["train_dataloader.dataset.max_length"] in (1024, 2048)
    assert values["train_cfg.max_steps"] == 500 * (64 * 8 // (1 * 32 * 8))


def test_what_has_no_counterpart_says_what_happens_instead() -> None:
    entries = {entry.setting.key: entry for entry in translated(PIPELINE).entries}

    for key, text in (
        ("rewards.llm_judge.worker_cls", "--reward FILE:FUNCTION"),
        ("actor_infer.strategy_args.strategy_name", "objective.generation"),
        ("actor_infer.device_mapping", "objective.generation"),
        ("value_clip", "not clipped"),
        ("difficulty_mask", "not chosen"),
    ):
        assert entries[key].outcome is Outcome.LEFT_OUT and text in str(entries[key].why), key
    assert entries["rewards.math_rule.worker_cls"].outcome is Outcome.CHANGED


def test_clipping_and_the_reference_follow_their_switches() -> None:
    off = {"pg_clip": 0.1, "pg_clip_low": 0.3, "pg_clip_high": 0.4, "kl_loss_coef": 0.01}
    assert {
        key: value for key, value in values_of(translated(PIPELINE, off)).items() if "epsilon" in key or "beta" in key
    } == {"objective.epsilon": 0.1}
    on = values_of(translated(PIPELINE, {**off, "use_pg_clip_range": True, "use_kl_loss": True}))
    assert (on["objective.epsilon"], on["objective.epsilon_high"], on["objective.beta"]) == (0.3, 0.4, 0.01)


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"adv_estimator": "gae"}, "no PPO"),
        ({"rewards": {"code": {"worker_cls": "x.CodeSandboxRewardWorker"}}}, "no reward like CodeSandboxRewardWorker"),
    ],
)
def test_what_would_train_something_else_is_refused_by_name(changes: dict[str, Any], obstacle: str) -> None:
    assert obstacle in str(translated(PIPELINE, changes).obstacle)
