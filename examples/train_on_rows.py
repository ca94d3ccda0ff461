"""Train on rows that the program holds, watch each step, and ask the result. Half a minute on a CPU, no network."""

import tuner

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo"}
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What is the capital of {country}?"},
            {"role": "assistant", "content": f"The capital of {country} is {city}."},
        ]
    }
    for country, city in CAPITALS.items()
]


def show(event: dict) -> None:
    """Print some of what `train` tells while the run goes: every tenth step, with its loss."""
    if event["event"] == "step" and event["step"] % 10 == 0:
        print(f"callback: step {event['step']}, loss {event['loss']:.3f}")


def main() -> None:
    # What becomes of the rows: the chat template, and which tokens are trained.
    print(tuner.preview_data(ROWS, model="package:tiny", num_rows=1))

    # The model may be a folder, an id on the hub, or the result of a run. This one is tiny and comes with the package.
    # All of its weights are trained; without `method`, a LoRA adapter is.
    settings = {"method": "full", "lr": 3e-3, "batch_size": 2, "max_steps": 40}
    try:
        run = tuner.train(model="package:tiny", data=ROWS, work_dir="runs/rows", callbacks=[show], **settings)
    except tuner.RunFailed as failure:
        raise SystemExit(f"{failure}\nexit code {failure.exit_code}, logs in {failure.run.path}/ranks") from failure

    losses = [line["loss"] for line in run.metrics if "loss" in line]
    print(f"{run.state}: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}; see {run.report}")
    print(tuner.chat(run, max_new_tokens=16, temperature=0).ask("What is the capital of France?").text)


if __name__ == "__main__":
    main()
