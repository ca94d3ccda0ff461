"""The block `log` of a recipe: what a run records, and which command it runs at the end."""

import shlex
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt, PositiveInt, field_validator

from tuner.recipes.strict import Block, Lax

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "swanlab", "clearml"]

_Command = str | tuple[str, ...] | list[str] | None

OF_A_TRIAL: dict[str, Any] = {"interval": 1, "trackers": (), "num_samples": 0, "generate": 0, "notify": None}
"""The block of a trial run of a few steps: it records every step, and runs no command at the end."""

NOT_PUSHED: dict[str, Any] = {"repository": None, "push": False}
"""The same of the block `checkpoint`: its weights go nowhere."""


class Log(Block):
    """What is recorded; interval in optimizer steps."""

    interval: PositiveInt | Literal["auto"]
    trackers: Annotated[tuple[Tracker, ...], Lax]
    num_samples: NonNegativeInt | Literal["auto"]
    generate: NonNegativeInt
    max_new_tokens: PositiveInt
    notify: _Command

    @field_validator("notify")
    @classmethod
    def _notify_is_a_command(cls, notify: _Command) -> _Command:
        try:
            words = _words(notify)
        except ValueError as error:
            raise ValueError(f"a command line has matching quotes ({error})") from None
        if notify is not None and not (words and words[0]):
            raise ValueError("the command is empty; write one, or None")
        return notify

    @property
    def command(self) -> tuple[str, ...]:
        """The words of `notify`; empty if it is None."""
        return _words(self.notify)


def _words(command: str | Sequence[str] | None) -> tuple[str, ...]:
    return tuple(shlex.split(command) if isinstance(command, str) else command or ())
