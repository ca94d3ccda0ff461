"""LLaMA-Factory's YAML and JSON, with the data sets that its `dataset_info.json` registers.

Its defaults that differ from ours are written into the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.importers import deepspeed, llamafactory_data, training_arguments
from tuner.importers.document import Document
from tuner.importers.training_arguments import (
    LIGER,
    NUM_PROC,
    attention,
    compute_type,
    held_out,
    model,
    own_template,
    same,
    target,
    truth,
    weights_type,
)
from tuner.importers.translation import Given, Outcome, Rule, Tool, Translation
from tuner.recipes import catalog
from tuner.recipes.aliases import Alias, by_word

_OBJECTIVES = {"sft": "sft", "pt": "pretrain", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": None}
_LOSSES = {"kto_pair": "bco_pair", "sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo"}
_TEMPLATES = {
    **{name: name for name in ("alpaca", "vicuna", "zephyr", "llama2", "llama3", "phi3", "mistral", "gemma")},
    **{"qwen": "chatml", "chatml": "chatml", "intern2": "internlm2", "deepseek": "deepseek"},
}
"""Its template -> ours, for models of which the catalog knows no template."""


def stage(t: Translation, given: Given) -> None:
    """Take what is learned; `pref_loss` says more of DPO."""
    word, loss = str(given.value), str(t.value("pref_loss", "sigmoid"))
    if word not in _OBJECTIVES:
        raise given.wrong("not a LLaMA-Factory stage", f"Known: {', '.join(_OBJECTIVES)}.")
    ours = "orpo" if word == "dpo" and loss == "orpo" else _OBJECTIVES[word]
    if ours is None:
        t.obstacle = "tuner trains on rows, not on a reward model's scores: the source's stage is ppo"
        t.set(given, "objective.type", "sft", "tuner does not support PPO: it trains on rows", changed=True)
        return
    t.objective = ours
    t.set(given, "objective.type", ours)


def loss(t: Translation, given: Given) -> None:
    """Take DPO's loss."""
    word = str(given.value)
    if t.objective not in ("dpo", "orpo"):
        t.leave(given, f"belongs to dpo, and the stage is {t.objective}")
    elif word in _LOSSES and t.objective == "dpo":
        t.set(given, "objective.loss_type", [_LOSSES[word]])
    elif word == "orpo":
        t.set(given, "objective.type", "orpo")
    else:
        t.set(given, "objective.loss_type", ["sigmoid"], f"tuner has no loss {word!r}", changed=True)


def of_objective(ours: str, *objectives: str) -> Rule:
    """Return the rule of a setting that some objectives alone have."""

    def rule(t: Translation, given: Given) -> None:
        if t.objective in objectives:
            t.set(given, f"objective.{ours}", given.value)
        else:
            t.leave(given, f"belongs to {' and '.join(objectives)}, and this is {t.objective}")

    return rule


def finetuning_type(t: Translation, given: Given) -> None:
    """Take the method, which quantization and flags of LoRA say more of."""
    word = str(given.value)
    bits = t.value("quantization_bit")
    if word == "lora":
        t.method = "qlora" if bits else "dora" if truth(t.value("use_dora")) else "lora"
    elif word == "freeze":
        t.method = "freeze"
    elif word == "oft":
        t.method = "qlora" if bits else "lora"
        t.set(given, "adapter.use_dora", False, "tuner does not support OFT: it uses LoRA", changed=True)
        return
    elif word != "full":
        raise given.wrong("not a LLaMA-Factory finetuning_type", "Known: lora, oft, freeze, full.")
    t.note(given, Outcome.TAKEN if word == t.method else Outcome.TRANSLATED, f"method {t.method}")


def quantization_bit(t: Translation, given: Given) -> None:
    """Take 4 or 8 bits."""
    bits = given.whole()
    ours = bits if bits in (4, 8) else 4
    why = None if bits == ours else f"bitsandbytes supports 4 or 8 bits, not {bits}"
    t.set(given, "quantization.bits", ours, why, changed=bits != ours)


def quantization_method(t: Translation, given: Given) -> None:
    """bitsandbytes is the one that tuner has."""
    word = str(given.value)
    t.leave(
        given,
        "tuner always does this"
        if word in ("bnb", "bitsandbytes")
        else f"tuner quantizes with bitsandbytes, not {word}",
    )


def modules(t: Translation, given: Given) -> None:
    """Take modules that are trained whole beside the adapter."""
    t.set(given, "adapter.modules_to_save", given.words())


def packing(t: Translation, given: Given) -> None:
    """Take packing; `neat_packing` turns it on whatever `packing` says, as packed samples never see each other here."""
    if given.key == "packing" and truth(t.value("neat_packing")):
        t.leave(given, "neat_packing is true, which packs")
    elif given.key == "neat_packing" and not truth(given.value):
        t.leave(given, "packed samples never attend to each other")
    else:
        t.set(given, "train_dataloader.dataset.packing", given.value)


def template(t: Translation, given: Given) -> None:
    """Take the chat template only for a model of which the catalog knows none."""
    word = str(given.value)
    if word not in _TEMPLATES or catalog.part_named(str(t.value("model_name_or_path"))):
        own_template(t, given)
    else:
        t.set(given, "model.chat_template", _TEMPLATES[word])


