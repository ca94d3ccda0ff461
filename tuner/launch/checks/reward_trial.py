"""Every reward of a recipe is called on the first rows before a run starts: see `rewards.trial`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tuner import paths
from tuner.data import formats, mixing
from tuner.data.formats.columns import Columns, renamed
from tuner.data.sample import Chat
from tuner.data.sample_kinds import before_last_answer
from tuner.errors import DataError
from tuner.launch.checks import Finding
from tuner.launch.resolved_run import ResolvedRun
from tuner.recipes.schema import Dataset
from tuner.recipes.schema.rewards import rewards_of
from tuner.rewards import TrialRow, mistakes

NUM_ROWS = 4
_CONVERSATIONS = ("messages", "conversations")


def tried(run: ResolvedRun) -> Iterator[Finding]:
    """Find the mistakes of rewards. Rows that are not local files are tried by nothing before the run."""
    config = run.recipe.config
    rewards = rewards_of(config.objective)
    if rewards:
        yield from mistakes(rewards, trial_rows(config.train_dataloader.dataset, config.objective.type))


def trial_rows(dataset: Dataset, objective: str) -> list[TrialRow]:
    """Return the first rows of each data set that is a local file; those that cannot be read are left out."""
    rows: list[TrialRow] = []
    for one in mixing.open(dataset.model_copy(update={"val_split": None})).sets if _is_local(dataset) else ():
        for row in one.head(NUM_ROWS):
            try:
                rows.append(trial_row(row, one.format, one.columns, objective))
            except DataError:  # `inputs.first_rows` reports it
                continue
    return rows


def _is_local(dataset: Dataset) -> bool:
    return all(share.path and paths.local(share.path) and ":" not in (share.format or "") for share in dataset.shares)


def trial_row(row: Mapping[str, object], row_format: str | None, columns: Columns | None, objective: str) -> TrialRow:
    """Return a row with its prompt; a conversation is cut before its last answer, which becomes the column `answer`.

    Raises:
        DataError: the row has no prompt.
    """
    own = renamed(row, columns, "the first rows")
    if "prompt" in own and not {"completion", "chosen"} & own.keys():
        return TrialRow(own["prompt"], {key: value for key, value in own.items() if key != "prompt"})
    name = row_format or formats.detect([own], "the first rows", objective=objective)
    sample = formats.read(name, own, "the first rows")
    if not isinstance(sample, Chat) or not sample.messages:
        raise DataError("the row has no prompt")
    others = {key: value for key, value in own.items() if key not in _CONVERSATIONS}
    prompt = before_last_answer(sample)
    return TrialRow(prompt.prompt, {**others, **prompt.columns})
