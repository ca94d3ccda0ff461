"""Bad input of every kind, generated: texts that are nearly right, damaged in the ways in which files and people do.

Each strategy gives what its door in `doors` takes. Most of what they give is refused; a few texts are taken, by chance.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from hypothesis import strategies as st

from tuner import __version__, assets
from tuner.recipes.schema import schema_keys

Strategy = st.SearchStrategy[Any]

ODD_TEXTS = (
    "",
    " ",
    ".",
    "..",
    "/",
    "~",
    "~nobody",
    "../" * 8 + "etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "/proc/self/mem",
    "a\0b",
    "a/\0b",
    "a\nb",
    "\r",
    "\x1b[2J",
    "\ud800",
    "\u202e\u200b",
    "tіny_full_sample_e1",  # a Cyrillic i
    "ｔｉｎｙ_full_sample_e1",
    "x" * 5_000,
    "_" * 400,
    "%s%n{0.__class__}",
    "${HOME}",
    "$(touch canary)",
    "`touch canary`",
    "; touch canary",
    "| touch canary",
    "-",
    "--",
    "--help",
    "=",
    "http://user:pw@127.0.0.1:9/x.json",
    "file:///etc/passwd",
    "hf://",
    "package:",
    "package:../../../base.py",
    "CON",
    "None",
    "nan",
    "__class__",
    "*",
    "[",
    "**/*" * 30,
)
ODD_NUMBERS = (
    "nan",
    "-nan",
    "inf",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 5_000,
    "1" + "0" * 30,
    "0x" + "f" * 40,
    "²",
    "٣",
)
ODD_VALUES = (
    *ODD_NUMBERS,
    "__import__('os').system('touch canary')",
    "open('canary', 'w')",
    "lambda: 0",
    "[i for i in range(9)]",
    "f'{1}'",
    "().__class__.__bases__[0]",
    "'a' * 99999999",
    "[0] * 99999999",
    "9 ** 9 ** 9",
    "1 << 99999",
    "[" * 40 + "]" * 40,
    "(" * 300 + ")" * 300,
    "{'a': 1, 'a': 2}",
    "{1: 2}",
    "dict(**{})",
    "'\\ud800'",
    "'\\x00'",
    "b''",
    "...",
    "1j",
    "'",
    "\\",
    "dict(",
    "none of it",
    "(yield)",
    "a" + ".b" * 400,
)
SEPARATORS = (
    *("", " ", ",", ":", "=", "\n", "\t", "\ufeff", "\0", "\x0c", "\u2028", "//", "/*", "#", '"', "'", "\\", "{", "}"),
    *("[", "]", "(", ")", "..", "*", "**", ";", "import os", "import os;", "_base_", "null", "NaN", "-", "9" * 400),
)

_CHANCE = st.randoms(use_true_random=True)
anything = st.text(st.characters(exclude_categories=()), max_size=30) | st.sampled_from(ODD_TEXTS)


def damaged(texts: Strategy) -> Strategy:
    """Return texts with one to three parts cut out, doubled, swapped or replaced by what has a meaning somewhere."""

    def damage(text: str, chance: Random) -> str:
        for _ in range(chance.randint(1, 3)):
            start, end = sorted(chance.choices(range(len(text) + 1), k=2))
            end = min(end, start + chance.choice((0, 1, 2, 40)))
            text = text[:start] + chance.choice((*SEPARATORS, text[start:end] * 2, text[start:end][::-1])) + text[end:]
        return text

    return st.builds(damage, texts, _CHANCE)


def _lines(chance: Random) -> str:
    """Return a recipe of some lines, most of them right."""
    keys = chance.choices(_KEYS, k=chance.randint(1, 4))
    values = [chance.choice((*ODD_VALUES, "None", "1", "'a'", "dict()", "[]", "True", "2e-5")) for _ in keys]
    lines = [f"_base_ = {chance.choice(_BASES)!r}"] if chance.random() < 0.8 else []
    for key, value in zip(keys, values, strict=True):
        first, *rest = key
        for name in reversed(rest):
            value = f"dict({name}={value})"
        lines.append(f"{first} = {value}")
    return "\n".join(lines) + "\n"


_KEYS = sorted(schema_keys())
_DOTTED = [".".join(keys) for keys in _KEYS]
_BASES = (
    "tiny_full_sample_e1",
    "tiny_qlora_sample_e1",
    "tiny_dpo_lora_sample_preferences_e1",
    "./hostile.py",
    "../x",
    "",
)

recipes = _CHANCE.map(_lines) | damaged(_CHANCE.map(_lines)) | anything

overrides = st.builds(
    lambda key, equals, value: f"{key}{equals}{value}",
    st.sampled_from(_DOTTED) | damaged(st.sampled_from(_DOTTED)) | anything,
    st.sampled_from(("=", "=", "=", "==", " = ", "", "\n=")),
    st.sampled_from(ODD_VALUES) | anything,
)

_PRESETS = [path.read_text(encoding="utf-8") for path in sorted((assets.PACKAGE / "deepspeed_presets").glob("*.json"))]
_ODD_JSON = (*ODD_NUMBERS, "[]", "{}", "null", '""', '"auto"', "true", "-1", "1.5", "[[[[]]]]", '{"a":1,"a":2}', "NaN")


def _other_value(text: str, chance: Random) -> str:
    config = json.loads(text)
    block, place = config, chance.choice(list(config))
    while isinstance(block[place], dict) and block[place] and chance.random() < 0.8:
        block, place = block[place], chance.choice(list(block[place]))
    block[place if chance.random() < 0.6 else chance.choice(("stgae", "a.b", "", "__class__", " "))] = "@"
    return json.dumps(config).replace('"@"', chance.choice(_ODD_JSON))


configs = damaged(st.sampled_from(_PRESETS)) | st.builds(_other_value, st.sampled_from(_PRESETS), _CHANCE) | anything

_TURN = '{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}'
_ROWS = (
    '{"instruction": "Why?", "output": "Because."}',
    f'{{"messages": [{_TURN}]}}',
    f'{{"messages": [{_TURN}], "tools": "[]", "system": "s"}}',
    f'{{"messages": [{_TURN}, {{"role": "assistant", "tool_calls": [{{"function": {{"arguments": "{{}}"}}}}]}}]}}',
    '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}',
    '{"conversations": [{"from": "function_call", "value": "{\\"name\\": \\"f\\", \\"arguments\\": {}}"}]}',
    '{"text": "### Human: a### Assistant: b"}',
    '{"prompt": "a", "chosen": "b", "rejected": "c"}',
    '{"prompt": "a", "completion": "b", "label": true}',
    '{"chat": {"turn_1": {"Human": "a", "MOSS": "b"}}, "meta_instruction": "m"}',
    '{"prompt": "a", "response_0": "b", "response_1": "c", "better_response_id": 0}',
)
_DEEP = "[" * 20_000 + "]" * 20_000
_ODD_CELLS = (
    *_ODD_JSON,
    '"\\ud800"',
    '"\\u0000"',
    _DEEP,
    f'"{_DEEP}"',
    '"[1,"',
    '"{\\"a\\": 1}"',
    "9",
    "[null]",
    '[{"a": []}]',
)


def _other_cell(text: str, chance: Random) -> str:
    """Return a row with one of its values replaced, at any depth."""
    row = json.loads(text)
    block: Any = row
    while True:
        places = list(block) if isinstance(block, dict) else list(range(len(block)))
        place = chance.choice(places)
        if not (isinstance(block[place], dict | list) and block[place] and chance.random() < 0.8):
            break
        block = block[place]
    block[place] = "@"
    return json.dumps(row).replace('"@"', chance.choice(_ODD_CELLS))


def _file(name: str, lines: list[str], chance: Random) -> tuple[str, bytes]:
    """Return a file of rows, its bytes now and then in another encoding or with one of them changed."""
    whole = {".jsonl": "\n".join(lines), ".json": f"[{','.join(lines)}]", ".csv": "\n".join(("a,b", *lines))}
    encoding = chance.choice(("utf-8", "utf-8", "utf-8", "utf-16", "utf-16-le", "utf-32"))
    content = bytearray(whole.get(name, lines[0]).encode(encoding, "surrogatepass"))
    for _ in range(chance.choice((0, 0, 1, 8))):
        content[chance.randrange(len(content))] = chance.randrange(256)
    return name, bytes(content[: chance.choice((None, None, chance.randrange(len(content)) + 1))])


_KINDS = (".jsonl", ".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow", ".jsonl.gz", ".json.zst", ".csv.bz2")
rows = st.builds(
    _file,
    st.sampled_from(_KINDS),
    st.lists(
        st.builds(_other_cell, st.sampled_from(_ROWS), _CHANCE)
        | damaged(st.sampled_from(_ROWS))
        | st.sampled_from(("null", "1", "[]", '""', "{}", "\0", "{", '{"a": 1} x', '"a","b","c"', '"a')),
        min_size=1,
        max_size=3,
    ),
    _CHANCE,
)

names = anything | damaged(
    st.sampled_from(("tiny_full_sample_e1", "deepspeed_zero2", "zero3", "checkpoint-5", "chatml"))
)

_MANIFEST = '{"facts": {"step": 5, "world_size": 2}, "files": {"model.safetensors": {"bytes": 7, "xxh3_128": "0"}}}'
manifests = (
    damaged(st.just(_MANIFEST))
    | st.builds(_other_cell, st.just(_MANIFEST), _CHANCE)
    | st.builds(lambda name: _MANIFEST.replace('"model.safetensors"', json.dumps(name)), anything)
    | st.just(_DEEP)
)

_WHOLE = (
    *_ODD_JSON,
    *_ODD_CELLS,
    "\ufeff{}",
    '{"a": 1} x',
    "- a\n- b\n",
    "a: &a [*a]\n",
    "!!python/object:os.system x\n",
)


def documents(*texts: str) -> Strategy:
    """Return JSON or YAML that is nearly one of some texts: damaged, with another value in it, or another whole."""
    known = st.sampled_from(texts)
    return damaged(known) | st.builds(_other_cell, known, _CHANCE) | st.sampled_from(_WHOLE) | anything


def lines_like(*texts: str) -> Strategy:
    """Return a text file that is nearly one of some texts, now and then not UTF-8."""
    text = damaged(st.sampled_from(texts)) | anything
    return text.map(lambda drawn: drawn.encode("utf-8", "surrogatepass")) | text.map(
        lambda drawn: drawn.encode("utf-16", "surrogatepass")
    )


_CONFIG = json.dumps(
    {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
        **{"max_position_embeddings": 512, "tie_word_embeddings": True, "rope_scaling": {"rope_type": "yarn"}},
        **{"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}, "layer_types": ["full"]},
        **{"auto_map": {"AutoConfig": "a.B"}, "text_config": {"model_type": "llama"}, "num_experts": 4},
        **{"vision_config": {"depth": 2, "hidden_size": 32}, "per_layer_config": {"0": {"head_dim": 2}}},
        **{"audio_config": {"num_hidden_layers": 1}, "rms_norm_eps": 1e-6, "mlp_layer_types": ["dense"]},
    }
)
_TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [{"id": 2, "content": "</s>", "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 3}, "merges": [["a", "b"]]},
    }
)
_TOKENIZER_CONFIG = json.dumps(
    {
        **{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "model_max_length": 512},
        **{"chat_template": [{"name": "default", "template": "{{ messages }}"}], "extra_special_tokens": {}},
        "added_tokens_decoder": {"2": {"content": "</s>", "special": True}},
    }
)
_ADAPTER = json.dumps(
    {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "it", "r": 8, "lora_alpha": 16},
        **{"lora_dropout": 0.0, "target_modules": ["q_proj"], "modules_to_save": None, "rank_pattern": {}},
        **{"init_lora_weights": True, "use_rslora": False, "auto_mapping": None, "revision": None, "bias": "none"},
    }
)
_GENERATION = '{"eos_token_id": [2], "temperature": 0.5, "do_sample": true, "max_length": 20, "stop_strings": ["a"]}'
_INDEX = '{"weight_map": {"model.layers.0.weight": "model.safetensors", "b": "c.safetensors"}}'
model_files = (
    st.tuples(st.just("config.json"), documents(_CONFIG))
    | st.tuples(st.just("tokenizer.json"), documents(_TOKENIZER))
    | st.tuples(st.sampled_from(("tokenizer_config.json", "processor_config.json")), documents(_TOKENIZER_CONFIG))
    | st.tuples(st.just("adapter_config.json"), documents(_ADAPTER))
    | st.tuples(st.just("generation_config.json"), documents(_GENERATION))
    | st.tuples(st.just("model.safetensors.index.json"), documents(_INDEX))
    | st.tuples(st.just("added_tokens.json"), documents('{"a": 1}'))
)
"""The name and the text of a file in a model's folder."""

