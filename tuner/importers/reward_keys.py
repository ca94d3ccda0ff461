"""Translates the keys of GRPO, RLOO and distillation that TRL, ms-swift and Axolotl share: rewards, sampling, vLLM.

Keys with the same name and value in a recipe stand in the tools' tables; here are those that need a look at the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from tuner.errors import Option
from tuner.files import JsonObject
from tuner.importers.aliases import Alias, by_word
from tuner.importers.translation import Function, Outcome, Rule, Setting, Translation, recorded_with
from tuner.recipes.schema.objectives import OBJECTIVES, objectives_with

ONLINE = objectives_with("rewards")
"""The objectives that learn from rewards."""
_REWARDS = ("objective", "rewards")
_MATH: JsonObject = {"type": "math", "column": "solution"}
_FORMAT: JsonObject = {"type": "format", "pattern": r"<think>.*</think>.*"}
_ACCURACIES = ("accuracy_reward", "accuracy", "reasoning_accuracy_reward")
_KNOWN: Mapping[str, tuple[JsonObject, str]] = {
    **{name: (_MATH, "compares the final answer with the column solution") for name in _ACCURACIES},
    **{name: (_FORMAT, "the whole completion matches it") for name in ("think_format_reward", "format")},
}
"""Reward of TRL, open-r1 or ms-swift -> the one of tuner that judges most alike, and how it does."""


def require_reward(t: Translation, key: str) -> None:
    """Say what stands in the way if an objective has no reward that tuner knows; `prepare` of a tool calls it.

    Args:
        t: The translation.
        key: The key that names the rewards.
    """
    words, add = t.words(key), Option("rewards", "FILE:FUNCTION")
    if t.objective in ONLINE and not any(map(_block, words)):
        named = f"like {', '.join(words)}" if words else "named in the config"
        t.obstacle = t.obstacle or f"tuner has no reward {named}: add {add} (docs/grpo.md)"


def _block(word: str) -> JsonObject | None:
    """Return the reward for another tool's name of it, or for a function's import path; None for another word."""
    if word in _KNOWN:
        return dict(_KNOWN[word][0])
    module, dot, function = word.rpartition(".")
    if dot and function.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        return {"type": f"{module}:{function}"}
    return None


def rewards(t: Translation, setting: Setting) -> None:
    """Set the rewards of a list of names and import paths, with the weights beside them."""
    if not t.is_of(ONLINE, setting):
        return
    words = setting.words(None)
    weights = t.words(setting.beside("reward_weights"))
    blocks = list(t.ours(_REWARDS) or [])
    for number, word in enumerate(words):
        block = _block(word)
        if block is None:
            t.change(setting, f"tuner has no reward {word!r}: {Option('rewards', 'FILE:FUNCTION')}")
            continue
        if number < len(weights):
            weight = t.inner((*setting.keys[:-1], "reward_weights"), weights[number]).number()
            block |= {"weight": weight} if weight not in (0, 1) else {}
        blocks.append(block)
        usage = _KNOWN[word][1] if word in _KNOWN else "it gets each completion as a text, and the columns by name"
        t.note(setting, Outcome.CHANGED, f"reward {block['type']}", f"{word}: {usage}")
    if blocks:
        t.set(setting, ".".join(_REWARDS), blocks)
    elif not words:
        t.leave(setting, "it names no reward")


def reward_model(t: Translation, setting: Setting) -> None:
    """Add a reward model to the rewards."""
    if t.is_of(ONLINE, setting):
        added = [{"type": "model", "path": path} for path in setting.words(None)]
        t.set(setting, ".".join(_REWARDS), [*(t.ours(_REWARDS) or []), *added])


def teacher(t: Translation, setting: Setting) -> None:
    """Set the teacher of a distillation, and say what its student learns on."""
    if t.is_of(("distill",), setting):
        why = "the student learns on completions that it writes itself, not on the answers of the rows"
        t.set(setting, "objective.teacher", setting.value, why, changed=True, is_learned=True)


def scaled(t: Translation, setting: Setting) -> None:
    """Set what advantages are divided by: TRL's words, or true and false of its older versions."""
    word = {"true": "group", "false": "none"}.get(str(setting.value).lower(), str(setting.value))
    _set(t, setting, "scale_rewards", word, "tuner has no such scale of rewards")


