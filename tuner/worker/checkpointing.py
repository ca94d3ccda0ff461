"""What a run saves: checkpoints during training, and the final model.

For a checkpoint, room on the disk is checked first; then every rank writes its part; then the manifest makes it valid.
During the next steps a thread of each rank computes the hashes of its part, and that of rank 0 puts the parts together
and writes the manifest. The trainer and DeepSpeed write the files; this module decides where they go, which weights are
left out, and which checkpoints are kept.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import convert_bytes
from deepspeed.runtime.engine import DeepSpeedEngine
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from tuner.data.text_encoder import TextEncoder
from tuner.errors import DiskError, Key, Option
from tuner.files import is_disk_error, make_folder, remedy
from tuner.hub.upload import Target, Upload
from tuner.models import adapters
from tuner.progress import shown
from tuner.runs import causes, checkpoints, metrics, rank_files
from tuner.runs.directory import RunDirectory
from tuner.runs.records import ManifestFacts
from tuner.worker import compat_checkpoints, compat_expert_parallel, compat_tensor_parallel
from tuner.worker.generation import stop_where_answers_end
from tuner.worker.process import warn
from tuner.worker.trainer_types import BuiltTrainer

SEEN_LIMIT_S = 300.0
"""How long rank 0 waits to see what other ranks have written, beyond the time that their disks may take. Caches of NFS
show it after 60 s at most."""
_SEEN_AT_THE_END_S, _SAY_S = 10.0, 10.0
UPLOAD_LIMIT_S = 600.0
"""The longest that the end of training waits for the last upload."""
_FIX = f"Free space and resume with {Option('resume', 'auto')}, or keep fewer: {Key('checkpoint.max_keep_ckpts', 1)}."


class CheckpointSaver(TrainerCallback):  # type: ignore[misc]
    """Lets the trainer write a checkpoint into a folder of its own, and makes it valid."""

    def __init__(
        self,
        trainer: BuiltTrainer,
        run_dir: RunDirectory,
        facts_of_step: Callable[[int], ManifestFacts],
        keep: int,
        *,
        keeps_best: bool = False,
        on_begin: Callable[[int], object] = lambda _: None,
        on_valid: Callable[[Path, float], None] = lambda *_: None,
    ) -> None:
        """Set the hooks of the trainer, which writes into its rank's folder in `checkpoints.unfinished`.

        Args:
            facts_of_step: Returns the facts for the manifest of a step; called on rank 0.
            on_begin: Called with the step of each save, on every rank, before anything is written.
            on_valid: Called on rank 0 with each valid checkpoint and the seconds since its save began.
        """
        self.trainer, self.facts, self.keep, self.keeps_best = trainer, facts_of_step, keep, keeps_best
        self.run_dir, self.home, self._on_begin, self._on_valid = run_dir, run_dir.checkpoints, on_begin, on_valid
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._sealing: Future[None] | None = None
        self._written_s = self._said_s = 0.0
        """When this rank's part was written, and when it was last said that the checkpoint waits for others."""
        self._deadline_s = 0.0
        """Until when rank 0 waits to see the others' parts; infinite until its own is on the disk."""
        trainer.write_checkpoint = self.save
        trainer.add_callback(self)
        self._last_bytes = 0
        self._has_frozen = not all(weight.requires_grad for weight in trainer.model.parameters())
        self._no_model_file = self._has_frozen and not isinstance(trainer.model, PeftModel)
        if self._has_frozen:
            trainer.model.register_load_state_dict_post_hook(compat_checkpoints.expect_no_frozen)
        if self._no_model_file:
            # from_pretrained would load a file with only the trained weights, and fill the others with random numbers.
            trainer.saves_model = False
        elif not isinstance(trainer.model, PeftModel):
            _save_tied_weights_once(trainer)
        if dist.get_rank() == 0:
            checkpoints.clear_unfinished(self.home)

    def save(self, write: Callable[[], None]) -> None:
        """Write one checkpoint and remove older ones; every rank takes part. After `wait` the checkpoint is valid.

        Raises:
            DiskError: a rank has no room for it, or the checkpoint before did not become valid. Older checkpoints are
                unchanged, and nothing of this one is left.
        """
        self._on_begin(self.trainer.state.global_step)
        self.wait()
        began_s = time.monotonic()
        engine, step = self.trainer.model_wrapped, self.trainer.state.global_step
        needed = self._make_room(engine, step)
        if self._has_frozen:
            compat_checkpoints.leave_out_frozen(engine)
        name = f"checkpoint-{step} ({convert_bytes(needed)})"
        with undo_on_disk_error(self.home, name):
            # DeepSpeed logs that it cannot make its folder, and fails over the file that it writes there.
            make_folder(rank_files.home_of(checkpoints.unfinished(self.home), dist.get_rank()) / f"checkpoint-{step}")
            write()
            dist.barrier()
        self._deadline_s, self._written_s = math.inf, time.monotonic()
        self._said_s = self._written_s
        if dist.get_rank() == 0:
            best = best_step(self.trainer.state) if self.keeps_best else None
            self._sealing = self._thread.submit(self._seal, step, self.facts(step), best, name, began_s)
        else:
            self._sealing = self._thread.submit(self._declare, step, name)

    def save_if_missing(self, write: Callable[[], None]) -> None:
        """Save the last step unless its checkpoint is there; `write` calls `save`. Errors as `save`."""
        self.wait()
        missing = [not (self.home / f"checkpoint-{self.trainer.state.global_step}" / checkpoints.MANIFEST).is_file()]
        dist.broadcast_object_list(missing)
        if missing[0]:
            write()

    def _seal(self, step: int, manifest_facts: ManifestFacts, best: int | None, name: str, began_s: float) -> None:
        try:
            with undo_on_disk_error(self.home, name), _told_if_slow(f"Checkpoint {step}") as tick:
                num_ranks, recipe = dist.get_world_size(), self.run_dir.recipe
                self._last_bytes = checkpoints.commit(
                    self.home, step, manifest_facts, recipe, num_ranks, self._announce_wait, tick
                )
                checkpoints.prune(self.home, self.keep, step, best)
        except FileNotFoundError:
            if (checkpoints.unfinished(self.home) / f"checkpoint-{step}").is_dir():
                raise
            warn(self.run_dir, f"checkpoint-{step} was removed before it was whole.")
            return
        if self.run_dir.universal.is_dir():  # a newer checkpoint replaces it
            shutil.rmtree(self.run_dir.universal)
        self._on_valid(self.home / f"checkpoint-{step}", time.monotonic() - began_s)

    def _declare(self, step: int, name: str) -> None:
        unfinished, folder, rank = checkpoints.unfinished(self.home), f"checkpoint-{step}", dist.get_rank()
        try:
            with undo_on_disk_error(self.home, name), _told_if_slow(f"Rank {rank} of {folder}") as tick:
                rank_files.declare(unfinished, folder, rank, tick)
        except FileNotFoundError:
            if (rank_files.home_of(unfinished, rank) / folder).is_dir():
                raise
            # It was removed: rank 0 says so.

    def _announce_wait(self, problem: str) -> bool:
        """Say from time to time what a checkpoint waits for; return whether it may wait longer."""
        now_s = time.monotonic()
        if self._deadline_s == math.inf:  # rank 0's part is on the disk now; another's may take twice as long
            self._deadline_s = now_s + (now_s - self._written_s) + SEEN_LIMIT_S
        if now_s - self._said_s > _SAY_S:
            self._said_s = now_s
            print(f"A checkpoint waits to be whole: {problem}.", flush=True)
        return now_s < self._deadline_s

    def wait(self) -> None:
        """Return when the last checkpoint is valid, on rank 0; on others, when the rank's part is on the disk.

        Raises:
            DiskError: as `save`, or rank 0 does not see the part of another rank.
        """
        if self._sealing:
            with shown("waiting until the last checkpoint is on the disk"):
                self._sealing.result()

    def on_step_end(self, *_: object, **__: object) -> None:
        # A full disk ends the run now, not when the next save is due.
        if self._sealing and self._sealing.done():
            self.wait()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Wait at the end of the block until the last checkpoint is valid on all ranks, also if the block fails."""
        try:
            yield
        except BaseException:
            # The other ranks may have ended.
            self._deadline_s = min(self._deadline_s, time.monotonic() + _SEEN_AT_THE_END_S)
            with suppress(Exception):  # the first error is the cause
                self.wait()
            raise
        self.wait()
        dist.barrier()

    def _make_room(self, engine: DeepSpeedEngine, step: int) -> int:
        """Return about how many bytes a checkpoint needs; all ranks raise if the file system has no room for it."""
        problem: list[str | None] = [None]
        num_bytes = torch.tensor(_num_bytes(engine, self._no_model_file), device=engine.device)
        dist.all_reduce(num_bytes)
        if dist.get_rank() == 0:
            if not self.home.is_dir():
                warn(self.run_dir, f"{self.home} was removed while the run trained; it is made again.")
                make_folder(self.home)
            checkpoints.clear_unfinished(self.home)
            needed, free = max(int(num_bytes), self._last_bytes), shutil.disk_usage(self.home).free
            if free < needed:
                problem = [f"checkpoint-{step} needs {convert_bytes(needed)}, and {convert_bytes(free)} are free"]
        dist.broadcast_object_list(problem)
        if problem[0]:
            raise DiskError(problem[0], where=self.home, fix=_FIX)
        return int(num_bytes)


@contextmanager
def _told_if_slow(name: str) -> Iterator[Callable[[int], None]]:
    """Print every ten seconds of the block how much of a checkpoint is on the disk; the block calls with more bytes."""
    over, began_s, num_bytes = threading.Event(), time.monotonic(), [0]

    def tell() -> None:
        while not over.wait(_SAY_S):
            so_far = f"{time.monotonic() - began_s:.0f} s, {convert_bytes(sum(num_bytes))} so far"
            print(f"{name} is on its way to the disk: {so_far}.", flush=True)

    telling = threading.Thread(target=tell, daemon=True, name="save-progress")
    telling.start()
    try:
        yield num_bytes.append
    finally:
        over.set()
        telling.join()


def _num_bytes(engine: DeepSpeedEngine, no_model_file: bool) -> int:
    """Return the bytes of a checkpoint that this rank will write, without some small files.

    Measured on DeepSpeed 0.19.8 and transformers 5.23: the weights in the trainer's file and, below stage 3, in
    DeepSpeed's; then the optimizer's states and the fp32 weights that it keeps, in parts from stage 1 on.
    """
    stage, leads = engine.zero_optimization_stage(), dist.get_rank() == 0
    weights, total = list(engine.module.parameters()), 0
    if leads:
        num_copies = (not no_model_file) + (stage < 3)
        saved = [weight for weight in weights if weight.requires_grad]
        num_bytes = (compat_tensor_parallel.num_elements(weight) * weight.element_size() for weight in saved)
        total = num_copies * sum(num_bytes)
    if stage or leads:
        weight_ids = {id(weight) for weight in weights}
        for weight, state in engine.basic_optimizer.state.items():
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            total += sum(tensor.nbytes for tensor in (tensors if id(weight) in weight_ids else (weight, *tensors)))
    return total


def validations(state: TrainerState) -> list[tuple[int, float]]:
    """Return the steps validated so far, each with its loss, without the validation before the first step."""
    return [
        (entry["step"], entry["eval_loss"]) for entry in state.log_history if "eval_loss" in entry and entry["step"]
    ]


def best_step(state: TrainerState) -> int | None:
    """Return the step of the lowest validation loss so far, the earliest if equal; None before any validation."""
    lowest = metrics.lowest(validations(state))
    return lowest and lowest[0]


@contextmanager
def undo_on_disk_error(home: Path, name: str) -> Iterator[None]:
    """Turn the errors of libraries on a full disk into a `DiskError`, and remove what they have written of `name`."""
    try:
        yield
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        checkpoints.clear_unfinished(home)
        cause = error.__cause__ if isinstance(error, DiskError) else error
        other = remedy(cause, home) if isinstance(cause, OSError) else None
        free = "" if other else f"; {convert_bytes(shutil.disk_usage(home).free)} are free without it"
        raise DiskError(f"{name} could not be written: {reason}{free}", where=home, fix=other or _FIX) from error


def _reason(error: Exception) -> str | None:
    """Return what an error says about a disk; None if it is about something else."""
    if isinstance(error, DiskError):
        return error.what
    if isinstance(error, OSError):
        return error.strerror if is_disk_error(error) else None
    found_causes = causes.classify(str(error))  # torch's text names positions in its file, not the disk
    return found_causes[0].says if found_causes and found_causes[0].name == DiskError.code else None


class CheckpointUploads:
    """Uploads checkpoints to the hub while training goes on: one at a time, each in a process of its own.

    A checkpoint that is saved during an upload is not uploaded: a later one, or the result, is newer. A failed upload
    is a warning of the run.
    """

    def __init__(self, run_dir: RunDirectory, target: Target) -> None:
        self._run_dir, self._target = run_dir, target
        self._upload: Upload | None = None

    def push(self, checkpoint: Path) -> None:
        if self._upload and not self._upload.has_ended:
            return
        self._report()
        self._upload = Upload(self._run_dir, checkpoint, checkpoint.name, self._target)

    def finish(self, tick: Callable[[], None], is_asked_to_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait for the last upload, or stop it if asked: two at once would change the repository under each other."""
        if self._upload and not self._upload.has_ended:
            print(f"Waiting for the upload of {self._upload.name}; at most {UPLOAD_LIMIT_S / 60:g} min.", flush=True)
            self._upload.wait(UPLOAD_LIMIT_S, tick, is_asked_to_stop)
        self._report()

    def stop(self) -> None:
        """End an upload that is going on: the run has failed, or was stopped."""
        if self._upload:
            self._upload.stop("the run ended before.")
        self._report()

    def _report(self) -> None:
        if self._upload and self._upload.has_ended:
            if problem := self._upload.problem:
                warn(self._run_dir, problem)
            self._upload = None


