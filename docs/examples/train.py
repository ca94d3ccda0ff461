"""Train a small model from Python, look at the run, ask its result and export it: half a minute on a CPU, no hub."""

import tuner


def main() -> None:
    # The name of a recipe, and what to change of it: by key, by block, or by a key's tail.
    recipe = tuner.load_recipe(
        "tiny_lora_sample_e1",
        lr=1e-3,
        max_steps=4,
        accumulative_counts=1,
        val_dataloader=None,
        log={"interval": 1, "num_samples": 0},
    )
    print(f"{recipe.name}: {recipe.config.train_cfg.max_steps} steps at lr {recipe.config.optim_wrapper.optimizer.lr}")

    # On paper: which ZeRO level would it take on other machines? A mistake would be in `found.findings`.
    print("on eight A100:", tuner.plan(recipe, gpus=8, gpu="a100-80g").recommended)
    found = tuner.check(recipe)
    assert found.ok, found.findings

    # The run itself, as `tuner train` starts it: processes of its own, checkpoints, one directory that holds all of it.
    try:
        run = tuner.train(recipe, work_dir="runs/first")
    except tuner.RunFailed as failure:
        raise SystemExit(f"{failure}\nexit code {failure.exit_code}, logs in {failure.run.path}/ranks") from failure
    losses = [line["loss"] for line in run.metrics if "loss" in line]
    print(f"{run.state}: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}; see {run.report}")

    # A `Run` stands for its path: it is a model to ask, to export, or to go on from (`resume=run`).
    answer = tuner.chat(run, max_new_tokens=16, temperature=0).ask("What is the capital of France?")
    print(answer.text)
    exported = tuner.export(run, "my-model", merge=True)
    print(f"my-model: {exported.num_tensors} tensors, {exported.num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
