"""Measures a model on meta tensors, in a process of its own: what it consists of, and what its layers hold in memory.

    python -m tuner.lab.measuring < job.json > measured.json

The model is built without weights. Forward passes, and backward passes with LoRA, at two lengths or more and two
micro-batches show what each kind of layer keeps: what grows with the tokens, and what grows with their pairs.
`measured` starts the process.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # transformers and PEFT look for them, and would load them: a second and a half
    sys.modules.update(dict.fromkeys(("bitsandbytes", "scipy", "sklearn")))  # type: ignore[arg-type]

import gc
import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, masking_utils
from transformers.initialization import no_init_weights

import tuner.models  # noqa: F401  registers InternLM
from tuner.data import limits
from tuner.files import JsonObject
from tuner.lab.compat_meta_tensors import (
    META,
    NO_CODE,
    GpuKernels,
    Memory,
    attention_of,
    decoder_layers,
    without_autocast,
)
from tuner.models.compat import offer_kernels
from tuner.recipes.model_facts import ODD_LINEARS
from tuner.recipes.schema.measured import Curve, Experts, Layers, Linear, Measured, at
from tuner.recipes.schema.unlearned_layers import without_gradient

_LENGTHS = (512, 2048, 8192)
"""Tokens of a row."""
_ALIKE = 1.5
"""The longest row is measured if the second takes at most so many times the operations of the first: where Python loops
over the chunks of a row it takes long, and such a layer holds no more per token."""
_RANK = 8
_DOWN = ("down_proj", "w2", "fc2", "c_proj", "output_linear", "dense_4h_to_h")
"""The last layers of MLPs: their inputs are the width."""
_SPLIT = ("gate", "gate_proj", "up_proj", "down_proj")


@dataclass
class _Seen:
    """Bytes of one layer in one run."""

    before: int = 0
    input: int = 0
    after: int = 0
    output: int = 0
    kept: int = 0
    steps: int = 0


@dataclass
class _Watch:
    """Follows the layers that are measured through a run; the others hand on what they get."""

    memory: Memory
    by_layer: dict[int, _Seen] = field(default_factory=dict)
    returned: dict[int, Any] = field(default_factory=dict)
    running: int | None = None

    def follow(self, layer: nn.Module, index: int) -> None:
        layer.register_forward_pre_hook(lambda *arguments: self._enters(index, *arguments), with_kwargs=True)
        layer.register_forward_hook(lambda *arguments: self._leaves(index, *arguments))

    def skip(self, layer: nn.Module, first: int) -> None:
        """Let a layer return what the first one of its kind returns, with its own input."""

        def forward(hidden: Any = None, *_: Any, **named: Any) -> Any:
            hidden = named.get("hidden_states") if hidden is None else hidden
            like = self.returned[first]
            return (hidden, *like[1:]) if isinstance(like, tuple) else hidden

        layer.forward = forward

    def _enters(self, index: int, layer: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.by_layer[index] = _Seen(before=self.memory.now, input=hidden.untyped_storage().nbytes())
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.ends(index))

    def _leaves(self, index: int, layer: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.returned[index] = output
        sizes = self.by_layer[index]
        sizes.output = hidden.untyped_storage().nbytes()
        sizes.after = self.memory.now - sizes.output  # its input goes when the call has returned
        sizes.kept = sizes.after - sizes.before
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._begins(index))

    def _begins(self, index: int) -> None:
        self.ends()
        self.running = index
        self.memory.begin()

    def ends(self, index: int | None = None) -> None:
        """Note the peak of the backward pass of a layer; None: of the one that runs, if one does."""
        if self.running is not None and index in (None, self.running):
            self.by_layer[self.running].steps = self.memory.peak - self.by_layer[self.running].after
            self.running = None


class Unmeasurable(Exception):
    """The model cannot be measured; the text says why."""


def main() -> None:
    """Read a job and write what was measured, or the reason why nothing was."""
    import logging

    logging.disable(logging.WARNING)
    offer_kernels()  # none: those of GPUs take no meta tensors
    began = time.monotonic()
    job = json.load(sys.stdin)
    try:
        with limits.memory():
            answer = tried(job) if "attention" in job else measure(job)
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        json.dump({"why": f"{type(error).__name__}: {first_line}{_place_of(error)}"}, sys.stdout)
        return
    seconds = round(time.monotonic() - began, 1)
    if measured := answer.get("measured"):
        answer["measured"] = {**measured.model_dump(), "seconds": seconds}
    json.dump({"seconds": seconds, **answer}, sys.stdout)


def _place_of(error: Exception) -> str:
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({innermost.filename.rpartition('/')[2]}, line {innermost.lineno})"


def measure(job: JsonObject) -> JsonObject:
    """Return the facts of a model, and what was measured.

    Args:
        job: `path`, a folder, and `options` of `from_pretrained`, or `facts`, the keys of a config.json.
    """
    config, code = _config_of(job)
    memory = Memory()
    with without_autocast(torch.bfloat16), memory, GpuKernels(memory, (8, 0)):
        with torch.device(META), no_init_weights():
            model = _build(config, code)
        gc.freeze()
        return {"architecture": facts_of(config, model), "measured": _measured(model, config, memory)}


def tried(job: JsonObject) -> JsonObject:
    """Return the attention with which the samples of a row stay apart, or why they may not.

    Args:
        job: As for `measure`; and `attention`, that of the run or None.
    """
    from tuner.lab import isolation  # it imports TRL

    config, code = _config_of(job)
    try:
        return {"apart": isolation.attention_that_packs(config, job["attention"], code)}
    except isolation.Doubtful as doubt:
        return {"doubt": str(doubt)}


def _config_of(job: JsonObject) -> tuple[Any, JsonObject]:
    """Return the config of a model, and the arguments that say which code of its own may run."""
    options = job.get("options", dict(NO_CODE))
    if path := job.get("path"):
        config = AutoConfig.from_pretrained(path, local_files_only=True, **options)
    else:
        config = AutoConfig.for_model(**job["facts"])
    for half in (config, config.get_text_config()):
        if "/" in attention_of(half):  # transformers takes it for a repository of kernels, which is code
            raise Unmeasurable(f"its config.json names attention of the hub, {attention_of(half)!r}")
    class_in_code = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    # Only `from_config` of a class of such code takes it.
    keys = ("trust_remote_code", "code_revision") if class_in_code else ("trust_remote_code",)
    return config, {key: options[key] for key in keys if key in options}


def _build(config: Any, code: JsonObject) -> Any:
    options = {"dtype": torch.bfloat16, **code}
    try:
        model = AutoModelForCausalLM.from_config(config, **options)
    except ValueError:
        model = AutoModelForImageTextToText.from_config(config, **options)
    model.tie_weights()
    text = model.config.get_text_config()
    text.use_cache = model.config.use_cache = False
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = bool(getattr(text, "router_aux_loss_coef", 0))
    model.train()
    return model


def facts_of(config: Any, model: Any) -> JsonObject:
    """Return the facts that every plan needs, of the text half."""
    text = config.get_text_config()
    head = model.get_output_embeddings()
    heads = getattr(text, "num_attention_heads", None) or 1
    inner = getattr(text, "intermediate_size", None) or getattr(text, "moe_intermediate_size", None)
    if isinstance(inner, list):
        inner = max(inner)
    text_facts = {
        "model_type": text.model_type,
        "num_hidden_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "intermediate_size": inner or 4 * text.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "vocab_size": text.vocab_size,
        "tie_word_embeddings": head.weight is model.get_input_embeddings().weight,
        "max_position_embeddings": int(getattr(text, "max_position_embeddings", None) or 2**20),
    }
    if isinstance(size := getattr(text, "head_dim", None), int) and size:
        text_facts["head_dim"] = size
    return text_facts


def _measured(model: Any, config: Any, memory: Memory) -> Measured:
    text = config.get_text_config()
    decoder, layers = model.get_decoder(), decoder_layers(model)
    if layers is None:
        raise Unmeasurable("the model has no list of decoder layers")
    kinds = _kinds(layers, text)
    first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    parts = {index: _parts(layers[index], text) for index in first.values()}
    outside = _outside(model, layers)
    attention = attention_of(text)
    watch = _Watch(memory)
    for index, kind in enumerate(kinds):
        if index == first[kind]:
            watch.follow(layers[index], index)
        else:
            watch.skip(layers[index], first[kind])
    model.get_input_embeddings().register_forward_hook(_with_gradient)
    full_curves, output, shared = _curves(decoder, watch, _LENGTHS)
    constants = {index: curves.constants for index, curves in full_curves.items()}
    # What a mask adds grows with the pairs of tokens.
    masked, _, shared_masked = _curves(decoder, watch, _LENGTHS[:2], constants, has_mask=True)
    on_experts = _adapt(model, layers, [*first.values()])
    adapter, _, _ = _curves(decoder, watch, _LENGTHS, backward=True)
    low_rank = {
        index: 2.0 * _RANK * sum(name.endswith("lora_A.default.weight") for name, _ in layers[index].named_parameters())
        for index in parts
    }
    of_kinds = tuple(
        Layers(
            **parts[index],
            output=output[index],
            whole=full_curves[index].kept,
            adapter=_difference(adapter[index].kept, ((1, low_rank[index]),)),
            mask=_difference(masked[index].kept, full_curves[index].kept),
            steps=adapter[index].steps,
        )
        for index in first.values()
    )
    order = [*first]
    return Measured(
        attention=attention,
        **outside,
        kinds=of_kinds,
        layers=tuple(order.index(kind) for kind in kinds),
        shared=shared,
        shared_mask=_difference(shared_masked, shared),
        experts_adapted=_SPLIT if on_experts else (),
    )


def _adapt(model: Any, layers: nn.ModuleList, indices: list[int]) -> bool:
    """Put LoRA on the linear layers of those that are measured; return whether PEFT would adapt their experts too.

    The other layers are hidden from PEFT, which takes long for each. What an adapter on experts keeps does not grow
    with the tokens, so it is not measured.
    """
    holder, name = next(
        (module, name) for module in model.modules() for name, child in module.named_children() if child is layers
    )
    setattr(holder, name, nn.ModuleList(layers[index] for index in indices))
    linears = {
        name: type(module) is nn.Linear for name, module in holder.named_modules() if isinstance(module, nn.Linear)
    }
    special_linears = [name for name, is_plain in linears.items() if not is_plain]
    excluded = [*special_linears, *without_gradient(linears)]
    settings: JsonObject = {"task_type": "CAUSAL_LM", "r": _RANK, "exclude_modules": excluded or None}
    kind = model.config.get_text_config().model_type
    with torch.device(META):
        targets = [*ODD_LINEARS[kind]] if kind in ODD_LINEARS else "all-linear"
        adapted = get_peft_model(model, LoraConfig(target_modules=targets, **settings), autocast_adapter_dtype=False)
        on_experts = any(".experts." in name and "lora_A" in name for name, _ in holder.named_parameters())
        if on_experts:
            adapted.unload()
            plain = {name.rpartition(".")[2] for name, is_plain in linears.items() if is_plain}
            other_targets = [*({*ODD_LINEARS.get(kind, plain)} - {*_SPLIT})]
            adapted = get_peft_model(
                model, LoraConfig(target_modules=other_targets, **settings), autocast_adapter_dtype=False
            )
    setattr(holder, name, layers)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
            parameter.register_post_accumulate_grad_hook(_drop)
    return on_experts


def _with_gradient(module: Any, args: Any, output: Tensor) -> Tensor:
    """Let what is embedded have a gradient, as the input of every layer but the first has."""
    return output if output.requires_grad else output.requires_grad_()


def _drop(weight: Tensor) -> None:
    """Let the gradient of a weight go as it comes: it is no activation."""
    weight.grad = None


def _difference(curve: Curve, less: Curve) -> Curve:
    return tuple((row, value - at(less, row)) for row, value in curve)


# --- What a model consists of ---


def _kinds(layers: nn.ModuleList, config: Any) -> list[tuple[Any, ...]]:
    """Return what makes each layer differ: its modules, its weights' shapes, and what the config says of it."""
    lists = [
        setting
        for setting in vars(config).values()
        if isinstance(setting, list | tuple) and len(setting) == len(layers)
    ]
    # A list whose values all differ numbers the layers.
    by_layer = [values for setting in lists if len(set(values := [*map(str, setting)])) < len(layers)]
    return [
        (
            tuple(type(module).__name__ for module in layer.modules()),
            tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters()),
            tuple(values[index] for values in by_layer),
        )
        for index, layer in enumerate(layers)
    ]


