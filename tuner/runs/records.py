"""What a run's files hold, as types: run.json, status.json, data.json, manifests, what ranks report.

Each file has a `version`; one without it is of version 1. A file of a later version is refused, because its keys may
mean something else. A key that this version does not know is kept when the file is written again.

This module reads and writes no file: `runs.directory` and `runs.checkpoints` do. It has no `from __future__ import
annotations`: pydantic would have to compile each of its annotations anew when a command starts.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer, model_validator
from pydantic.dataclasses import dataclass

from tuner.errors import RunDirectoryError, brief_repr
from tuner.files import JsonObject
from tuner.runs.verdict import Verdict

State = Literal["running", "done", "failed", "stopped"]


class Keys(BaseModel):
    """An object in a file: values of another type, NaN and infinity are errors, unknown keys are kept; immutable."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    def to_json(self) -> JsonObject:
        """Return the keys that were given, and those that the file had."""
        return self.model_dump(mode="json", exclude_unset=True)


class Versioned(Keys):
    """A whole file. When a key changes its meaning, its class gives `version` a higher default and reads earlier ones.

    Each class counts by itself: an earlier tuner still reads the files whose keys mean the same.
    """

    version: Annotated[int, Field(ge=1)] = 1

    @classmethod
    def of(cls, content: Mapping[str, object], file: Path) -> Self:
        """Return what a file holds.

        Raises:
            RunDirectoryError: a later version of tuner has written it, or a key is missing or has a wrong value.
        """
        version = content.get("version", 1)
        if cls.is_later(content):
            latest = cls.model_fields["version"].default
            problem = f"{file.name} has version {version}, and this version of tuner reads {latest}"
            fix = "Use the version of tuner that wrote it, or a later one."
            raise RunDirectoryError(problem, where=file.parent, fix=fix)
        try:
            return cls.model_validate({**content, "version": version})
        except ValidationError as error:
            problem = f"{file.name} is damaged: {_first_problem(error)}"
            raise RunDirectoryError(problem, where=file.parent, fix="Restore it: only tuner writes it.") from error

    @classmethod
    def is_later(cls, content: Mapping[str, object]) -> bool:
        """Return whether a later version of tuner has written it, whose keys may mean something else."""
        version = content.get("version", 1)
        return isinstance(version, int) and version > cls.model_fields["version"].default

    def to_json(self) -> JsonObject:
        return {"version": self.version, **super().to_json()}


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    key = ".".join(map(str, first["loc"])) or "the file"
    if first["type"] == "missing":
        return f"{key} is missing"
    return f"{key} = {brief_repr(first['input'])}: {first['msg']}"


class BatchSettings(Keys):
    """The batch as a recipe sets it; "auto" leaves a value to the machines."""

    micro_batch: int | str
    accumulation: int | str
    asked_global_batch: int | None = None

    @property
    def samples(self) -> int | None:
        """The samples of one rank and step; None if the machines decide."""
        micro, accumulation = self.micro_batch, self.accumulation
        return micro * accumulation if isinstance(micro, int) and isinstance(accumulation, int) else None


class CheckpointState(Keys):
    """What decides which runs can load a checkpoint; the run that saves it knows it before its start.

    Args:
        asked_batch: As the recipe sets it, before it was made to fit a checkpoint.
        batch: As it runs.
        deepspeed: The preset, or the name of the user's config.
        stage: ZeRO's.
        nvme: The optimizer's states are on a disk.
        nvme_weights_alone: The weights are on a disk, and the optimizer's states are not.
        tensor_parallel: The ranks that share each matrix of the layers.
        expert_parallel: The ranks that divide the experts of a layer among them.
        date: The day of the run's first start, which chat templates render.
    """

    world_size: int
    global_batch: int | None = None
    asked_batch: BatchSettings | None = None
    batch: BatchSettings | None = None
    deepspeed: str
    stage: int
    nvme: bool
    nvme_weights_alone: bool = False
    tensor_parallel: int = 1
    expert_parallel: int = 1
    dtype: str
    optimizer: str
    date: str | None = None


# run.json

_OF_HOSTS = (
    *("--hostfile", "--include", "--exclude", "--spare-nodes", "--nnodes"),
    *("--nproc-per-node", "--master-addr", "--master-port"),
)
HOSTFILE_FLAGS = (*_OF_HOSTS, "--ssh")
NODE_FLAGS = (*_OF_HOSTS, "--launcher", "--max-restarts")
"""The flags of `RunRecord.node_flags` that are shown. --ssh is not: it names a command, and the run may be anyone's."""


class LoadAs(StrEnum):
    """How a checkpoint is loaded."""

    SAVED = "saved"
    UNIVERSAL = "universal"
    """Its state is redistributed to another number of ranks."""
    WEIGHTS = "weights"
    """Its weights alone; the optimizer starts fresh."""


