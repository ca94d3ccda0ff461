"""The type of token ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
"""Ids of shape [tokens]."""
