"""Other tools' commands and options: what each is here, for whoever types them out of habit.

XTuner's are those of its `entry_point.py` and `tools/` at v0.1.23. It prints nothing and decides nothing but the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from tuner.errors import UsageError
from tuner.recipes import aliases
from tuner.recipes.aliases import by_word

_VISION = "tuner trains text models and does not support images"
_COMMANDS = {
    # XTuner's that `same` does not do.
    "copy-cfg": "tuner copy RECIPE [DEST] writes a recipe as a file",
    "list-dataset-format": "tuner data RECIPE --data FILE says which format it found; docs/own-data.md lists them",
    "test evaluate": "tuner eval RUN evaluates a run's result",
    "mmbench eval-refcoco": _VISION,
    "preprocess": "tuner prepares data when it trains; tuner data RECIPE shows it before",
    # Those of LLaMA-Factory, ms-swift, TRL, Axolotl, accelerate, transformers.
    "sft pt dpo rlhf finetune launch run": (
        "tuner train RECIPE trains; the objective is part of the recipe's name (tuner list --objectives)"
    ),
    "config": "tuner copy RECIPE writes a recipe as a file, and tuner show RECIPE prints it",
    "infer inference generate webchat": (
        "tuner chat RUN chats with a run's result or a model; a script passes the prompt on stdin"
    ),
    "merge merge-lora": "tuner export RUN DEST --merge writes the merged model",
    "deploy api": "tuner serve RUN serves a run's result or a model",
    "env": "tuner doctor tests what training needs on this machine",
    "version": "tuner --version prints it",
    "help": "tuner --help prints it",
    "resume": "tuner train RECIPE --resume auto resumes from the newest checkpoint",
    "validate": "tuner check RECIPE checks a recipe, a DeepSpeed config or a run",
}
COMMANDS = by_word(_COMMANDS)
"""Command -> which of ours does it."""

_OPTIONS = {
    "chat": {
        "--prompt-template --stop-words --command-stop-word --answer-stop-word": (
            "Remove it: tuner chat uses the chat template that the model was trained with."
        ),
        "--system-template": "Pass the text itself: --system TEXT.",
        "--with-plugins --lagent": "Remove it: tuner chat has no plugins.",
        "--no-streamer": "Remove it: an answer to stdin is printed when it is complete.",
        "--top-k --repetition-penalty": "Remove it: sampling is set with --temperature and --top-p.",
        "--offload-folder": "Remove it: the model is spread over the visible GPUs.",
        "--torch-dtype": "Remove it: the model runs in the dtype that it was trained in.",
        "--bot-name": "Remove it: answers are printed unchanged.",
        "--llava --visual-encoder --visual-select-layer --image": f"{_VISION}.",
    },
    "pth_to_hf": {
        "--cfg-options": "Remove it: a run directory holds its recipe.",
        "--save-format": f"Remove it: {_VISION}.",
    },
    "merge": {"--is-clip": f"Remove it: {_VISION}."},
    "train": {
        "--num-gpus": "Use --nproc-per-node N, or set CUDA_VISIBLE_DEVICES.",
        "--num-nodes": "Use --nnodes N.",
        "--hostfile": "Start the same command on each machine (--nnodes, --node-rank), or use tuner submit.",
        "--include": "Set CUDA_VISIBLE_DEVICES=0,1 before the command.",
        "--deepspeed-config": "Use --deepspeed my.json.",
        "--config": "Pass the recipe itself: tuner train RECIPE.",
    },
}
"""Command of ours -> options that others have there -> what to do."""


def same(args: Sequence[str]) -> list[str] | None:
    """Return the words for a command of XTuner's that one of ours does just so, or None where none does."""
    name = args[0].lower()
    words = [part for word in args[1:] for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if name == "list-cfg":
        return ["list", *(word for word in words if word not in ("-p", "--pattern"))]
    if name == "copy-cfg" and len(words) == 2:
        return ["copy", words[0], str(Path(words[1]) / f"{Path(words[0]).stem}_copy.py")]
    if name == "log-dataset":
        at = words.index("--show") if "--show" in words else len(words)
        return ["data", *words[:at], *words[at + 2 :]]  # text, masked text and tokens are shown at once
    if name == "check-custom-dataset":
        return ["data", *words, "--all", "--bad"]
    return None


def launcher(error: click.BadParameter) -> UsageError | None:
    """Return what to say of XTuner's word for torchrun, or None where the error is of something else."""
    if error.param is None or error.param.name != "launcher" or "'pytorch'" not in error.message:
        return None
    fix = (
        "Remove it: tuner starts the ranks with torchrun. If torchrun already started "
        "this process, use --launcher none."
    )
    return UsageError("no launcher 'pytorch'", where="--launcher", fix=fix)


def command(name: str) -> UsageError | None:
    """Return what to say of a command of another tool's, or None where it is none."""
    ours = COMMANDS.get(name, COMMANDS.get(name.replace("_", "-")))
    return UsageError(f"no command {name!r}", where="tuner", fix=f"Instead: {ours}.") if ours else None


def option(error: click.NoSuchOption) -> UsageError | None:
    """Return what to say of an option of another tool's, or None where it is none."""
    if error.ctx is None:
        return None
    called, flag = error.ctx.command, error.option_name
    dashed = flag.replace("_", "-")
    ours = {name for parameter in called.params for name in parameter.opts}
    instead = by_word(_OPTIONS.get(error.ctx.info_name or "", {}))
    fix = f"Use {dashed}." if dashed in ours else instead.get(dashed)
    if fix is None and "--set" in ours:
        fix = _as_key(flag.removeprefix("--"))
    return UsageError(f"no option {flag!r}", where=error.ctx.command_path, fix=fix) if fix else None


def _as_key(word: str) -> str | None:
    """Return how a recipe's key, in another tool's words or in ours, is set, or None where it is no key."""
    from tuner.recipes.schema import schema_keys  # pydantic's core, which --help does not need

    if alias := aliases.find(word, "VALUE"):
        if alias.flag:
            return f"Use {alias.flag} PATH."
        return f"Use --set {alias.key}=VALUE." if alias.key else alias.instead
    plain = word.replace("-", "_")
    is_key = any(plain in (keys[-1], ".".join(keys)) for keys in schema_keys())
    return f"Use --set {plain}=VALUE." if is_key else None
