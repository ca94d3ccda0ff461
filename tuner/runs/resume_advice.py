"""How to resume a run: the command, the flags of its nodes, and those for code with all that each allows."""

from __future__ import annotations

import shlex
from pathlib import Path

from tuner import remote_code
from tuner.runs.directory import RunDirectory, resume_command
from tuner.runs.records import NODE_FLAGS

_MOST_SHOWN = 300
"""Characters: what a flag allows must be shown whole."""


def resume_advice(path: Path, node_rank: int | None = None) -> str:
    """Return the command of `resume_command` with the flags that the run's nodes and its recipe need.

    Args:
        node_rank: That of the node where it is shown, if one does: what each node has to type is shown on each.

    Beside a flag that allows code stands what it allows.

    The owner of the run is not known, so a flag never stands without the code that it allows: if that is too long to be
    shown, the flag is left out, and the command says where the recipe names it. A recipe.json that cannot be read
    counts as one that names no code.
    """
    run_dir, allowed = RunDirectory(path), dict[str, list[str]]()
    log, checkpoint, model = (run_dir.recipe_block(name) for name in ("log", "checkpoint", "model"))
    rewards = run_dir.recipe_block("objective").get("rewards")
    blocks = rewards if isinstance(rewards, list) else []
    types = [str(block.get("type") if isinstance(block, dict) else block) for block in blocks]
    code_keys = [("log.notify", log.get("notify")), ("checkpoint.repository", checkpoint.get("repository"))]
    code_keys += [("objective.rewards", kind) for kind in types if ":" in kind]
    if "/" in str(model.get("attn_implementation")):
        code_keys.append(("model.attn_implementation", model["attn_implementation"]))
    if shown := [f"{key} = {value!r}" for key, value in code_keys if value]:
        allowed["--allow-code"] = shown
    if model.get("trust_remote_code") is True:
        allowed[remote_code.FLAG] = [remote_code.described(str(model.get("path")), str(model.get("revision")))]
    meanings = "; ".join(f"{flag} allows {', '.join(shown)}" for flag, shown in allowed.items())
    flags, notes = _of_nodes(run_dir, node_rank)
    if allowed and len(meanings) <= _MOST_SHOWN:
        flags, notes = [*flags, *allowed], [*notes, meanings]
    return " ".join((resume_command(path), *flags, *(f"({note})" for note in notes)))


def _of_nodes(run_dir: RunDirectory, node_rank: int | None) -> tuple[list[str], list[str]]:
    """Return the flags that start the nodes of a run, and what to change of them.

    Only flags that start nodes: the owner of the run is not known.
    """
    record = run_dir.run_or_none
    flags = [flag for flag in record.node_flags if flag.partition("=")[0] in NODE_FLAGS] if record else []
    if record is None:
        return [], []
    if sum(map(len, flags)) > _MOST_SHOWN:
        return [], ["with the flags of its nodes, which run.json has as node_flags"]
    command = record.on_node(shlex.join(flags), node_rank)
    notes = ["on every node, with its own --node-rank"] if record.names_nodes and node_rank is None else []
    if any(flag.startswith("--ssh=") for flag in record.node_flags):
        notes.append("it was started with --ssh, which is not shown: add yours")
    return [command] if command else [], notes
