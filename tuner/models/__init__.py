"""The models that tuner serves itself; importing this package registers them with transformers' Auto classes.

It loads no weights.
"""

from __future__ import annotations

from tuner.models import internlm as internlm
