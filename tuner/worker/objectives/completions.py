"""How TRL's trainers that generate completions keep the promises of all trainers.

    rows         PromptBatches: every prompt once an epoch; the last step takes prompts from the start of the epoch too
    completions  Sampled: which token comes next depends on the prompt, the completion and the seed, on any number of
                 ranks, and after a resume
    validation   one greedy completion of each prompt

TRL compares completions over all ranks, so each rank's part of a step may begin within the completions of a prompt.
Seen with TRL 1.16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from peft import PeftModel
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from tuner.data import templates
from tuner.data.text_encoder import TextEncoder
from tuner.files import append_line
from tuner.machine.libraries import replaced
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.long_context import tokens_per_sample
from tuner.rewards.built_in import text_of
from tuner.runs.directory import RunDirectory
from tuner.worker import compat
from tuner.worker.objectives import Training
from tuner.worker.trainers import TunerTrainer

_GREEDY = -1
"""The number of a completion that is not sampled."""
_LISTED = 8
"""Completions of a step that completions.jsonl lists, from the start of the batch of all ranks."""
_RESERVED = {"image", "images", "prompts", "completion", "completions", "completion_ids", "environment"}
"""Columns that TRL takes for something else."""
PROMPT_IDS, NUMBER = "tuner.prompt_ids", "tuner.number"
"""What tuner adds to a row; a column of the user's may be called `number`."""
ADDED = frozenset({PROMPT_IDS, NUMBER})


@dataclass(frozen=True)
class Numbered:
    """A prompt of an epoch: the row, and the number of the completion in the epoch."""

    row: int
    completion: int