def _linears(module: nn.Module) -> Iterator[Linear]:
    for name, inner in module.named_modules():
        if isinstance(inner, nn.Linear):
            has_bias, is_plain = inner.bias is not None, type(inner) is nn.Linear
            yield Linear(name, inner.in_features, inner.out_features, has_bias, is_plain)


def _parts(layer: nn.Module, config: Any) -> JsonObject:
    linears = tuple(_linears(layer))
    experts = _experts(layer, config)
    total = sum(weight.numel() for weight in layer.parameters())
    counted = sum(linear.parameters for linear in linears)
    inner = sum(linear.inputs for linear in linears if linear.name.rpartition(".")[2] in _DOWN)
    if experts:
        counted += experts.parameters
        inner += experts.per_token * experts.width
    return {"linears": linears, "experts": experts, "others": total - counted, "inner": inner}


def _experts(layer: nn.Module, config: Any) -> Experts | None:
    """Return the fused experts of a layer: weights of three dimensions in one module."""
    for module in layer.modules():
        fused = [weight for weight in module.parameters(recurse=False) if weight.dim() == 3]
        if len(fused) < 2:
            continue
        num = fused[0].shape[0]
        per_token = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1
        of_one = sum(weight[0].numel() for weight in fused)
        down = min(fused, key=lambda weight: weight[0].numel())
        hidden = config.hidden_size if config.hidden_size in down.shape[1:] else max(down.shape[1:])
        width = down[0].numel() // hidden
        return Experts(num, per_token, hidden, width, matrices=round(of_one / (hidden * width)))
    return None


