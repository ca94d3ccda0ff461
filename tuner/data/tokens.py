"""The types of token ids and of their weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
"""Ids of shape [tokens]."""
Weights = npt.NDArray[np.float32]
"""How much each token's loss weighs, of shape [tokens]."""