class Attempt(Keys):
    """An earlier attempt of the same start: how it ended, with which split it ran, and the step that it began after."""

    cause: str | None = None
    what: str | None = None
    rank: int | None = None
    step: int | None = None
    deepspeed: str
    micro_batch: int
    accumulation: int
    began: int = 0


class EndedAttempt(Keys):
    """What decides whether a run may start again after an attempt.

    Args:
        step: The step in which it ended; None: before the first.
        began: The step of the checkpoint that it resumed from; 0: it began anew.
        saved: The step of the newest checkpoint at its end.
        node: The node of Slurm on which it ended; None: not known.
    """

    cause: str | None
    step: int | None
    began: int
    saved: int
    node: str | None = None


class BatchCounts(Keys):
    """The batch of all ranks, and the counts of rows, samples and optimizer steps; None: not known before the start."""

    micro_batch: int
    accumulation: int
    ranks: int
    global_batch: int
    rows: int | None = None
    rows_are: str = ""
    samples: int | None = None
    steps_per_epoch: int | None = None
    steps_per_epoch_is: str = ""
    steps: int | None = None
    steps_are: str = ""
    epochs: float | None = None
    max_steps: int | None = None
    steps_done: int = 0
    steps_left: int | None = None


class PrecisionRecord(Keys):
    dtype: str
    reason: str = ""


class Arithmetic(Keys):
    """The FLOPs of training on one token and the peak FLOP/s of the slowest GPU: a GPU's utilisation is their ratio."""

    flops_per_token: float
    peak_flops_per_gpu: float


OUTSIDE_TENSORS = ("context", "fragmentation", "vllm", "rewards")
"""Parts of the estimate that `torch.cuda.max_memory_allocated` does not count."""


class FitBytes(Keys):
    """The estimate of the memory that a GPU needs, by part."""

    gpu_bytes: dict[str, int]


class Planned(Keys):
    """What the plan promises of a run; None: it says nothing of it, as of memory and seconds on a CPU.

    Args:
        peak_bytes: The tensors of a GPU at the peak of a step.
        step_s: Seconds of a step with full rows.
        sending_s: The part of it in which ranks send, and nothing hides it.
        hours: Of the steps alone.
        checkpoint_bytes: One checkpoint, without the tokenizer.
        result_bytes: The weights of the result.
        num_checkpoints: How many the disk has at once, with the one that is being written.
        flops_per_token: Of training on one token.
    """

    peak_bytes: int | None = None
    step_s: float | None = None
    sending_s: float | None = None
    tokens_per_second: float | None = None
    hours: float | None = None
    checkpoint_bytes: int | None = None
    result_bytes: int | None = None
    num_checkpoints: int | None = None
    flops_per_token: float | None = None

    @property
    def disk_bytes(self) -> int | None:
        """The room that it needs on the disk."""
        if self.checkpoint_bytes is None or self.result_bytes is None or self.num_checkpoints is None:
            return None
        return self.checkpoint_bytes * self.num_checkpoints + self.result_bytes


class GpuFacts(Keys):
    name: str


class HardwareFacts(Keys):
    """The machine, as `machine.hardware` sees it."""

    gpus: list[GpuFacts] = []
    num_cpus: int | None = None


