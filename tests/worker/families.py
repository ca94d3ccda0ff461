"""The families that are trained in `test_families`: those of the catalog's parts, and those that a user may bring.

`python -m tests.worker.families REQUESTS ANSWERS` trains what it is asked for, a line each, for the price of one start:
two steps on a small model, as a rank does it.
"""

from __future__ import annotations

import gc
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.models.brought import BROUGHT
from tests.worker.only_rank import made_run
from tuner.recipes import catalog
from tuner.recipes.recipe_file import read_part

METHODS = ("full", "lora")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SETS = {
    "train_cfg.max_steps": 2,
    "train_dataloader.batch_size": 2,
    "train_dataloader.dataset.max_rows": 4,  # every step sees the same rows
    "accumulative_counts": 2,
    "dtype": "fp32",
    "lr": 1e-3,
    "warmup_ratio": 0.0,
    "checkpoint.interval": 2,
    "log.interval": 1,
    "log.num_samples": 0,
    "val_dataloader": None,
}


@cache
def examples() -> dict[str, str | None]:
    """Return each family with the name of a part; None: it has none, and is what a user brings."""
    found: dict[str, str | None] = {}
    parts = {name: read_part("models", name).values.get("architecture") for name in catalog.names("models")}
    for name, facts in sorted(parts.items(), key=lambda part: "vision_config" in (part[1] or ())):  # text alone first
        if facts:
            found.setdefault(facts["model_type"], name)
    return dict(sorted({**dict.fromkeys(BROUGHT), **found}.items()))


def trained(kind: str, method: str, folder: Path) -> dict[str, Any]:
    """Train two steps; return their losses, how far the result is from the start, and from what was saved of it."""
    from tuner.lab import stand_ins
    from tuner.worker.guard import Guard
    from tuner.worker.train import run_rank

    make_model(kind, folder / "model")
    made, run, rank = made_run(method, folder / "model", folder / "run", "zero2", _SETS)
    run_rank(run, rank, Guard(run, rank))
    lines = map(json.loads, run.metrics.read_text(encoding="utf-8").splitlines())
    folders = (folder / "model", run.final, run.checkpoints / "checkpoint-2")
    before, after, saved = (stand_ins.outputs(path) for path in folders)
    return {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "packing": made.recipe.config.train_dataloader.dataset.packing,
        "moved": stand_ins.apart(before, after),
        "apart": stand_ins.apart(after, saved),
    }


def make_model(kind: str, folder: Path) -> None:
    """Write a small random model of the family, whose config.json counts experts in the words of published ones."""
    import transformers

    from tests.models.brought import brought
    from tuner.lab import stand_ins
    from tuner.recipes.loading import load
    from tuner.recipes.schema.architecture import Architecture

    tokenizer, _ = stand_ins.tokenizer_of(load("tiny_full_sample_e1").config.model)
    part = examples()[kind]
    if part and kind not in BROUGHT:
        facts = Architecture(**read_part("models", part).values["architecture"])
        stand_ins.make_model(facts, tokenizer, folder, 0)
    else:
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = brought(kind, vocab_size=-(-len(tokenizer) // 64) * 64, **ids)
        transformers.set_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    file, published = folder / "config.json", transformers.AutoConfig.for_model(kind)
    written = json.loads(file.read_text(encoding="utf-8"))
    unknown = set(_EXPERTS) - published.to_dict().keys() - published.attribute_map.keys()
    file.write_text(json.dumps({key: written[key] for key in written.keys() - unknown}), encoding="utf-8")


def main() -> None:
    """Answer each line `KIND METHOD FOLDER` of the first file with a line of JSON in the second."""
    from tuner.worker.quiet import quiet_libraries

    quiet_libraries()
    requests, answers = map(Path, sys.argv[1:])
    with requests.open() as lines, answers.open("w", buffering=1) as answered:
        for line in lines:
            kind, method, folder = line.split()
            try:
                found = trained(kind, method, Path(folder))
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            gc.collect()
            gc.freeze()  # what the libraries hold by now: a trainer collects garbage, which took a quarter of its time
            print(json.dumps(found), file=answered)


if __name__ == "__main__":
    main()
