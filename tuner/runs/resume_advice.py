"""How to resume a run whose recipe names code: the command, and beside each flag all that the flag allows."""

from __future__ import annotations

from pathlib import Path

from tuner import remote_code
from tuner.runs.directory import RunDirectory, resume_command

_MOST_SHOWN = 300
"""Characters: what a flag allows must be shown whole."""


def resume_advice(path: Path) -> str:
    """Return the command of `resume_command` with the flags that the run's recipe needs, and what each of them allows.

    Whose run it is cannot be known, so a flag never stands without the code that it allows: if that is too long to be
    shown, the flag is left out, and the command says where the recipe names it. A recipe.json that cannot be read
    counts as one that names no code.
    """
    run_dir, allowed = RunDirectory(path), dict[str, list[str]]()
    log, checkpoint, model = (run_dir.recipe_block(name) for name in ("log", "checkpoint", "model"))
    rewards = run_dir.recipe_block("objective").get("rewards")
    blocks = rewards if isinstance(rewards, list) else []
    types = [str(block.get("type") if isinstance(block, dict) else block) for block in blocks]
    named = [("log.notify", log.get("notify")), ("checkpoint.repository", checkpoint.get("repository"))]
    named += [("objective.rewards", kind) for kind in types if ":" in kind]
    if "/" in str(model.get("attn_implementation")):
        named.append(("model.attn_implementation", model["attn_implementation"]))
    if shown := [f"{key} = {value!r}" for key, value in named if value]:
        allowed["--allow-code"] = shown
    if model.get("trust_remote_code") is True:
        allowed[remote_code.FLAG] = [remote_code.described(str(model.get("path")), str(model.get("revision")))]
    meanings = "; ".join(f"{flag} allows {', '.join(shown)}" for flag, shown in allowed.items())
    if not allowed or len(meanings) > _MOST_SHOWN:
        return resume_command(path)
    return f"{resume_command(path)} {' '.join(allowed)} ({meanings})"