class RunRecord(Versioned):
    """run.json: what was decided before the start. What a rank cannot do without must be there.

    Args:
        name: The recipe's name.
        launch_id: Differs from that of earlier launches in the same directory.
        started: The time of the start.
        command: What was typed.
        argv: The command of the ranks.
        node_flags: Flags that start each node anew, besides its rank; none on one node that no hostfile has started,
            and where another launcher starts the ranks.
        next: The next command to type after a failure, by cause; "again" resumes the run without a change.
        attempts: Earlier attempts of this start.
        follows_failure: tuner restarts it after one: an attempt of this start, or an earlier srun of the job.
        seed: Of everything that is drawn at random.
        deepspeed: The preset, or the name of the user's config.
        precision: The compute type, and why.
        resume: The path of the checkpoint that it resumes from.
        resume_as: What it takes of that checkpoint: all as saved, all for another number of ranks, or the weights.
        resume_step: The step of that checkpoint.
        world_size: The number of ranks.
        num_nodes: The number of nodes.
        batch: The batch, and the counts of rows, samples and optimizer steps.
        state: What the manifests of its checkpoints say of it.
        bind_cores: Each rank keeps to cores of its own.
        saves_result: It writes `final/`; a trial of `tuner tune` does not.
        needs_bitsandbytes: Ranks import bitsandbytes.
        swaps_to: The folders on disks that its DeepSpeed config swaps to.
        arithmetic: The FLOPs of training on a token, and of a GPU: their ratio is the utilisation.
        fit: The estimate of a GPU's memory in bytes, by part.
        planned: What the plan promises, which the end compares with what was measured.
        warnings: What the plan warned of.
        hardware: The machine.
        versions: Of tuner, Python and the libraries.
        platform: The operating system.
        interpreter: The path of Python.
    """

    name: str = ""
    launch_id: str
    started: str = ""
    command: list[str] = []
    argv: list[str] = []
    node_flags: list[str] = []
    next: dict[str, str] = {}
    attempts: list[Attempt] = []
    follows_failure: bool = False
    seed: int | None = None
    deepspeed: str = ""
    precision: PrecisionRecord | None = None
    resume: str | None = None
    resume_as: Annotated[LoadAs | None, Field(strict=False)] = None
    resume_step: int | None = None
    world_size: int
    num_nodes: int = 1
    batch: BatchCounts
    state: CheckpointState
    bind_cores: bool = False
    saves_result: bool = True
    needs_bitsandbytes: bool = True
    swaps_to: list[str] = []
    arithmetic: Arithmetic | None = None
    fit: FitBytes | None = None
    planned: Planned | None = None
    warnings: list[str] = []
    hardware: HardwareFacts = HardwareFacts()
    versions: dict[str, str | None] = {}
    platform: str = ""
    interpreter: str = ""

    @property
    def names_nodes(self) -> bool:
        """Whether a command is typed on each node, with the rank of the node."""
        return any(flag.startswith("--nnodes=") for flag in self.node_flags) and not any(
            flag.startswith("--hostfile=") for flag in self.node_flags
        )

    def on_node(self, command: str, node_rank: int | None) -> str:
        """Return a command that starts the run again as one of its nodes has to type it.

        Args:
            command: Without the rank of a node.
        """
        return f"{command} --node-rank={node_rank or 0}" if self.names_nodes else command


# requeues.json


class Requeues(Versioned):
    """The attempts of a job of Slurm after which it put itself back into the queue; `restarts`: started srun again."""

    job: str
    attempts: list[EndedAttempt] = []
    restarts: list[EndedAttempt] = []


# status.json


class DiagnosisRecord(Keys):
    """The first cause of a failure, and what to type next."""

    cause: str
    what: str
    rank: int | None = None
    step: int | None = None
    next_command: str = ""


class Pushed(Keys):
    """The upload of the result: its address, or the problem."""

    repository: str
    address: str | None = None
    problem: str | None = None


class RunStatus(Versioned):
    """status.json: whether a run is at work, and how it ended.

    Args:
        state: What the run does, or how it ended.
        pid: The process that wrote the file.
        exit_code: Of the run.
        message: Why it failed or was stopped, and how to resume it.
        ended: When it ended, by the clock of the machine that wrote it; None: it runs, or was killed.
        signal: The signal that it was told to stop by.
        diagnosis: Of a failure: its first cause, and what to type next.
        seconds: The time that this attempt trained, from the start of its ranks.
        step: The optimizer step at the end.
        max_steps: The planned number of steps.
        result_step: The step whose weights the result has.
        loss: The last logged training loss.
        num_compiled_graphs: The graphs that torch.compile made.
        num_trained_weights: The number of weights that were trained.
        verdict: Whether it has learned.
        peak_bytes: The most memory that a rank held.
        pushed: The upload of the result: its address, or the problem.
    """

    state: State
    pid: int | None = None
    exit_code: int | None = None
    message: str | None = None
    ended: str | None = None
    signal: int | None = None
    diagnosis: DiagnosisRecord | None = None
    seconds: float | None = None
    step: int | None = None
    max_steps: int | None = None
    result_step: int | None = None
    loss: float | None = None
    num_compiled_graphs: int | None = None
    num_trained_weights: int | None = None
    verdict: Verdict | None = None
    peak_bytes: int | None = None
    pushed: Pushed | None = None


# data.json


COUNTED = ConfigDict(allow_inf_nan=False, defer_build=True)
"""Of a dataclass in a file: a strict one would refuse the object that it is there."""


@dataclass(frozen=True, config=COUNTED)
class Total:
    """How many samples share a reason, and the tokens that training does not see because of it."""

    what: str
    reason: str
    samples: int
    tokens: int

    def __str__(self) -> str:
        lost = f" ({self.tokens:,} tokens)" if self.tokens else ""
        return f"{self.samples:,} {self.what}: {self.reason}{lost}"


@dataclass(frozen=True, config=COUNTED)
class Unread:
    """A key, or turns, that nothing is made of, the owner, the number of rows that have it, and the first of them."""

    owner: str
    key: str
    rows: int
    first: str