def save_final_model(trainer: BuiltTrainer, encoder: TextEncoder, folder: Path) -> None:
    """Write weights (or adapter), the encoder's files, and generation config; every rank takes part."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    state = _gathered(trainer.deepspeed, model)
    if dist.get_rank() == 0:
        if not isinstance(model, PeftModel) and any(isinstance(module, LoraLayer) for module in model.modules()):
            state = adapters.merged(model, model.state_dict() if state is None else state)
        # Not Trainer.save_model: it adds training_args.bin, a pickle, to files that a user will publish.
        # PEFT would save embeddings with an adapter or with added rows up to three times.
        once = {"save_embedding_layers": False} if isinstance(model, PeftModel) else {}
        model.save_pretrained(folder, state_dict=state, **once)
        encoder.save(folder)
        if generation := getattr(model, "generation_config", None):  # a reward model has no generation config
            stop_where_answers_end(generation, encoder)
            generation.save_pretrained(folder)
    dist.barrier()


def _gathered(engine: DeepSpeedEngine, model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """Return the whole weights of ZeRO-3, split layers or divided experts on rank 0; None if every rank has them."""
    is_adapter, splits = isinstance(model, PeftModel), engine.autotp_size() > 1
    if engine.has_moe_layers:
        return compat_expert_parallel.whole_weights(engine)
    if engine.zero_optimization_stage() < 3 and not splits:
        return None
    whole_weights = compat_tensor_parallel.whole_weights if splits else compat_checkpoints.whole_weights
    state = whole_weights(engine, trained_alone=is_adapter)
    return state if is_adapter else _without_tied(model, state)


def _save_tied_weights_once(trainer: BuiltTrainer) -> None:
    """Leave further names of tied weights out of the weights that the Trainer saves in a checkpoint."""
    whole_weights = trainer.accelerator.get_state_dict

    def without_tied(engine: DeepSpeedEngine) -> dict[str, torch.Tensor] | None:
        weights: dict[str, torch.Tensor] | None = whole_weights(engine)
        return weights and _without_tied(trainer.model, weights)

    trainer.accelerator.get_state_dict = without_tied


def _without_tied(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights that DeepSpeed has copied or gathered, with each tied one once: each of its names is a tensor."""
    return {name: weight for name, weight in state.items() if name not in model.all_tied_weights_keys}
