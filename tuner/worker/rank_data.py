"""The rows of one rank: prepared once a node, or streamed from blocks that local rank 0 of the node has made.

`data` turns rows into tokens. A checkpoint of a streamed run says where the block of its next row begins.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from transformers import TrainerCallback, TrainerState, TrainingArguments

from tuner.data import blocks, copies, outcomes, step_count
from tuner.data.blocks import BlockStart, Maker
from tuner.data.pipeline import Pipeline
from tuner.data.prepare import describe, prepare, trusts_fastokens
from tuner.data.prepared import Prepared
from tuner.data.stream import Stream, StreamedRows
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, Option, Stopped
from tuner.files import JsonObject, make_folder
from tuner.machine.topology import Batch, Rank
from tuner.recipes.schema import PREFETCHED, RecipeConfig
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunData, StreamData, TrainedData
from tuner.runs.resume_point import ResumePoint
from tuner.worker.heartbeat import Heartbeat
from tuner.worker.process import warn
from tuner.worker.run_files import RunFiles


class NodeStream(TrainerCallback):  # type: ignore[misc]
    """The stream of the ranks of a node. Local rank 0 has the blocks made; leaving the `with` block removes them."""

    stream: Stream

    def __init__(self, files: RunFiles, rank: Rank) -> None:
        """Find the folder of the node's blocks; every rank takes part."""
        self.config, self.run_dir, self.point, self.rank = files.config, files.run_dir, files.resume_point, rank
        self.global_batch = files.record.batch.global_batch
        self.home = self.run_dir.stream / str(_leader(rank))
        self._maker: Maker | None = None
        self._files: JsonObject = {}
        self._reported = 0

    def open(self, encoder: TextEncoder, tick: Callable[[], None]) -> Stream:
        """Return the stream when its first rows are there; local rank 0 calls it before the other ranks.

        Raises:
            DataError: the rows cannot be streamed, or the checkpoint was trained on other rows.
            TunerError: as `Maker`.
        """
        config, point = self.config, self.point
        first = point.checkpoint.step * self.global_batch if point else 0
        assert config.train_cfg.max_steps, "the schema asks for it"
        num_rows = config.train_cfg.max_steps * self.global_batch
        sha256 = None
        if self.rank.local_rank == 0:
            sha256 = self._have_blocks_made(encoder, num_rows)
        if self._maker:
            self._maker.passed(first)
        rows = StreamedRows(self.home, num_rows, config.randomness.seed, config.objective.type)
        go_on = self._maker.go_on if self._maker else None
        self.stream = Stream(rows, first, go_on, is_over=lambda: bool(self.run_dir.failures()), tick=tick)
        if self._maker and self._maker.ready:
            self._reported = self._maker.ready[0].end
        if point and sha256 not in (None, self.stream.first.sha256):
            raise data_has_changed(point, "other rows or another order", "others")
        return self.stream

    def _have_blocks_made(self, encoder: TextEncoder, num_rows: int) -> str | None:
        """Start making blocks at the block of the next row, and return the hash of that block if it is known."""
        loader = self.config.train_dataloader
        pipeline = Pipeline(loader.dataset, self.config.objective.type)
        self._files = blocks.opened(pipeline)
        start, sha256 = _start(self.point, self._files) if self.point else (BlockStart(), None)
        shutil.rmtree(self.home, ignore_errors=True)  # blocks of an attempt that was killed
        make_folder(self.home)
        max_rows = blocks.ROWS if loader.dataset.streaming is True else int(loader.dataset.streaming)
        # A step ends when the dataloader has the first micro-batches of the next step, for all ranks.
        rounds = 2 + PREFETCHED * loader.num_workers
        ahead = self.global_batch * (1 + -(-rounds // self.config.split.accumulation))
        self._maker = Maker(pipeline, encoder, self.home, start, max_rows=max_rows, ahead=ahead, num_rows=num_rows)
        return sha256

    def data_at(self, step: int) -> TrainedData:
        """Return what the checkpoint of a step says of the stream; on rank 0."""
        assert self._maker
        start, sha256 = self._maker.at(step * self.global_batch)
        return TrainedData(stream=StreamData(files=self._files, start=start._asdict(), sha256=sha256))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if self._maker:
            self._maker.passed(state.global_step * self.global_batch)
            if self.rank.rank == 0:
                self.report_blocks()

    def report_blocks(self) -> None:
        """Print a summary of each new block in the first epoch, and report its changed rows; not of the first block."""
        for start, end, folder, _ in self._maker.ready if self._maker else ():
            if start.first >= self._reported and not start.epoch:
                block = Prepared.load(folder, self.config.objective.type)
                print(describe(block, f"train, from {start.first:,} on"), flush=True)
                self.run_dir.add_to_data_report({"split": "train", **line} for line in block.changed())
            self._reported = max(self._reported, end)

    def __enter__(self) -> NodeStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._maker:
            return
        self._maker.end()
        # After a failure other ranks may still read the blocks, and would fail too; the next start removes them.
        if kind is None or issubclass(kind, Stopped):
            shutil.rmtree(self.home, ignore_errors=True)
            with contextlib.suppress(OSError):  # it holds the blocks of another node
                self.run_dir.stream.rmdir()


def _leader(rank: Rank) -> int:
    """Return the rank that is local rank 0 on this node: launchers may place ranks on nodes in blocks or in turns."""
    this_host, everywhere = socket.gethostname(), [("", 0)] * rank.world_size
    dist.all_gather_object(everywhere, (this_host, rank.local_rank))
    return max(number for number in range(rank.rank + 1) if everywhere[number] == (this_host, 0))


def _start(point: ResumePoint, files: JsonObject) -> tuple[BlockStart, str | None]:
    """Return where the block of the next row begins, and its hash if the block was made before.

    Raises:
        DataError: the checkpoint was trained on other files.
    """
    data = point.checkpoint.facts.data
    if data is None or data.stream is None:
        raise data_has_changed(point, "a stream", "data that was prepared whole")
    if (saved := data.stream.files) != files:
        now, before = (f"{read['files']:,} files of {read['bytes']:,} bytes" for read in (files, saved))
        raise data_has_changed(point, now, before)
    return BlockStart(**data.stream.start), data.stream.sha256


def data_has_changed(point: ResumePoint, now: str, before: str) -> DataError:
    now = "other rows or another order" if now == before else now
    message = f"the data has changed: it now has {now}, and {point.path.name} was trained on {before}"
    fix = f"Restore the data, or start a new run without {Option('resume')}."
    return DataError(message, where="train_dataloader.dataset", fix=fix)


@dataclass(frozen=True)
class RankRows:
    """The rows of a rank, and the encoder that made them; `stream` has opened those that are read during training."""

    train: Prepared | Stream
    val: Prepared | None
    encoder: TextEncoder
    stream: NodeStream | None


def prepare_rows(
    files: RunFiles, rank: Rank, heart: Heartbeat, at_the_end: contextlib.ExitStack, encoder: TextEncoder
) -> RankRows:
    """Return the rows of a rank: local rank 0 prepares them, and the other ranks of the node then read its files."""
    config, run_dir = files.config, files.run_dir
    streams = config.train_dataloader.dataset.streaming
    stream = at_the_end.enter_context(NodeStream(files, rank)) if streams else None
    heart.beat("preparing the data")
    tick, val = heart.tick, config.val_dataloader
    prepared = partial(prepare, encoder=encoder, objective=config.objective.type, tick=tick)
    if rank.local_rank != 0:
        dist.barrier()
    trusted = trusts_fastokens(encoder)
    train_rows = partial(prepared, num_rows=files.record.batch.rows)
    train_data = stream.open(encoder, tick) if stream else train_rows(config.train_dataloader.dataset)
    val_data = prepared(val.dataset) if val else None
    if trusted and not trusts_fastokens(encoder) and not stream:
        # A row of the validation was encoded differently: the training rows may hold such tokens too.
        train_data = train_rows(config.train_dataloader.dataset)
    if rank.local_rank == 0:
        dist.barrier()
    if rank.rank == 0:
        first = train_data.first if isinstance(train_data, Stream) else train_data
        show_data({"train": first} | ({"validation": val_data} if val_data else {}), run_dir)
        leaks = val_data.in_training(train_data) if val_data and isinstance(train_data, Prepared) else 0
        of_leaks = [copies.leak_warning(leaks, val_data.counts.read)] if val_data and leaks else []
        warn_unless_planned((*first.hints, *of_leaks), run_dir)
        warn_of_few_steps(config, first, run_dir)
    return RankRows(train_data, val_data, encoder, stream)


def show_data(prepared: dict[str, Prepared], run_dir: RunDirectory) -> None:
    """Print a summary of the data, and write each changed or dropped sample to data_report.jsonl."""
    for name, result in prepared.items():
        print(describe(result, name), flush=True)
    if warning := outcomes.warning({name: result.data.changes for name, result in prepared.items()}):
        warn(run_dir, warning)
    if warning := outcomes.unread_warning({name: result.data.unread for name, result in prepared.items()}):
        warn(run_dir, warning)
    data = RunData(train=prepared["train"].data)
    if "validation" in prepared:
        data = data.model_copy(update={"validation": prepared["validation"].data})
    run_dir.write_data(
        data, ({"split": name, **line} for name, result in prepared.items() for line in result.changed())
    )


def warn_unless_planned(warnings: Iterable[str], run_dir: RunDirectory) -> None:
    """Print the warnings that the plan has not printed: it reads few rows, and no rows of the hub."""
    planned = run_dir.read_run().warnings
    for text in warnings:
        if not any(warning.startswith(text) for warning in planned):
            warn(run_dir, text)


def warn_of_few_steps(config: RecipeConfig, rows: Prepared | None, run_dir: RunDirectory) -> None:
    """Warn if the rows make too few optimizer steps to learn from, or fewer than the warm-up has.

    It is silent if the plan has said so of the rows that it counted.
    """
    if rows is None:
        return
    planned = run_dir.read_run().batch
    batch = Batch(planned.micro_batch, planned.accumulation, planned.ranks)
    counts, samples_a_row = rows.counts, config.objective.samples_a_row if config.objective.facts.generates else 1
    num_samples = counts.packed_rows * samples_a_row
    description = (
        f"{counts.kept:,} samples packed into {counts.packed_rows:,} rows of "
        f"{counts.pack_length or counts.max_length:,} tokens"
        if counts.packing
        else f"{num_samples:,} samples"
    )
    warnings = partial(
        step_count.warnings, config, batch, description=description, unpacked=counts.kept if counts.packing else None
    )
    for warning, planned_warning in zip(warnings(num_samples), warnings(planned.samples), strict=True):
        if warning and not planned_warning:
            warn(run_dir, f"{warning}.")
