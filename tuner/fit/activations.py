"""Bytes that one micro-batch holds in its forward and backward pass: of the layers, of the head, of the loss.

It takes a recipe and an architecture; it knows no ZeRO level, which does not change activations.

What layers save is counted on the tensors that autograd keeps in transformers 5.23 (bf16): exact for Llama, Qwen
2 and 3, Mistral and Gemma, within an eighth for the others (tests/fit/test_activations.py). Korthikanti et al., 2022
(arXiv:2205.05198), section 4, counts the same way for another layer. The loss is TRL 1.16's as a GPU computes it:
trl/kernels/chunked_logprob.py where logits come in chunks, trl/experimental where `logit_copies` counts them;
tests/fit/test_loss.py takes it through the real trainers.
"""

from __future__ import annotations

from typing import NamedTuple

from tuner.fit.families import (
    Family,
    Layer,
    inner_of_tower,
    layer_of_tower,
    linear_widths,
    pixels_of_patch,
    tower_family,
)
from tuner.fit.parameters import (
    adapted,
    built,
    dropout_on_tower,
    on_experts,
    patches_of,
    rank_on_tower,
    trains_tower,
)
from tuner.recipes.schema import Dataloader, RecipeConfig, measured
from tuner.recipes.schema.architecture import Architecture, Tower
from tuner.recipes.schema.long_context import num_tiles, tokens_of_rank
from tuner.recipes.schema.measured import at
from tuner.recipes.schema.tools import tools_of

