"""One rank's training, from the files of the run directory to the saved result: read it from top to bottom.

    prepare_rank   read the run's files, join the other ranks, turn rows into tokens
    build_rank     load the model, build TRL's trainer on DeepSpeed, add the callbacks
    train          take the steps, from the checkpoint if the run is resumed
    finish         save the result, and report what the run has learned

Each function takes the object that the one before it returned. Values come from recipe.json, deepspeed.json and
run.json. The rank itself adds the model's path on this node (`models.load.pretrained_path`) and the prepared data
(`data.prepare`), and takes whole logits where TRL's head, in tiles, would give others (`callbacks.CheckHead`).
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from transformers import TrainerCallback, TrainingArguments

from tuner.data.prepared import Prepared
from tuner.errors import MachineError, Option, Stopped, UsageError
from tuner.hub.upload import Target
from tuner.machine.topology import Rank
from tuner.models import adapters, compat_experts
from tuner.models.load import load_model, load_reference, pretrained_path
from tuner.recipes.schema import RecipeConfig, four_bit_experts
from tuner.runs import beats, checkpoints, ledger, metrics, promises
from tuner.runs.beats import Phase
from tuner.runs.directory import RunDirectory
from tuner.runs.records import ManifestFacts, RunRecord, RunStatus
from tuner.runs.time_limits import TimeLimits
from tuner.runs.verdict import Trained, judge
from tuner.worker import agreement, compat, compat_tensor_parallel, compat_update, experts, resume, speed, trainer_setup
from tuner.worker.answer_metrics import AnswersValidationPrompts
from tuner.worker.callbacks import (
    CheckHead,
    CheckLoraLearns,
    CheckWeightsMoved,
    HeartbeatCallback,
    ValidateAtStart,
    ValidationCallback,
    WatchRewards,
    own_callback,
)
from tuner.worker.checkpointing import (
    CheckpointSaver,
    CheckpointUploads,
    best_step,
    save_final_model,
    undo_on_disk_error,
)
from tuner.worker.consensus import Interrupted, RankConsensus, set_random_states
from tuner.worker.encoders import encoder_of
from tuner.worker.guard import Guard
from tuner.worker.pace import Pace
from tuner.worker.process import bind_cores, late_ranks_named, serve_store, warn
from tuner.worker.rank_data import RankRows, prepare_rows
from tuner.worker.run_files import RunFiles
from tuner.worker.samples import show_samples
from tuner.worker.step_log import KeepMeasurements, LogsSteps, MetricsCallback, ProgressBar, Tracker, peak_bytes
from tuner.worker.trainer_types import BuiltTrainer

_COMPARING_S = 180.0
"""The limit of the comparison after a failure: its beginning starts the GPUs and connects the ranks, and seven times
256 MiB may go over a slow network: 35 s at 1 Gbit/s."""
_SLOW_ON_CPU = 3.0
"""How many times the median is slow: cores are shared with other programs, and a warning is for ill machines."""


@dataclass(frozen=True)
class PreparedRank:
    """One rank with its rows: the result of `prepare_rank`.

    Attributes:
        at_the_end: Holds what is to be closed when training ends.
        started_s: When this rank began, by `time.monotonic`.
        model_path: The model's folder on this node.
        checkpoint: The folder that the trainer resumes from; None in a new run.
    """

    files: RunFiles
    rank: Rank
    guard: Guard
    device: torch.device
    at_the_end: contextlib.ExitStack
    started_s: float
    rows: RankRows
    arguments: TrainingArguments
    model_path: str
    checkpoint: Path | None
    users_callbacks: tuple[TrainerCallback, ...]

    @property
    def config(self) -> RecipeConfig:
        return self.files.config

    @property
    def leads(self) -> bool:
        return self.rank.rank == 0


@dataclass(frozen=True)
class BuiltRank:
    """A rank that is ready to train: the result of `build_rank`. `train` returns it again after the last step."""

    prepared: PreparedRank
    trainer: BuiltTrainer
    saver: CheckpointSaver
    consensus: RankConsensus
    weights_check: CheckWeightsMoved
    uploads: CheckpointUploads | None


def run_rank(run_dir: RunDirectory, rank: Rank, guard: Guard) -> None:
    """Train, save the result to `run_dir.final`, and show what it learned.

    Raises:
        UsageError: another number of ranks has been started than the run's batch is split over.
        TunerError: data, model or machine do not fit the recipe, or no weight has changed.
        NotANumber: a loss, a gradient or a weight is NaN or infinite.
        Stopped: a signal asked for it; a checkpoint of the last step is saved.
    """
    with contextlib.ExitStack() as at_the_end:
        finish(train(build_rank(prepare_rank(run_dir, rank, guard, at_the_end))))


# prepare


def prepare_rank(run_dir: RunDirectory, rank: Rank, guard: Guard, at_the_end: contextlib.ExitStack) -> PreparedRank:
    """Read the run's files, join the other ranks, and turn rows into tokens. Errors as `run_rank`."""
    started_s = time.monotonic()
    compat.check_names()
    compat.print_no_memory()
    files = RunFiles.read(run_dir)
    config = files.config
    # A new shape of a batch may compile the model again in any step.
    guard.watch(TimeLimits(config.train_cfg.hang_timeout, learns_steps=not config.train_cfg.torch_compile))
    users_callbacks = tuple(map(own_callback, config.train_cfg.callbacks))
    _refuse_other_world(rank, files.record)
    checkpoint = resume.converted(run_dir, files.resume_point, rank)
    guard.heart.beat("waiting for the other ranks", Phase.WAITING)
    with late_ranks_named(run_dir, rank):
        device = _join(rank, config)
    guard.heart.enter(Phase.STARTUP)
    if rank.world_size > 1:
        agreement.require(agreement.environment(run_dir, needs_bitsandbytes=files.record.needs_bitsandbytes))
        if (names := agreement.differing_variables()) and rank.rank == 0:
            warn(run_dir, f"Nodes differ in {', '.join(names)}.")
    if rank.world_size > 1 and files.record.follows_failure:
        _compare_ranks(run_dir, guard, device)
    # First: it may make the package's own model, which ZeRO-3's arguments would shard.
    model_path = pretrained_path(config.model)
    arguments = trainer_setup.arguments_of(files, device)
    rows = prepare_rows(files, rank, guard.heart, at_the_end, encoder_of(config, model_path, run_dir.day))
    if rank.world_size > 1:  # a rank alone asks no hub for what it would compare
        _require_same_inputs(config, model_path, rows)
    if files.record.bind_cores:  # not earlier: one rank prepares the data with all cores
        bind_cores(rank.local_rank, rank.ranks_here)
    if isinstance(rows.train, Prepared):
        resume.check_data(files.resume_point, rows.train)
    return PreparedRank(
        files=files,
        rank=rank,
        guard=guard,
        device=device,
        at_the_end=at_the_end,
        started_s=started_s,
        rows=rows,
        arguments=arguments,
        model_path=model_path,
        checkpoint=checkpoint,
        users_callbacks=users_callbacks,
    )