_HEADER = '{"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}}'


def _tensors(header: str, length: int, size: int) -> bytes:
    text = header.encode("utf-8", "surrogatepass")
    return (len(text) + length).to_bytes(8, "little", signed=False) + text + b"\0" * size


tensor_files = st.builds(
    _tensors, documents(_HEADER), st.sampled_from((0, 0, 0, 1, 40, 10**9, 2**62)), st.sampled_from((8, 8, 0, 7, 64))
) | st.binary(max_size=40)
"""The bytes of a safetensors file."""

_MESSAGES = (
    {"kind": "Hello", "rank": 1, "nodes": 2, "lost": None, "process": {"host": "h1", "pid": 1, "instance": "1"}},
    {"kind": "Planned", "plan": {"command": "tuner train x", "digest": "0", "values": {"lr": "1"}}, "launch": None},
    {"kind": "Ended", "launch": "first", "code": 137, "text": "killed", "cause": "killed", "objection": None},
    {"kind": "Error", "who": "", "texts": ["wrong"], "code": "bad-recipe", "exit_code": 2},
    {"kind": "Beat", "is_adrift": False},
    {"kind": "Who"},
    {"kind": "Bye"},
)
MESSAGES = tuple(json.dumps({"version": __version__, **message}) for message in _MESSAGES)
messages = documents(*MESSAGES)
"""A line of another node's launcher."""

