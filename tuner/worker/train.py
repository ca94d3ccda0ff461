"""One rank's training, from the files of the run directory to the saved result: read it from top to bottom.

    prepare   read the run's files, join the other ranks, turn rows into tokens
    build     load the model, build TRL's trainer on DeepSpeed, add the callbacks
    train     take the steps, from the checkpoint if the run is resumed
    finish    save the result, say what was learned

Each function takes the object that the one before it returned. No value is decided here: all come from recipe.json,
deepspeed.json and run.json. The rank itself adds the model's path on this node (`models.load.source`) and the prepared
data (`data.prepare`).
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from transformers import TrainerCallback, TrainingArguments

from tuner.data.encoder import Encoder
from tuner.data.prepared import Prepared
from tuner.data.stream import Stream
from tuner.data.text_encoder import TextEncoder
from tuner.errors import Stopped
from tuner.hub.upload import Target
from tuner.machine.topology import Rank
from tuner.models.load import load_model, load_reference, source, tokenizer_of
from tuner.recipes.schema import RecipeConfig, resolved_recipe
from tuner.runs import checkpoints, metrics
from tuner.runs.directory import RunDirectory, resume_command
from tuner.runs.resume_point import ResumePoint
from tuner.runs.verdict import Trained, judge
from tuner.worker import compat, experts, resume, trainer_setup
from tuner.worker.answer_metrics import AnswersValidationPrompts
from tuner.worker.callbacks import (
    CheckHead,
    CheckWeightsMoved,
    HeartbeatCallback,
    ValidateFirst,
    ValidationCallback,
    own_callback,
)
from tuner.worker.checkpointing import (
    CheckpointSaver,
    CheckpointUploads,
    best_step,
    disk_errors,
    save_final_model,
)
from tuner.worker.compat import CheckDeepSpeedConfig, ResetStage0Optimizer
from tuner.worker.consensus import RankConsensus
from tuner.worker.guard import Guard
from tuner.worker.process import bind_cores, serve_store, warn
from tuner.worker.rank_data import NodeStream, prepare_rows
from tuner.worker.samples import show_samples
from tuner.worker.step_log import KeepMeasurements, LogsSteps, MetricsCallback, ProgressBar, trackers


@dataclass(frozen=True)
class Inputs:
    """One rank with its data: what `prepare` returns."""

    started_s: float
    run: RunDirectory
    rank: Rank
    guard: Guard
    config: RecipeConfig
    facts: dict[str, Any]
    """run.json."""
    zero: dict[str, Any]
    """deepspeed.json."""
    point: ResumePoint | None
    checkpoint: Path | None
    """The folder that the trainer resumes from; None in a new run."""
    arguments: TrainingArguments
    device: torch.device
    model_path: str
    encoder: Encoder
    train_data: Prepared | Stream
    val_data: Prepared | None
    stream: NodeStream | None
    users_callbacks: tuple[TrainerCallback, ...]
    at_the_end: contextlib.ExitStack

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage of deepspeed.json."""
        return int(self.zero.get("zero_optimization", {}).get("stage", 0))


@dataclass(frozen=True)
class Training:
    """A rank that is ready to train: what `build` returns. `train` returns it again, after the last step."""

    inputs: Inputs
    trainer: Any
    saver: CheckpointSaver
    consensus: RankConsensus
    moves: CheckWeightsMoved
    pushes: CheckpointUploads | None


def run_rank(run: RunDirectory, rank: Rank, guard: Guard) -> None:
    """Train, save the result to `run.final`, and show what it learned.

    Raises:
        TunerError: data, model or machine are not what the recipe needs, or no weight has changed.
        NotANumber: a loss, a gradient or a weight is NaN or infinite.
        Stopped: a signal asked for it; a checkpoint of this very step was written.
    """
    with contextlib.ExitStack() as at_the_end:
        finish(train(build(prepare(run, rank, guard, at_the_end))))