def _refuse_other_world(rank: Rank, record: RunRecord) -> None:
    # Each node multiplies its own --nproc-per-node by --nnodes, and no node sees the command of another.
    if rank.world_size != record.world_size:
        problem = f"{rank.world_size} ranks were started, and node 0 has planned {record.world_size}"
        fix = f"Give every node the same number: {Option('nproc_per_node', 'N')}, and as many GPUs."
        raise UsageError(problem, where=Option("nproc_per_node"), fix=fix)


def _compare_ranks(run_dir: RunDirectory, guard: Guard, device: torch.device) -> None:
    """After a failure, measure what each rank computes and all reduce, and warn of what is slow, with its machine.

    A rank that does not answer ends all, with its machine's name.

    Raises:
        MachineError: a rank computes wrong numbers.
    """
    times = _SLOW_ON_CPU if device.type == "cpu" else speed.SLOW
    if guard.rank.rank == 0:
        print(f"After a failure, the ranks compare a matrix product and all-reduces: {_COMPARING_S:.0f} s at most.")
    with guard.limited(_COMPARING_S, "the comparison of the ranks") as begin:
        of_all = speed.measured(device, guard.rank, begin)
    for host, text, fix, is_wrong in speed.slow(of_all, times):
        if is_wrong:
            raise MachineError(text, where=host, fix=fix)
        if guard.rank.rank == 0:
            warn(run_dir, f"{host}: {text}. {fix}")
    get_accelerator().empty_cache()


def _require_same_inputs(config: RecipeConfig, model_path: str, rows: RankRows) -> None:
    inputs = {**agreement.rows(rows), **agreement.model_files(model_path, config.model.revision)}
    inputs |= agreement.own_code(config.objective)
    if (teacher := config.objective.taught_by) and teacher.path:
        inputs |= agreement.model_files(teacher.path, teacher.revision, "teacher")
    if config.adapter and config.adapter.path:
        inputs |= agreement.model_files(config.adapter.path, None, agreement.ADAPTER)
    agreement.require(inputs)


