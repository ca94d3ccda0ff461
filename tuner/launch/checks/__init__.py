"""The checks of a run before it starts, one module for each subject. A check yields its findings.

A check refuses nothing itself: `launch.preflight` decides which checks run, and refuses the run.
"""

from __future__ import annotations

from tuner.errors import TunerError

Finding = TunerError | str
"""Why a run cannot succeed, or a warning."""
