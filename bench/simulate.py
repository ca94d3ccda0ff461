"""The plan's estimate beside a simulation of the same step: peaks of GPU memory, without a GPU.

    python -m bench simulate [--layers N] [--point WORDS] [--json FILE]

Each point is a run that tuner resolves for GPUs that are not here. `bench.simulation` takes its step with the libraries
themselves, on meta tensors, and shares no formula with `tuner.fit`. The aim: an estimate never more than 2 % below the
simulation and never more than 5 % above. Both are without CUDA's context and fragmentation.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from bench.table import Table, arguments
from tuner.fit.estimate import peak
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine import libraries
from tuner.machine.hardware import Gpu, Hardware
from tuner.machine.topology import LaunchFlags
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides
from tuner.recipes.recipe_file import read_part
from tuner.recipes.schema.architecture import VARLEN

if TYPE_CHECKING:
    from bench.simulation import Job, Simulated

_OF_LORA = ("r", "lora_alpha", "lora_dropout", "target_modules", "vision")
_OF_4_BITS = {"bnb_4bit_quant_type": "quant_type", "bnb_4bit_use_double_quant": "double_quant"}
"""bitsandbytes' names for what a recipe's `quantization` says."""
LEAST, MOST = -0.02, 0.05
"""By how much an estimate may be off."""
GIB = 1024**3
GPUS = {
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0), "GPU-a100"),
    "T4": Gpu("Tesla T4", 15 * GIB, (7, 5), "GPU-t4"),
}


def shape(
    kind: str, layers: int, width: int, inner: int, heads: tuple[int, int], words: int, positions: int, **more: Any
) -> dict[str, Any]:
    """Return the facts of a model; `heads`: of queries, and of keys and values."""
    widths = {"hidden_size": width, "intermediate_size": inner, "vocab_size": words}
    of_heads = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    others = {"num_hidden_layers": layers, "max_position_embeddings": positions, "tie_word_embeddings": False}
    return {"model_type": kind, **widths, **of_heads, **others, **more}


_TIED = {"tie_word_embeddings": True}
# Shapes of published models. A small vocabulary and many key-value heads, or the other way round: both matter.
LLAMA_2_7B = shape("llama", 32, 4096, 11008, (32, 32), 32000, 4096)
LLAMA_3_8B = shape("llama", 32, 4096, 14336, (32, 8), 128256, 8192)
QWEN_2_5_1B = shape("qwen2", 28, 1536, 8960, (12, 2), 151936, 32768, **_TIED)
QWEN_3_8B = shape("qwen3", 36, 4096, 12288, (32, 8), 151936, 40960, head_dim=128)
GEMMA_2_9B = shape("gemma2", 42, 3584, 14336, (16, 8), 256000, 8192, head_dim=256, **_TIED)
_8_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MIXTRAL = shape("mixtral", 32, 4096, 14336, (32, 8), 32000, 32768, **_8_EXPERTS)
_128_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
QWEN_3_30B_A3B = shape("qwen3_moe", 48, 2048, 6144, (32, 4), 151936, 40960, head_dim=128, **_128_EXPERTS)
_32_EXPERTS = {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
GPT_OSS_20B = shape("gpt_oss", 24, 2880, 2880, (64, 8), 201088, 131072, head_dim=64, **_32_EXPERTS)
LLAVA_7B = {
    "model_type": "llava",
    "text_config": LLAMA_2_7B,
    "vision_config": {
        "model_type": "clip_vision_model",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "projection_dim": 768,
    },
    "image_token_index": 31999,
    "image_seq_length": 576,
    "tie_word_embeddings": False,
}
_SECTIONS = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
QWEN_2_5_VL_3B = {
    "model_type": "qwen2_5_vl",
    "text_config": shape(
        "qwen2_5_vl_text", 36, 2048, 11008, (16, 2), 151936, 32768, rope_parameters=_SECTIONS, **_TIED
    ),
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "image_token_id": 151655,
    "tie_word_embeddings": True,
}
MINIMAX = {"model_type": "minimax", "num_hidden_layers": 4, "num_local_experts": 4}
MINIMAX_M2 = {"model_type": "minimax_m2", "num_hidden_layers": 4, "num_local_experts": 16}
GLM_5 = {"model_type": "glm_moe_dsa", "num_hidden_layers": 5, "n_routed_experts": 16}
DEEPSEEK_V4 = {"model_type": "deepseek_v4", "num_hidden_layers": 4, "n_routed_experts": 16}
AFMOE = {"model_type": "afmoe", "num_hidden_layers": 5, "num_experts": 16}
"""Models that no formula describes, with few layers and experts; transformers' classes have the other sizes."""
KIMI_LINEAR = {"model_type": "kimi_linear", "num_hidden_layers": 5, "num_local_experts": 16}
OLMO_HYBRID = {"model_type": "olmo_hybrid", "num_hidden_layers": 4}
DEEPSEEK_V3_2 = {"model_type": "deepseek_v32", "num_hidden_layers": 5, "n_routed_experts": 16}
_DOTS_EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
DOTS_1 = {"model_type": "dots1", "num_hidden_layers": 4, **_DOTS_EXPERTS}
LFM_2 = {"model_type": "lfm2", "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}
# Sizes of Nemotron 3 Nano 30B-A3B and Granite 4.0 H Small.
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "hidden_size": 2688,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
GRANITE_4 = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_key_value_heads": 8,
    "vocab_size": 100352,
    "tie_word_embeddings": True,
    "num_local_experts": 16,
    "num_experts_per_tok": 10,
    "mamba_d_state": 128,
    "position_embedding_type": "nope",
}


