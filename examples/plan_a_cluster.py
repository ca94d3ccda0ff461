"""Ask on paper what a run needs on machines that need not be here. A second, no GPU, no network."""

import tuner


def main() -> None:
    recipe = tuner.load_recipe("qwen3_8b_full_alpaca_e3", lr=1e-5, max_length=4096)
    print(recipe)

    # One table a question: the memory of each ZeRO level, and which one to take.
    print(tuner.plan(recipe, gpus=8, gpu="a100-80g"))
    for nodes in (1, 2, 4):
        plan = tuner.plan(recipe, nodes=nodes, gpus=8, gpu="a100-80g", interconnect="8x400Gb/s")
        print(f"{nodes} nodes of 8: {plan.recommended}")

    # What is wrong with it there, all at once; each finding says what to do.
    print(tuner.check(recipe, gpus=8, gpu="a100-80g", deepspeed={"zero_optimization": {"stage": 3, "stag": 1}}))


if __name__ == "__main__":
    main()
