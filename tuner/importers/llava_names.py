"""XTuner's LLaVA recipes: what their names set, by the rules that its 33 files follow.

    llava_{llm}[_qlora|_full|_quant]_clip_vit_large_p14_336[_lora|_full]_e1_gpu8_{pretrain|finetune}[_refcoco]

`xtuner_names` finds the names. XTuner counts max_length in tokens of text, and tuner with those of the image: the parts
of the data sets have the sum.
"""

from __future__ import annotations

import re

Values = dict[str, object]
"""Values of a recipe by key."""

TOWER = "openai/clip-vit-large-patch14-336"
VIT = "clip_vit_large_p14_336"
_END = r"_e(?P<epochs>\d+)_gpu(?P<gpus>\d+)_"
PRETRAIN = rf"^llava_(?P<llm>.+?)_{VIT}{_END}pretrain$"
PRETRAIN_4_BITS = rf"^llava_(?P<llm>(?:internlm|vicuna).+?|.+?(?=_quant_))(?:_quant)?_{VIT}{_END}pretrain$"
SHAREGPT4V = rf"^llava_(?P<llm>.+?)_{VIT}{_END}sharegpt4v_pretrain$"
FULL = rf"^llava_(?P<llm>.+?)(?P<full>_full)?(?<!_qlora)(?<!_quant)_{VIT}(?(full)(?P<tower>_lora)?){_END}finetune$"
INTERNVL = rf"^llava_(?P<llm>.+?)_full_{VIT}(?P<tower>_full|_lora)?{_END}internvl_finetune$"
QLORA = rf"^llava_(?P<llm>.+?)_qlora_{VIT}(?P<tower>_lora)?{_END}finetune$"
REFCOCO = rf"^llava_(?P<llm>.+?)_qlora_{VIT}(?P<tower>_lora)?{_END}finetune_refcoco$"
OFFICIAL_PRETRAIN = r"^llava_v15_(?P<size>7b|13b)_pretrain$"
OFFICIAL = r"^llava_v15_(?P<size>7b|13b)_finetune$"
OFFICIAL_LORA = r"^llava_v15_(?P<size>7b|13b)_finetune_lora$"

REFUSED = (
    (
        r"internvl_v(?P<version>1_5|2)_",
        "trains an InternVL that is published only with code of its own; transformers, and so tuner, loads those with "
        "names that end in -hf, such as: tuner train --model OpenGVLab/InternVL3-2B-hf --data FILE --method lora",
    ),
    (r"llava_", "is none of XTuner's LLaVA recipes: tuner knows those with an LLM of its catalog and the tower " + VIT),
)
"""Beginnings of names of recipes with images that tuner refuses, each with the reason."""

_FIRST, _SECOND = 256, 128
"""Samples of an optimizer step of each stage, on all GPUs together."""
_PROJECTOR = ["multi_modal_projector"]


def pretrain(match: re.Match[str]) -> Values:
    """Return the values of a first stage: the projector alone is trained."""
    groups = match.groupdict()
    rate = 5e-4 if "70b" in str(groups.get("llm")) else 1e-3
    batch = 16 if match.re.pattern == SHAREGPT4V else 32
    return {"model": _model(("vision", "language"), pads=False), **_steps(groups, _FIRST, batch, rate)}


def full(match: re.Match[str]) -> Values:
    """Return the values of a second stage that trains the projector, the LLM, and the tower or its LoRA if named."""
    groups = match.groupdict()
    tower = groups.get("tower")
    has_more_tokens = match.re.pattern == INTERNVL and tower == "_lora"
    batch = 16 if "size" in groups else 4 if has_more_tokens or _is_large(groups) else 8
    model = _model(() if tower else ("vision",), pads=True)
    if tower == "_lora":
        model["vision_lora"] = {"r": 64, "lora_alpha": 16, "lora_dropout": 0.05}
    return {"model": model, **_steps(groups, _SECOND, batch, 2e-5)}


def adapted(match: re.Match[str]) -> Values:
    """Return the values of a second stage with adapters on the LLM, and on the tower if the name says so."""
    groups = match.groupdict()
    adapter: Values = {"lora_dropout": 0.05, "modules_to_save": _PROJECTOR}
    if "size" in groups:
        adapter |= {"r": 128, "lora_alpha": 256}
    elif groups.get("tower"):
        adapter |= {"r": 512, "lora_alpha": 256, "vision": True, "vision_r": 64, "vision_lora_alpha": 16}
    else:
        adapter |= {"r": 64, "lora_alpha": 16}
    batch = 8 if _is_large(groups) else 16
    return {"model": _model((), pads=True), "adapter": adapter, **_steps(groups, _SECOND, batch, 2e-4)}


def _is_large(groups: dict[str, str | None]) -> bool:
    size = re.search(r"_(\d+)b(?=_|$)", groups.get("llm") or "")
    return size is not None and int(size[1]) >= 20


def _model(frozen: tuple[str, ...], *, pads: bool) -> Values:
    return {"vision": {"path": TOWER, "pad_to_square": pads}, "freeze": frozen}


def _steps(groups: dict[str, str | None], samples: int, batch: int, rate: float) -> Values:
    gpus = int(groups.get("gpus") or 8)
    batch = 1 if gpus == 1 else batch
    loader = {"batch_size": batch, "dataset": {"packing": False}}
    accumulation = max(1, samples // (batch * gpus))
    optimizer = {"optimizer": {"lr": rate}, "accumulative_counts": accumulation}
    return {"train_dataloader": loader, "optim_wrapper": optimizer}
