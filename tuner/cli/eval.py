"""`tuner eval`: what a result is worth, on rows it was not trained on and on public tasks."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tuner.cli import complete
from tuner.cli.help import Command
from tuner.cli.models import max_new_tokens_option, model_options, stdout_is_the_answers
from tuner.cli.options import OptionValue, taken_out
from tuner.cli.say import say, say_json
from tuner.errors import DiskError, UsageError
from tuner.machine.hardware import detect


@click.command(
    cls=Command,
    examples=(
        "tuner eval work_dirs/NAME/TIME",
        "tuner eval Qwen/Qwen3-0.6B --data test.jsonl",
    ),
    json_keys={
        "tuner eval RUN --json": "`source`, `objective`, `sets`, `counts`, `metrics`",
    },
)
@model_options
@click.option(
    "--data",
    metavar="PATH",
    shell_complete=complete.files,
    help="Rows to evaluate on: a file, a folder or an id on the hub. [default: the run's validation rows]",
)
@click.option("--format", "row_format", metavar="NAME", help="Row format of --data. [default: detected]")
@click.option("--split", metavar="NAME", help="Split of the data set, such as test. [default: train]")
@click.option("--max-rows", type=click.IntRange(1), help="Use only so many rows, of --data or of each task.")
@click.option("--batch-size", type=click.IntRange(1), help="Rows per batch. [default: as in validation]")
@click.option(
    "--generate", type=click.IntRange(1), metavar="N", help="Also answer N prompts and write the answers to --out."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON lines file for the answers of --generate; it must not exist.",
)
@max_new_tokens_option
@click.option("--tasks", metavar="NAMES", help="lm-eval tasks, separated by commas, or a task's .yaml file.")
@click.option(
    "--num-fewshot", type=click.IntRange(0), help="Examples before each question of a task. [default: the task's]"
)
@click.option(
    "--apply-chat-template",
    is_flag=True,
    help="Ask the questions of tasks through the chat template. [default: plain text, as lm-eval does]",
)
@click.option("--allow-code", is_flag=True, help="Call the rewards of the run that are functions of your own.")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
def command(
    source: str,
    generate: int | None,
    out: Path | None,
    tasks: str | None,
    as_json: bool,
    **options: OptionValue,
) -> None:
    """Evaluate a trained model, or any other one: loss and perplexity, generated answers, lm-eval tasks.

    SOURCE is a run directory (its result, or its newest checkpoint), a checkpoint, a model's folder, or an id on the
    hub. The rows are the run's validation rows, or --data. A model that was trained on preferences is judged by
    them. One that was trained on rewards completes prompts, and the mean of each reward is printed. With --tasks and
    no --data, only the tasks are evaluated.
    """
    _check_out(generate, out)
    names = tuple(name.strip() for name in (tasks or "").split(",") if name.strip())
    if tasks is not None and not names:
        raise UsageError("no task is given", where="--tasks", fix="Example: --tasks arc_easy,hellaswag.")
    with stdout_is_the_answers():
        from tuner.results.evaluate import Wanted, evaluate  # torch

        wanted = Wanted(num_answers=generate or 0, out=out, tasks=names, **taken_out(Wanted._fields, options))
        done = evaluate(source, wanted, detect(os.environ), tell=lambda line: say(line, err=True), **options)
    if as_json:
        say_json(done.to_json())
        return
    say(f"{done.description}.")
    for name, number in done.scores():
        click.echo(f"{name:20} {number}")
    if done.generations:
        say(f"answers: {len(done.generations)}, in {out}")


def _check_out(generate: int | None, out: Path | None) -> None:
    if (generate is None) != (out is None):
        raise UsageError("--generate and --out need each other", where="--generate", fix="Add: --out answers.jsonl.")
    if out and (out.exists() or not out.absolute().parent.is_dir()):
        problem = f"{out} already exists" if out.exists() else f"the folder of {out} does not exist"
        raise UsageError(problem, where="--out", fix="Choose a new file.")
    if out and not os.access(out.absolute().parent, os.W_OK | os.X_OK):
        raise DiskError(
            f"{out.absolute().parent} cannot be written", where="--out", fix="Choose a file in another folder."
        )
