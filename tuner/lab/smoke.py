"""Tests a recipe with a small random model on two CPU ranks: train, save, resume and reload, with a report per stage.

It uses no GPU, and leaves nothing behind for the real run.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from transformers import ProcessorMixin

from tuner.data.image_encoder import ImageEncoder
from tuner.data.text_encoder import TextEncoder
from tuner.errors import ModelError, TunerError
from tuner.files import JsonObject, disk_errors
from tuner.fit.splits import possible_splits
from tuner.lab import stand_ins
from tuner.launch import batch_size, measured, preflight, render, supervise
from tuner.launch.resolve import load_for_trial, resolve_run
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine import hardware
from tuner.machine.launchers import without_variables
from tuner.machine.topology import LaunchFlags
from tuner.progress import told
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import LOADERS, NOT_PUSHED, OF_A_TRIAL, Dataset, RecipeConfig, Rows
from tuner.recipes.schema.architecture import VARLEN
from tuner.runs import creation, metrics
from tuner.runs.directory import RunDirectory

UNKNOWN = "Not tested: GPU kernels, GPU memory (see tuner plan), NCCL and the real weights."
_RANKS, _STEPS, _MAX_BATCH, _MAX_ROWS = 2, 2, 2, {"train_dataloader": 64, "val_dataloader": 16}
_LEAST_SPLIT = 0.25
_ON_A_CPU = {None, "auto", "sdpa", "eager", VARLEN}
_TOLERANCE = {"fp32": 0.0, "bf16": 0.01}


@dataclass(frozen=True)
class Stage:
    """A stage that has ended: what is told of it, and its exit code (0 if it passed). Its fields are keys of JSON."""

    name: str
    seconds: float
    told: str
    exit_code: int = 0


@dataclass(frozen=True)
class SmokeResult:
    """All stages; only the last one can have failed. `kept` is the folder that is kept after a failure."""

    name: str
    stages: tuple[Stage, ...]
    kept: Path | None

    @property
    def exit_code(self) -> int:
        return self.stages[-1].exit_code


class _Failed(TunerError):
    """A run ended with this exit code; its error is already printed."""

    def __init__(self, problem: str, exit_code: int) -> None:
        super().__init__(problem)
        self.exit_code = exit_code


def smoke(request: Request, environ: Mapping[str, str], tell: Callable[[Stage], None]) -> SmokeResult:
    """Test a recipe in a scratch folder, which is removed if every stage passes.

    Args:
        environ: For the ranks; it must hide GPUs and switch the hub off, as this process must.
        tell: Is called with each stage when it ends.

    Raises:
        TunerError: the recipe is wrong, or needs code that it does not trust.
    """
    recipe = load_for_trial(request)
    told(*(f"WARNING: {warning}" for warning in recipe.warnings))
    if recipe.config.model.remote_code or recipe.config.architecture is None:
        problem = f"cannot build a small model of {recipe.config.model.path!r}: its architecture is unknown"
        remedy = "Add its facts to the recipe: architecture = dict(...)."
        if not recipe.config.model.remote_code and measured.is_unknown(recipe.config):  # it asks no hub itself
            problem = f"{problem}, because its config.json is not here"
            remedy = f"Fetch it first: {measured.download(recipe.config)}"
        raise ModelError(problem, where="model.path", fix=remedy)
    fix = "Free space, or set TMPDIR to a folder on another disk."
    with disk_errors(Path(tempfile.gettempdir()), fix):
        scratch = Path(tempfile.mkdtemp(prefix="tuner-smoke-"))
    try:
        with disk_errors(scratch, fix):
            stages = _stages(_Smoke(request, recipe, scratch, environ), tell)
    except BaseException as error:
        error.add_note(f"Its files are kept in {scratch}")
        raise
    if stages[-1].exit_code:
        return SmokeResult(recipe.name, stages, scratch)
    shutil.rmtree(scratch)
    return SmokeResult(recipe.name, stages, None)


def _stages(bench: _Smoke, tell: Callable[[Stage], None]) -> tuple[Stage, ...]:
    done: list[Stage] = []
    for name in ("model", "data", "train", "resume", "export"):
        started, code = time.monotonic(), 0
        try:
            summary = getattr(bench, name)()
        except TunerError as error:
            summary, code = error.what if isinstance(error, _Failed) else str(error), error.exit_code
        done.append(Stage(name, round(time.monotonic() - started, 1), summary, code))
        tell(done[-1])
        if code:
            break
    return tuple(done)


class _Smoke:
    """The stages of one smoke test. Each returns its summary, and uses the results of the stages before it."""

    def __init__(self, request: Request, recipe: Recipe, scratch: Path, environ: Mapping[str, str]) -> None:
        self.request, self.recipe, self.scratch = request, recipe, scratch
        self.environ = without_variables(environ)  # they are for the real run
        lightest = possible_splits(recipe.config, _RANKS)[0]
        small = batch_size.with_split(recipe, lightest, "derived: the least memory").config
        self.values, self.notes = smaller(small)
        self.processor: ProcessorMixin | None = None
        self.encoder: TextEncoder | None = None
        self.first: ResolvedRun | None = None

    def model(self) -> str:
        """Make the small model and its tokenizer."""
        architecture, seed = self.recipe.config.architecture, self.recipe.config.randomness.seed
        assert architecture is not None, "refused before"
        model, folder = self.recipe.with_template_text().config.model, self.scratch / "model"
        if self.recipe.config.reads_images:
            vision_model = stand_ins.make_vision_model(model, architecture, folder, seed)
            small, num_parameters, self.processor, is_own = vision_model
            stand_in = "a small LLaVA stands in for the model"
        else:
            tokenizer, is_own = stand_ins.tokenizer_of(model)
            self.encoder = TextEncoder(tokenizer)
            small, num_parameters = stand_ins.make_model(architecture, tokenizer, folder, seed)
            stand_in = "a stand-in for its tokenizer, which is not in the cache"
            if self.recipe.config.objective.taught_by:  # of other random weights
                teacher = self.scratch / "teacher"
                of_teacher = self.recipe.config.teacher_architecture or architecture
                stand_ins.make_model(of_teacher, tokenizer, teacher, seed + 1)
                self.values["objective"] |= {"teacher": str(teacher), "teacher_revision": None}
        self.values["model"] |= {"path": str(folder), "revision": None, "trust_remote_code": False, "vision": None}
        self.values["architecture"] = small.model_dump()
        if count := self.values["train_cfg"]["trainable_layers"]:
            self.values["train_cfg"]["trainable_layers"] = min(count, small.num_hidden_layers)
        own_part = "its own tokenizer" if self.processor is None else "its own processor of images"
        origin = own_part if is_own else stand_in
        summary = (
            f"{small.model_type} of {small.num_hidden_layers} layers, {num_parameters / 1e6:.1f}M parameters; {origin}"
        )
        return "; ".join((summary, *self.notes))

    def data(self) -> str:
        """Prepare the first rows, as the ranks do."""
        objective, summaries = self.recipe.config.objective.type, []
        for key in LOADERS:
            if self.values[key]:
                block = self.values[key]["dataset"]
                has_images = self.processor is not None
                absent = [
                    name for rows in (block["mixture"] or [block]) for name in _stood_in(rows, objective, has_images)
                ]
                described = Dataset.model_validate(block)
                if self.processor is not None:
                    self.encoder = ImageEncoder.of(self.processor, described)
                assert self.encoder is not None, "the stage of the model made it"
                dataset, summary = stand_ins.prepared(described, self.encoder, objective)
                self.values[key]["dataset"] = dataset.model_dump()
                summaries += [f"{summary} (stand-ins for {', '.join(absent)}, not in the cache)" if absent else summary]
        return summaries[0]

    def train(self) -> str:
        """Train two steps, with a checkpoint after each."""
        self.first = self._plan("run")
        preflight.check(self.first)
        losses = self._run(self.first)
        ranks = f"{_RANKS} ranks, {self.first.level}, {self.first.precision.dtype}"
        return f"{ranks}: losses {', '.join(f'{losses[step]:.4f}' for step in sorted(losses))}"

    def resume(self) -> str:
        """Resume from the first checkpoint, and check that the second step has the same loss."""
        assert self.first is not None
        again = self._run(self._plan("resumed", self.first.run_path / "checkpoints" / "checkpoint-1"))
        before = _losses(RunDirectory(self.first.run_path))[_STEPS]
        apart = abs(again[_STEPS] - before) / max(abs(before), 1e-30)
        self._same(apart, f"after checkpoint-1 the loss of step {_STEPS} is {again[_STEPS]}, not {before}")
        return f"from checkpoint-1: step {_STEPS} has {_alike(apart)} loss"

    def export(self) -> str:
        """Reload the result, and compare it with the resumed run's result and with the last checkpoint."""
        assert self.first is not None
        run_dir, scores = RunDirectory(self.first.run_path), self.recipe.config.objective.facts.scores
        folders = {"the resumed run's result": self.scratch / "resumed" / "final"}
        if not self.values["train_cfg"]["trainable_layers"]:  # such a checkpoint holds only the trained layers
            folders["checkpoint-2"] = run_dir.checkpoints / f"checkpoint-{_STEPS}"
        worst = 0.0
        for name, folder in folders.items():
            encoder = self.encoder if self.processor else None
            apart = stand_ins.difference(run_dir.final, folder, scores=scores, encoder=encoder)
            self._same(apart, f"the reloaded result differs from {name} by {apart:.1%}")
            worst = max(worst, apart)
        readers = "transformers and peft" if self.values["adapter"] else "transformers"
        return f"the result reloads in {readers} with {_alike(worst)} outputs"

    def _same(self, apart: float, problem: str) -> None:
        assert self.first is not None
        if not apart <= _TOLERANCE[self.first.precision.dtype]:  # NaN is not
            raise TunerError(problem)

    def _plan(self, name: str, resume: Path | None = None) -> ResolvedRun:
        request = self.request._replace(
            flags=LaunchFlags(nproc_per_node=_RANKS, nnodes=1),
            work_dir=self.scratch / name,
            resume=str(resume) if resume else None,
            ignore_fit=True,
        )
        small = replace(self.recipe, config=RecipeConfig.model_validate(self.values))
        this_machine, now = hardware.detect(self.environ), datetime.now().astimezone()
        return resolve_run(request, self.environ, this_machine, now, recipe=small)

    def _run(self, plan: ResolvedRun) -> dict[int, float]:
        """Run a resolved run to its end and return the loss of each step."""
        run_dir = creation.create(plan.run_path, render.files(plan), resume=False)
        if code := supervise.run_ranks(plan, run_dir, shows_rank_0=False):
            raise _Failed(f"exit code {code}; the ranks' logs are in {run_dir.ranks}", code)
        return _losses(run_dir)