def _join(rank: Rank, config: RecipeConfig) -> torch.device:
    serve_store()
    patience = compat.wait_for_ever()
    transformers.set_seed(config.randomness.seed)
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(rank.local_rank)
        deepspeed.init_distributed(dist_backend=accelerator.communication_backend_name(), timeout=patience)
        return torch.device(accelerator.device_name(), rank.local_rank)
    # On a CPU accelerate opens no group before ZeRO-3's zero.Init, which then counts one rank: so it is opened here.
    compat.build_no_collective()
    deepspeed.init_distributed(dist_backend="gloo", timeout=patience)
    return torch.device("cpu")


# build


def build_rank(prepared: PreparedRank) -> BuiltRank:
    """Load the model, build TRL's trainer on DeepSpeed, and add the callbacks."""
    files, config, rows, guard = prepared.files, prepared.config, prepared.rows, prepared.guard
    guard.heart.beat("loading the model")
    models = _load_models(prepared)
    guard.heart.beat("setting up the training")
    compat_update.spare_waits(files.zero)
    if files.zero_stage == 3:
        compat.renew_releases()
    trainer = trainer_setup.trainer(files, prepared.arguments, models, rows)
    uploads = _uploads(prepared)
    saver = _saver(prepared, trainer, uploads)
    consensus = RankConsensus(trainer, guard, rows.encoder)
    consensus.interrupts = config.train_cfg.torch_compile != "deepcompile"  # which cannot validate after a resume
    if config.log.generate:
        trainer.measure_answers = AnswersValidationPrompts(config, rows.encoder, files.run_dir, consensus).measure
    weights_check = CheckWeightsMoved(trainer, config.objective.facts)
    callbacks: list[TrainerCallback] = [consensus, weights_check, *_callbacks(prepared)]
    callbacks.append(compat.PrepareEngine(trainer, files.zero))
    if prepared.rank.world_size > 1:
        callbacks.append(Pace(trainer, files.run_dir))
    if prepared.leads:
        callbacks.append(KeepMeasurements(trainer, files.run_dir, files.zero))
    if rows.stream:
        callbacks.append(rows.stream)
    for callback in (*callbacks, *_before_step_1(files, trainer, models), *prepared.users_callbacks):
        trainer.add_callback(callback)
    trainer.add_callback(resume.EndIfNothingIsLeft())
    if files.resume_point:
        resume.LoadCheckpoint(trainer, files.resume_point, config.randomness.seed)  # the trainer calls it
    return BuiltRank(prepared, trainer, saver, consensus, weights_check, uploads)


def _load_models(prepared: PreparedRank) -> trainer_setup.Models:
    files, config, vocabulary = prepared.files, prepared.config, prepared.rows.encoder.vocabulary
    of_both = (config, prepared.model_path, trainer_setup.dtype(files.zero), str(prepared.device))
    shards = files.zero_stage == 3
    models = (
        load_model(*of_both, shards=shards, vocabulary=vocabulary),
        load_reference(*of_both, shards=shards, vocabulary=vocabulary),
    )
    if compat_experts.packed_in(models[0]):  # the plan knows it of models that it can count
        four_bit_experts.refuse_disks(files.zero["zero_optimization"])
    if prepared.leads and (layers := adapters.left_out(models[0], config)):
        print(f"No LoRA is on {len(layers)} layers that no gradient reaches, such as {layers[0]}.", flush=True)
    heart = prepared.guard.heart
    tick = torch.compiler.disable(heart.tick) if config.train_cfg.torch_compile else heart.tick
    for model in filter(None, models):
        experts.let_ranks_choose(model, files.zero_stage)
        model.register_forward_pre_hook(lambda *_: tick())  # trainers compute before step 1 without a callback
    return models


def _uploads(prepared: PreparedRank) -> CheckpointUploads | None:
    checkpoint = prepared.config.checkpoint
    if not checkpoint.push or not checkpoint.repository or not prepared.leads:
        return None
    uploads = CheckpointUploads(prepared.files.run_dir, Target(checkpoint.repository, checkpoint.private))
    prepared.at_the_end.callback(uploads.stop)
    return uploads


