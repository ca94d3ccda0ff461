"""Runs as training leaves them, without the training: curves, samples, checkpoints, restarts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from tests.launch.plans import checkpoint, made, written_run
from tests.machine.gpus import H200, machine
from tuner.launch import render
from tuner.runs import creation
from tuner.runs.directory import RunDirectory
from tuner.runs.records import DataCounts, RunData, RunStatus, SplitData, Total
from tuner.runs.verdict import Outcome, Verdict

VERDICT = Verdict(Outcome.LEARNED, "validation", 0.693, 0.412, 300, "")
MORE = {"verdict": VERDICT, "num_trained_weights": 21_823_488}
RECIPE = "qwen3_8b_dpo_lora_ultrafeedback_e1"


def trained(path: Path, *sets: str, num_steps: int = 300, seed: int = 0, name: str | None = None) -> RunDirectory:
    """Write a run that has ended well after some hundred steps on eight GPUs."""
    plan = made(*sets, recipe=RECIPE, hardware=machine(*[H200] * 8), deepspeed="zero2", work_dir=path)
    files = render.files(plan)
    if name is not None:
        files["run.json"] = json.dumps({**json.loads(files["run.json"]), "name": name})
    run = creation.create(path, files, resume=False)
    for step in range(1, num_steps + 1):
        noise = math.sin(step * (7.3 + seed)) * 0.06
        line = {"step": step, "loss": 2.2 * math.exp(-step / (90 + 20 * seed)) + 0.5 + noise, "epoch": step / num_steps}
        line |= {"grad_norm": 1.2 + noise * 5, "learning_rate": 2e-4 * (1 + math.cos(math.pi * step / num_steps)) / 2}
        line |= {"tokens_per_second": 41_000 + 9_000 * noise, "mfu": 0.41 + noise / 9, "rewards/margins": step / 200}
        run.log_metrics({**line, "memory_bytes": (52 << 30) + (min(step, 9) << 28)})
        if step % 50 == 0:
            run.log_metrics({"step": step, "eval_loss": line["loss"] + 0.1, "eval_rewards/margins": step / 220})
    for step in (250, 300):
        checkpoint(path, step)
    samples = [
        {"prompt": "What is the capital of Spain?", "right": "Madrid.", "before": "The capital of", "answer": "Madrid.",
         "is_right": True},
        {"prompt": "user: Two and two?\nassistant: Four.\nuser: And three?", "right": "Seven.", "before": None,
         "answer": "Six, I believe, because three comes after two and before four.", "is_right": False},
    ]  # fmt: skip
    (path / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    counts = DataCounts(2048, packing=True, read=1000, kept=998, dropped=2, tokens=9, trained_tokens=5)
    empty = Total("dropped", "there is no answer", samples=2, tokens=0)
    data = RunData(train=SplitData(counts=counts, changes=[empty], unread=[]))
    run.write_data(data, [{"where": "rows.jsonl:7", **asdict(empty)}])
    run.write_status(
        RunStatus(state="done", exit_code=0, seconds=5821.4, step=num_steps, loss=0.6, result_step=250, **MORE)
    )
    return run


def rewarded(path: Path) -> RunDirectory:
    """Write a run that learned from rewards."""
    run = trained(path, num_steps=20)
    for step in range(1, 21):
        line = {"step": step, "loss": 0.1, "reward": step / 20, "reward_std": 0.3, "kl": 0.01, "entropy": 1.5}
        line |= {"completion_length": 30.0, "completions/clipped_ratio": 0.1, "frac_reward_zero_std": 0.25}
        run.log_metrics(line)
    completions = [
        {"step": step, "prompt": "3 + 4 =", "completion": f"{answer} at {step}", "advantage": advantage,
         "rewards": {"math": float(advantage > 0)},
         "calls": [{"tool": "add", "arguments": {"a": 3, "b": 4}, "result": None if step == 20 else "seven"}]}
        for step in (1, 10, 20)
        for answer, advantage in zip("765432", (1.5, 0.9, 0.1, -0.1, -0.9, -1.5), strict=True)
    ]  # fmt: skip
    run.completions.write_text("".join(json.dumps(completion) + "\n" for completion in completions))
    return run


def failed(path: Path) -> RunDirectory:
    """Write a run that was started again once and then ran out of memory."""
    run = written_run(path)
    run.write_status(
        RunStatus(state="stopped", exit_code=75, message="stopped: at step 4 on request; its checkpoint is saved.")
    )
    files = {name: (path / name).read_text() for name in ("recipe.py", "recipe.json", "deepspeed.json", "run.json")}
    facts = {
        **json.loads(files["run.json"]),
        "resume_step": 4,
        "warnings": ["This run may not fit: it needs about 81 of 80 GiB."],
    }
    run = creation.create(path, {**files, "run.json": json.dumps(facts)}, resume=True)
    run.ranks.mkdir()
    run.log_warning("the tracker wandb is disabled for the rest of the run: ConnectionError: no route")
    for step in range(1, 7):
        run.log_metrics({"step": step, "loss": 8.0 - step, "memory_bytes": 640 << 20})
    found = {"cause": "gpu-out-of-memory", "what": "a GPU ran out of memory", "rank": 3, "step": 7}
    command = "tuner train mine.py --set train_dataloader.batch_size=1"
    run.write_status(
        RunStatus(state="failed", exit_code=1, message="...", diagnosis={**found, "next_command": command})
    )
    checkpoint(path, 4)
    checkpoint(path, 6, valid=False)
    return run
