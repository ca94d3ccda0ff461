"""How long a run may stand still before it counts as hung, by what it does; that of a step is learned from the run.

A rank counts the time in which it makes no progress (`worker.heartbeat`). Nothing is measured or ended here. The first
step of a start belongs to the start: it compiles.
"""

from __future__ import annotations

from typing import Literal

from tuner.runs.beats import Phase

_LIMIT_S = 1800.0
_LEAST_S = {Phase.STEPS: 300.0, Phase.SAVES: _LIMIT_S}
"""The least limits of the phases with learned limits."""
_TIMES = 10
"""A limit that is learned is this many times the longest so far."""
_STEPS = 10
"""So many steps are measured before their limit is learned."""


class TimeLimits:
    """The limits of one rank, in seconds without progress.

    Args:
        asked: The user's limit, which holds for all phases; 'auto': the limits of steps and saves follow the run.
        learns_steps: False where a late step may compile: the limit of steps then stays that of a start.
    """

    def __init__(self, limit_s: float | Literal["auto"] = "auto", *, learns_steps: bool = True) -> None:
        self.asked_s, self.learns_steps = None if limit_s == "auto" else limit_s, learns_steps
        self.longest_s = dict.fromkeys(_LEAST_S, 0.0)
        self.num_steps = 0
        """The steps that were measured."""

    def of(self, phase: Phase) -> float:
        """Return the limit of a phase."""
        if self.asked_s is not None:
            return self.asked_s
        if phase is Phase.FINISH:  # it saves the result
            phase = Phase.SAVES
        if phase not in _LEAST_S or (phase is Phase.STEPS and not self.knows_steps):
            return _LIMIT_S
        return max(_LEAST_S[phase], _TIMES * self.longest_s[phase])

    @property
    def knows_steps(self) -> bool:
        """Whether the limit of a step is learned."""
        return self.asked_s is None and self.learns_steps and self.num_steps >= _STEPS

    def learn(self, phase: Phase, seconds: float) -> str | None:
        """Note how long a step or a save took; return what to say once the limit of a step is learned."""
        self.longest_s[phase] = max(self.longest_s[phase], seconds)
        knew_steps = self.knows_steps
        self.num_steps += phase is Phase.STEPS
        if knew_steps or not self.knows_steps:
            return None
        longest_s, limit_s = self.longest_s[Phase.STEPS], self.of(Phase.STEPS)
        return (
            f"Steps take up to {longest_s:.3g} s: a run that stands still in a step for {limit_s:.0f} s now ends as "
            f"hung ({_LIMIT_S:.0f} s so far; train_cfg.hang_timeout sets it)."
        )
