"""Translates the keys of ROLL's two pipelines that generate: rewards become `grpo`, a teacher becomes `distill`.

ROLL generates with other processes than it trains with. In tuner the ranks that train generate, so the keys of those
processes have no counterpart. ROLL's student learns on the answers of its rows; tuner's learns on completions that it
writes itself. ROLL's defaults are from roll/configs/base_config.py and roll/pipeline/distill/distill_config.py at
v0.3.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.errors import Option
from tuner.importers.aliases import Alias, by_word
from tuner.importers.document import Value
from tuner.importers.key_tables import Changes
from tuner.importers.reward_keys import teacher
from tuner.importers.translation import Function, Outcome, Rule, Setting, Translation, noted, of_objective

GRPO = "grpo"
DISTILL = "distill"
DISTILL_DEFAULTS: Mapping[str, Value] = {"kd_objective": "forward_kl", "max_grad_norm": 0.0}
_BETAS = {"forward_kl": 0.0, "js_divergence": 0.5, "reverse_kl": 1.0}
"""ROLL's kd_objective -> the `beta` that means the same."""
_TEACHER = ("teacher_pretrain", "teacher.model_args.model_name_or_path")
_REWARDS = ("objective", "rewards")
_MATH: Mapping[str, Value] = {"type": "math", "column": "ground_truth"}
"""The reward that means the same as ROLL's, on the column of the right answer in its data."""
_WORKERS = dict.fromkeys(("MathRuleRewardWorker", "MathVerifyRewardWorker"), _MATH)
_AGGREGATIONS = {"token-mean": "bnpo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
"""ROLL's loss_agg_mode -> TRL's loss_type: a mean over the tokens of a batch, over those of a completion, or a sum."""
_OF_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")


def prepare(t: Translation) -> None:
    """Choose the objective, and say what stands in its way."""
    t.objective = GRPO
    if t.value("adv_estimator") in ("gae", "skip_obs_gae"):
        t.obstacle = "tuner has no PPO with a critic (adv_estimator gae): objective grpo compares completions instead"
    worker_keys = (key for key in t.settings if key.startswith("rewards.") and key.endswith(".worker_cls"))
    workers = [str(t.settings[key].value) for key in worker_keys]
    if workers and not any(_reward_of(worker) for worker in workers):
        names = ", ".join(worker.rpartition(".")[2] for worker in workers)
        t.obstacle = t.obstacle or f"tuner has no reward like {names}: write a function, docs/grpo.md"


def _reward_of(worker: str) -> Mapping[str, Value] | None:
    return _WORKERS.get(worker.rpartition(".")[2])


def only_if(switch: str, rule: Rule, *, is_on: bool = True) -> Function:
    """Return a rule that is used if a switch of ROLL's has this value; it is off if it is not written."""

    def guarded(t: Translation, setting: Setting) -> None:
        if t.is_on(switch) == is_on:
            t.apply(rule, setting)
        else:
            t.leave(setting, f"{switch} is {'off' if is_on else 'on'}")

    return guarded


def clips_both_ways(t: Translation, setting: Setting) -> None:
    """Set `delta`: ROLL's second clip limits the ratio of a bad completion to 1 + 2 pg_clip."""
    if setting.truth():
        t.set(setting, "objective.delta", 1 + 2 * t.number("pg_clip", 0.2))
    else:
        t.note(setting, Outcome.TAKEN)


def estimator(t: Translation, setting: Setting) -> None:
    """Record the estimator of advantages; `prepare` refuses those with a critic."""
    if setting.value == GRPO:
        t.note(setting, Outcome.TAKEN, "objective grpo")
    else:
        t.note(setting, Outcome.CHANGED, "objective grpo", "advantages are rewards minus the mean of their group")


def steps(t: Translation, setting: Setting, role: str, num_gpus: int) -> None:
    """Set the optimizer steps of a number of rollouts."""
    micro, accumulation = (t.whole(f"{role}.training_args.{name}", 1) for name in _OF_STEP)
    completions = t.whole("rollout_batch_size", 128) * t.whole("num_return_sequences_in_group", 1)
    per_rollout = max(1, completions * t.whole("ppo_epochs", 1) // (micro * accumulation * max(1, num_gpus)))
    why = f"{per_rollout} optimizer step{'s' if per_rollout > 1 else ''} a rollout on ROLL's GPUs"
    t.set(setting, "train_cfg.max_steps", setting.whole() * per_rollout if setting.number() > 0 else None, why)


def reward(t: Translation, setting: Setting) -> None:
    """Add the reward of a worker, or record that tuner has none like it; its other keys say how ROLL runs it."""
    if setting.keys[-1] != "worker_cls":
        t.leave(setting, "each rank runs the rewards")
        return
    block, before = _reward_of(str(setting.value)), t.ours(_REWARDS) or []
    if block is None:
        add = Option("rewards", "FILE:FUNCTION")
        t.leave(setting, f"tuner has no such reward: write a function and add {add} (docs/grpo.md)")
    else:
        rewards = before if block in before else [*before, dict(block)]
        why = "for every row: tuner does not choose rewards by a row's tag"
        t.set(setting, ".".join(_REWARDS), rewards, why, changed=True)


_GENERATED = "actor_infer.generating_args"
_RULES: Mapping[str, Rule] = by_word(
    {
        "num_return_sequences_in_group": Alias("objective.num_generations"),
        "rollout_batch_size": noted(
            Outcome.CHANGED, "a step generates what it trains on: micro-batch x accumulation x ranks completions"
        ),
        "prompt_length": Alias("train_dataloader.dataset.max_length"),
        "response_length": Alias("objective.max_completion_length"),
        "ppo_epochs": Alias("objective.num_iterations"),
        "adv_estimator": estimator,
        "kl_loss_coef": only_if("use_kl_loss", Alias("objective.beta")),
        "pg_clip": only_if("use_pg_clip_range", Alias("objective.epsilon"), is_on=False),
        "pg_clip_low": only_if("use_pg_clip_range", Alias("objective.epsilon")),
        "pg_clip_high": only_if("use_pg_clip_range", Alias("objective.epsilon_high")),
        "dual_clip_loss": clips_both_ways,
        "entropy_loss_coef": Alias("objective.entropy_coef"),
        "max_len_mask": Alias("objective.mask_truncated_completions"),
        "norm_std_type": Alias("objective.scale_rewards", {"group": "group", "batch": "batch", ".*": "none"}),
        "loss_agg_mode": Alias(
            "objective.loss_type", _AGGREGATIONS, "tuner has no such mode; objective.loss_type keeps its default"
        ),
        f"{_GENERATED}.max_new_tokens": Alias("objective.max_completion_length"),
        f"{_GENERATED}.temperature": Alias("objective.temperature"),
        f"{_GENERATED}.top_p": Alias("objective.top_p"),
        f"{_GENERATED}.top_k": Alias("objective.top_k"),
        f"{_GENERATED}.repetition_penalty": Alias("objective.repetition_penalty"),
        f"{_GENERATED}.num_return_sequences": "num_return_sequences_in_group sets it",
        f"{_GENERATED}.*": "completions are sampled",
        "rewards.*": reward,
        "actor_infer.*": "the ranks that train generate: objective.generation chooses the engine",
        "use_kl_loss": "with kl_loss_coef: objective.beta, 0 if it is off",
        "use_pg_clip_range": "with pg_clip_low and pg_clip_high",
        "whiten_advantages": "advantages are compared in their group: objective.scale_rewards",
        "reward_clip advantage_clip value_clip": "rewards and advantages are not clipped",
        "difficulty_*": "rows are not chosen by how often they are solved",
        "critic*": "there is no critic",
    }
)
RULES: Mapping[str, Rule] = {key: of_objective(GRPO, rule) for key, rule in _RULES.items()}
"""Keys of the pipeline of rewards -> rules; those that depend on the role stand in `roll`."""


def prepare_distillation(t: Translation) -> None:
    """Choose the objective, and say what is missing."""
    t.objective = DISTILL
    if not any(t.value(key) for key in _TEACHER):
        t.obstacle = "the config names no teacher: add teacher_pretrain"


def divergence(t: Translation, setting: Setting) -> None:
    """Set which divergence the loss is."""
    beta = _BETAS.get(str(setting.value))
    if beta is None:
        why = f"tuner has no {setting.value}: objective.beta is 1.0, the reverse KL"
        t.change(setting, why)
    else:
        t.set(setting, "objective.beta", beta)


def teachers_temperature(t: Translation, setting: Setting) -> None:
    """Record a temperature of the teacher alone: tuner has one for both models."""
    is_same = setting.number() == t.number("kd_temperature", 1.0)
    t.note(setting, Outcome.TAKEN if is_same else Outcome.CHANGED, why="both models have objective.temperature")


_DISTILL_RULES: Mapping[str, Rule] = by_word(
    {
        " ".join(_TEACHER): teacher,
        "kd_objective": divergence,
        "kd_temperature": Alias("objective.temperature"),
        "teacher_temperature": teachers_temperature,
        "distill_loss_weight": Changes("the loss is the divergence alone", frozenset({"1", "1.0"})),
        "distill_on_prompt": "the loss is on completions",
        "logits_topk": "the probabilities of all tokens are compared",
        "logits_transfer_backend": "each rank computes with the teacher, so no logits are sent",
        "adaptive_kl_alpha skew_lambda": "of a divergence that tuner does not have",
        "teacher.*": "the ranks that train hold the teacher too: objective.teacher_bits=4 saves memory",
    }
)
DISTILL_RULES: Mapping[str, Rule] = {key: of_objective(DISTILL, rule) for key, rule in _DISTILL_RULES.items()}
"""Keys of distillation -> rules."""