def _outside(model: Any, layers: nn.ModuleList) -> JsonObject:
    """Return the parts of the LLM that are in no layer."""
    inputs, head, decoder = model.get_input_embeddings(), model.get_output_embeddings(), model.get_decoder()
    inside = {id(module) for module in layers.modules()}
    excluded_weights = {id(weight) for weight in layers.parameters()} | {id(inputs.weight), id(head.weight)}
    linears = tuple(
        Linear(name, module.in_features, module.out_features, module.bias is not None)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in inside
    )
    total = sum(weight.numel() for weight in decoder.parameters() if id(weight) not in excluded_weights)
    counted = sum(linear.parameters for linear in linears)
    names = {id(module): name for name, module in model.named_modules()}
    (words, width), has_bias = head.weight.shape, getattr(head, "bias", None) is not None
    return {
        "embeddings": names[id(inputs)].rpartition(".")[2],
        "embedding_weights": inputs.weight.numel(),
        "head": Linear(names[id(head)].rpartition(".")[2], width, words, has_bias, quantizable=False),
        "linears": linears,
        "others": total - counted,
    }


# --- What its layers hold ---


class _Held(NamedTuple):
    """Bytes a token of a layer, by the length of a row."""

    kept: Curve
    steps: Curve
    constants: tuple[int, int]
    """Bytes of both that do not grow with the tokens: two rows have them once."""


