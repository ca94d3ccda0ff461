"""Tokens/s of a training loop on a CPU, alone and beside a copy of itself, by how long idle threads spin.

    python -m bench.spin tuner/configs/assets/tiny --tokens 64
    python -m bench.spin build/real/smollm2 --tokens 256

The folder needs a config.json alone: weights are random.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

SETTINGS: dict[str, dict[str, str]] = {
    "libgomp's own": {},
    **{f"GOMP_SPINCOUNT={count}": {"GOMP_SPINCOUNT": str(count)} for count in (100, 1_000, 10_000)},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
}


def train(folder: str, num_tokens: int, seconds: float) -> None:
    """Print "ready", wait for a line, train for `seconds`, and print the tokens per second."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, model.config.vocab_size, (1, num_tokens))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    print("ready", flush=True)
    sys.stdin.readline()
    start, num_steps = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        step()
        num_steps += 1
    print(round(num_steps * num_tokens / (time.monotonic() - start)), flush=True)


def speeds(variables: dict[str, str], num_copies: int) -> list[str]:
    """Return the tokens per second of each of some copies of this process that train at the same time."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    env = {**kept, **variables, "OMP_NUM_THREADS": str(os.cpu_count())}
    command = [sys.executable, "-m", "bench.spin", "--train", *sys.argv[1:]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    copies = [subprocess.Popen(command, env=env, text=True, **pipes) for _ in range(num_copies)]
    outputs = [copy.stdout for copy in copies if copy.stdout]
    for output in outputs:
        output.readline()
    for copy in copies:
        if copy.stdin:
            copy.stdin.write("\n")
            copy.stdin.flush()
    return [output.readline().strip() for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a step")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(args.folder, args.tokens, args.seconds)
    for _ in range(args.rounds):
        for name, variables in SETTINGS.items():
            print(name, "| alone", *speeds(variables, 1), "| two at once", *speeds(variables, 2), flush=True)


if __name__ == "__main__":
    main()
