"""Train on several data sets at once, each with its share, and validate on rows of your own. Half a minute on a CPU."""

import json
from pathlib import Path

import tuner

SUMS = [
    {"prompt": f"What is {one} plus {two}?", "completion": f"{one} plus {two} is {one + two}."}
    for one in range(1, 6)
    for two in range(1, 6)
]


def main() -> None:
    file = Path("sums.jsonl")
    file.write_text("".join(f"{json.dumps(row)}\n" for row in SUMS[4:]), encoding="utf-8")

    # weight=2: every row twice; 0.05: one row in twenty. `part` is a data set of the catalog (tuner list --datasets).
    mixture = [{"part": "sample", "weight": 0.05}, {"path": str(file), "weight": 2}]
    rows = {"dataset": {"path": None, "mixture": mixture}}
    recipe = tuner.load_recipe("tiny_lora_sample_e1", train_dataloader=rows, val=SUMS[:4], lr=1e-3, batch_size=4)
    print(tuner.preview_data(recipe=recipe, num_rows=2))

    run = tuner.train(recipe, max_steps=3, log={"num_samples": 0}, work_dir="runs/mixture")
    print([line["eval_loss"] for line in run.metrics if "eval_loss" in line])


if __name__ == "__main__":
    main()