def of_part(name: str, **few: object) -> dict[str, Any]:
    """Return the facts of a part of the catalog, whose type has a formula, with few layers and experts."""
    return {**read_part("models", name).values["architecture"], **few}


MODELS: dict[str, dict[str, Any]] = {
    "MiniMax": MINIMAX,
    "MiniMax M2": MINIMAX_M2,
    "GLM-5": GLM_5,
    "AFMoE": AFMOE,
    "DeepSeek V4": DEEPSEEK_V4,
    "DeepSeek V3.2": DEEPSEEK_V3_2,
    "Kimi Linear": KIMI_LINEAR,
    "OLMo hybrid": OLMO_HYBRID,
    "Nemotron-H": NEMOTRON_H,
    "Granite 4": GRANITE_4,
    "LFM2": LFM_2,
    "dots1": DOTS_1,
    "Qwen3-Next": of_part("qwen3_next_80b_a3b_instruct", num_hidden_layers=4, num_experts=16),
    "Qwen3.5 9B": of_part("qwen3_5_9b", num_hidden_layers=4),
    "Ministral 3 8B": of_part("ministral3_8b", num_hidden_layers=4),
    "SmolLM3 3B": of_part("smollm3_3b", num_hidden_layers=4),
    "LLaVA 1.5 7B": LLAVA_7B,
    "Qwen2.5-VL 3B": QWEN_2_5_VL_3B,
    "Llama 2 7B": LLAMA_2_7B,
    "Llama 3 8B": LLAMA_3_8B,
    "Qwen 2.5 1.5B": QWEN_2_5_1B,
    "Qwen 3 8B": QWEN_3_8B,
    "Gemma 2 9B": GEMMA_2_9B,
    "Mixtral 8x7B": MIXTRAL,
    "Qwen 3 30B-A3B": QWEN_3_30B_A3B,
    "gpt-oss 20B": GPT_OSS_20B,
}


@dataclass(frozen=True)
class Point:
    """One run to simulate: steps of `accumulation` micro-batches of `rows` rows of `tokens` tokens."""

    model: str
    method: str
    zero: int
    ranks: int = 8
    rows: int = 1
    tokens: int = 4096
    accumulation: int = 2
    recompute: bool = True
    packing: bool = False
    offload: bool = False
    loss: str = "chunked"
    gpu: str = "A100"
    layers: int | None = None
    """Fewer than the LLM and the tower have; None: as many."""
    num_images: int = 0
    """Images in each row: nearly all of its tokens are theirs."""
    on_tower: bool = False
    """LoRA is on the tower and the projector too."""

    def __str__(self) -> str:
        """Return its name, by which `--point` selects it."""
        more = [
            f"{self.ranks} x {self.gpu}",
            f"{self.rows} x {self.tokens}",
            "recomputed" if self.recompute else "kept",
        ]
        more += ["one micro-batch"] * (self.accumulation == 1)
        more += ["LoRA on the tower"] * self.on_tower
        more += ["packed"] * self.packing + ["whole logits"] * (self.loss == "whole")
        level = f"ZeRO-{self.zero}{' offload' * self.offload}"
        return f"{self.model}, {self.method}, {level}, {', '.join(more)}"

    def config(self) -> dict[str, Any]:
        """Return the model's config.json."""
        whole, most = MODELS[self.model], self.layers or sys.maxsize
        if "text_config" not in whole:
            return _cut(whole, most)
        return whole | {
            "text_config": _cut(whole["text_config"], most),
            "vision_config": _cut(whole["vision_config"], most),
        }


