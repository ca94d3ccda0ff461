"""Fine-tune on answers, then on preferences (DPO), which begins with the first run's result. A minute on a CPU."""

import tuner

ANSWERS = [
    {"prompt": f"Say {word} politely.", "completion": f"Dear reader, {word}, if you please."}
    for word in ("hello", "goodbye", "thanks", "sorry", "welcome", "cheers", "yes", "no")
]
PREFERENCES = [
    {"prompt": f"Say {word}.", "chosen": f"Dear reader, {word}, if you please.", "rejected": f"{word}!!!"}
    for word in ("hello", "goodbye", "thanks", "sorry", "welcome", "cheers", "yes", "no")
]
SHORT = {"max_steps": 3, "batch_size": 2, "log": {"num_samples": 0}}


def main() -> None:
    first = tuner.train(model="package:tiny", data=ANSWERS, lr=1e-3, work_dir="runs/sft", **SHORT)
    print(f"sft: {first.state}, {first.metrics[-1]}")

    # `model=first`: the adapter of the first run goes on. A method's name may have an objective before it.
    second = tuner.train(model=first, method="dpo_lora", data=PREFERENCES, lr=1e-4, work_dir="runs/dpo", **SHORT)
    rewards = [line["rewards/accuracies"] for line in second.metrics if "rewards/accuracies" in line]
    print(f"dpo: {second.state}, chosen above rejected in {rewards[-1]:.0%} of the last pairs")


if __name__ == "__main__":
    main()