_OWN_LAYER_NORM = {"cohere", "cohere2"}
"""A layer norm written out in fp32: its steps are saved one by one."""
_FP32_WEIGHT_NORM = {
    *("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "olmo2", "olmo3"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
_LIGER = {"llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3"}
"""model_types in which Liger 0.8 replaces the RMS norms of a layer and a dense gated MLP."""
_MIXER = "linear_attn."
"""Begins the names of the linear layers of linear attention."""
_CHUNK = 64
"""Tokens that linear attention computes at a time."""
_TILE_TOKENS, _TILE_LOGITS = 4096, 32768
"""TRL's fused head computes so many tokens' logits at a time, and of each so many; the tile is there whole in any case
(TOKEN_CHUNK_SIZE in trl/kernels/chunked_logprob.py, _CHUNKED_LOGPROB_CHUNK_SIZE in trl/trainer/utils.py)."""
_WHOLE_LOGIT_BYTES = 12
"""Bytes of a logit at the peak of the whole loss's backward: log-probability, its gradient, the logit's; all fp32."""
_NORM_STEPS = 7
"""Copies of the hidden states, in the compute type, while an RMS norm's backward runs in fp32; its trained weight's
gradient needs one more."""
_LEAST_STEPS = 5
"""The same for a whole layer with a narrow MLP."""
_TILE_STEPS = 3
"""What tiles add to them: their inputs' gradients, each and joined, and their outputs (bench/memory.py --long)."""
_FORWARD_STEPS, _LOSS_STEPS = 10, 6
"""Copies of the hidden states in a forward pass that keeps nothing: in attention, and in the last norm and the head."""


_CHOICE_BYTES = 26
"""Bytes of a logit while the next token is chosen: the model's own, and six tensors in fp32, the noise among them."""


class Work(NamedTuple):
    """Bytes of one micro-batch. Backward frees `kept` layer by layer; the others come on top, one after another.

    `at_loss` and `logits` stand there together while the loss's backward runs, `at_layer` while one layer's does.
    """

    kept: float
    at_loss: float
    logits: float
    at_layer: float
    offloaded: float = 0.0
    """What is kept in the host's memory instead."""
    of_layers: tuple[float, ...] = ()
    """What each layer keeps on the GPU, from the last one on; empty if it is offloaded."""
    at_again: float = 0.0
    """As `at_layer`, while the first of some layers are computed again; `freed` of `kept` is gone then."""
    freed: float = 0.0
    """What the layers behind them have kept."""
    waiting: float = 0.0
    """The gradient of a head that is the embeddings: it waits for theirs through the backward pass of all layers."""
    at_end: float = 0.0
    """While the backward pass of the embeddings runs, when all of `kept` is gone."""


_OFFLOAD_STASH = 5
"""Tensors that TRL 1.16's offloading leaves on the GPU until they have arrived (max_fwd_stash_size)."""


class _Mask(NamedTuple):
    """Bytes of a mask that all layers share, and of what each layer saves of it."""

    shared: int = 0
    of_layer: int = 0


def of_recipe(
    recipe: RecipeConfig,
    architecture: Architecture,
    weight_bytes: int = 2,
    *,
    old_gpus: bool = False,
    plain_mixers: bool = False,
) -> Work:
    """Return what one micro-batch holds.

    Args:
        weight_bytes: 4 (fp32) doubles what is saved in 16 bits.
        old_gpus: SDPA has no kernel for grouped heads (compute capability below 8.0).
        plain_mixers: Linear attention has no kernels: transformers computes it.
    """
    tokens = tokens_of_rank(recipe)
    scale, hidden = tokens * weight_bytes / 2, weight_bytes * tokens * architecture.hidden_size
    layers = built(architecture).layers[-(recipe.train_cfg.trainable_layers or 0) :]
    mask = _mask(recipe, architecture, recipe.train_dataloader, tokens, weight_bytes)
    shared = _shared(recipe, architecture, scale, has_mask=bool(mask.shared)) if architecture.measured else mask.shared
    in_mlp = min(tokens, architecture.hidden_size) if recipe.train_cfg.tiled_mlp else tokens
    family = built(architecture).family
    liger = has_liger(recipe, architecture)
    # More at the peak of a layer's backward: in its MLP, or in eager attention when what the MLP and its norms keep is
    # gone.
    scores = scale * _scores(recipe, architecture, _eager(architecture).at_peak)
    trained = recipe.adapter is None
    of_norms = scale * _norms(family, architecture, trained=trained, liger=liger) / 2 if family.norms > 1 else 0.0
    saved_by, steps_of = dict[Layer, float](), dict[Layer, float]()
    for layer in dict.fromkeys(layers):  # most are alike
        if layer.measured:
            kept, backward_bytes = _as_measured(recipe, architecture, layer, layer.measured, old_gpus=old_gpus)
            saved_by[layer] = scale * kept + weight_bytes * _copied_experts(recipe, family, layer)
            steps_of[layer] = max(
                scale * backward_bytes, _at_expert_gradients(recipe, family, layer, scale, weight_bytes)
            )
            continue
        of_mlp = weight_bytes / 2 * _mlp(family, architecture, layer, liger=liger)
        saved_by[layer] = (
            scale * layer_bytes(recipe, architecture, layer, old_gpus=old_gpus, plain_mixers=plain_mixers)
            - (tokens - in_mlp) * of_mlp
            + mask.of_layer
            + weight_bytes * _copied_experts(recipe, family, layer)
        )
        steps_of[layer] = max(
            weight_bytes * _backward_steps(architecture, layer, tokens, in_mlp),
            scores - in_mlp * of_mlp - of_norms,
            _at_expert_gradients(recipe, family, layer, scale, weight_bytes),
        )
    saved, steps = [saved_by[layer] for layer in layers], [steps_of[layer] for layer in layers]

    def handed_on(layer: Layer) -> float:
        return scale * layer.measured.output if layer.measured else float(hidden)

    at_again = freed = 0.0
    norm = scale * _norm(architecture.hidden_size, family, architecture, trained=trained, liger=liger)
    at_head = norm + hidden
    kept_by_loss, logits = _loss(recipe, architecture, tokens, weight_bytes)
    at_loss = norm + kept_by_loss
    if recipe.split.recompute:
        # Every layer's input, and the one mask of all; a layer is computed again before its backward.
        again = _num_recomputed(recipe, architecture)
        of_layers = [*saved[again:][::-1], *(handed_on(layer) for layer in layers[:again][::-1])]
        kept = sum(of_layers) + shared
        at_layer = max(kept + step for kept, step in zip(saved[:again], steps[:again], strict=True))
        at_layer = max(at_layer, _at_layer_of_tower(recipe, architecture, tokens, weight_bytes))
        if again < len(layers):
            freed = sum(saved[again:])
            at_again, at_layer = at_layer, max(at_head + (_NORM_STEPS + trained) * hidden, *steps[again:])
    else:
        # Of the head, the norm is what is left when the loss is gone.
        of_layers = saved[::-1]
        kept = sum(saved) + (shared if architecture.measured else 0)
        at_layer = max(at_head + (_NORM_STEPS + trained) * hidden, *steps)
    at_layer += _dequantized(recipe, layers, weight_bytes)
    at_again += _dequantized(recipe, layers, weight_bytes)
    kept += of_tower(recipe, architecture, tokens, weight_bytes)
    waiting, at_end = _at_embeddings(recipe, architecture, hidden, weight_bytes)
    if not recipe.train_cfg.activation_offloading:
        return Work(
            kept=kept,
            at_loss=at_loss,
            logits=logits,
            at_layer=at_layer,
            of_layers=tuple(of_layers),
            at_again=at_again,
            freed=freed,
            waiting=waiting,
            at_end=at_end,
        )
    recomputes_all = recipe.split.recompute and _num_recomputed(recipe, architecture) == len(layers)
    inputs = (linear.inputs for layer in layers for linear in layer.linears)
    widest = hidden if recomputes_all else weight_bytes * tokens * max(architecture.hidden_size, *inputs)
    on_gpu = min(kept, _OFFLOAD_STASH * widest)
    return Work(on_gpu, at_loss, logits, at_layer, kept - on_gpu, waiting=waiting, at_end=at_end)


def _at_embeddings(
    recipe: RecipeConfig, architecture: Architecture, of_inputs: float, weight_bytes: int
) -> tuple[float, float]:
    """Return the bytes of the head's gradient that waits for that of the embeddings, and of all when this comes.

    Autograd gives a weight one gradient: the head's is kept until the embeddings', the last one, is added to it in
    place (torch 2.13, csrc/autograd/input_buffer.cpp).

    Args:
        of_inputs: Bytes of the gradient of what is embedded.
    """
    model = built(architecture)
    if recipe.adapter or recipe.train_cfg.trainable_layers or "language" in recipe.model.freeze:
        return 0.0, 0.0  # an adapter trains copies of both, each its own weight
    waits = model.tied and not recipe.objective.facts.scores
    waiting = float(weight_bytes * model.embeddings * waits)
    return waiting, of_inputs + weight_bytes * model.embeddings + waiting


def _num_recomputed(recipe: RecipeConfig, architecture: Architecture) -> int:
    """Return how many of the layers that are trained, or lie before such a layer's gradient, are computed again."""
    if not recipe.split.recompute:
        return 0
    num_layers, trained = architecture.num_hidden_layers, recipe.train_cfg.trainable_layers
    frozen = num_layers - trained if trained else 0  # they have no backward pass
    return max(1, recipe.split.num_recomputed(num_layers) - frozen)


def of_tower(recipe: RecipeConfig, architecture: Architecture, tokens: int, weight_bytes: int) -> float:
    """Return the bytes that the tower keeps for the backward pass of a micro-batch.

    With recomputation that is the input of each layer. A tower without a trained weight keeps nothing. All tokens count
    as those of images.
    """
    tower, rank = architecture.vision_config, rank_on_tower(recipe)
    if tower is None or not tower.hidden_size or not trains_tower(recipe):
        return 0.0
    family, width, num_layers = tower_family(tower), tower.hidden_size, tower.num_hidden_layers or 0
    if family.pools:
        # The norm that follows is the first layer's. Each patch has a weight in fp32 for each token of its image.
        at_begin = weight_bytes * pixels_of_patch(tower) + 4 * (tower.num_tokens or 0)
    elif rank or recipe.adapter:
        # Patches are embedded without a gradient, and so is the first norm computed.
        at_begin = -max(weight_bytes * width, family.fp32 * width // 2)
    else:
        at_begin = weight_bytes * (width + pixels_of_patch(tower)) + family.fp32 * width
    if recipe.split.recompute:
        return patches_of(tower, tokens) * (num_layers * weight_bytes * width + max(0, at_begin))
    return patches_of(tower, tokens) * (num_layers * _layer_of_tower(recipe, tower, weight_bytes) + at_begin)


def _layer_of_tower(recipe: RecipeConfig, tower: Tower, weight_bytes: int) -> float:
    """Return the bytes of a patch that a layer of the tower keeps without recomputation."""
    family, width, rank = tower_family(tower), tower.hidden_size or 0, rank_on_tower(recipe)
    fp32 = family.fp32 + (0 if rank or recipe.adapter else family.fp32_of_norms)
    kept = weight_bytes * (family.widths * width + family.inner * inner_of_tower(tower)) + fp32 * width
    return kept + (_kept_by_lora(recipe, tower, rank, weight_bytes) if rank else 0)


def _at_layer_of_tower(recipe: RecipeConfig, architecture: Architecture, tokens: int, weight_bytes: int) -> float:
    """Return the bytes at the peak of a tower layer's backward, which is computed again before it."""
    tower = architecture.vision_config
    if tower is None or not tower.hidden_size or not trains_tower(recipe):
        return 0.0
    # As in `_backward_steps`: gradients of the hidden states, of the MLP's product and of one of its factors.
    steps = max(tower.hidden_size + 2 * inner_of_tower(tower), _LEAST_STEPS * tower.hidden_size)
    return patches_of(tower, tokens) * (_layer_of_tower(recipe, tower, weight_bytes) + weight_bytes * steps)


def _kept_by_lora(recipe: RecipeConfig, tower: Tower, rank: int, weight_bytes: int) -> float:
    """Return the bytes of a patch that LoRA keeps in a layer: low-rank values and, with dropout, masks and copies.

    A mask takes 1 byte a number on a GPU (ATen/native/cuda/Dropout.cu). Of an input with a copy no original is kept.
    """
    linears = [*adapted(recipe, layer_of_tower(tower))]
    low_rank = weight_bytes * rank * len(linears)
    if not dropout_on_tower(recipe):
        return low_rank
    copies = (weight_bytes + 1) * sum(linear.inputs for linear in linears)
    # The inputs of attention, of its last layer (SDPA keeps that of a Gemma 4), of the MLP and of its last layer.
    widths = 2 if tower_family(tower).pools else 3
    originals = weight_bytes * (widths * (tower.hidden_size or 0) + inner_of_tower(tower))
    return low_rank + max(0, copies - originals)


def of_validation(recipe: RecipeConfig, architecture: Architecture, weight_bytes: int = 2) -> float:
    """Return the bytes of one micro-batch of a validation, which keeps nothing: of its widest layer, or of its loss."""
    loader = recipe.val_dataloader
    if loader is None:
        return 0.0
    tokens, hidden = tokens_of_rank(recipe, "val_dataloader"), architecture.hidden_size
    at_layer = _forward(recipe, architecture, loader, tokens, weight_bytes)
    at_loss: float = _LOSS_STEPS * tokens * hidden + min(tokens, _TILE_TOKENS) * _TILE_LOGITS
    if recipe.objective.facts.keeps_logits:
        at_loss = recipe.objective.logit_copies * architecture.vocab_size * tokens
    layers = built(architecture).layers
    return float(weight_bytes * max(at_layer, at_loss) + _dequantized(recipe, layers, weight_bytes))


def of_generation(recipe: RecipeConfig, architecture: Architecture, weight_bytes: int = 2, ranks: int = 1) -> float:
    """Return the bytes at the peak of generation by the model that trains; 0 if it does not generate.

    A rank generates all its completions of a step, or of several steps, together. The peak is while the model reads the
    prompts, or at the end, when keys and values of all tokens are kept and the next token is chosen. Layers with a
    window count as others; those without softmax attention count nothing, because transformers keeps little for them.
    """
    generation = recipe.objective.generated_by
    if generation is None or generation.engine != "transformers":
        return 0.0
    loader, completion = recipe.train_dataloader, recipe.objective.completion_tokens
    batch = loader.micro_batch * recipe.split.accumulation * ranks
    prompt = loader.dataset.max_length + recipe.objective.prompt_tokens
    # After the result of a tool the model reads all that is there already again.
    read = prompt + (completion if tools_of(recipe.objective) else 0)
    completions = recipe.objective.generated_at_once(batch) // ranks
    of_values = architecture.v_head_dim or architecture.head_dim
    width = architecture.num_key_value_heads * (architecture.head_dim + of_values)
    kinds = architecture.layer_types or ("",) * architecture.num_hidden_layers
    of_others = "sliding_attention" if architecture.layer_types or built(architecture).family.linear_attention else ""
    attending = sum(kind == of_others or architecture.attends_to_all(layer) for layer, kind in enumerate(kinds))
    reading = _forward(recipe, architecture, loader, completions * read, weight_bytes)
    reading += attending * width * completions * read
    # One layer's keys and values are there twice: they are copied as they get longer.
    choosing: float = (attending + 1) * width * completions * (prompt + completion)
    choosing += completions * architecture.vocab_size * _CHOICE_BYTES / weight_bytes
    return float(weight_bytes * max(reading, choosing))


def _forward(
    recipe: RecipeConfig, architecture: Architecture, loader: Dataloader, tokens: int, weight_bytes: int
) -> float:
    """Return the numbers that the widest layer holds in a forward pass that keeps nothing."""
    hidden = architecture.hidden_size
    in_mlp = -(-tokens // num_tiles(recipe, hidden)) if recipe.train_cfg.tiled_mlp else tokens
    inner = max((inner_width(architecture, layer) for layer in built(architecture).layers), default=0)
    at_layer: float = max(
        4 * tokens * hidden + _halves(architecture) * in_mlp * inner, _FORWARD_STEPS * tokens * hidden
    )
    at_layer += 2 * tokens * architecture.head_dim  # rotary positions
    at_layer += sum(_mask(recipe, architecture, loader, tokens, weight_bytes)) / weight_bytes
    if attention_of(recipe, architecture) == "eager":
        at_layer += 3 * architecture.num_attention_heads * tokens * _row_tokens(recipe, architecture, loader)
    return at_layer


def _halves(architecture: Architecture) -> int:
    """Return the numbers of an MLP's width that live at once in its forward pass: a fused gate stays with the rest."""
    family = built(architecture).family
    return 2 + family.gated * (1 + (len(family.mlp) == 2))


def _dequantized(recipe: RecipeConfig, layers: tuple[Layer, ...], weight_bytes: int) -> int:
    """Return the bytes of the one weight that bitsandbytes 0.50 unpacks to multiply with it."""
    if recipe.quantization is None:
        return 0
    return weight_bytes * max(
        (linear.weights for layer in layers for linear in layer.linears if linear.quantizable), default=0
    )


def _row_tokens(recipe: RecipeConfig, architecture: Architecture, loader: Dataloader) -> int:
    """Return the tokens of one row of a micro-batch, which attend to each other.

    Rows that packing has filled stand side by side, others end to end, and so do those of a router that is kept
    balanced (`tuner.data.batches`).
    """
    end_to_end = recipe.objective.facts.packs and (recipe.balances_router(architecture) or not loader.dataset.packing)
    return loader.dataset.max_length * (loader.micro_batch if end_to_end else 1)


def _mask(
    recipe: RecipeConfig, architecture: Architecture, loader: Dataloader, tokens: int, weight_bytes: int
) -> _Mask:
    """Return the bytes of what tells pairs of tokens apart: SDPA takes a bool and saves it in the compute type.

    SDPA needs one where samples share a row or are padded to one length, eager attention always, in the compute type;
    flash attention needs none.
    """
    row, name = _row_tokens(recipe, architecture, loader), attention_of(recipe, architecture)
    if recipe.train_cfg.sequence_parallel_size > 1:
        return _Mask()  # samples are computed one after the other
    if name == "eager":
        return _Mask(_eager(architecture).masks * weight_bytes * tokens * row)
    is_alone = row == tokens == loader.dataset.max_length and not loader.dataset.packing
    return _Mask(tokens * row, weight_bytes * tokens * row) if name == "sdpa" and not is_alone else _Mask()


def _scores(recipe: RecipeConfig, architecture: Architecture, of_pair: int) -> int:
    """Return the bytes a token of an eager attention's scores, of which a head and pair of tokens has `of_pair`."""
    if attention_of(recipe, architecture) != "eager":
        return 0
    return architecture.num_attention_heads * of_pair * _row_tokens(recipe, architecture, recipe.train_dataloader)


def _backward_steps(architecture: Architecture, layer: Layer, tokens: int, in_mlp: int) -> int:
    """Return the numbers that a layer's backward makes beside what was saved, at its peak in the MLP.

    They are the gradients of the hidden states, of the MLP's product, and of one of its factors. Experts with biases
    (gpt-oss) are fullest while they are computed again: each of a token's experts has its own copy of both biases.

    Args:
        in_mlp: Those of the tokens that are in the MLP at a time.
    """
    least = _LEAST_STEPS + (_TILE_STEPS if in_mlp < tokens else 0)
    inner, experts = inner_width(architecture, layer), layer.experts
    of_mlp = 2 * inner
    if experts and experts.bias:
        of_mlp += experts.per_token * experts.hidden
    return max(tokens * architecture.hidden_size + in_mlp * of_mlp, tokens * least * architecture.hidden_size)


def inner_width(architecture: Architecture, layer: Layer) -> int:
    """Return the width of a layer's MLP, and of the experts that a token passes through."""
    if layer.measured:
        return layer.measured.inner
    family = built(architecture).family
    downs = (family.mlp[-1], family.shared[-1])
    experts = layer.experts.per_token * layer.experts.width if layer.experts else 0
    return sum(linear.inputs for linear in layer.linears if linear.name in downs) + experts


def _loss(recipe: RecipeConfig, architecture: Architecture, tokens: int, weight_bytes: int) -> tuple[float, float]:
    """Return the bytes that the loss keeps for its backward, and those at the peak of that, beside what it reads.

    It keeps its input. The fused head makes one tile of logits and turns it into their gradient in place. The gradients
    of the hidden states and of a trained head are summed up in fp32, and stand there once more in the compute type at
    the end. If they are computed with the logits, they are what is kept, and the peak is in the forward pass.
    """
    objective_facts, inputs = recipe.objective.facts, float(weight_bytes * tokens * architecture.hidden_size)
    if objective_facts.scores:
        return inputs, 0.0
    if objective_facts.keeps_logits:
        return inputs, float(recipe.objective.logit_copies * weight_bytes * architecture.vocab_size * tokens)
    head = built(architecture).head
    is_trained = _trains_head(recipe, head.name)
    rows = tokens + head.outputs * is_trained
    if recipe.train_cfg.loss == "whole":
        of_logits = _WHOLE_LOGIT_BYTES * architecture.vocab_size * tokens
        of_gradients = weight_bytes * (architecture.vocab_size * tokens + rows * head.inputs)
        return inputs, float(max(of_logits, of_gradients))
    if recipe.computes_logits_once:
        tile_tokens = min(tokens, max(_TILE_TOKENS * _TILE_LOGITS // head.outputs, head.inputs * is_trained))
        # At the end the gradients stand there once more in the compute type, and no tile.
        at_peak = weight_bytes * max(tile_tokens * head.outputs + tokens * head.inputs, rows * head.inputs)
        return float(4 * head.inputs * rows), float(at_peak)
    tile = weight_bytes * min(tokens, _TILE_TOKENS) * _TILE_LOGITS
    return inputs, float(tile + (4 + weight_bytes % 4) * rows * head.inputs)


def _trains_head(recipe: RecipeConfig, name: str) -> bool:
    if recipe.adapter is None:
        return not recipe.train_cfg.trainable_layers
    return any(name.endswith(module) for module in recipe.adapter.modules_to_save or ())


def layer_bytes(
    recipe: RecipeConfig,
    architecture: Architecture,
    layer: Layer,
    *,
    old_gpus: bool = False,
    plain_mixers: bool = False,
) -> float:
    """Return the bytes that one layer saves for one token, a mask left out; arguments as of `of_recipe`."""
    family, trained = built(architecture).family, recipe.adapter is None
    name = attention_of(recipe, architecture)
    all_heads = repeats_heads(name, architecture, has_mask=has_mask(recipe, architecture), old_gpus=old_gpus)
    liger = has_liger(recipe, architecture)
    total = _norms(family, architecture, trained=trained, liger=liger) + _mlp(family, architecture, layer, liger=liger)
    if plain_mixers and is_mixer(layer):
        total += _delta_rule(architecture, trained=trained)
    else:
        total += _attention(family, architecture, layer, trained=trained, all_heads=all_heads)
    total += _scores(recipe, architecture, _eager(architecture).saved)
    return total + (_adapter(recipe, architecture, layer) if recipe.adapter else 0)


def has_mask(recipe: RecipeConfig, architecture: Architecture) -> bool:
    """Return whether attention gets a mask that tells pairs of tokens apart."""
    return bool(_mask(recipe, architecture, recipe.train_dataloader, tokens_of_rank(recipe), 2).shared)


def has_liger(recipe: RecipeConfig, architecture: Architecture) -> bool:
    """Return whether Liger's kernels compute a layer; they save the inputs of norms and gates in 16 bits, and no more.

    Source: liger-kernel 0.8.5, `ops/rms_norm.py` and `ops/swiglu.py`; its rotary embeddings and queries' norms count as
    transformers' own, which is no less.
    """
    return recipe.model.use_liger_kernel is True and architecture.model_type in _LIGER


def _norms(family: Family, architecture: Architecture, *, trained: bool, liger: bool) -> float:
    # What a norm gives to linear layers is saved once more: one norm's output for attention, another's for the MLP.
    inputs = 2 * 2 * architecture.hidden_size if family.norms != 1 else 2 * architecture.hidden_size
    return family.norms * _norm(architecture.hidden_size, family, architecture, trained=trained, liger=liger) + inputs


def _norm(width: int, family: Family, architecture: Architecture, *, trained: bool, liger: bool = False) -> float:
    """Return what a norm saves: its input (RMS norms in fp32) and, where its weight is trained, the scaled input."""
    if liger:
        return 2 * width + 4
    if architecture.model_type in _OWN_LAYER_NORM:
        return 12 * width
    if family.norm_bias or architecture.model_type == "olmo":
        return 2 * width + 8
    weighted = 4 if architecture.model_type in _FP32_WEIGHT_NORM else 2
    return (4 + (weighted if trained else 0)) * width + 4


def _attention(
    family: Family, architecture: Architecture, layer: Layer, *, trained: bool, all_heads: bool = False
) -> float:
    """Return what attention saves but for scores; with `all_heads` keys and values are copies for each query head."""
    heads, groups = architecture.num_attention_heads, architecture.num_key_value_heads
    query, key = heads * architecture.head_dim, groups * architecture.head_dim
    if architecture.kv_lora_rank:  # keys and values of every head come out of the latent
        value = heads * (architecture.v_head_dim or architecture.head_dim)
        return 4 * query + 4 * value + 8 * (architecture.kv_lora_rank + (architecture.q_lora_rank or 0)) + 4 * heads
    if is_mixer(layer):  # each projection's output before and after the convolution, and inputs of the kernels in fp32
        return 6 * sum(linear.outputs for linear in layer.linears if linear.name.startswith(_MIXER))
    total: float = 4 * query + 4 * (query if all_heads else key) + 4 * heads
    if family.double_queries:  # the gate, the output in the order of its heads, and their product
        total += 6 * query
    if family.qk_norm and (not family.qk_norm_optional or architecture.use_qk_norm):
        weighted = 4 if architecture.model_type in _FP32_WEIGHT_NORM else 2
        total += (4 + (weighted if trained else 0)) * (query + key) + 4 * (heads + groups)
    return total


def is_mixer(layer: Layer) -> bool:
    """Return whether a layer that no measurement describes has linear attention."""
    return any(linear.name.startswith(_MIXER) for linear in layer.linears)


def _delta_rule(architecture: Architecture, *, trained: bool) -> float:
    """Return what a gated delta net saves in transformers' own code (5.23, `torch_chunk_gated_delta_rule`).

    It computes in fp32. Keys count for each value head: queries and keys before and after their norm, both decayed,
    the keys scaled, and those of the state. Values: with padding, corrected twice; then the gated norm's. Each chunk
    keeps its state and five products of its pairs of tokens.
    """
    keys, values, heads = linear_widths(architecture)
    of_key = architecture.linear_key_head_dim or 0
    of_chunks = values * 4 * of_key / _CHUNK + heads * 5 * 4 * _CHUNK
    of_convolution = 4 * (2 * keys + values)  # before and after, in 16 bits
    of_norm = 2 * values + 4 * heads if trained else 0
    return of_convolution + 8 * 4 * of_key * heads + 28 * values + of_chunks + 36 * heads + of_norm


def _mlp(family: Family, architecture: Architecture, layer: Layer, *, liger: bool = False) -> float:
    bytes_per_input = 6 if liger else 8 if family.gated else 4
    downs = (family.mlp[-1], family.shared[-1])
    dense = sum(bytes_per_input * linear.inputs for linear in layer.linears if linear.name in downs)
    experts = layer.experts
    if experts is None:
        return dense
    if family.shared_gate:
        dense += 2 * architecture.hidden_size
    if family.clamped_experts:
        # Both layers, the clamped gate, its sigmoid, their product, up + 1, and the product of the two.
        bytes_per_input = 14
    return dense + experts.per_token * (bytes_per_input * experts.width + 4 * experts.hidden) + 6 * experts.num


def _adapter(recipe: RecipeConfig, architecture: Architecture, layer: Layer) -> float:
    """Return what adapters save: the low-rank values, and with dropout a mask (1 byte) and a copy (2) of each input."""
    adapter = recipe.adapter
    assert adapter is not None
    low_rank = 2 * adapter.r * len(layer.linears)
    if not recipe.drops_inputs:
        return low_rank
    copies = 3 * sum(linear.inputs for linear in layer.linears)
    # The undropped inputs of attention, MLP and its last layer are then saved no more.
    downs = max((linear.inputs for linear in layer.linears), default=0)
    return low_rank + max(0, copies - 4 * architecture.hidden_size - 2 * downs)


def _as_measured(
    recipe: RecipeConfig, architecture: Architecture, layer: Layer, curves: measured.Layers, *, old_gpus: bool
) -> tuple[float, float]:
    """Return the bytes a token that a layer keeps, and that its backward makes beside them, as they were measured.

    The backward pass was measured with experts that have no gradient: where they have one, their inputs are kept too,
    and go before the peak.
    """
    row, adapter, of_experts = _row_tokens(recipe, architecture, recipe.train_dataloader), recipe.adapter, 0
    if (experts := layer.experts) and (adapter is None or on_experts(adapter, built(architecture).family, experts)):
        of_experts = 2 * (experts.per_token * (experts.hidden + experts.width) + experts.hidden)
    kept = at(curves.whole, row) if adapter is None else at(curves.adapter, row) + of_experts
    kept += _adapter(recipe, architecture, layer) if adapter else 0
    if old_gpus or has_mask(recipe, architecture):
        kept += at(curves.mask, row)
    if attention_of(recipe, architecture) != default_attention(architecture):
        kept += _scores(recipe, architecture, _eager(architecture).saved)
    return kept, max(0.0, at(curves.steps, row) - of_experts)


def _shared(recipe: RecipeConfig, architecture: Architecture, scale: float, *, has_mask: bool) -> float:
    """Return the bytes that a measured model keeps outside its layers: masks, positions."""
    row, measurement = _row_tokens(recipe, architecture, recipe.train_dataloader), architecture.measured
    assert measurement is not None
    return scale * (at(measurement.shared, row) + (at(measurement.shared_mask, row) if has_mask else 0))


def _copied_experts(recipe: RecipeConfig, family: Family, layer: Layer) -> int:
    """Return the parameters of experts that a layer saves once more, in the compute type.

    PEFT adds an adapter's update to a copy of them (peft 0.21, `lora/layer.py`, `ParamWrapper.forward`), and
    bitsandbytes unpacks those in 4 bits.
    """
    if layer.experts is None:
        return 0
    if _adapts_experts(recipe, family, layer):
        return layer.experts.parameters
    return layer.experts.quantizable if recipe.packs_experts else 0


def _adapts_experts(recipe: RecipeConfig, family: Family, layer: Layer) -> bool:
    adapter, experts = recipe.adapter, layer.experts
    return adapter is not None and experts is not None and on_experts(adapter, family, experts) > 0


def _at_expert_gradients(recipe: RecipeConfig, family: Family, layer: Layer, scale: float, weight_bytes: int) -> float:
    """Return the bytes beside what a layer keeps while its backward holds gradients of fused experts, which are whole.

    The gradient of the down layers is there beside those of the experts' outputs, which are gone themselves, and of
    the gates' products. Then comes that of the gate and up layers: what they have made is gone, and has a gradient.
    """
    experts = layer.experts
    if experts is None or not (recipe.adapter is None or _adapts_experts(recipe, family, layer)):
        return 0.0
    residual, product = (scale * 2 * width for width in (experts.hidden, experts.per_token * experts.width))
    num_inputs = experts.matrices - 1
    num_kept = 7 if family.clamped_experts else 2 * num_inputs
    of_down, of_inputs = weight_bytes * experts.down, weight_bytes * (experts.parameters - experts.down)
    # With an adapter the gradient of the down layers has gone on to it, and their copy is not needed any more.
    beside = of_down if recipe.adapter is None else -of_down
    at_inputs = of_inputs + beside - (num_kept - num_inputs) * product
    return residual + max(of_down + product, at_inputs)


# --- Which attention computes a model if the recipe names none, and the scores that an eager one holds ---
# Source: transformers 5.24, the model classes and their `eager_attention_forward`.

WITHOUT_SDPA = {"bloom", "gemma2", "gpt_oss"}
"""model_types whose scores SDPA cannot compute: ALiBi, soft-capping, sinks."""


class _Eager(NamedTuple):
    """Bytes of eager attention for a head and a pair of tokens, in 16 bits, and how many masks a model has."""

    saved: int = 6
    """A softmax in fp32 (4) and its copy in 16 bits (2)."""
    at_peak: int = 6
    """Beside them: the gradients of the softmax's output and input, less what is freed by then."""
    masks: int = 1
    """Two where layers with a window stand beside those without."""


_OWN_EAGER = {"gemma2": _Eager(saved=8, masks=2), "gpt_oss": _Eager(saved=2, at_peak=4, masks=2)}
"""gemma2 saves its tanh too; gpt_oss computes its softmax in 16 bits."""
_WIDEST_HEAD = 256
"""The widest head for which transformers lets SDPA share key-value heads (integrations/sdpa_attention.py)."""


def default_attention(architecture: Architecture) -> str:
    """Return the attention that transformers takes if none is named: 'sdpa', or 'eager' where that cannot compute."""
    if measurement := architecture.measured:
        return measurement.attention
    return "eager" if architecture.model_type in WITHOUT_SDPA else "sdpa"


def attention_of(recipe: RecipeConfig, architecture: Architecture) -> str:
    """Return the attention of a recipe; 'auto' that is not settled yet counts as no flash attention."""
    name = recipe.model.attn_implementation
    return default_attention(architecture) if name in (None, "auto") else str(name)


def _eager(architecture: Architecture) -> _Eager:
    return _OWN_EAGER.get(architecture.model_type, _Eager())


def repeats_heads(attention: str, architecture: Architecture, *, has_mask: bool, old_gpus: bool) -> bool:
    """Return whether keys and values are copied to all query heads, and the copies saved.

    Eager attention always does (`repeat_kv`); SDPA does with a mask or with wide heads, and on old GPUs, which have no
    kernel for grouped heads (`models.compat.repeat_heads_on_old_gpus`).
    """
    if attention == "sdpa":
        return has_mask or old_gpus or architecture.head_dim > _WIDEST_HEAD
    return attention == "eager"