def _cut(config: dict[str, Any], most: int) -> dict[str, Any]:
    """Return a config with no more than so many layers."""
    name = next(name for name in ("num_hidden_layers", "depth") if name in config)
    return config | {name: min(most, config[name])}


KINDS = (
    Point("Llama 3 8B", "full", 0, ranks=1),
    Point("Llama 3 8B", "full", 1),
    Point("Llama 2 7B", "full", 2),
    Point("Llama 3 8B", "full", 3),
    Point("Llama 2 7B", "full", 3, recompute=False),
    Point("Llama 3 8B", "full", 3, rows=2, recompute=False, packing=True),
    Point("Qwen 2.5 1.5B", "full", 3, recompute=False),
    Point("Llama 3 8B", "lora", 0, ranks=1),
    Point("Llama 3 8B", "lora", 2),
    Point("Llama 3 8B", "lora", 2, recompute=False),
    Point("Llama 3 8B", "lora", 3, recompute=False),
    Point("Llama 3 8B", "qlora", 2),
    Point("Llama 3 8B", "qlora", 3),
    Point("Gemma 2 9B", "lora", 2, tokens=2048, recompute=False),
    Point("Mixtral 8x7B", "full", 3, ranks=64, recompute=False),
    Point("Qwen 3 30B-A3B", "lora", 2),
    Point("gpt-oss 20B", "lora", 2, tokens=2048),
    Point("Llama 3 8B", "lora", 0, ranks=1, gpu="T4", tokens=2048),
    Point("Llama 3 8B", "qlora", 3, recompute=False),
    Point("Qwen 3 30B-A3B", "qlora", 2),
    Point("gpt-oss 20B", "qlora", 3, tokens=2048),
)
"""Every kind of run once. `tests/fit/test_simulated.py` takes most of them with few layers."""
POINTS = (
    *KINDS,
    Point("Llama 3 8B", "full", 2),
    Point("Llama 3 8B", "full", 2, recompute=False),
    Point("Llama 3 8B", "full", 3, recompute=False),
    Point("Llama 3 8B", "full", 3, loss="whole"),
    Point("Llama 3 8B", "full", 3, accumulation=1),
    Point("Llama 3 8B", "full", 2, accumulation=1),
    Point("Llama 3 8B", "full", 2, offload=True),
    Point("Llama 3 8B", "full", 3, offload=True),
    Point("Llama 3 8B", "lora", 3, offload=True),
    Point("Llama 2 7B", "full", 2, rows=4, packing=True),
    Point("Qwen 2.5 1.5B", "full", 2),
    Point("Qwen 3 8B", "full", 2, recompute=False),
    Point("Llama 3 8B", "lora", 3),
    Point("Llama 3 8B", "qlora", 0, ranks=1),
    Point("Llama 3 8B", "qlora", 2, recompute=False),
    Point("Gemma 2 9B", "full", 3),
    Point("Gemma 2 9B", "lora", 0, ranks=1, tokens=2048),
    Point("Gemma 2 9B", "lora", 0, ranks=1, tokens=8192),
    Point("Llama 3 8B", "qlora", 0, ranks=1, gpu="T4", tokens=2048, recompute=False),
    Point("Mixtral 8x7B", "lora", 3),
    Point("Mixtral 8x7B", "full", 3, ranks=64),
    Point("Qwen 3 30B-A3B", "full", 3, ranks=16),
    Point("Qwen 3 30B-A3B", "qlora", 3),
    Point("Mixtral 8x7B", "qlora", 3),
    Point("gpt-oss 20B", "qlora", 2, tokens=2048),
)