def adapter_path(t: Translation, given: Given) -> None:
    """Go on with a trained adapter."""
    if t.method == "full":
        t.leave(given, "all weights are trained: merge it into the model first (tuner export --merge)")
    else:
        t.set(given, "adapter.path", str(given.value))


def gradient_checkpointing(t: Translation, given: Given) -> None:
    """LLaMA-Factory says it the other way round."""
    t.set(given, "train_cfg.gradient_checkpointing", not truth(given.value))


def early_stopping(t: Translation, given: Given) -> None:
    """Take the patience, counted in validations in both."""
    t.set(given, "train_cfg.early_stopping_patience", given.value)


def freeze_layers(t: Translation, given: Given) -> None:
    """Take how many of the last layers are trained."""
    if t.method == "freeze" and given.whole() > 0:
        t.set(given, "train_cfg.trainable_layers", given.value)
    else:
        t.leave(given, "only the last layers can be trained, with finetuning_type freeze")


def rslora(t: Translation, given: Given) -> None:
    """Take rank-stabilized LoRA."""
    t.set(given, "adapter.use_rslora", given.value)


def pissa(t: Translation, given: Given) -> None:
    """Begin an adapter with the largest part of the base, found in `pissa_iter` rounds; -1 is all of it, exactly."""
    rounds = t.whole("pissa_iter", 16)
    if truth(given.value):
        t.set(given, "adapter.init_lora_weights", "pissa" if rounds == -1 else f"pissa_niter_{rounds}")
    else:
        t.set(given, "adapter.init_lora_weights", True)


def _defaults(document: Document) -> Mapping[str, Any]:
    """Return what LLaMA-Factory means by what is not written; its gradient checkpointing is on."""
    said = document.values
    rank = said.get("lora_rank") or 8
    method = said.get("finetuning_type") or "lora"
    is_adapter = method in ("lora", "oft")
    of_adapter = {"lora_rank": rank, "lora_dropout": 0.0, "lora_target": "all"} if is_adapter else {}
    if is_adapter and str(rank).isdecimal():
        of_adapter["lora_alpha"] = 2 * int(rank)
    general = training_arguments.no_warmup(training_arguments.DEFAULTS, document)
    general.pop("gradient_checkpointing")
    return {
        "stage": "sft",
        "finetuning_type": "lora",
        **general,
        **of_adapter,
        "cutoff_len": 2048,
        "packing": said.get("stage") == "pt",
        "disable_gradient_checkpointing": False,
        **({"freeze_trainable_layers": 2} if method == "freeze" else {}),
    }


def _refuse_version_1(document: Document) -> Document:
    """Refuse a config of its unreleased rewrite (USE_V1=1), whose words are others: `model`, `peft_config`."""
    told = next((key for key in ("model_class", "train_dataset", "peft_config") if key in document.values), None)
    if told and "model" in document.values:
        fix = "Use the keys of its releases: model_name_or_path, finetuning_type, dataset."
        raise document.wrong("a config of LLaMA-Factory's rewrite (USE_V1=1), which is not supported", (told,), fix)
    return document


