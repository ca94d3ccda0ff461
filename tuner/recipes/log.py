"""What a run records and whom it tells: the block `log` of a recipe."""

import shlex
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic_core import core_schema as core

from tuner.recipes.block import Block, Field, Lax, PositiveInt, check_key

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "swanlab", "clearml"]

OF_A_TRIAL: dict[str, Any] = {"interval": 1, "trackers": (), "num_samples": 0, "generate": 0, "notify": None}
"""The block of a run of a few steps that is not the user's run: it records every step and tells nobody."""

NOT_PUSHED: dict[str, Any] = {"repository": None, "push": False}
"""The same of the block `checkpoint`: its weights go nowhere."""


class Log(Block):
    """What is recorded; interval in optimizer steps."""

    interval: PositiveInt | Literal["auto"]
    trackers: Annotated[tuple[Tracker, ...], Lax]
    num_samples: Annotated[int, Field(ge=0)] | Literal["auto"]
    generate: Annotated[int, Field(ge=0)]
    max_new_tokens: PositiveInt
    notify: str | tuple[str, ...] | list[str] | None

    @check_key("notify")
    @classmethod
    def _notify_is_a_command(cls, notify: Any, info: core.ValidationInfo) -> Any:
        try:
            words = _words(notify)
        except ValueError as error:
            raise ValueError(f"a command line has matching quotes ({error})") from None
        if notify is not None and not (words and words[0]):
            raise ValueError("the command is empty; write one, or None")
        return notify

    @property
    def command(self) -> tuple[str, ...]:
        """The words of `notify`, none where it is None."""
        return _words(self.notify)


def _words(command: str | Sequence[str] | None) -> tuple[str, ...]:
    return tuple(shlex.split(command) if isinstance(command, str) else command or ())