_OF_IMAGES = Point("LLaVA 1.5 7B", "lora", 3, tokens=2368, recompute=False, num_images=4)
IMAGES = (
    *(
        replace(_OF_IMAGES, model=model, method=method, zero=zero, ranks=ranks, recompute=recompute)
        for model in ("LLaVA 1.5 7B", "Qwen2.5-VL 3B")
        for method, zero, ranks, recompute in (
            ("full", 1, 8, True),
            ("full", 2, 8, False),
            ("lora", 0, 1, True),
            ("lora", 2, 8, False),
        )
    ),
    _OF_IMAGES,
    replace(_OF_IMAGES, recompute=True),
    replace(_OF_IMAGES, on_tower=True),
    replace(_OF_IMAGES, zero=2, recompute=True, on_tower=True),
    replace(_OF_IMAGES, method="full", zero=2, recompute=True),
    replace(_OF_IMAGES, model="Qwen2.5-VL 3B", method="full", recompute=True),
)
"""Models that read images: 4 of 576 tokens in a row."""


_BOTH = (("full", 3, True), ("lora", 2, False))
_NEW = {
    2048: ("MiniMax", "MiniMax M2", "GLM-5", "AFMoE"),
    1024: (
        *("DeepSeek V3.2", "Kimi Linear", "OLMo hybrid", "Nemotron-H", "Granite 4", "LFM2", "dots1"),
        *("Qwen3-Next", "Qwen3.5 9B", "Ministral 3 8B", "SmolLM3 3B"),
    ),
    512: ("DeepSeek V4",),
}
"""By the tokens of a row: what mixes tokens without attention takes Python many steps."""
MEASURED = (
    *(
        Point(model, method, zero, tokens=tokens, recompute=recompute)
        for tokens, models in _NEW.items()
        for model in models
        for method, zero, recompute in _BOTH
    ),
    Point("MiniMax M2", "qlora", 2, tokens=2048),
    Point("MiniMax M2", "qlora", 3, tokens=2048),
    Point("GLM-5", "qlora", 2, tokens=1024),
    Point("DeepSeek V4", "qlora", 2, tokens=512),
    Point("MiniMax", "qlora", 3, tokens=1024),
    Point("MiniMax", "lora", 3, tokens=1024),
    Point("MiniMax M2", "lora", 3, tokens=2048),
)
"""Models of 2026. The plan measures all but Qwen3-Next, Qwen3.5, Ministral 3 and SmolLM3."""


@dataclass(frozen=True)
class Compared:
    """One point: what was simulated, and the lines of the plan's estimate in bytes."""

    simulated: Simulated
    estimated: Mapping[str, float]

    @property
    def off_by(self) -> float:
        """The error of the estimate, as a part of what was simulated."""
        return sum(self.estimated.values()) / self.simulated.peak - 1


def compare(point: Point, folder: Path) -> Compared:
    """Resolve the run of a point, and return the plan's estimate of its peak beside a simulation."""
    run = resolved(point, folder)
    assert run.fit is not None
    machines, recipe = run.fit.machines, run.recipe.config
    assert recipe.architecture is not None
    ranks, width = (machines.world_size, machines.gpus_per_node), machines.weight_bytes
    kernels = {"old_gpus": machines.old_gpus, "plain_mixers": machines.plain_mixers}
    needs = peak(recipe, recipe.architecture, run.fit.costs, *ranks, width, **kernels, loads=False)
    estimated = {name: size for name, size in needs.gpu.items() if name not in ("context", "fragmentation")}
    return Compared(of_fullest_rank(replace(job_of(run), num_images=point.num_images)), estimated)


def of_fullest_rank(job: Job) -> Simulated:
    """Return the highest of the ranks' peaks.

    ZeRO-1 and 2 divide all weights in their order: the first rank has the embeddings, the last one the layers that get
    their gradients first, while most activations are held, and one between them parts of the largest weights.
    """
    from bench.simulation import rank_at_largest, simulate

    differ = job.stage in (1, 2) and not job.adapter and job.ranks > 1
    ranks = {0, rank_at_largest(job), job.ranks - 1} if differ else {0}
    return max((simulate(replace(job, rank=rank)) for rank in sorted(ranks)), key=lambda found: found.peak)