_MEDIA = "tuner trains text models and does not support images, sound or video"
_OTHER = "tuner does not support this"
_REASONS = {
    "image_* video_* use_audio_in_video audio_sampling_rate crop_to_patches media_dir": _MEDIA,
    "freeze_vision_tower freeze_multi_modal_projector freeze_language_model visual_inputs train_mm_proj_only": _MEDIA,
    "preprocessing_batch_size overwrite_cache tokenized_path data_shared_file_system": (
        "tuner prepares data once and caches it"
    ),
    "streaming buffer_size mix_strategy interleave_probs eval_on_each_dataset": (
        "data sets are joined whole; for weights of a mixture: train_dataloader.dataset.mixture"
    ),
    "train_on_prompt mask_history ignore_pad_token_for_loss": "the loss covers every answer of the assistant",
    "tool_format": "the chat template renders tools",
    "enable_thinking preserve_thinking": "the template sets it, or train_dataloader.dataset.thinking",
    "cache_dir hf_hub_token ms_hub_token om_hub_token use_fast_tokenizer low_cpu_mem_usage": (
        "the hub's own variables set it (HF_HOME, HF_TOKEN)"
    ),
    "split_special_tokens add_tokens add_special_tokens new_special_tokens* init_special_tokens": (
        "tuner uses the model's tokenizer: add tokens to the model's folder first"
    ),
    "rope_scaling shift_attn mixture_of_depths train_from_scratch block_diag_attn": _OTHER,
    "use_unsloth use_unsloth_gc use_reentrant_gc upcast_layernorm upcast_lmhead_output": (
        "affects only speed or memory; tuner sets it automatically"
    ),
    "use_v1_kernels use_kv_cache device_map compute_dtype print_param_status offload_folder": (
        "affects only speed or memory; tuner sets it automatically"
    ),
    "use_kt kt_config.* kt_* cpu_infer chunk_size": (
        "tuner does not support KTransformers: offload a model that does not fit (zero3_offload)"
    ),
    "infer_backend infer_dtype vllm_* sglang_* do_sample temperature top_p top_k num_beams max_length": (
        "answering: tuner chat, tuner serve"
    ),
    "max_new_tokens repetition_penalty length_penalty skip_special_tokens eval_num_beams predict_with_generate": (
        "answering: tuner chat, tuner eval"
    ),
    "export_*": "exporting: tuner export RUN DEST --merge",
    "quantization_device_map": "each rank holds its own copy, or DeepSpeed's shard",
    "freeze_trainable_modules freeze_extra_modules": "tuner trains whole layers with all their modules",
    "loraplus_lr_embedding pissa_convert pissa_iter create_new_adapter adapter_folder oft_* module_dropout": (
        "adapters are PEFT's LoRA"
    ),
    "use_galore galore_* use_apollo apollo_* use_badam badam_* use_adam_mini use_muon use_llama_pro": (
        f"{_OTHER}: the optimizer is AdamW"
    ),
    "use_mca use_megatron_bridge megatron_bridge_args use_hyper_parallel hyper_parallel_* dist_config.*": (
        "tuner trains with DeepSpeed"
    ),
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size": "tuner trains with DeepSpeed",
    "context_parallel_size virtual_pipeline_model_parallel_size sequence_parallel recompute_*": (
        "Megatron only; for sequence parallelism: --set sequence_parallel_size=N"
    ),
    "account_for_* bias_activation_fusion apply_rope_fusion masked_softmax_fusion cross_entropy_loss_fusion": (
        "Megatron only"
    ),
    "moe_* calculate_per_token_loss use_distributed_optimizer overlap_* use_packed_sequences mixed_precision": (
        "Megatron only"
    ),
    "megatron_pretrained_checkpoint export_hf_on_finish extra_config": "Megatron only",
    "use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha pref_ftx pref_bco_weight simpo_gamma": _OTHER,
    "ppo_* ref_model ref_model_adapters ref_model_quantization_bit reward_model reward_model_*": (
        "tuner's reference is the model before training; it has no PPO"
    ),
    "use_swanlab swanlab_*": "a tracker: log.trackers=swanlab, which reads its own variables",
    "compute_accuracy include_effective_tokens_per_second": "the run's metrics have loss and accuracy",
    "disable_shuffling": "rows are shuffled by the seed",
    "ray_* placement_strategy resources_per_worker master_addr master_port": (
        "the launcher sets it: --nnodes, --master-addr, --master-port"
    ),
    "enable_torch_profiler profiler_* profile_modules fp8 fp8_*": _OTHER,
    "task task_dir lang n_shot save_dir download_mode batch_size": "evaluation: tuner eval",
    "model_max_length reserved_label_len": "cutoff_len sets it",
    "split": "dataset_info.json has the split of each data set",
}

TABLE: Mapping[str, Rule] = {
    **training_arguments.TABLE,
    **by_word(_REASONS),
    "model_name_or_path": model,
    "model_revision": Alias("model.revision"),
    "stage": stage,
    "finetuning_type": finetuning_type,
    "quantization_bit": quantization_bit,
    "quantization_method": quantization_method,
    **same("quantization_type double_quantization lora_rank resize_vocab moe_aux_loss_coef cutoff_len"),
    "lora_alpha": Alias("adapter.lora_alpha"),
    "lora_dropout": Alias("adapter.lora_dropout"),
    "lora_target": target,
    "additional_target": modules,
    "use_dora": Alias("adapter.use_dora"),
    "use_rslora": rslora,
    "pissa_init": pissa,
    "loraplus_lr_ratio": Alias("optim_wrapper.optimizer.loraplus_lr_ratio"),
    "adapter_name_or_path": adapter_path,
    "freeze_trainable_layers": freeze_layers,
    "pref_beta": of_objective("beta", "dpo", "orpo", "kto"),
    "pref_loss": loss,
    "dpo_label_smoothing": of_objective("label_smoothing", "dpo"),
    "ld_alpha": of_objective("ld_alpha", "dpo"),
    "kto_chosen_weight": of_objective("desirable_weight", "kto"),
    "kto_rejected_weight": of_objective("undesirable_weight", "kto"),
    "template": template,
    "dataset": llamafactory_data.datasets,
    "eval_dataset": llamafactory_data.datasets,
    "dataset_dir": "the recipe lists data sets by their own paths",
    "max_samples": llamafactory_data.max_samples,
    "val_size": held_out,
    "packing": packing,
    "neat_packing": packing,
    "default_system": llamafactory_data.system,
    "flash_attn": attention,
    "enable_liger_kernel": LIGER,
    "preprocessing_num_workers": NUM_PROC,
    "disable_gradient_checkpointing": gradient_checkpointing,
    "pure_bf16": compute_type,
    "torch_dtype": weights_type,
    "early_stopping_steps": early_stopping,
    "deepspeed": deepspeed.chosen,
}

TOOL = Tool(
    "LLaMA-Factory",
    TABLE,
    _defaults,
    llamafactory_data.settle,
    begin=_refuse_version_1,
    keys="llamafactory",
)
