"""The private names of transformers that serving takes. Seen with transformers 5.24."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel


def logits_processors(model: PreTrainedModel, config: GenerationConfig, num_prompt_tokens: int) -> LogitsProcessorList:
    """Return what `generate` does to the scores of a prompt's next tokens: temperature, top_p, penalties and others."""
    model._prepare_special_tokens(config, device=model.device)
    return model._get_logits_processor(config, input_ids_seq_length=num_prompt_tokens)


def response_template(tokenizer: Any, model_type: str) -> dict[str, Any] | None:
    """Return how the answers of a model hold tool calls, for `parse_response`; None if that is not known."""
    # Few published tokenizers say it themselves yet; transformers keeps a table of families for its own server.
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS

    own_template = getattr(tokenizer, "response_template", None)
    return own_template or next(
        (template for names, template in _RESPONSE_TEMPLATE_FALLBACKS.items() if model_type in names), None
    )