hostfiles = lines_like("worker-1 slots=8\nworker-2 slots=8\n", "# a\n10.0.0.1 slots=2")
environments = lines_like("NCCL_DEBUG=INFO\nA=b c\n# x\n", "NCCL_SOCKET_IFNAME=eth0")

_ACCELERATE = {
    **{"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "bf16"},
    **{"num_machines": 1, "num_processes": 8, "machine_rank": 0, "main_process_ip": None, "use_cpu": False},
    "deepspeed_config": {
        **{"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_clipping": 1.0},
        **{"gradient_accumulation_steps": 4, "deepspeed_config_file": "zero2", "zero3_init_flag": True},
    },
}
_ROLL = {
    "deepspeed_zero3": {"zero_optimization": {"stage": 3}},
    "defaults": ["a"],
    "actor_train": {"strategy_args": {}},
}
launch_configs = documents(json.dumps(_ACCELERATE), json.dumps(_ROLL), _PRESETS[0])
"""YAML that --deepspeed takes."""

_OF_TOOLS = (
    {
        **{"model_name_or_path": "a/b", "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 8},
        **{"dataset": "d", "template": "qwen", "cutoff_len": 2048, "learning_rate": "1.0e-4", "lora_target": "all"},
        **{"per_device_train_batch_size": 1, "deepspeed": "zero2", "bf16": True, "quantization_bit": 4},
    },
    {
        **{"base_model": "a/b", "sequence_len": 512, "micro_batch_size": 2, "num_epochs": 1, "adapter": "qlora"},
        **{"datasets": [{"path": "x.jsonl", "type": "alpaca"}], "lora_r": 8, "lora_target_modules": ["q_proj"]},
        **{"val_set_size": 0.05, "sample_packing": True, "load_in_4bit": True, "optimizer": "adamw_torch"},
    },
    {
        "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "a/t.model", "max_seq_len": 9},
        "model": {"_component_": "torchtune.models.llama3.lora_llama3_8b", "lora_rank": 8, "lora_alpha": 16},
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "a"},
        "dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "packed": True},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5},
        "metric_logger": {"_component_": "x", "log_dir": "a"},
        **{"batch_size": 2, "epochs": 1, "loss": {"_component_": "x"}},
    },
    {
        "model": "a/b",
        "tuner_type": "lora",
        "dataset": ["x"],
        "torch_dtype": "bfloat16",
        "lora_rank": 8,
        "num_train_epochs": 1,
    },
    {"model_name_or_path": "a/b", "dataset_name": "d", "use_peft": True, "lora_r": 8, "max_seq_length": 64, "seed": 1},
    {
        **{"exp_name": "x", "rollout_batch_size": 8, "pretrain": "a/b", "prompt_length": 8, "response_length": 8},
        "actor_train": {
            "model_args": {"dtype": "bf16"},
            "training_args": {"learning_rate": 1e-6, "per_device_train_batch_size": 1},
            "data_args": {"file_name": ["x.jsonl"], "template": "qwen"},
            "strategy_args": {
                "strategy_name": "deepspeed_train",
                "strategy_config": {"zero_optimization": {"stage": 2}},
            },
        },
        "rewards": {"math": {"worker_cls": "x", "tag_included": ["a"]}},
    },
)
tool_configs = documents(*map(json.dumps, _OF_TOOLS))
recipe_documents = documents(
    '{"_base_": "tiny_full_sample_e1", "optim_wrapper": {"optimizer": {"lr": 1e-4}}, "model": {"path": "a/b"}}'
)

_SCRIPTS = (
    "#!/bin/bash\nN=$((4 * 2))\ntorchrun --nproc_per_node $N -m swift sft --model a/b --dataset 'x y' \\\n  --seed 8\n",
    "deepspeed --num_gpus=8 llamafactory-cli train a.yaml lora_rank=4",
    "trl sft --model_name_or_path a/b --dataset_name d --use_peft --learning_rate 1e-4",
    "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift sft --model a --target_modules all-linear --dataset 'a#5' b",
)
scripts = lines_like(*_SCRIPTS)
_XTUNER = """from xtuner.dataset import process_hf_dataset
from mmengine.config import read_base
pretrained_model_name_or_path = 'a/b'
max_length = 2048
batch_size = 1
model = dict(type=SupervisedFinetune, llm=dict(type=AutoModelForCausalLM.from_pretrained, torch_dtype=torch.float16),
             lora=dict(type=LoraConfig, r=64, lora_alpha=16))
train_dataset = dict(type=process_hf_dataset, dataset=dict(type=load_dataset, path='x'), max_length=max_length)
optim_wrapper = dict(type=AmpOptimWrapper, optimizer=dict(type=AdamW, lr=2e-4, betas=(0.9, 0.999)))
train_cfg = dict(type=TrainLoop, max_epochs=3)
"""
python_configs = lines_like(_XTUNER)

_STATUS = '{"state": "done", "exit_code": 0, "step": 5, "max_steps": 9, "loss": 1.5, "seconds": 9.0, "verdict": {}}'
_LINE = '{"step": 1, "loss": 2.5, "lr": 1e-4, "grad_norm": 1.0, "tokens_per_second": 9.5, "time": 1.0}'
_SAMPLE = '{"prompt": "a", "right": "b", "before": null, "answer": "c", "is_right": true, "images": ["x"]}'
_COMPLETION = '{"step": 1, "prompt": "a", "completion": "b", "rewards": {"a": 1.0}, "reward": 1.0, "advantage": 0.5}'
_RUN = json.dumps(
    {
        **{"name": "a", "launch_id": "x", "command": ["a"], "versions": {"a": "1"}, "hardware": {"gpus": []}},
        **{"attempts": [{"seconds": 1.0}], "state": {"world_size": 1}, "batch": {"global_batch": 8}},
    }
)
_CHANGE = {"what": "bad", "reason": "x", "samples": 1, "tokens": 0}
_COUNTS = {"max_length": 64, "packing": True, "read": 1}
_DATA = json.dumps({"train": {"counts": _COUNTS, "changes": [_CHANGE], "unread": []}})
run_files = (
    st.tuples(st.just("status.json"), documents(_STATUS))
    | st.tuples(st.just("run.json"), documents(_RUN))
    | st.tuples(st.just("data.json"), documents(_DATA))
    | st.tuples(st.just("recipe.json"), documents('{"recipe": {"log": {"notify": []}}, "origins": {}}'))
    | st.tuples(st.just("deepspeed.json"), documents(_PRESETS[0]))
    | st.tuples(st.just("metrics.jsonl"), documents(_LINE))
    | st.tuples(st.just("samples.jsonl"), documents(_SAMPLE))
    | st.tuples(st.sampled_from(("completions.jsonl", "answers.jsonl")), documents(_COMPLETION))
    | st.tuples(
        st.sampled_from(("ranks/0.beat", "ranks/0.json", "lock")), documents('{"pid": 1, "count": 1, "at": 1.0}')
    )
    | st.tuples(st.just("ranks/warnings.jsonl"), documents('{"warning": "a"}'))
)
"""The name and the text of a file in a run directory."""

_REQUEST = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "tool_calls": []}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    **{"n": 2, "stop": ["a"], "max_tokens": 5, "temperature": 1.0, "logprobs": True, "top_logprobs": 2, "stream": True},
    **{"logit_bias": {"5": 1.0}, "response_format": {"type": "json_object"}, "stream_options": {"include_usage": True}},
}
requests = documents(json.dumps(_REQUEST), '{"model": "m", "prompt": ["a", [1, 2]], "echo": true, "best_of": 1}')

