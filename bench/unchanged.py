"""Does a change of the code change any decision? Records the resolved runs of 40 recipes, and compares two recordings.

    python -m bench.unchanged record before.json
    python -m bench.unchanged compare before.json after.json

A recording holds exit code and output of `train --dry-run --json`, at one rank and at two with ZeRO-3, of
`plan --json` for eight GPUs, and of `show --json` for one GPU and for two nodes. Paths of the checkout and of Python,
and how much of the disk is free, are left out, so two checkouts can be compared.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

from click.testing import CliRunner

from tuner.cli import tuner

ROOT = Path(__file__).parents[1]
RECIPES = (
    "tiny_full_sample_e1", "tiny_lora_sample_e3", "tiny_qlora_sample_e1", "tiny_dpo_lora_sample_preferences_e1",
    "tiny_kto_full_sample_preferences_e1", "tiny_orpo_lora_sample_preferences_e1",
    "tiny_reward_lora_sample_preferences_e1", "tiny_pretrain_full_sample_e1", "tiny_freeze_sample_e2",
    "tiny_dora_sample_e1", "internlm2_chat_7b_qlora_oasst1_e3", "internlm2_7b_full_alpaca_e3",
    "internlm_7b_qlora_moss_sft_all_e1", "internlm_chat_7b_qlora_colorist_e5", "baichuan2_7b_chat_qlora_lawyer_e3",
    "baichuan_7b_qlora_alpaca_enzh_e3", "chatglm3_6b_qlora_alpaca_zh_e3", "deepseek_moe_16b_chat_full_oasst1_e3",
    "gemma_7b_it_full_alpaca_e3", "llama2_7b_chat_qlora_medical_e1", "llama2_70b_qlora_open_platypus_e1",
    "llama3_8b_instruct_qlora_alpaca_e3", "mistral_7b_qlora_skypile_pretrain_e1",
    "mixtral_8x7b_instruct_qlora_oasst1_e3",
    "phi3_mini_4k_instruct_full_alpaca_e3", "qwen1_5_7b_chat_qlora_alpaca_e3", "qwen_7b_chat_qlora_sql_e3",
    "yi_34b_qlora_alpaca_enzh_e3", "zephyr_7b_beta_qlora_oasst1_e3", "starcoder_qlora_stack_exchange_e1",
    "qwen3_8b_lora_alpaca_e3", "qwen3_0_6b_full_tulu_3_sft_mixture_e1", "qwen3_8b_dpo_lora_ultrafeedback_binarized_e1",
    "llama3_1_8b_reward_lora_skywork_reward_e1", "gemma2_9b_it_orpo_lora_orpo_dpo_mix_40k_e1",
    "qwen2_5_7b_kto_qlora_kto_mix_14k_e1", "deepseek_v2_lite_lora_alpaca_e1", "glm_4_9b_0414_rslora_alpaca_e1",
    "gemma3_4b_it_dora_alpaca_e1", "qwen3_0_6b_pretrain_full_wikitext_2_e1",
)  # fmt: skip
COMMANDS = (
    ({}, "train {} --dry-run --json --work-dir run"),
    ({"NPROC_PER_NODE": "2"}, "train {} --dry-run --json --work-dir run --deepspeed deepspeed_zero3"),
    ({}, "plan {} --gpu a100 --gpus 8 --json"),
    ({}, "show {} --gpu rtx4090 --json"),
    ({}, "show {} --gpu h100 --gpus 8 --nodes 2 --json"),
)


def record() -> dict[str, list[object]]:
    """Return exit code and output of each command."""
    runs: dict[str, list[object]] = {}
    for recipe in RECIPES:
        for env, command in COMMANDS:
            words = command.format(recipe)
            result = CliRunner().invoke(tuner, words.split(), env=env)
            texts = result.stdout, result.stderr, str(result.exception)
            called = " ".join((*(f"{key}={value}" for key, value in env.items()), words))
            runs[called] = [result.exit_code, *map(_comparable, texts)]
    return runs


def _comparable(text: str) -> str:
    text = text.replace(sys.prefix, "PREFIX").replace(str(ROOT), "ROOT")
    return re.sub(r"[\d.]+ GiB are free", "N GiB are free", text)


def main() -> None:
    """Run the command line of this module; exit code 1: something changed."""
    action, *files = sys.argv[1:]
    if action == "record":
        target = Path(files[0]).resolve()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            runs = record()
            text = json.dumps(runs, indent=1).replace(os.path.realpath(folder), "CWD")
        target.write_text(text, encoding="utf-8")
        print(f"{len(runs)} commands, {sum(not run[0] for run in runs.values())} with exit code 0")
        return
    before, after = (json.loads(Path(file).read_text(encoding="utf-8")) for file in files)
    changed = [command for command in before if before[command] != after.get(command)]
    print("\n".join(changed) or f"the same: {len(before)} commands")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
