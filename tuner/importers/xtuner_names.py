"""XTuner's spellings: the words of its recipe names that `catalog` does not know, in one table.

It rewrites text; `catalog` decides whether the result is a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tuner.errors import Key
from tuner.files import JsonObject
from tuner.hooks import NameWord
from tuner.importers import llava_names


class Spelling(NamedTuple):
    """One of XTuner's words: `pattern` occurs once in a name and is replaced by `ours`."""

    written: str
    """The word as the docs show it."""
    says: str
    """One line: what the word means, or what the recipe with it does."""
    pattern: str
    ours: str = ""
    values: Callable[[re.Match[str]], JsonObject] | JsonObject | None = None
    """The values that the word sets, above the recipe and below the command line's overrides."""
    loses: str | None = None
    """What XTuner does for this word and tuner does not; it is a warning before training."""


def _train(*, batch: int | None = None, accumulate: int | None = None, max_length: int | None = None) -> JsonObject:
    loader = {"batch_size": batch, "dataset": {"max_length": max_length} if max_length else None}
    return {
        "train_dataloader": {key: value for key, value in loader.items() if value},
        "optim_wrapper": {"accumulative_counts": accumulate} if accumulate else {},
    }


def _tokens(match: re.Match[str]) -> int:
    return int(match["number"]) * {"k": 1024, "M": 1024**2}[match["unit"]]


_LENGTH = r"_(?P<number>[1-9]\d{0,3})(?P<unit>[kM])"
_SPLITS = (
    f"XTuner splits each sample of this recipe over several GPUs (sequence parallelism); tuner does so only with "
    f"{Key('sequence_parallel_size', 'N')}."
)

