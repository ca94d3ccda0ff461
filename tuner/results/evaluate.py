"""Evaluates a model: loss and perplexity, accuracy on pairs of answers, generated answers, and lm-eval's tasks.

`tuner eval` and `tuner.evaluate` call `evaluate`.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tuner import paths
from tuner.data.batches import SampleCollator, WeighedCollator, lays_end_to_end
from tuner.data.holdout import Holdout
from tuner.data.image_batches import PIXELS, ImageCollator, PixelLoader
from tuner.data.image_encoder import ImageEncoder
from tuner.data.layouts import WEIGHTS
from tuner.data.prepare import describe, prepare
from tuner.data.prepared import Prepared
from tuner.data.sample import IGNORED, Chat
from tuner.data.sample_kinds import WrongKind
from tuner.data.text_encoder import TextEncoder
from tuner.errors import (
    DataError,
    MachineError,
    Option,
    RewardError,
    RunDirectoryError,
    Text,
    TunerError,
    UsageError,
    did_you_mean,
)
from tuner.files import JsonObject, write_new_text
from tuner.machine.hardware import Hardware
from tuner.models.load import load_reference, pretrained_path
from tuner.notebook import lines_of, table
from tuner.recipes.recipe import read_base
from tuner.recipes.schema import Dataset, RecipeConfig, one_data_set
from tuner.recipes.schema.objectives import OBJECTIVES, facts_of
from tuner.results.chat import answer, check_can_answer, check_room
from tuner.results.loaded_model import LoadedModel, ModelSpec, encoder_of, load, load_frozen, spec_of
from tuner.results.saved import SOURCE
from tuner.runs import checkpoints
from tuner.runs.verdict import REWARD
from tuner.worker.answer_metrics import answer_metrics
from tuner.worker.compat import needs_mask
from tuner.worker.encoders import with_tools
from tuner.worker.generation import Settings, on_device
from tuner.worker.samples import before_answer, prompts, right_answer, shown
from tuner.worker.trainer_setup import evaluator
from tuner.worker.trainers import UNIT, num_trained, weight_of

_LENGTH = 2048
"""Limit of tokens per sample, if neither a recipe nor the model has one."""
_JUDGED, _REWARDS = ("eval_loss", "eval_accuracy", "eval_margin"), "eval_rewards/"
_JUDGED_BY_RUN = "Give the run that the model comes from to measure the loss of its objective: tuner eval RUN."
_MAX_SHOWN = 15
_MOST_NATS = 700.0
"""Above this loss, exp(loss) overflows a float."""


class Wanted(NamedTuple):
    """What to measure: the arguments of `tuner.evaluate`, which says what None means; `num_answers` prompts get one."""

    data: str | None = None
    row_format: str | None = None
    split: str | None = None
    max_rows: int | None = None
    batch_size: int | None = None
    num_answers: int = 0
    out: Path | None = None
    max_new_tokens: int = 512
    tasks: tuple[str, ...] = ()
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    allow_code: bool = False


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The measurements of a model.

    Args:
        rows: The objective and the data sets; empty if only tasks were evaluated.
        metrics: Metrics on the rows, such as `loss` and `perplexity`.
        generations: The answers, each with `prompt`, `right`, `answer` and more.
        answers: Metrics of the answers, such as exact match.
        out: The file with the answers.
        tasks: lm-eval's results by task.
    """

    description: str
    source: str
    dtype: str
    bits: int
    rows: JsonObject = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    generations: list[JsonObject] = field(default_factory=list)
    answers: dict[str, float] = field(default_factory=dict)
    out: Path | None = None
    tasks: dict[str, JsonObject] = field(default_factory=dict)

    def to_json(self) -> JsonObject:
        """Return the measurements as plain values, without the answers."""
        value: JsonObject = {"source": self.source, "dtype": self.dtype, "bits": self.bits}
        value |= {**self.rows, "metrics": self.metrics} if self.rows else {}
        if self.generations:
            value |= {"generations": str(self.out)} if self.out else {}
            value |= {"num_generations": len(self.generations), "answers": self.answers}
        return value | ({"tasks": self.tasks} if self.tasks else {})

    def __repr__(self) -> str:
        rows = lines_of(self.scores()) if self.scores() else []
        return "\n".join((f"Evaluation of {self.source}", *rows[:_MAX_SHOWN]))

    def _repr_html_(self) -> str:
        return table(self.scores(), title=f"Evaluation of {self.source}")

    def scores(self) -> list[tuple[str, str]]:
        """Return the name and the text of each number."""
        numbers = [
            (name, f"{number:,}" if isinstance(number, int) else f"{number:.6g}")
            for name, number in (self.metrics | self.answers).items()
        ]
        for task, results in self.tasks.items():
            for name, number in results.items():
                if isinstance(number, float) and "_stderr," not in name:
                    error = results.get(name.replace(",", "_stderr,", 1))
                    shown = f" ± {error:.4f}" if isinstance(error, float) else ""
                    numbers.append((f"{task} {name}", f"{number:.4f}{shown}"))
        return numbers