def prepare(run: RunDirectory, rank: Rank, guard: Guard, at_the_end: contextlib.ExitStack) -> Inputs:
    """Read the run's files, join the other ranks, and turn rows into tokens."""
    started_s = time.monotonic()
    compat.check_names()
    config = resolved_recipe(run.read_json(run.resolved_recipe), run.resolved_recipe)
    guard.watch(config.train_cfg.hang_timeout)
    users_callbacks = tuple(map(own_callback, config.train_cfg.callbacks))
    facts, zero = run.read_json(run.run), run.read_json(run.deepspeed)
    point = ResumePoint.of(facts)
    checkpoint = resume.converted(run, point, rank)
    device = _join(rank, config)
    path = source(config.model)  # it may make the package's own model, which ZeRO-3's arguments would shard
    arguments = trainer_setup.arguments(config, zero, run, device)
    encoder = TextEncoder(tokenizer_of(config, path))
    streams = config.train_dataloader.dataset.streaming
    stream = at_the_end.enter_context(NodeStream(config, run, rank)) if streams else None
    train_data, val_data = prepare_rows(
        config, encoder, rank, run, guard, stream and partial(stream.open, encoder, point)
    )
    if facts["bind_cores"]:  # not before: one rank prepares the data with all cores
        bind_cores(rank.local_rank, facts["world_size"] // facts["num_nodes"])
    if isinstance(train_data, Prepared):
        resume.check_data(point, train_data)
    return Inputs(
        started_s=started_s,
        run=run,
        rank=rank,
        guard=guard,
        config=config,
        facts=facts,
        zero=zero,
        point=point,
        checkpoint=checkpoint,
        arguments=arguments,
        device=device,
        model_path=path,
        encoder=encoder,
        train_data=train_data,
        val_data=val_data,
        stream=stream,
        users_callbacks=users_callbacks,
        at_the_end=at_the_end,
    )


def build(inputs: Inputs) -> Training:
    """Load the model, build TRL's trainer on DeepSpeed, and add the callbacks."""
    run, guard, config, facts, zero = inputs.run, inputs.guard, inputs.config, inputs.facts, inputs.zero
    guard.heart.beat("loading the model")
    models = _load_models(inputs)
    guard.heart.beat("setting up the training")
    data = inputs.train_data, inputs.val_data
    trainer = trainer_setup.trainer(config, inputs.arguments, models, inputs.encoder, data, run)
    if config.log.generate:
        trainer.measure_answers = AnswersValidationPrompts(config, inputs.encoder, run).measure

    def facts_of_checkpoint(step: int) -> dict[str, Any]:
        if inputs.stream:
            return {**facts["state"], "data": inputs.stream.facts(step)}
        assert isinstance(inputs.train_data, Prepared)
        return {**facts["state"], "data": resume.data_of(inputs.train_data)}

    pushes = None
    if config.checkpoint.push and config.checkpoint.repository and inputs.rank.rank == 0:
        pushes = CheckpointUploads(run, Target(config.checkpoint.repository, config.checkpoint.private))
    if pushes:
        inputs.at_the_end.callback(pushes.stop)

    def on_valid(checkpoint: Path, seconds: float) -> None:
        guard.heart.saved(seconds)
        if pushes:
            pushes.push(checkpoint)

    keep, keeps_best = config.checkpoint.max_keep_ckpts, bool(config.checkpoint.save_best)
    saver = CheckpointSaver(trainer, run, facts_of_checkpoint, keep, keeps_best=keeps_best, on_valid=on_valid)
    guard.before_leaving = saver.wait
    consensus, moves = RankConsensus(trainer, guard, inputs.encoder), CheckWeightsMoved(trainer)
    mended: tuple[TrainerCallback, ...] = CheckDeepSpeedConfig(trainer, zero), ResetStage0Optimizer(trainer)
    if inputs.rank.rank == 0:
        mended = (*mended, KeepMeasurements(trainer, run, zero))
    followed = (inputs.stream,) if inputs.stream else ()
    own = _callbacks(config, run, facts, guard, inputs.rank)
    first = _before_step_1(inputs, trainer, models)
    for callback in (consensus, moves, *own, *mended, *followed, *first, *inputs.users_callbacks):
        trainer.add_callback(callback)
    if inputs.point:
        resume.LoadCheckpoint(trainer, inputs.point, config.randomness.seed)
    return Training(inputs, trainer, saver, consensus, moves, pushes)


def train(training: Training) -> Training:
    """Take the steps.

    Raises:
        NotANumber: a loss, a gradient or a weight is NaN or infinite.
        Stopped: a signal asked for it.
        TunerError: no weight has changed.
    """
    inputs = training.inputs
    checkpoint = inputs.checkpoint
    with training.saver.waited_for(), resume.data_alone(checkpoint), contextlib.suppress(resume.NothingLeft):
        training.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if step := training.consensus.stopped_at:
        message = f"at step {step} on request; its checkpoint is saved"
        raise Stopped(message, fix=f"Resume: {resume_command(inputs.run.path)}")
    training.moves.check()
    return training


def finish(training: Training) -> None:
    """Save the result, and let rank 0 say what the run has learned."""
    inputs, trainer = training.inputs, training.trainer
    run, rank, guard, config, facts = inputs.run, inputs.rank, inputs.guard, inputs.config, inputs.facts
    guard.heart.beat("saving the result")
    is_adapter, keeps_best = config.adapter is not None, bool(config.checkpoint.save_best)
    best = resume.load_best(trainer, run, facts, is_adapter=is_adapter) if keeps_best else None
    if facts["saves_result"]:
        with disk_errors(run.checkpoints, "the result"):
            save_final_model(trainer, inputs.encoder, checkpoints.unfinished(run.checkpoints) / run.final.name)
            if rank.rank == 0:
                checkpoints.put_in_place(run.checkpoints, run.final)
    guard.heart.beat("at the end")
    if training.pushes:
        training.pushes.finish(guard.heart.tick)
    if rank.rank == 0:
        _finish(run, config, trainer, guard, time.monotonic() - inputs.started_s, best)
        if not rank.supervised:
            guard.ended(0)


def _load_models(inputs: Inputs) -> tuple[Any, Any | None]:
    """Return the model to train, and the frozen copy that it is compared with if the objective needs one."""
    config, heart = inputs.config, inputs.guard.heart
    where = (config, inputs.model_path, trainer_setup.dtype(inputs.zero), str(inputs.device))
    shards = inputs.zero_stage == 3
    models = (
        load_model(*where, shards=shards, vocabulary=inputs.encoder.vocabulary),
        load_reference(*where, shards=shards, vocabulary=inputs.encoder.vocabulary),
    )
    tick = torch.compiler.disable(heart.tick) if config.train_cfg.torch_compile else heart.tick
    for model in filter(None, models):
        experts.let_ranks_choose(model, inputs.zero_stage)
        model.register_forward_pre_hook(lambda *_: tick())  # what trainers compute before step 1 has no callback
    return models


def _before_step_1(inputs: Inputs, trainer: Any, models: tuple[Any, Any | None]) -> list[TrainerCallback]:
    """Return the callbacks that compute with the model before the first step."""
    config, callbacks = inputs.config, list[TrainerCallback]()
    if (
        config.train_cfg.loss == "chunked"
        and config.objective.facts.chooses_loss
        and not config.train_cfg.torch_compile
    ):
        callbacks.append(
            CheckHead(trainer, partial(trainer_setup.use_whole_logits, trainer, models, config), inputs.run)
        )
    # Not with DeepCompile's passes: they take the first graphs that they see for those of training.
    if config.train_cfg.torch_compile != "deepcompile":
        callbacks.append(ValidateFirst(trainer, inputs.facts["batch"]["global_batch"]))
    return callbacks


def _join(rank: Rank, config: RecipeConfig) -> torch.device:
    """Join the process group and return this rank's device."""
    serve_store()
    patience = compat.wait_for_ever()
    transformers.set_seed(config.randomness.seed)
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(rank.local_rank)
        deepspeed.init_distributed(dist_backend=accelerator.communication_backend_name(), timeout=patience)
        return torch.device(accelerator.device_name(), rank.local_rank)
    # accelerate opens no group before ZeRO-3's zero.Init on a CPU, which then counts one rank: so it is opened here.
    compat.build_no_collective()
    deepspeed.init_distributed(dist_backend="gloo", timeout=patience)
    return torch.device("cpu")


def _callbacks(
    config: RecipeConfig, run: RunDirectory, facts: dict[str, Any], guard: Guard, rank: Rank
) -> tuple[TrainerCallback, ...]:
    metrics = MetricsCallback(run, facts, ProgressBar(guard.terminal) if rank.rank == 0 else None)
    followers = trackers(config.log.trackers, run) if rank.rank == 0 else []
    return LogsSteps(config.log.interval), ValidationCallback(config), metrics, HeartbeatCallback(guard), *followers


def _num_parameters(parameters: Iterable[Any]) -> int:
    return sum(getattr(one, "ds_numel", one.numel()) for one in parameters)


def _finish(
    run: RunDirectory, config: RecipeConfig, trainer: Any, guard: Guard, seconds: float, best: int | None
) -> None:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    step = trainer.state.global_step
    facts = {"step": step, "max_steps": trainer.state.max_steps, "result_step": best or step}
    facts["loss"] = losses[-1] if losses else None
    if config.train_cfg.torch_compile:
        facts["num_compiled_graphs"] = compat.num_compiled_graphs()
    facts["num_trained_weights"] = num_trained = _num_parameters(
        one for one in trainer.model.parameters() if one.requires_grad
    )
    trained = Trained(
        result_step=facts["result_step"],
        planned_steps=facts["max_steps"],
        epochs=None if config.train_cfg.max_steps else config.train_cfg.max_epochs,
        learning_rate=config.optim_wrapper.optimizer.lr,
        num_trained=num_trained,
    )
    # The file has a validation after the last checkpoint, the log what another directory's run logged before it.
    verdict = judge([*trainer.state.log_history, *metrics.every_line(run)], trained)
    facts["verdict"] = verdict.to_json() if verdict else None
    run.write_status("done", exit_code=0, seconds=round(seconds, 1), **facts)
    print(f"Trained {step} steps in {seconds:.0f} s.", flush=True)
    if verdict:
        print(f"Verdict: {verdict}", flush=True)
    if facts.get("num_compiled_graphs") == 0:
        warn(run, "torch.compile compiled nothing in this model: the steps ran uncompiled.")
    if step < trainer.state.max_steps:
        print(
            (
                f"Early stopping ended the run before step {trainer.state.max_steps}: the "
                "validation loss no longer improved."
            ),
            flush=True,
        )
    if best:
        print(f"The result has the weights of step {best}, with the lowest validation loss.", flush=True)
    elif config.checkpoint.save_best and (wanted := best_step(trainer.state)) not in (None, step):
        gone = f"the validation loss was the lowest at step {wanted}, but its checkpoint is missing"
        warn(run, f"{gone}: the result has the weights of step {step}.")
    show_samples(config, run, guard, run_s=seconds, num_parameters=_num_parameters(trainer.model.parameters()))
    print(f"\nResult:  {run.final}\nReport:  {run.report}\nMetrics: {run.metrics}\nRecipe:  {run.recipe}")
    print(f"To change the recipe and train it again: tuner train {shlex.quote(str(run.recipe))} --set lr=...")
    use = "eval" if config.objective.facts.scores else "chat"
    print(f"Next: tuner {use} {shlex.quote(str(run.path))}", flush=True)
