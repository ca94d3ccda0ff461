"""Translates the keys of ROLL's distillation to the objective `distill`.

ROLL's student learns on the answers of its rows; tuner's learns on completions that it writes itself. ROLL's defaults
are from roll/pipeline/distill/distill_config.py at v0.3.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.importers.document import Value
from tuner.importers.roll_pipeline import left, of_pipeline
from tuner.importers.translation import Outcome, Rule, Setting, Translation
from tuner.recipes.aliases import by_word

DISTILL = "distill"
DEFAULTS: Mapping[str, Value] = {"kd_objective": "forward_kl", "max_grad_norm": 0.0}
_BETAS = {"forward_kl": 0.0, "js_divergence": 0.5, "reverse_kl": 1.0}
"""ROLL's kd_objective -> the `beta` that means the same."""
_TEACHER = ("teacher_pretrain", "teacher.model_args.model_name_or_path")


def prepare(t: Translation) -> None:
    """Choose the objective, and say what is missing."""
    t.objective = DISTILL
    if not any(t.value(key) for key in _TEACHER):
        t.obstacle = "the config names no teacher: add teacher_pretrain"


def teacher(t: Translation, setting: Setting) -> None:
    """Set the teacher, and say what its student learns on."""
    why = "the student learns on completions that it writes itself, not on the answers of the rows"
    t.set(setting, "objective.teacher", setting.value, why, changed=True)


def divergence(t: Translation, setting: Setting) -> None:
    """Set which divergence the loss is."""
    beta = _BETAS.get(str(setting.value))
    if beta is None:
        t.note(setting, Outcome.CHANGED, why=f"tuner has no {setting.value}: objective.beta is 1.0, the reverse KL")
    else:
        t.set(setting, "objective.beta", beta)


def temperature(t: Translation, setting: Setting) -> None:
    """Set the temperature of both models; it is also that of the completions."""
    t.set(setting, "objective.temperature", setting.number())


def teachers_temperature(t: Translation, setting: Setting) -> None:
    """Record a temperature of the teacher alone: tuner has one for both models."""
    if setting.number() == t.number("kd_temperature", 1.0):
        t.note(setting, Outcome.TAKEN)
    else:
        t.note(setting, Outcome.CHANGED, why="both models have objective.temperature")


def weight(t: Translation, setting: Setting) -> None:
    """Record the weight of the divergence: tuner adds no loss of the rows' answers to it."""
    if setting.number() == 1:
        t.note(setting, Outcome.TAKEN)
    else:
        t.note(setting, Outcome.CHANGED, why="the loss is the divergence alone")


_RULES = by_word(
    {
        " ".join(_TEACHER): teacher,
        "kd_objective": divergence,
        "kd_temperature": temperature,
        "teacher_temperature": teachers_temperature,
        "distill_loss_weight": weight,
        "distill_on_prompt": left("the loss is on completions"),
        "logits_topk": left("the probabilities of all tokens are compared"),
        "logits_transfer_backend": left("each rank computes with the teacher, so no logits are sent"),
        "adaptive_kl_alpha skew_lambda": left("of a divergence that tuner does not have"),
        "teacher.*": left("the ranks that train hold the teacher too: objective.teacher_bits=4 saves memory"),
    }
)
RULES: Mapping[str, Rule] = {key: of_pipeline(DISTILL, "distillation", rule) for key, rule in _RULES.items()}
"""Keys of distillation -> rules."""
