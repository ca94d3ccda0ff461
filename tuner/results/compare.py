"""Whether a merged model says what its base with the adapter on it says: logits of both, in fp32 on this host.

It changes nothing; one model is in memory at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tuner.errors import TunerError
from tuner.fit.sizes import gib
from tuner.machine.hardware import available_host_bytes
from tuner.models.load import load_weights
from tuner.recipes.schema import Model
from tuner.results.base import folder_of, model_of
from tuner.results.model import ModelSpec, with_adapter

NUM_TOKENS = 16
_BYTES = 4
_BESIDES = 1.25
"""Of the weights' bytes: activations, and a layer that is loaded beside the model."""
_MOST = {torch.float32: 1e-3}
_MOST_ROUNDED = 0.1
"""The root mean square of the difference over that of the logits, by the weights' type; 16 bits round each weight."""


def compare_merged(
    draft: Path, adapter: Path, base: Model, num_parameters: int, dtype: torch.dtype, *, scores: bool
) -> str:
    """Return what was compared, as one sentence: nothing, where the host's memory has no room for the model.

    Raises:
        TunerError: the merged model says something else.
    """
    needed, free = int(_BYTES * _BESIDES * num_parameters), available_host_bytes()
    if free is not None and needed > free:
        why = f"in fp32 that needs {gib(needed)}, and {gib(free)} are free"
        return f"The merged logits were not compared with the adapter's: {why}."
    path = str(folder_of(base))
    of_base = model_of(path, None, base.trust_remote_code)
    spec = ModelSpec(f"the adapter {adapter}", of_base, path, scores, None, adapter)
    said = _logits(with_adapter(load_weights(of_base, path, torch.float32, scores=scores), spec))
    of_draft = model_of(str(draft), None, base.trust_remote_code)
    merged = _logits(load_weights(of_draft, str(draft), torch.float32, scores=scores))
    apart = float((merged - said).square().mean().sqrt() / said.square().mean().sqrt())
    if not apart <= _MOST.get(dtype, _MOST_ROUNDED):
        what = f"the merged model's logits differ from those of the adapter on its base by {apart:.1%}"
        raise TunerError(what, where="--merge", fix="Export only the adapter: without --merge.")
    return (
        f"Verified on {NUM_TOKENS} tokens: its logits equal those of the adapter on its base, "
        f"within {apart:.1g} of their size."
    )


def _logits(model: Any) -> torch.Tensor:
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.linspace(0, rows - 1, NUM_TOKENS).long()[None]
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits.float()
    return found