def resolved(point: Point, folder: Path) -> ResolvedRun:
    """Return the run of a point as `tuner train` resolves it where flash-attn and Liger are not installed."""
    (folder / "config.json").write_text(json.dumps(point.config()), encoding="utf-8")
    row = {"messages": [{"role": role, "content": "So?"} for role in ("user", "assistant")]}
    (folder / "rows.jsonl").write_text(json.dumps(row if point.num_images else {"text": "So?"}), encoding="utf-8")
    sets = {
        "train_dataloader.batch_size": point.rows,
        "optim_wrapper.accumulative_counts": point.accumulation,
        "train_dataloader.dataset.max_length": point.tokens,
        "train_dataloader.dataset.packing": point.packing,
        "train_cfg.gradient_checkpointing": point.recompute,
        "train_cfg.loss": point.loss,
        "train_cfg.max_steps": 2,
        "model.use_liger_kernel": False,
    }
    if point.on_tower:
        sets["adapter.vision"] = True
    pairs = [("--set", f"{key}={value}") for key, value in sets.items()]
    overrides = Overrides(str(folder), str(folder / "rows.jsonl"), pairs=pairs)
    nodes = -(-point.ranks // 8)
    flags = LaunchFlags(nproc_per_node=point.ranks // nodes, nnodes=nodes, master_addr="host" if nodes > 1 else None)
    level = f"deepspeed_zero{point.zero}{'_offload' * point.offload}" if point.zero else "none"
    name = f"tiny_{'' if point.num_images else 'pretrain_'}{point.method}_custom_e1"
    request = Request(identify(name), overrides, level, flags, work_dir=folder / "run", ignore_fit=True)
    machine = Hardware((GPUS[point.gpu],) * (point.ranks // nodes), 64, 2000 * GIB, True)
    with mock.patch.object(libraries, "installed_flash_attention", lambda *_: ()):
        return resolve_run(request, {"NODE_RANK": "0"} if nodes > 1 else {}, machine, datetime.now(UTC))


def job_of(run: ResolvedRun) -> Job:
    """Return what one rank of a resolved run trains."""
    from transformers import AutoConfig

    from bench.simulation import Job

    recipe = run.recipe.config
    config = AutoConfig.from_pretrained(recipe.model.path)
    dataset, rows = recipe.train_dataloader.dataset, recipe.split.micro_batch
    row_tokens = dataset.max_length
    adapter, quantization, attention = recipe.adapter, recipe.quantization, recipe.model.attn_implementation
    if dataset.packing and (getattr(config, "router_aux_loss_coef", 0) or attention == VARLEN):
        rows, row_tokens = 1, rows * row_tokens  # `tuner.data.batches` lays them end to end
    return Job(
        config,
        run.final.config,
        run.topology.world_size,
        rows,
        row_tokens,
        is_packed=dataset.packing,
        recompute=bool(recipe.split.recompute),
        loss=recipe.train_cfg.loss,
        attention=attention,
        adapter={name: getattr(adapter, name) for name in _OF_LORA} if adapter else None,
        quantization={theirs: getattr(quantization, ours) for theirs, ours in _OF_4_BITS.items()}
        if quantization
        else None,
        packs_experts=recipe.packs_experts,
        capability=run.hardware.gpus[0].compute_capability,
    )


def lines(sizes: Mapping[str, float]) -> str:
    """Return lines of memory from the largest on, in GB; those that would be 0.0 are left out."""
    kept = sorted(((size, name) for name, size in sizes.items() if size >= 5e7), reverse=True)
    return ", ".join(f"{name} {size / 1e9:.1f}" for size, name in kept)


def main() -> None:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--layers", type=int, help="at most so many layers of each model")
    parser.add_argument("--point", default="", metavar="WORDS", help="the points whose name has these words alone")
    parser.add_argument("--lines", action="store_true", help="what the two peaks consist of, too")
    given = parser.parse_args()
    table = Table("simulate", "Peaks of one GPU in GB (10^9 bytes), estimated by the plan and simulated.")
    for point in (
        replace(point, layers=given.layers) for point in (*POINTS, *IMAGES, *MEASURED) if given.point in str(point)
    ):
        with tempfile.TemporaryDirectory() as folder:
            found = compare(point, Path(folder))
        row: dict[str, Any] = {
            "run": str(point),
            "peak in": found.simulated.moment,
            "simulated": f"{found.simulated.peak / 1e9:.2f}",
            "estimated": f"{sum(found.estimated.values()) / 1e9:.2f}",
            "off by": f"{found.off_by:+.1%}",
        }
        if given.lines:
            row |= {"lines simulated": lines(found.simulated.lines), "lines estimated": lines(found.estimated)}
        table.add(row)
    table.show(given.json)


if __name__ == "__main__":
    import logging
    import os

    os.environ["DS_ACCELERATOR"] = "cpu"
    logging.disable(logging.WARNING)
    main()