def loss_type(t: Translation, setting: Setting) -> None:
    """Set the loss, or keep tuner's if it has no such loss."""
    words = setting.words()
    if t.objective == "dpo":
        t.set(setting, "objective.loss_type", words)
    elif words == [t.objective]:  # SimPO is a loss of TRL's CPOTrainer
        t.note(setting, Outcome.TAKEN, f"objective {t.objective}")
    else:
        word = words[0].removeprefix("chunked_") if words else ""
        _set(t, setting, "loss_type", word, f"tuner has no loss {word!r} of {t.objective}")


def _set(t: Translation, setting: Setting, name: str, value: str, why: str) -> None:
    """Set a key of the objective to one of its words; another word is recorded as changed."""
    if not t.is_of(objectives_with(name), setting):
        return
    options = get_args(OBJECTIVES[t.objective].model_fields[name].annotation)
    if value in options:
        t.set(setting, f"objective.{name}", value)
    else:
        t.change(setting, f"{why}: one of {', '.join(options)}")


def top_k(t: Translation, setting: Setting) -> None:
    """Set the number of the most likely tokens to choose from; -1 and 0 mean all tokens."""
    if t.is_of(objectives_with("top_k"), setting):
        t.set(setting, "objective.top_k", max(0, setting.whole()))


def prompt_length(t: Translation, setting: Setting) -> None:
    """Set the longest prompt of an objective that generates; others count the whole sample."""
    if OBJECTIVES[t.objective].facts.generates:
        why = "longer prompts are left out, not cut"
        t.set(setting, "train_dataloader.dataset.max_length", setting.whole(), why, changed=True)
    else:
        t.leave(setting, "max_length limits the whole sample, prompt and answer")


def steps_per_generation(t: Translation, setting: Setting) -> None:
    """Record how many micro-batches are generated at once: as many as a step trains on, unless the key is set."""
    if t.objective not in ONLINE or setting.whole() == t.whole("gradient_accumulation_steps", 1):
        t.note(setting, Outcome.TAKEN, why="the completions of one step are generated at once")
    else:
        why = "it counts micro-batches: set objective.generation_batch_size to the completions of all ranks"
        t.note(setting, Outcome.CHANGED, why=why)


def engine(t: Translation, setting: Setting) -> None:
    """Choose vLLM as the program that generates, on the GPUs of the ranks or as a server."""
    if not t.is_of(objectives_with("generation"), setting):
        return
    t.set(setting, "objective.generation.engine", "vllm" if setting.truth() else "transformers")
    keys = ("mode", "server_base_url", "server_host", "server_port")
    mode, url, host, port = (t.value(setting.beside(f"vllm_{key}")) for key in keys)
    if setting.truth() and mode == "server":
        host = "127.0.0.1" if host in (None, "0.0.0.0") else host  # noqa: S104 (an address to bind to, not to call)
        t.set(setting, "objective.generation.server", str(url or f"http://{host}:{port or 8000}"))


def for_vllm(rule: Rule) -> Function:
    """Return the rule for a setting of vLLM, which counts only if vLLM generates."""

    def guarded(t: Translation, setting: Setting) -> None:
        if t.objective in objectives_with("generation") and t.is_on(setting.beside("use_vllm")):
            t.apply(rule, setting)
        else:
            t.leave(setting, "vLLM does not generate: use_vllm is not set")

    return guarded


RULES = by_word(
    {
        "reward_funcs": rewards,
        "reward_weights": recorded_with("reward_funcs"),
        "scale_rewards": scaled,
        "top_k": top_k,
        "steps_per_generation": steps_per_generation,
        "use_vllm": engine,
        "vllm_mode vllm_server_base_url vllm_server_host vllm_server_port": for_vllm(recorded_with("use_vllm")),
        **{
            f"vllm_{key}": for_vllm(Alias(f"objective.generation.{key}"))
            for key in ("group_port", "gpu_memory_utilization", "tensor_parallel_size", "enable_sleep_mode")
        },
    }
)
"""Key -> rule, in the words of TRL, which ms-swift shares."""
