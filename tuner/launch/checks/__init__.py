"""What can be wrong with a run before it starts, a module for each subject; a check yields what it finds.

A check looks and refuses nothing itself: `launch.preflight` decides which run when, and ends the run.
"""

from __future__ import annotations

from tuner.errors import TunerError

Finding = TunerError | str
"""Why a run cannot succeed, or a warning."""
