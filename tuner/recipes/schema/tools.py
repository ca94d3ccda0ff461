"""The keys of functions that the model calls while it writes a completion: tools, and the methods of an environment."""

from typing import Annotated

from pydantic import AfterValidator, PositiveFloat, PositiveInt

from tuner.recipes.schema.block import Block, Contradictions, Lax
from tuner.recipes.schema.rewards import names_code, rewards_of

_EXAMPLES = "'my_tools.py:search'", "'my_game.py:Game'"
_Tool = Annotated[str, AfterValidator(lambda name: names_code(name, _EXAMPLES[0]))]
_Environment = Annotated[str, AfterValidator(lambda name: names_code(name, _EXAMPLES[1]))]
TOOL_KEYS = frozenset({"tools", "environment", "tool_timeout", "max_calls", "max_result_tokens"})
"""The keys of `Tools`; TRL has other arguments for them."""


class Tools(Block):
    """Mixed into an objective with completions that may call the user's functions, several times in one completion."""

    # Functions that the model may call: 'my_tools.py:search' or 'my_package.my_module:search', with type hints and a
    # docstring that describes each argument.
    tools: Annotated[tuple[_Tool, ...], Lax] = ()
    # A class whose methods the model may call, such as 'my_game.py:Game'. Each completion has an object of its own,
    # whose method reset gets the row.
    environment: _Environment | None = None
    # Seconds for one call.
    tool_timeout: PositiveFloat = 10.0
    # Calls of a completion; it ends at one more.
    max_calls: PositiveInt = 8
    # Tokens of a result, or of what reset adds to the prompt; the rest is cut off.
    max_result_tokens: PositiveInt = 256

    @property
    def uses_tools(self) -> bool:
        """Whether the model may call functions."""
        return bool(self.tools or self.environment)

    def contradictions(self) -> Contradictions:
        yield from super().contradictions()
        if not self.uses_tools:
            yield from self.unread("without tools or an environment", "tool_timeout", "max_calls", "max_result_tokens")
        if self.environment is None and any(reward.type == "environment" for reward in rewards_of(self)):
            yield "rewards", "the reward 'environment' is that of an environment; set objective.environment"


def tools_of(objective: Block) -> Tools | None:
    """Return the objective if its model calls functions, else None."""
    return objective if isinstance(objective, Tools) and objective.uses_tools else None