def _saver(prepared: PreparedRank, trainer: BuiltTrainer, uploads: CheckpointUploads | None) -> CheckpointSaver:
    """Return what saves checkpoints, and let the guard wait for it."""
    checkpoint, rows, guard = prepared.config.checkpoint, prepared.rows, prepared.guard
    state = prepared.files.record.state

    def facts_of_checkpoint(step: int) -> ManifestFacts:
        if rows.stream:
            return ManifestFacts(state=state, data=rows.stream.data_at(step))
        assert isinstance(rows.train, Prepared)
        return ManifestFacts(state=state, data=resume.data_of(rows.train))

    def on_valid(folder: Path, seconds: float) -> None:
        guard.heart.saved(seconds)
        if uploads:
            uploads.push(folder)

    saver = CheckpointSaver(
        trainer,
        prepared.files.run_dir,
        facts_of_checkpoint,
        checkpoint.max_keep_ckpts,
        keeps_best=bool(checkpoint.save_best),
        on_begin=guard.heart.save_begins,
        on_valid=on_valid,
    )
    guard.before_leaving = saver.wait
    return saver


def _callbacks(prepared: PreparedRank) -> tuple[TrainerCallback, ...]:
    """Return the callbacks that need no trainer."""
    run_dir, config, guard = prepared.files.run_dir, prepared.config, prepared.guard
    bar = ProgressBar(guard.terminal) if prepared.leads else None
    of_rank_0 = [Tracker(name, run_dir) for name in config.log.trackers] if prepared.leads else []
    watch = [WatchRewards(run_dir)] if config.objective.facts.generates else []
    metrics_callback = MetricsCallback(run_dir, prepared.files.record, bar)
    logs_steps, validation = LogsSteps(config.log.interval), ValidationCallback(config)
    return logs_steps, validation, metrics_callback, HeartbeatCallback(guard), *watch, *of_rank_0


def _before_step_1(files: RunFiles, trainer: BuiltTrainer, models: trainer_setup.Models) -> list[TrainerCallback]:
    """Return the callbacks that compute with the model before the first step."""
    config, callbacks = files.config, list[TrainerCallback]()
    cfg = config.train_cfg
    if cfg.loss == "chunked" and config.objective.facts.can_chunk_logits and not cfg.torch_compile:
        whole_logits = partial(trainer_setup.use_whole_logits, trainer, models, config)
        callbacks.append(CheckHead(trainer, whole_logits, files.run_dir))
    # Not with DeepCompile's passes: they take the first graphs that they see for the graphs of training.
    if cfg.torch_compile != "deepcompile":
        if config.adapter or config.model.vision_lora:
            callbacks.append(CheckLoraLearns(trainer, files.run_dir))
        callbacks.append(ValidateAtStart(trainer, files.record.batch.global_batch))
    return callbacks


# train


def train(built: BuiltRank) -> BuiltRank:
    """Take the steps. Errors as `run_rank`."""
    trainer, checkpoint = built.trainer, built.prepared.checkpoint
    with built.saver.waited_for(), resume.code_refused(checkpoint):
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except Interrupted:
            _save_last_step(built)
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        except resume.NothingLeft:
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    if step := built.consensus.stopped_at:
        raise Stopped(f"at step {step} on request; its checkpoint is saved")
    built.weights_check.check()
    return built


def _save_last_step(built: BuiltRank) -> None:
    """Save the step before the generation, or the validation, that all ranks have left; as if it had ended there."""
    trainer, consensus, guard = built.trainer, built.consensus, built.prepared.guard
    guard.step = consensus.stopped_at = trainer.state.global_step
    guard.heart.beat(f"saving step {guard.step}", Phase.SAVES)
    if consensus.random_after_step:
        set_random_states(consensus.random_after_step)
    else:  # no step was taken since the resume
        trainer.set_random_states_of(str(built.prepared.checkpoint))
    built.saver.save_if_missing(trainer.save_last_step)


# finish


def finish(built: BuiltRank) -> None:
    """Save the result; rank 0 reports what the run has learned."""
    prepared, trainer = built.prepared, built.trainer
    run_dir, record, config, guard = prepared.files.run_dir, prepared.files.record, prepared.config, prepared.guard
    guard.heart.beat("saving the result", Phase.FINISH)
    is_adapter, keeps_best = config.adapter is not None, bool(config.checkpoint.save_best)
    best = resume.load_best(trainer, run_dir, record, is_adapter=is_adapter) if keeps_best else None
    if record.saves_result:
        with undo_on_disk_error(run_dir.checkpoints, "the result"):
            unfinished = checkpoints.unfinished(run_dir.checkpoints) / run_dir.final.name
            save_final_model(trainer, prepared.rows.encoder, unfinished)
            if prepared.leads:
                checkpoints.put_in_place(run_dir.checkpoints, run_dir.final)
    guard.heart.beat("at the end")
    if built.uploads:
        built.uploads.finish(guard.heart.tick, lambda: guard.stop_requested)
    if prepared.leads:
        _report(built, time.monotonic() - prepared.started_s, best)
        if not prepared.rank.supervised:
            guard.tell_end(0)


