"""Evaluate what a run trained, talk with it, and export it. A minute on a CPU, without a network."""

import tuner


def main() -> None:
    short = {"lr": 1e-3, "batch_size": 2, "max_steps": 3, "val_dataloader": None}
    run = tuner.train("tiny_lora_sample_e1", work_dir="runs/use", **short)

    # Without data, the run's own validation rows; this run has none.
    rows = [{"prompt": "What is the capital of France?", "completion": "The capital of France is Paris."}]
    before, after = tuner.evaluate("package:tiny", data=rows), tuner.evaluate(run, data=rows)
    print(f"loss {before.metrics['loss']:.3f} before, {after.metrics['loss']:.3f} after")

    chat = tuner.chat(run, max_new_tokens=16, temperature=0)
    print(chat.ask("What is the capital of France?").text)
    print(chat.ask("And of Italy?").text)

    # One folder that transformers loads without tuner; format="gguf" writes a file for Ollama and llama.cpp,
    # and tuner.serve(run) answers OpenAI's clients.
    exported = tuner.export(run, "runs/my-model", merge=True)
    print(f"runs/my-model: {exported.num_tensors} tensors, {exported.num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