def evaluate(
    source: str,
    wanted: Wanted,
    hardware: Hardware,
    *,
    adapter: str | None = None,
    trust_remote_code: bool = False,
    bits: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Evaluate the model that `source` names.

    Args:
        source, adapter, trust_remote_code: As for `spec_of`.
        bits: As for `load`.
        tell: Is called with a line about the rows, before the weights are loaded.

    Raises:
        TunerError: the model, the rows or a task are wrong, or the file for the answers exists.
    """
    if wanted.tasks:
        check_tasks(wanted.tasks)
    spec = spec_of(source, adapter, trust_remote_code=trust_remote_code)
    prepared: Prepared | None = None
    note: str | None = None
    conversations: list[Chat] = []
    if wanted.data or wanted.num_answers or not wanted.tasks:
        rows = rows_of(spec, wanted.data, wanted.row_format, wanted.split, wanted.max_rows)
        prepared, conversations = _prepared(spec, rows, wanted.num_answers, allow_code=wanted.allow_code)
        tell(describe(prepared, "rows"))
        note = _without_its_run(spec)
        if note:
            tell(f"NOTE: {note}")
    loaded = load(spec, hardware, bits)
    measured: dict[str, Any] = {"out": wanted.out}
    if prepared:
        sets = [asdict(data_set) for data_set in prepared.sets]
        rows_json = {"objective": spec.objective, "sets": sets, "counts": asdict(prepared.counts)}
        measured["rows"] = rows_json | ({"note": note} if note else {})
        measured["metrics"] = _measured(loaded, hardware, prepared, wanted.batch_size)
    if conversations:
        answered = generations(loaded, conversations, Settings(wanted.max_new_tokens, temperature=0))
        if wanted.out:
            lines = (f"{json.dumps(generated, ensure_ascii=False)}\n" for generated in answered)
            write_new_text(wanted.out, "".join(lines))
        texts, right = ([generated[key] for generated in answered] for key in ("answer", "right"))
        measured |= {"generations": answered, "answers": answer_metrics(texts, right)}
    if wanted.tasks:
        options = {"num_fewshot": wanted.num_fewshot, "apply_chat_template": wanted.apply_chat_template}
        size = wanted.batch_size or 1
        measured["tasks"] = task_scores(loaded, wanted.tasks, size, **options, limit=wanted.max_rows)
    return Evaluation(loaded.description, spec.description, str(loaded.dtype)[6:], loaded.bits, **measured)


def _prepared(spec: ModelSpec, rows: Dataset, num_questions: int, *, allow_code: bool) -> tuple[Prepared, list[Chat]]:
    """Read the rows before the weights are loaded, so that wrong rows are reported early."""
    of_objective = facts_of(spec.objective)
    needs_recipe = (of_objective.is_judged and not of_objective.scores) or of_objective.generates
    if needs_recipe and spec.recipe is None:
        problem = f"the objective that {spec.description} was trained with is unknown"
        raise UsageError(problem, where=SOURCE, fix="Give the run directory that it comes from.")
    if spec.recipe and not allow_code and (functions := spec.recipe.objective.own_functions):
        called = dict.fromkeys(name for names in functions.values() for name in names)
        problem = f"the {' and '.join(functions)} of the run call code: {', '.join(called)}"
        raise UsageError(problem, where=SOURCE, fix=f"Read that code, then add {Option('allow_code', True)}.")
    encoder = encoder_of(spec)
    if spec.recipe:
        encoder = with_tools(encoder, spec.recipe)
    conversations = questions(spec, encoder, rows, num_questions) if num_questions else []
    try:
        return prepare(rows, encoder, objective=spec.objective), conversations
    except WrongKind as error:
        if spec.recipe is None:  # nothing is trained here, and without a run nothing says how such rows are judged
            error.fix = Text(
                f"{_JUDGED_BY_RUN} The plain loss of the chosen answers of pairs: {Option('row_format', 'chosen')}."
            )
        raise


def _measured(loaded: LoadedModel, hardware: Hardware, prepared: Prepared, batch_size: int | None) -> dict[str, float]:
    recipe, size = loaded.spec.recipe, batch_size or 1
    if recipe and not batch_size:
        recipe_size = (recipe.val_dataloader or recipe.train_dataloader).batch_size
        size = 1 if recipe_size == "auto" else recipe_size
    if facts_of(loaded.spec.objective).is_judged:
        if recipe is None:  # of a model that scores answers: its evaluation compares two scores, and needs no training
            values = {"model": loaded.spec.model, "objective": {"type": loaded.spec.objective}}
            recipe = RecipeConfig.model_validate({**read_base().values, **values})
        return judged(loaded, recipe, prepared, size, hardware)
    if facts_of(loaded.spec.objective).generates:
        assert recipe is not None, "checked with the rows"
        return completed(loaded, recipe, prepared, size)
    return likelihood(loaded, prepared, size)


def _without_its_run(spec: ModelSpec) -> str | None:
    """Return what an exported model's evaluation does not measure, which that of its run would; None if nothing."""
    folder = spec.adapter or paths.local(spec.path)
    if spec.recipe or folder is None:
        return None
    try:
        trained_with = checkpoints.facts(folder).objective
    except (OSError, ValueError, RunDirectoryError):  # a model of somebody else
        return None
    of_objective = facts_of(trained_with) if trained_with and trained_with in OBJECTIVES else None
    if of_objective is None or not of_objective.is_judged or of_objective.scores:
        return None
    return (
        f"the model was trained with {trained_with}, whose loss needs what an export does not keep, so this is the "
        f"plain loss of the answers. {_JUDGED_BY_RUN}"
    )


def rows_of(
    spec: ModelSpec,
    data: str | None = None,
    row_format: str | None = None,
    split: str | None = None,
    max_rows: int | None = None,
) -> Dataset:
    """Return the rows to evaluate on: the user's, or the validation rows of the model's run.

    None means the value of the recipe or of the data set.

    Raises:
        UsageError: the user names no rows, and the run has no validation rows.
    """
    recipe = spec.recipe
    if data is not None:
        context = spec.context_tokens or _LENGTH
        block = recipe.train_dataloader.dataset if recipe else Dataset(path=None, max_length=context, packing=False)
        block = block.model_copy(update=one_data_set(data) | {"format": row_format, "val_split": None})
    elif recipe and recipe.val_dataloader:
        block = recipe.val_dataloader.dataset
    else:
        problem = f"{spec.description} has no validation data"
        raise UsageError(
            problem, where=Option("data"), fix=f"Give some: {Option('data', 'FILE')}, or an id on the hub."
        )
    if max_rows and (holdout := Holdout.of(block)):  # a block's `max_rows` counts all rows, also those of training
        max_rows = min(holdout.rows_with(max_rows), block.max_rows or sys.maxsize)
    # `likelihood` lays samples end to end only where a test knows that the model keeps them apart.
    is_known = recipe is None or (recipe.model.packs_with is None and not recipe.model.trust_remote_code)
    limits = {"split": split, "max_rows": max_rows, "packing": None if is_known else False}
    return block.model_copy(update={name: value for name, value in limits.items() if value is not None})


def likelihood(loaded: LoadedModel, prepared: Prepared, batch_size: int) -> dict[str, float]:
    """Return the loss in nats (the mean over all trained tokens, as in validation) and the perplexity.

    Raises:
        TunerError: the loss is not a finite number.
    """
    pad_id, reads_images = loaded.encoder.pad_id, loaded.spec.model.images is True
    end_to_end = lays_end_to_end(loaded.model, reads_images=reads_images)
    encoder = cast(ImageEncoder, loaded.encoder)
    of_samples = SampleCollator(DataCollatorForLanguageModeling(pad_id, end_to_end), needs_mask(loaded.model))
    of_text = WeighedCollator(of_samples)
    collate = ImageCollator(of_text, encoder) if reads_images else of_text
    loader = PixelLoader(encoder, 0)
    total, weight, num_tokens = 0.0, 0.0, 0
    for batch in DataLoader(prepared.dataset, batch_size, collate_fn=collate):
        shown = batch.pop(PIXELS, None)
        pixels = loader.pixels(shown) if shown else None
        inputs = {**send_to_device(batch, loaded.model.device), **on_device(loaded.model, pixels or {})}
        labels_BT, weights_BT = inputs.pop("labels"), inputs.pop(WEIGHTS, None)
        with torch.inference_mode():
            logits_BTV = loaded.model(**inputs, use_cache=False).logits
        total += _nats(logits_BTV, labels_BT, weights_BT)
        items = weight_of(batch)
        weight += num_trained(labels_BT) if items is None else items / UNIT
        num_tokens += num_trained(labels_BT)
    mean = _finite(total / weight, loaded)
    return {"loss": mean, "perplexity": math.exp(min(mean, _MOST_NATS)), "tokens": num_tokens}


def _nats(logits_BTV: torch.Tensor, labels_BT: torch.Tensor, weights_BT: torch.Tensor | None) -> float:
    """Return the weighed sum of the trained tokens' losses; the model's own may include the balance of experts."""
    logits_TV, labels_T = logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten().to(logits_BTV.device)
    is_trained_T = labels_T != IGNORED
    logits_NV, labels_N = logits_TV[is_trained_T].float(), labels_T[is_trained_T]
    if weights_BT is None:
        return float(F.cross_entropy(logits_NV, labels_N, reduction="sum"))
    losses_N = F.cross_entropy(logits_NV, labels_N, reduction="none")
    return float(losses_N @ weights_BT[:, 1:].flatten().to(losses_N)[is_trained_T])


def _finite(loss: float, loaded: LoadedModel) -> float:
    if not math.isfinite(loss):
        problem = f"the loss of {loaded.spec.description} is {loss}"
        raise TunerError(problem, fix="Its weights are damaged, or overflow fp16.")
    return loss


def judged(
    loaded: LoadedModel, config: RecipeConfig, prepared: Prepared, batch_size: int, hardware: Hardware
) -> dict[str, float]:
    """Return the metrics of TRL's trainer for the recipe's objective on pairs or rated answers, with TRL's names.

    `rewards/accuracies` (`accuracy` of a reward model) is the share of pairs in which the model prefers the chosen
    answer. Each metric is a mean over rows; if the objective `depends_on_micro_batch`, it depends on the batch size.

    Raises:
        TunerError: the loss is not a finite number.
        ModelError, MachineError: the reference model cannot be loaded.
    """
    models = (loaded.model, _reference(loaded, config, hardware))
    with tempfile.TemporaryDirectory() as folder:
        trainer = evaluator(config, models, loaded.encoder, prepared.dataset, batch_size, folder)
        metrics = trainer.evaluate()
    _finite(metrics["eval_loss"], loaded)
    names = (name for name in sorted(metrics) if name in _JUDGED or name.startswith(_REWARDS))
    return {name.removeprefix("eval_"): metrics[name] for name in names}


def completed(loaded: LoadedModel, config: RecipeConfig, prepared: Prepared, batch_size: int) -> dict[str, float]:
    """Return what a validation of the run measures on one greedy completion of each prompt.

    That is `reward`, the weighted sum of the rewards, and the mean of each reward (`rewards/NAME`); with a teacher
    `divergence`, the mean over the tokens.

    Raises:
        TunerError: the divergence is not a finite number.
        RewardError: a reward fails, or has no number for any completion.
        ModelError: the teacher cannot be loaded.
    """
    config = config.model_copy(update={"objective": config.objective.without_training()})
    device, vocabulary = str(loaded.model.device), loaded.encoder.vocabulary
    teacher = None
    if config.objective.taught_by:
        teacher = load_reference(config, "", loaded.dtype, device, shards=False, vocabulary=vocabulary)
    encoder = with_tools(loaded.encoder, config)
    with tempfile.TemporaryDirectory() as folder:
        trainer = evaluator(config, (loaded.model, teacher), encoder, prepared.dataset, batch_size, folder)
        metrics = trainer.evaluate()
    metrics = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    if teacher is not None:
        return {"divergence": _finite(metrics["loss"], loaded)}
    rewards = {name: value for name, value in metrics.items() if name.startswith("rewards/") and name.endswith("/mean")}
    means = {name.removesuffix("/mean"): value for name, value in rewards.items()}
    if empty := [name.removeprefix("rewards/") for name, value in means.items() if value is None]:
        problem = f"the reward {empty[0]!r} failed, or returned None, for every completion"
        raise RewardError(problem, where="objective.rewards", fix="Correct it: tuner check RUN calls each reward.")
    return {REWARD: metrics[REWARD], **means, "completion_length": metrics["completion_length"]}


def _reference(loaded: LoadedModel, config: RecipeConfig, hardware: Hardware) -> PreTrainedModel | None:
    """Return the reference model: the model before training. TRL needs none for an adapter, which it switches off."""
    if loaded.spec.adapter or not config.objective.facts.has_reference:
        return None
    return load_frozen(config.model, pretrained_path(config.model), loaded.dtype, hardware, None, scores=False).eval()


def questions(spec: ModelSpec, encoder: TextEncoder, dataset: Dataset, count: int) -> list[Chat]:
    """Return up to `count` conversations that end with the right answer, after checking that each prompt fits.

    Raises:
        DataError: the data set or a row of it is wrong or has no prompt, or the chat template rejects it.
        UsageError: a prompt is longer than the context.
        ModelError: the model cannot answer.
    """
    check_can_answer(spec, encoder)
    conversations = prompts(dataset, count, spec.objective)
    if not conversations:
        raise DataError(
            "no row is a conversation that ends with an answer",
            where=Option("generate"),
            fix=f"Give rows of conversations: {Option('data', 'FILE')}.",
        )
    for chat in conversations:
        check_room(spec, torch.tensor([encoder.prompt_ids(before_answer(chat))]))
    return conversations


def generations(loaded: LoadedModel, conversations: list[Chat], settings: Settings) -> list[JsonObject]:
    """Return the model's answers to the conversations of `questions`, each with the right answer."""
    rows = []
    for chat in conversations:
        prompt = chat.messages[:-1]
        ids_BT = torch.tensor([loaded.encoder.prompt_ids(before_answer(chat))])
        reply = answer(loaded, ids_BT, settings, pixels=loaded.encoder.pixels_in(prompt, ids_BT))
        details = {"answer": reply.text, "tokens": reply.num_tokens, "is_whole": reply.is_whole}
        rows.append({"prompt": shown(prompt), "right": right_answer(loaded.encoder, chat), **details})
    return rows


def check_tasks(tasks: Sequence[str]) -> None:
    """Check, before a model is loaded, that lm-eval is installed and has every task.

    Raises:
        MachineError: lm-eval is not installed.
        UsageError: there is no such task.
    """
    if find_spec("lm_eval") is None:
        fix = "Install it: pip install 'tuner-deepspeed[eval]', or pip install lm-eval."
        raise MachineError("task scores need lm-eval, which is not installed", where=Option("tasks"), fix=fix)
    from lm_eval.tasks import TaskManager  # an extra; it reads the names of thousands of tasks

    known_tasks = TaskManager().all_tasks
    for name in tasks:
        if name not in known_tasks and not name.endswith((".yaml", ".yml")):
            fix = did_you_mean(name, known_tasks, "lm-eval ls tasks")
            raise UsageError(f"lm-eval has no task {name!r}", where=Option("tasks"), fix=fix)


def task_scores(
    loaded: LoadedModel, tasks: Sequence[str], batch_size: int, **options: int | bool | None
) -> dict[str, JsonObject]:
    """Return lm-eval's results by task: metrics and standard errors, with lm-eval's names, options and defaults."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    done = simple_evaluate(
        model=HFLM(pretrained=loaded.model, tokenizer=loaded.encoder.library_object, batch_size=batch_size),
        tasks=[*tasks],
        task_manager=TaskManager(),
        log_samples=False,
        **options,
    )
    assert done is not None, "this process is rank 0"
    # numpy's numbers, and NaN where a task has too few rows for an error
    results: dict[str, JsonObject] = json.loads(
        json.dumps(done["results"], default=float), parse_constant=lambda _: None
    )
    return results