@dataclass(config=COUNTED)
class DataCounts:
    """What became of the rows. `tokens` are those that are left; `trained_tokens` those of them that carry loss.

    `read` counts rows, `bad` those of them and of the unreadable ones that were left out; `kept`, `dropped`,
    `truncated` and `split` count samples: to kto a row with two answers is two. `packed_rows` are the rows of the
    result: as many as samples when not packing. `pack_length` are the tokens that packing fills a row to.
    """

    max_length: int
    packing: bool
    read: int = 0
    bad: int = 0
    kept: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    truncated_tokens: int = 0
    packed_rows: int = 0
    pack_length: int = 0


class SplitData(Keys):
    """What became of the rows of one split.

    Args:
        changes: How many samples are bad, dropped, truncated, split or changed, by reason.
        unread: The keys of rows that nothing is made of.
    """

    counts: DataCounts
    changes: list[Total]
    unread: list[Unread]


class RunData(Versioned):
    """data.json: what became of the rows of each split."""

    train: SplitData
    validation: SplitData | None = None

    @property
    def splits(self) -> dict[str, SplitData]:
        """Each split that the run has, by its name."""
        return {"train": self.train, **({"validation": self.validation} if self.validation else {})}


# ranks/N.json


class RankReport(Versioned):
    """ranks/N.json: how a rank ended badly.

    Args:
        message: The whole error.
        cause: The code of a TunerError, and `what` its message without the code.
        step: The optimizer step at work, from 1.
        origin: The rank where it began, if that is another rank.
    """

    rank: int
    exit_code: int
    message: str
    step: int | None = None
    cause: str | None = None
    what: str | None = None
    origin: int | None = None


# ranks/pace.json


class RankPace(Keys):
    """The mean time of one rank in a step, in seconds: what it does by itself, and what it waits for others."""

    rank: int
    host: str
    data_s: float
    computing_s: float
    waiting_s: float

    @property
    def own_s(self) -> float:
        return self.data_s + self.computing_s


class SlowRank(Keys):
    """A slow rank: its own time is `ratio` times the median of all ranks. `until_step` None: it still is slow."""

    rank: int
    host: str
    since_step: int
    until_step: int | None = None
    ratio: float
    part: Literal["data", "computing"]

    @property
    def line(self) -> str:
        """The same in words."""
        until = f" until step {self.until_step:,}" if self.until_step is not None else ""
        where = f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"
        return f"{where}, which takes {self.ratio:.1f} x the median since step {self.since_step:,}{until} ({self.part})"


class RanksPace(Versioned):
    """pace.json: the last comparison of all ranks, and the slow ones that were named in this attempt."""

    step: int
    ranks: list[RankPace]
    slow: list[SlowRank]


# manifest.json


class StreamData(Keys):
    """Where the block of the next row of a stream begins, and the files that it reads."""

    files: JsonObject
    start: dict[str, int]
    sha256: str | None = None


class TrainedData(Keys):
    """What identifies the data that a checkpoint was trained on: prepared rows, or a stream."""

    rows: int | None = None
    tokens: int | None = None
    sha256: str | None = None
    stream: StreamData | None = None


class ManifestFacts(Keys):
    """What a manifest says beside its files; the keys of `state` stand beside the others there.

    Args:
        step: The optimizer step of a checkpoint; an export has none.
        state: Of a checkpoint.
        of: Of a converted checkpoint: the hash of the manifest of the one that it was made of.
        objective: Of an export: what it was trained with.
        quantized: Of an export in fewer bits: what these cost.
    """

    step: int | None = None
    state: CheckpointState | None = None
    data: TrainedData | None = None
    of: str | None = None
    objective: str | None = None
    num_tensors: int | None = None
    tensors: dict[str, JsonObject] | None = None
    quantized: JsonObject | None = None

    @model_validator(mode="before")
    @classmethod
    def _gather_state(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "stage" not in values:
            return values
        state = {key: value for key, value in values.items() if key in CheckpointState.model_fields}
        return {**{key: value for key, value in values.items() if key not in state}, "state": state}

    @model_serializer(mode="wrap")
    def _spread_state(self, serialize: Callable[[Self], JsonObject]) -> JsonObject:
        values = serialize(self)
        return {**(values.pop("state", None) or {}), **values}


class ManifestFile(Keys):
    """A file of a checkpoint."""

    bytes: int
    xxh3_128: str


class RankFiles(Versioned):
    """What one rank has written of a checkpoint: the files by path, as its node sees them."""

    host: str
    files: dict[str, ManifestFile]


class Manifest(Versioned):
    """manifest.json: the files by path, and what is true of them together."""

    facts: ManifestFacts = ManifestFacts()
    files: dict[str, ManifestFile]
