"""`tuner eval`: what a result is worth, on rows it was not trained on and on public tasks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuner.cli import complete
from tuner.cli.help import Command
from tuner.cli.models import loaded, max_new_tokens_option, model_options, stdout_is_the_answers
from tuner.cli.say import say
from tuner.cli.sources import source_of
from tuner.errors import DiskError, UsageError

if TYPE_CHECKING:
    from tuner.data.prepared import Prepared
    from tuner.data.sample import Message
    from tuner.machine.hardware import Hardware
    from tuner.recipes.schema import Dataset
    from tuner.results.model import LoadedModel, ModelSpec


@click.command(
    cls=Command,
    examples=(
        "tuner eval work_dirs/NAME/TIME",
        "tuner eval Qwen/Qwen3-0.6B --data test.jsonl",
    ),
)
@model_options
@click.option("--data", metavar="PATH", shell_complete=complete.files, help="Rows.  [default: the validation rows]")
@click.option("--format", "row_format", metavar="NAME", help="The shape of a row of --data.  [default: detected]")
@click.option("--split", metavar="NAME", help="Split of the data set.")
@click.option("--max-rows", type=click.IntRange(1), help="Use only the first rows, also of a task.")
@click.option("--batch-size", type=click.IntRange(1), help="Rows per batch.  [default: as in validation]")
@click.option(
    "--generate", type=click.IntRange(1), metavar="N", help="Generate answers to N prompts and write them to --out."
)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="A new JSON lines file for the answers.")
@max_new_tokens_option
@click.option("--tasks", metavar="NAMES", help="Tasks of lm-eval, separated by commas; a task's .yaml works too.")
@click.option("--num-fewshot", type=click.IntRange(0), help="Examples before each question.  [default: the task's]")
@click.option(
    "--apply-chat-template", is_flag=True, help="Apply the chat template to tasks; lm-eval's default is plain text."
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(
    source: str,
    adapter: str | None,
    bits: str | None,
    data: str | None,
    row_format: str | None,
    split: str | None,
    max_rows: int | None,
    batch_size: int | None,
    generate: int | None,
    out: Path | None,
    max_new_tokens: int,
    tasks: str | None,
    num_fewshot: int | None,
    apply_chat_template: bool,
    as_json: bool,
) -> None:
    """Evaluate SOURCE: loss and perplexity on rows, or its preferences if it was trained on judged answers.

    SOURCE is a run directory (its result, or its newest checkpoint), a checkpoint, a model's folder, or an id on the
    hub. The rows are the run's validation rows, or --data. With --tasks and no --data, only the tasks are evaluated.
    """
    _check_out(generate, out)
    source = source_of(source)
    names = tuple(name.strip() for name in (tasks or "").split(",") if name.strip())
    if tasks is not None and not names:
        raise UsageError("no task is given", where="--tasks", fix="Example: --tasks arc_easy,hellaswag.")
    with stdout_is_the_answers():
        if names:
            from tuner.results.benchmarks import check

            check(names)
        from tuner.results.benchmarks import scores
        from tuner.results.evaluate import rows_of
        from tuner.results.model import spec_of

        spec = spec_of(source, adapter)
        on_rows = data or generate or not names
        rows = rows_of(spec, data, row_format, split, max_rows) if on_rows else None
        prepared, asked = _prepared(spec, rows, generate or 0) if rows else (None, [])
        found, hardware = loaded(spec, bits)
        value: dict[str, Any] = {"source": spec.description, "dtype": str(found.dtype)[6:], "bits": found.bits}
        if prepared:
            value |= _measured(found, hardware, prepared, batch_size)
        if asked and out:
            scores_of_answers = _write_answers(found, asked, out, max_new_tokens)
            value |= {"generations": str(out), "num_generations": len(asked), "answers": scores_of_answers}
        if names:
            options = {"num_fewshot": num_fewshot, "apply_chat_template": apply_chat_template, "limit": max_rows}
            value["tasks"] = scores(found, names, batch_size or 1, **options)
    if as_json:
        from tuner.files import dump_json

        click.echo(dump_json(value), nl=False)
    else:
        _print(value, found)


def _check_out(generate: int | None, out: Path | None) -> None:
    if (generate is None) != (out is None):
        raise UsageError("--generate and --out need each other", where="--generate", fix="Add: --out answers.jsonl.")
    if out and (out.exists() or not out.absolute().parent.is_dir()):
        what = f"{out} already exists" if out.exists() else f"the folder of {out} does not exist"
        raise UsageError(what, where="--out", fix="Choose a new file.")
    if out and not os.access(out.absolute().parent, os.W_OK | os.X_OK):
        raise DiskError(
            f"{out.absolute().parent} cannot be written", where="--out", fix="Choose a file in another folder."
        )


def _prepared(spec: ModelSpec, rows: Dataset, num_questions: int) -> tuple[Prepared, list[list[Message]]]:
    """Read the rows before any weights are loaded: they may be wrong, or nothing that this model can be judged on."""
    from tuner.data.prepare import describe, prepare
    from tuner.data.sample import JUDGED
    from tuner.results.evaluate import questions
    from tuner.results.model import tokenizer_of

    if spec.objective in JUDGED and spec.recipe is None:
        what = f"the objective that {spec.description} was trained with is unknown"
        raise UsageError(what, where="SOURCE", fix="Give the run directory that it comes from.")
    tokenizer = tokenizer_of(spec)
    asked = questions(spec, tokenizer, rows, num_questions) if num_questions else []
    prepared = prepare(rows, tokenizer, objective=spec.objective)
    say(describe(prepared, "rows"), err=True)
    return prepared, asked


def _measured(found: LoadedModel, hardware: Hardware, prepared: Prepared, batch_size: int | None) -> dict[str, Any]:
    """Return counts of the rows and what was measured on them."""
    from dataclasses import asdict

    from tuner.data.sample import JUDGED
    from tuner.results.evaluate import judged, likelihood

    recipe, objective, size = found.spec.recipe, found.spec.objective, batch_size or 1
    if recipe and not batch_size:
        wanted = (recipe.val_dataloader or recipe.train_dataloader).batch_size
        size = 1 if wanted == "auto" else wanted
    if objective in JUDGED:
        assert recipe is not None, "checked with the rows"
        metrics = judged(found, recipe, prepared, size, hardware)
    else:
        metrics = likelihood(found, prepared, size)
    sets = [asdict(one) for one in prepared.sets]
    return {"objective": objective, "sets": sets, "counts": asdict(prepared.counts), "metrics": metrics}


def _write_answers(found: LoadedModel, asked: list[list[Message]], out: Path, max_new_tokens: int) -> dict[str, float]:
    """Write the answers beside the right ones, and return their generation metrics."""
    import json

    from tuner.files import write_new_text
    from tuner.results.evaluate import generations
    from tuner.worker.answer_metrics import answer_metrics
    from tuner.worker.generation import Settings

    answers = generations(found, asked, Settings(max_new_tokens, temperature=0))
    write_new_text(out, "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in answers))
    return answer_metrics([one["answer"] for one in answers], [one["right"] for one in answers])


def _print(value: dict[str, Any], found: LoadedModel) -> None:
    say(f"{found.description}.")
    for name, number in (value.get("metrics", {}) | value.get("answers", {})).items():
        click.echo(f"{name:20} {number:,}" if isinstance(number, int) else f"{name:20} {number:.6g}")
    for task, results in value.get("tasks", {}).items():
        for name, number in results.items():
            if isinstance(number, float) and "_stderr," not in name:
                error = results.get(name.replace(",", "_stderr,", 1))
                shown = f" ± {error:.4f}" if isinstance(error, float) else ""
                click.echo(f"{task:20} {name:24} {number:.4f}{shown}")
    if "generations" in value:
        say(f"answers: {value['num_generations']}, in {value['generations']}")