def _curves(
    decoder: Any,
    watch: _Watch,
    lengths: tuple[int, ...],
    constants: dict[int, tuple[int, int]] | None = None,
    **options: bool,
) -> tuple[dict[int, _Held], dict[int, float], Curve]:
    """Run the model at each length; return what its layers keep, what each hands on, and what is kept outside.

    Args:
        decoder: The model without its head.
        lengths: Tokens of a row; the third one only if the second takes about as many operations as the first.
        constants: As of `_Held`, by layer, if they are known.
    """
    kept, steps = dict[int, list[tuple[int, float]]](), dict[int, list[tuple[int, float]]]()
    output, shared = dict[int, float](), list[tuple[int, float]]()
    operations = list[int]()
    for length in lengths:
        began = watch.memory.operations
        first, outside = _run(decoder, watch, 1, length, **options)
        operations.append(watch.memory.operations - began)
        if constants is None:
            two, _ = _run(decoder, watch, 2, length, **options)
            constants = {  # what one row and two rows of the same length have alike
                index: (max(0, 2 * sizes.kept - two[index].kept), max(0, 2 * sizes.steps - two[index].steps))
                for index, sizes in first.items()
            }
        for index, sizes in first.items():
            of_kept, of_steps = constants[index]
            kept.setdefault(index, []).append((length, (sizes.kept - of_kept) / length))
            steps.setdefault(index, []).append((length, max(0.0, sizes.steps - of_steps) / length))
            output[index] = sizes.output / length
        shared.append((length, max(0.0, outside / length)))
        if operations[-1] > _ALIKE * operations[0]:
            break
    assert constants is not None
    curves = {index: _Held(tuple(kept[index]), tuple(steps[index]), constants[index]) for index in kept}
    return curves, output, tuple(shared)


def _run(
    decoder: Any, watch: _Watch, rows: int, length: int, *, has_mask: bool = False, backward: bool = False
) -> tuple[dict[int, _Seen], int]:
    """Take a forward pass, and a backward pass; return what was seen of the layers, and the bytes kept outside them."""
    memory = watch.memory
    watch.by_layer.clear()
    watch.running = None
    gc.collect()  # after `gc.freeze`: the model is not looked at
    before = memory.now
    inputs = {"input_ids": torch.zeros((rows, length), dtype=torch.long, device=META)}
    if has_mask:
        inputs["attention_mask"] = torch.ones((rows, length), dtype=torch.long, device=META)
    # Without positions samples share no row; meta tensors hold none that could be looked at.
    with mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None):
        hidden = decoder(**inputs, use_cache=False).last_hidden_state
    if backward:
        loss = hidden.float().sum()
        del hidden
        loss.backward()
        watch.ends()
    watch.returned.clear()
    first = min(watch.by_layer.values(), key=lambda sizes: sizes.before)
    return dict(watch.by_layer), first.before - before - first.input


if __name__ == "__main__":
    main()
