"""What the name of a run or of a model means, looked for here before the hub is asked."""

from __future__ import annotations

from pathlib import Path

from tuner.cli.say import say


def newest_of(name: str) -> str:
    """Return the newest run in a recipe's folder, work_dirs/RECIPE, and say so; any other name as it is."""
    from tuner import paths
    from tuner.recipes.starting_weights import holds_model
    from tuner.runs.directory import is_run, newest_run

    folder = paths.expanded(name)
    if not paths.is_folder(folder) or is_run(folder) or holds_model(folder) or not (run := newest_run(folder)):
        return name
    say(f"{name} holds runs: taking the newest, {run}.", err=True)
    return str(run)


def source_of(name: str) -> str:
    """Return what SOURCE means: `newest_of`, or the name as it is.

    Raises:
        RunDirectoryError: nothing is there, and the name is no id of the hub with its owner: the hub is not asked.
    """
    from tuner import paths
    from tuner.recipes import mistaken
    from tuner.runs.listing import below, no_run

    local, fix = paths.local(name), "Give a run, a model's folder, or a hub id: OWNER/NAME."
    if local:
        if not paths.exists(local):
            raise no_run(name, "SOURCE", fix)
        return newest_of(name)
    from huggingface_hub import try_to_load_from_cache  # 0.01 s, for names alone of which nothing is here

    folder = Path(name).parent
    is_cached = "/" not in name and isinstance(try_to_load_from_cache(name, "config.json"), str)
    if is_cached or ("/" in name and not (paths.is_folder(folder) and below(folder))):
        return name
    meant = mistaken.hub_id(name)
    raise no_run(name, "SOURCE", f"Did you mean {meant}?" if meant else fix)