def _report(built: BuiltRank, seconds: float, best: int | None) -> None:
    """Write status.json, and print the verdict, samples of answers, and where the result is.

    The result has the weights of the step `best`; None: the last one.
    """
    prepared, trainer = built.prepared, built.trainer
    run_dir, config, state = prepared.files.run_dir, prepared.config, trainer.state
    step, max_steps, first_step = state.global_step, state.max_steps, prepared.files.record.resume_step or 0
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    num_trained = _num_parameters(weight for weight in trainer.model.parameters() if weight.requires_grad)
    trained = Trained(
        result_step=best or step,
        planned_steps=max_steps,
        epochs=None if config.train_cfg.max_steps else config.train_cfg.max_epochs,
        learning_rate=config.optim_wrapper.optimizer.lr,
        num_trained=num_trained,
        first_step=first_step,
    )
    # The file has a validation after the last checkpoint; the log has what a run in another directory logged before.
    verdict = judge([*state.log_history, *metrics.every_line(run_dir)], trained)
    status = RunStatus(
        state="done",
        exit_code=0,
        seconds=round(seconds, 1),
        step=step,
        max_steps=max_steps,
        result_step=best or step,
        loss=losses[-1] if losses else None,
        num_trained_weights=num_trained,
        verdict=verdict,
    )
    if config.train_cfg.torch_compile:
        status = status.model_copy(update={"num_compiled_graphs": compat.num_compiled_graphs()})
    run_dir.write_status(status)
    print(_taken(first_step, step, max_steps, seconds), flush=True)
    if verdict:
        print(f"Verdict: {verdict}", flush=True)
    if status.num_compiled_graphs == 0:
        warn(run_dir, "torch.compile compiled nothing in this model: the steps ran uncompiled.")
    if step < max_steps:
        reason = "the validation loss no longer improved"
        print(f"Early stopping ended the run before step {max_steps}: {reason}.", flush=True)
    if best:
        print(f"The result has the weights of step {best}, with the lowest validation loss.", flush=True)
    elif config.checkpoint.save_best and (lowest_step := best_step(state)) not in (None, step):
        gone = f"the validation loss was the lowest at step {lowest_step}, but its checkpoint is missing"
        warn(run_dir, f"{gone}: the result has the weights of step {step}.")
    num_parameters = _num_parameters(trainer.model.parameters())
    show_samples(config, prepared.rows.encoder, run_dir, prepared.guard, run_s=seconds, num_parameters=num_parameters)
    # Saving and samples may need the most; the other ranks have told theirs.
    most_bytes = max(peak_bytes(), metrics.peak_bytes(run_dir), beats.peak_bytes(run_dir))
    run_dir.write_status(status.model_copy(update={"peak_bytes": most_bytes}))
    if line := promises.line(ledger.read_ledger(run_dir).promises):
        print(line, flush=True)
    print(
        f"\nResult:  {run_dir.final}\nReport:  {run_dir.report}\nMetrics: {run_dir.metrics}\nRecipe:  {run_dir.recipe}"
    )
    print(f"To change the recipe and train it again: tuner train {shlex.quote(str(run_dir.recipe))} --set lr=...")
    use = "eval" if config.objective.facts.scores else "chat"
    print(f"Next: tuner {use} {shlex.quote(str(run_dir.path))}", flush=True)


def _taken(first_step: int, step: int, max_steps: int, seconds: float) -> str:
    if not first_step:
        return f"Trained {step} steps in {seconds:.0f} s."
    if step == first_step:
        return f"No step was left to train: the checkpoint is of step {step}, and the run ends at step {max_steps}."
    return f"Trained {step - first_step} more steps, up to step {step}, in {seconds:.0f} s."


def _num_parameters(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return the number of weights, also if ZeRO-3 has sharded them or ranks have split the layers."""
    return sum(map(compat_tensor_parallel.num_elements, parameters))