def smaller(config: RecipeConfig) -> tuple[JsonObject, list[str]]:
    """Return the recipe's values for two steps on a CPU, and notes on values that had to change."""
    values, notes = config.model_dump(), []
    optim = values["optim_wrapper"]
    if optim["dtype"] != "fp32":
        notes += ["bf16 for fp16"] if optim["dtype"] == "fp16" else []
        optim["dtype"] = "bf16"
    optimizer = config.optim_wrapper.optimizer
    if optimizer.facts.library == "bitsandbytes" or optimizer.facts.on_cpu != "always":
        notes.append(f"AdamW for {optimizer.type}")
        optim["optimizer"]["type"] = "AdamW"
    if (attention := values["model"]["attn_implementation"]) not in _ON_A_CPU:
        notes.append(f"sdpa for {attention}")
        values["model"]["attn_implementation"] = None
    values["model"]["use_liger_kernel"] = False
    optim["accumulative_counts"] = min(optim["accumulative_counts"], _MAX_BATCH)
    if values["adapter"] and values["adapter"]["path"]:
        notes.append("a new adapter like the trained one")
        values["adapter"]["path"] = None
    if values["train_cfg"]["activation_offloading"]:
        notes.append("activations stay where they are")
    values["train_cfg"] |= {
        "activation_offloading": False,
        "sequence_parallel_size": min(values["train_cfg"]["sequence_parallel_size"], _RANKS),
        "autotp_size": min(values["train_cfg"]["autotp_size"], _RANKS),
        "global_batch_size": None,
        "max_steps": _STEPS,
        "val_interval": None,
        "early_stopping_patience": None,
    }
    values["checkpoint"] |= {"interval": 1, "max_keep_ckpts": _STEPS, "save_best": None, **NOT_PUSHED}
    values["log"] |= OF_A_TRIAL
    for key in LOADERS:
        if loader := values[key]:
            # The completions of a prompt are of one step.
            loader["batch_size"] = max(min(loader["batch_size"], _MAX_BATCH), config.objective.samples_a_row)
            rows = loader["dataset"]
            max_rows = _MAX_ROWS[LOADERS[0]] if rows["val_split"] else _MAX_ROWS[key]  # both use the same rows
            rows["max_rows"] = min(rows["max_rows"] or max_rows, max_rows)
            rows["val_split"] = rows["val_split"] and max(rows["val_split"], _LEAST_SPLIT)
    return values, notes


def _stood_in(rows: JsonObject, objective: str, has_images: bool) -> list[str]:
    """Replace rows that are not on this machine by stand-ins; return the name of the replaced rows."""
    row_values = {key: value for key, value in rows.items() if key in Rows.model_fields}
    other = stand_ins.stand_in(Rows.model_validate(row_values), objective, has_images=has_images)
    if other is None:
        return []
    name = str(rows["path"])
    rows |= other
    return [name]


def _losses(run_dir: RunDirectory) -> dict[int, float]:
    lines = (line for line in metrics.every_line(run_dir) if "loss" in line)
    return {line["step"]: float(line["loss"]) for line in lines}  # one that is not finite is a text there


def _alike(apart: float) -> str:
    return "the same" if apart == 0 else f"within {apart:.1e} the same"