class Prompts(Dataset):  # type: ignore[misc]
    """The prepared rows as TRL's trainers take them: `prompt`, the columns for rewards, and what tuner adds."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, numbered: Numbered) -> dict[str, Any]:
        row = self.rows[numbered.row]
        columns = {key: value for key, value in json.loads(row["row"]).items() if key not in _RESERVED}
        return {**columns, PROMPT_IDS: row["prompt_ids"], NUMBER: numbered.completion}


class PromptBatches(BatchSampler):  # type: ignore[misc]
    """The completions that this rank generates, batch by batch: each prompt of an epoch `generations` times.

    TRL takes the same batch again for each of the micro-batches that it is split into. A batch holds this rank's part
    of `steps` steps, one after another.
    """

    batch_size: int | None

    def __init__(
        self,
        num_rows: int,
        *,
        of_rank: int,
        rank: int,
        ranks: int,
        generations: int,
        repeats: int,
        seed: int,
        steps: int = 1,
    ) -> None:
        self.num_rows, self.of_rank, self.rank, self.generations = num_rows, of_rank, rank, generations
        self.of_all, self.steps, self.repeats = of_rank * ranks, steps, repeats
        self.seed, self.epoch = seed, 0
        self.prompts = steps * self.of_all // generations
        self.batch_size, self.sampler = None, self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.num_rows // self.prompts) * self.repeats

    def __iter__(self) -> Iterator[list[Numbered]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.num_rows, generator=generator).tolist()
        for start in range(0, self.num_rows, self.prompts):
            first = start * self.generations + self.rank * self.of_rank
            firsts = range(first, first + self.steps * self.of_all, self.of_all)
            numbers = [number for start in firsts for number in range(start, start + self.of_rank)]
            batch = [Numbered(order[number // self.generations % self.num_rows], number) for number in numbers]
            yield from [batch] * self.repeats


class Sampled(LogitsProcessor):  # type: ignore[misc]
    """Makes the greedy choice a sample: noise of each completion's own generator is added to its logits.

    The largest of logits plus Gumbel noise is a sample of their softmax (Gumbel 1954; Maddison et al. 2014).
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise_BV = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
        for row, generator in zip(noise_BV, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() - noise_BV.log()


def seed_of(seed: int, epoch: int, completion: int, turn: int = 0) -> int:
    """Return the seed of a completion: its own for each seed of the run, epoch and number in the epoch.

    Each turn after results of tools has another one.
    """
    first = (seed * 1_000_003 + epoch) * 1_000_003 + completion
    return (first + turn * 7_777_777_777_777) % 2**63


class GeneratingTrainer(TunerTrainer):
    """Mixed into a trainer of TRL that generates. It changes what `TunerTrainer` says of rows and of validation.

    The batch of a step is full, and TRL normalizes its loss over all ranks.
    """

    weighs_rows = False
    generates = True
    num_generations = 1
    """The completions of a prompt."""
    num_iterations = 1
    """The steps on each part of the completions that are generated at once; TRL sets it."""
    num_parts = 1
    """The steps that share the completions that are generated at once, each with a part of its own."""

    @property
    def steps_per_generation(self) -> int:
        return self.num_iterations * self.num_parts

    def __init__(self, *, completions_file: Path, **others: Any) -> None:
        super().__init__(**others)
        self.completions_file = completions_file
        """Where the main process lists completions."""

    # TRL's
    eos_token_ids: list[int]
    generation_kwargs: dict[str, Any]

    _numbers: Sequence[int] = ()
    _ids: Sequence[Sequence[int]] = ()
    _turn = 0
    """0: a completion begins; later it goes on after results of tools."""

    # -- rows

    def get_train_dataloader(self) -> DataLoaderShard:
        args = self.args
        batches = PromptBatches(
            len(self.train_dataset),
            of_rank=args.train_batch_size * args.gradient_accumulation_steps,
            rank=args.process_index,
            ranks=args.world_size,
            generations=self.num_generations,
            steps=self.num_parts,
            repeats=args.gradient_accumulation_steps * self.steps_per_generation,
            seed=args.seed,
        )
        self.prompt_batches = batches
        return DataLoaderShard(
            Prompts(self.train_dataset), batch_sampler=batches, collate_fn=_same, device=args.device, _drop_last=True
        )

    def get_batch_samples(self, iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return a step's batches of prompts. A step on earlier completions counts an equal part of their tokens."""
        self.batches_of_step = []
        return [batch for _, batch in zip(range(num_batches), iterator, strict=False)], None

    # -- completions

    def _generate_and_score_completions(self, inputs: Sequence[Mapping[str, Any]]) -> Any:
        """Return TRL's completions, and list some of them."""
        self._numbers = [row[NUMBER] for row in inputs]
        names = dict.fromkeys(key for row in inputs for key in row if key not in ADDED)
        with self.consensus.generating() if self.consensus else nullcontext():
            inputs = self.begun(inputs)
            self._ids = [row[PROMPT_IDS] for row in inputs]
            output = super()._generate_and_score_completions([{key: row.get(key) for key in names} for row in inputs])
        self.leave_together()
        metrics = compat.metrics_of(self, "train" if self.model.training else "eval")
        metrics["completion_length"].append(metrics["completions/mean_length"][-1])
        if self.model.training:
            num_tokens = sum(map(len, self._ids)) + int(output["completion_mask"].sum())
            self.num_tokens = num_tokens // self.num_parts
            self._list_completions()
        return output

    def begun(self, inputs: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the rows with the prompts that the model reads."""
        return inputs

    def complete(self, inputs: Sequence[Mapping[str, Any]]) -> Any:
        """Generate a completion of each prompt; TRL's metrics then say what they are like."""
        return self._generate_and_score_completions(inputs)

    def _tokenize_prompts(self, prompts: Sequence[Any]) -> Any:
        return [list(ids) for ids in self._ids], None, {}

    def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
        with self._seeded():
            completions = super()._generate_single_turn(*args, **options)
        self.leave_together()  # their rewards may take long
        return completions

    def written_numbers(self) -> Sequence[int]:
        """Return the numbers of the completions that the next generation writes."""
        return self._numbers

    def leave_together(self) -> None:
        if self.consensus:
            self.consensus.leave_together()

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Let the model generate with the seeds of this batch's completions."""
        if self.use_vllm:  # it takes the most likely tokens for a validation, and samples by seeds of its own otherwise
            engine = self.vllm_generation
            with replaced(engine, temperature=0.0 if _GREEDY in self._numbers else engine.temperature):
                yield
            return
        model, args, device = self.accelerator.unwrap_model(self.model_wrapped), self.args, self.accelerator.device
        processors = LogitsProcessorList()
        if _GREEDY not in self._numbers:
            epoch = self.prompt_batches.epoch
            processors.append(TemperatureLogitsWarper(float(args.temperature)))
            if args.top_k:
                processors.append(TopKLogitsWarper(args.top_k))
            if args.top_p < 1:
                processors.append(TopPLogitsWarper(args.top_p))
            if args.min_p:
                processors.append(MinPLogitsWarper(args.min_p))
            seeds = [seed_of(args.seed, epoch, number, self._turn) for number in self.written_numbers()]
            processors.append(Sampled(seeds, device))
        criteria = StoppingCriteriaList([self.consensus.ends_generation] if self.consensus else [])
        extras = {"logits_processor": processors, "stopping_criteria": criteria}
        with replaced(model, generate=partial(model.generate, **extras)):
            yield

    def generates_until(self, end_ids: Sequence[int]) -> None:
        """End completions at these tokens too, and let `Sampled` choose the tokens."""
        self.eos_token_ids = list(dict.fromkeys((*self.eos_token_ids, *end_ids)))
        if self.use_vllm:
            self.vllm_generation.generation_kwargs |= {"stop_token_ids": self.eos_token_ids}
            return
        names = ("max_new_tokens", "pad_token_id", "bos_token_id", "repetition_penalty", "cache_implementation")
        options = {name: self.generation_kwargs[name] for name in names}
        options |= {"do_sample": False, "eos_token_id": self.eos_token_ids}
        self.generation_config, self.generation_kwargs = GenerationConfig(**options, disable_compile=True), options

    def _list_completions(self) -> None:
        if not self.accelerator.is_main_process:
            return
        logs, step = compat.last_completions(self), self.state.global_step + 1
        num = len(logs["prompt"])
        for number in range(0, num, max(1, num // _LISTED)):
            line = {"step": step, **{name: text_of(logs[name][number]) for name in ("prompt", "completion")}}
            append_line(self.completions_file, json.dumps(line | self.scores_of(logs, number)))

    def scores_of(self, logs: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return what a line of completions.jsonl says of a completion besides its text."""
        return {}

    # -- validation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoaderShard:
        loader = super().get_eval_dataloader(eval_dataset)
        rows = Prompts(loader.dataset)
        batches = [[Numbered(row, _GREEDY) for row in batch] for batch in loader.batch_sampler]
        return DataLoaderShard(rows, batch_sampler=batches, collate_fn=_same, device=self.args.device, _drop_last=True)


def _same(rows: Any) -> Any:
    return rows


class GeneratingTraining(Training):
    """The rows are prompts; TRL collates nothing."""

    fixed_arguments = MappingProxyType({})

    @property
    def of_trl(self) -> type[Any]:
        """The class in whose module TRL generates."""
        return compat.class_that_generates(self.trainer)

    def constructor(self, config: RecipeConfig, folder: Path, encoder: TextEncoder) -> dict[str, Any]:
        return {"completions_file": RunDirectory(folder).completions}

    def before(self, arguments: Any, config: RecipeConfig, model: Any) -> None:
        """Choose the program that generates; take the reentrant form of recomputation where DeepSpeed needs it."""
        compat.check_trainer(self.of_trl, "generates")
        generation = config.objective.generated_by
        if generation is not None and generation.engine == "vllm":
            arguments.use_vllm, arguments.vllm_mode = True, "server" if generation.server else "colocate"
            arguments.vllm_server_base_url, arguments.vllm_group_port = generation.server, generation.group_port
            arguments.vllm_gpu_memory_utilization = generation.gpu_memory_utilization
            arguments.vllm_tensor_parallel_size = generation.tensor_parallel_size
            arguments.vllm_enable_sleep_mode = generation.enable_sleep_mode
            arguments.vllm_max_model_length = tokens_per_sample(config)
        if arguments.gradient_checkpointing and isinstance(model, PeftModel) and is_deepspeed_zero3_enabled():
            # The other form fails while weights are gathered: DeepSpeed issue 8130.
            arguments.gradient_checkpointing_kwargs = {"use_reentrant": True}

    def after(self, built: Any, config: RecipeConfig) -> None:
        """End completions where answers end in the chat template."""
        end = templates.answers_end(built.processing_class) if built.processing_class.chat_template else None
        built.generates_until([] if end is None else [end])