saved_data = st.tuples(
    st.sampled_from(("state.json", "dataset_dict.json", "dataset_info.json")),
    documents('{"_data_files": [{"filename": "a.arrow"}], "_split": "train"}', '{"splits": ["train"]}'),
)

_COUNTS = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "PORT", "MASTER_PORT")
_TEXTS = ("ADDR", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
_SLURM = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_RESTART_COUNT"),
)
_NODES = ("n[1-", "n[1-9999999999]", "n[3-1]", "n1,n2", "2(x99999999999)", "2(x")
_WORDS = st.sampled_from((*ODD_NUMBERS, "8; rm", "-1", "0", "1", "2", *_NODES))
variables = st.dictionaries(
    st.sampled_from((*_COUNTS, *_TEXTS, *_SLURM)), (_WORDS | anything).filter(lambda text: "\0" not in text), min_size=1
) | st.fixed_dictionaries({name: _WORDS for name in _SLURM})

bombs = st.tuples(
    st.sampled_from((".jsonl.gz", ".json.gz", ".csv.gz", ".parquet", ".arrow")), st.integers(9, 31), st.integers(1, 3)
)
"""The kind of a file, MiB of its last row, rows: some kilobytes each."""
_STATEMENTS = (
    "{% for i in range(99999) %}{{ i }}{% endfor %}",
    "{{ range(10 ** 9) }}",
    "{{ 'x' * 10 ** 9 }}",
    "{{ 'x' * 10 ** 13 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 1 // 0 }}",
    "{{ messages.a.b() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no') }}",
    "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% include 'a' %}",
    "{{",
    "{% for %}",
)
chat_templates = st.builds(
    "".join, st.lists(st.sampled_from(_STATEMENTS) | damaged(st.sampled_from(_STATEMENTS)), min_size=1, max_size=2)
)