SPELLINGS = (
    # The end of a name, outermost first.
    Spelling("_copy", "The name of a copy made by `xtuner copy-cfg`: the same recipe.", r"_copy$"),
    Spelling(
        "_hf",
        "The same recipe, which XTuner runs on transformers' Trainer.",
        r"_hf$",
        loses=("XTuner's `_hf` recipes warm up over 100 steps; tuner warms up over a share "
"of all steps, as without `_hf`."),
    ),
    Spelling(
        "_openmind",
        "The same on Ascend NPUs, with LoRA for the QLoRA in the name: bitsandbytes has no 4 bits there.",
        r"_qlora_(?P<rest>.+)_openmind$",
        r"_lora_\g<rest>",
    ),
    Spelling("_gpu8", "8 samples a GPU, an optimizer step each.", r"_gpu8$", values=_train(batch=8, accumulate=1)),
    Spelling("_varlen", "Packed samples do not attend to each other: in tuner they never do.", r"_varlen$"),
    Spelling(
        "_8k_sp1",
        "A speed benchmark of 3 epochs: max_length in units of 1024 (k) or 1024^2 (M), accumulating 1.",
        rf"{_LENGTH}_sp1$",
        "_e3",
        lambda match: _train(accumulate=1, max_length=_tokens(match)),
    ),
    Spelling(
        "_128k_sp8, _1M_sp16",
        "The same with sequence parallelism in XTuner: accumulating 8, 16.",
        rf"{_LENGTH}_sp(?P<gpus>\d+)$",
        "_e3",
        lambda match: _train(accumulate=int(match["gpus"]), max_length=_tokens(match)),
        rf"{_SPLITS} On as many GPUs, a step takes \g<gpus> times as many samples as XTuner's.",
    ),
    Spelling("_sp1", "Sequence parallelism over one GPU: none.", r"_sp1$"),
    Spelling(
        "_sp4, _sequence_parallel_4, _2gpus",
        "Sequence parallelism, in tuner the key sequence_parallel_size. Without it, each GPU keeps whole samples.",
        r"_(?:sp|sequence_parallel_)\d+$|_\d+gpus$",
        loses=_SPLITS,
    ),
    Spelling(
        "_16k after _e3",
        "max_length in units of 1024 tokens.",
        rf"(?<=_e\d){_LENGTH}$",
        values=lambda match: _train(max_length=_tokens(match)),
    ),
    # LLaVA: an LLM, a tower, and one of two stages.
    Spelling(
        "llava_internlm2_chat_7b_clip_..._pretrain, llava_LLM_quant_clip_..._pretrain",
        "LLaVA's first stage, on an LLM that XTuner keeps in 4 bits: the projector alone learns.",
        llava_names.PRETRAIN_4_BITS,
        r"\g<llm>_full_llava_pretrain_e\g<epochs>",
        llava_names.pretrain,
        "XTuner keeps the frozen LLM of this recipe in 4 bits; tuner keeps it in 16 bits.",
    ),
    Spelling(
        "llava_LLM_clip_vit_large_p14_336_e1_gpu8_pretrain",
        "LLaVA's first stage: the projector alone learns from 558 thousand captions.",
        llava_names.PRETRAIN,
        r"\g<llm>_full_llava_pretrain_e\g<epochs>",
        llava_names.pretrain,
    ),
    Spelling(
        "llava_LLM_clip_vit_large_p14_336_e1_gpu8_sharegpt4v_pretrain",
        "The same on the captions of ShareGPT4V.",
        llava_names.SHAREGPT4V,
        r"\g<llm>_full_sharegpt4v_pretrain_e\g<epochs>",
        llava_names.pretrain,
    ),
    Spelling(
        "llava_LLM_full_clip_vit_large_p14_336_e1_gpu8_finetune",
        "LLaVA's second stage: the projector and the LLM learn from 665 thousand conversations. With `_lora` behind "
        "the tower, the tower has LoRA.",
        llava_names.FULL,
        r"\g<llm>_full_llava_instruct_e\g<epochs>",
        llava_names.full,
    ),
    Spelling(
        "llava_LLM_full_clip_vit_large_p14_336_full_e2_gpu8_internvl_finetune",
        "The same on InternVL's data; with `_full` behind the tower, the tower learns too, with `_lora` by LoRA.",
        llava_names.INTERNVL,
        r"\g<llm>_full_internvl_sft_e\g<epochs>",
        llava_names.full,
    ),
    Spelling(
        "llava_LLM_qlora_clip_vit_large_p14_336_lora_e1_gpu8_finetune",
        "The second stage with adapters on the LLM in 4 bits, with `_lora` also on the tower; the projector is whole.",
        llava_names.QLORA,
        r"\g<llm>_qlora_llava_instruct_e\g<epochs>",
        llava_names.adapted,
    ),
    Spelling(
        "llava_LLM_qlora_clip_vit_large_p14_336_lora_e1_gpu8_finetune_refcoco",
        "The same, with questions for RefCOCO's boxes.",
        llava_names.REFCOCO,
        r"\g<llm>_qlora_llava_refcoco_e\g<epochs>",
        llava_names.adapted,
    ),
    Spelling(
        "llava_v15_7b_pretrain",
        "The first stage of LLaVA 1.5, on Vicuna.",
        llava_names.OFFICIAL_PRETRAIN,
        r"vicuna_\g<size>_v15_full_llava_pretrain_e1",
        llava_names.pretrain,
    ),
    Spelling(
        "llava_v15_7b_finetune",
        "The second stage of LLaVA 1.5.",
        llava_names.OFFICIAL,
        r"vicuna_\g<size>_v15_full_llava_instruct_e1",
        llava_names.full,
    ),
    Spelling(
        "llava_v15_7b_finetune_lora",
        "The same with adapters on the LLM; the projector is whole.",
        llava_names.OFFICIAL_LORA,
        r"vicuna_\g<size>_v15_lora_llava_instruct_e1",
        llava_names.adapted,
    ),
    # The middle of a name.
    Spelling(
        "internlm2_chat_1_8b_dpo, internlm2_chat_7b_orpo",
        "XTuner's preference recipes start from the SFT weights of these models: internlm2_chat_1_8b_sft.",
        r"^(?P<model>internlm2_chat_(?:1_8b|7b))(?=_(?:dpo|orpo|reward)_)",
        r"\g<model>_sft",
    ),
    Spelling(
        "minicpm3_4b_chat",
        "`minicpm3_4b`, which is a chat model.",
        r"^minicpm3_4b_chat(?=_)",
        "minicpm3_4b",
    ),
    Spelling(
        "_varlenattn",
        "Packed pairs that do not attend to each other, one packed row per GPU; tuner pads pairs, one per GPU.",
        r"_varlenattn(?=_|$)",
        values=_train(batch=1),
    ),
    Spelling(
        "_dpo_full, _orpo_qlora",
        "Without a data set: orpo_dpo_mix_40k.",
        r"(?P<training>_(?:dpo|orpo)_(?:full|lora|qlora))$",
        r"\g<training>_orpo_dpo_mix_40k",
    ),
    Spelling(
        "_dpo_..., _orpo_... without _eN",
        "3 epochs.",
        r"(?P<all>_(?:dpo|orpo)_(?:full|lora|qlora)_.+)(?<!_e\d)$",
        r"\g<all>_e3",
    ),
    Spelling(
        "_reward_... without _eN",
        "1 epoch: more overfit a reward model.",
        r"(?P<all>_reward_(?:full|lora|qlora)_.+)(?<!_e\d)$",
        r"\g<all>_e1",
    ),
    Spelling(
        "_w_untokenized_dataset",
        "1 epoch of InternEvo's settings on a user's own file.",
        r"_w_untokenized_dataset$",
        "_full_finetune_custom_dataset_e1",
    ),
    Spelling(
        "_w_tokenized_dataset, _w_internevo_dataset",
        "The same on tokens, which tuner does not read: on text.",
        r"_w_(?:tokenized|internevo)_dataset$",
        "_full_finetune_custom_dataset_e1",
        loses="XTuner reads tokens written by InternEvo; tuner reads rows of text.",
    ),
    Spelling(
        "_full_intern_repo_dataset_template",
        "The same at 8k tokens, accumulating 4.",
        r"_full_intern_repo_dataset_template$",
        "_full_finetune_custom_dataset_e1",
        _train(accumulate=4, max_length=8192),
    ),
)  # fmt: skip

REFUSED = (
    *llava_names.REFUSED,
    (r"POLAR_", "is XTuner's reward model against reference answers; tuner's reward models learn from pairs"),
)
"""Beginnings of XTuner's names that tuner refuses, each with the reason."""


def spellings_in(name: str) -> Iterator[tuple[Spelling, re.Match[str], str]]:
    """Yield each of XTuner's words in a name, in the order in which they are replaced, and the name after that."""
    for spelling in SPELLINGS:
        if match := re.search(spelling.pattern, name, re.ASCII):
            name = name[: match.start()] + match.expand(spelling.ours) + name[match.end() :]
            yield spelling, match, name


def readings(name: str) -> Iterator[tuple[str, tuple[NameWord, ...]]]:
    """Yield a name with one more of XTuner's words replaced each time, and these words."""
    words: tuple[NameWord, ...] = ()
    for spelling, match, our_name in spellings_in(name):
        values = spelling.values(match) if callable(spelling.values) else spelling.values
        words = (*words, NameWord(match[0], values or {}, spelling.loses and match.expand(spelling.loses)))
        yield our_name, words


def refusal_of_name(name: str) -> str | None:
    """Return why tuner refuses one of XTuner's names, or None."""
    return next((reason for pattern, reason in REFUSED if re.match(pattern, name)), None)
