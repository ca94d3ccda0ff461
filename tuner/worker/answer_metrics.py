"""Generation metrics: at every validation the model answers prompts, and its answers are compared with the references.

`worker.samples` shows a few answers after training; this measures `log.generate` answers during training.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from statistics import mean
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, StoppingCriteriaList

from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, DiskError
from tuner.files import append_line
from tuner.machine.libraries import is_installed
from tuner.recipes.schema import RecipeConfig
from tuner.runs.directory import RunDirectory
from tuner.worker.compat import takes_mask
from tuner.worker.consensus import RankConsensus
from tuner.worker.generation import ask_for_one_answer, on_device, stop_where_answers_end
from tuner.worker.process import warn
from tuner.worker.samples import before_answer, prompts, right_answer, same_text, shown

_BATCH = 8
"""Prompts in one batch of a rank, padded on the left."""
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
"""Kana, Han and Hangul: scripts in which one character counts as a word."""
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")


def answer_metrics(answers: Sequence[str], right: Sequence[str]) -> dict[str, float]:
    """Return `exact_match` and `rouge_l`, means from 0 to 1, and `bleu`, from 0 to 100, of all answers together.

    ROUGE-L is the F-measure of the rouge-score package, without stemming. The package itself takes only a-z and 0-9 as
    words; here a word is a run of letters of any script, or one Chinese, Japanese or Korean character. BLEU is
    sacrebleu's corpus score. A metric is left out if its package is not installed: pip install
    'tuner-deepspeed[metrics]'.
    """
    metrics = {"exact_match": sum(map(same_text, answers, right)) / len(answers)}
    if is_installed("rouge_score"):
        from rouge_score.rouge_scorer import RougeScorer

        words = SimpleNamespace(tokenize=lambda text: _WORD.findall(text.lower()))
        scores = map(RougeScorer(["rougeL"], tokenizer=words).score, right, answers)
        metrics["rouge_l"] = mean(score["rougeL"].fmeasure for score in scores)
    if is_installed("sacrebleu"):
        from sacrebleu.metrics.bleu import BLEU

        tokenizer = "zh" if re.search(f"[{_CJK}]", "".join(right)) else "13a"
        metrics["bleu"] = float(BLEU(tokenize=tokenizer).corpus_score(list(answers), [list(right)]).score)
    return metrics


class AnswersValidationPrompts:
    """Answers `log.generate` validation prompts greedily and measures the answers. All ranks call it together."""

    def __init__(
        self, config: RecipeConfig, encoder: TextEncoder, run_dir: RunDirectory, consensus: RankConsensus
    ) -> None:
        self.consensus = consensus
        assert config.val_dataloader, "the schema asks for it"
        self.run_dir, self.encoder, self.max_new_tokens = run_dir, encoder, config.log.max_new_tokens
        dataset = config.val_dataloader.dataset
        self.questions: list[torch.Tensor] = []
        self.pixels: list[dict[str, torch.Tensor]] = []
        self.prompts: list[str] = []
        self.right: list[str] = []
        for chat in prompts(dataset, config.log.generate, config.objective.type):
            prompt = chat.messages[:-1]
            try:
                ids_T = torch.tensor(encoder.prompt_ids(before_answer(chat)))
            except DataError:  # the preparation of the data has already reported this row
                continue
            if len(ids_T) <= dataset.max_length:
                self.questions.append(ids_T)
                self.pixels.append(encoder.pixels_in(prompt, ids_T[None]))
                self.prompts.append(shown(prompt))
                self.right.append(right_answer(encoder, chat))
        if not self.questions and dist.get_rank() == 0:
            warn(run_dir, "log.generate is ignored: no validation row has a prompt that fits dataset.max_length.")

    def measure(self, model: PreTrainedModel, step: int) -> dict[str, float]:
        """Return the metrics of `answer_metrics` under names that begin with `eval_`; append to answers.jsonl."""
        if not self.questions:
            return {}
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        # Every rank computes the same number of batches, because ZeRO-3 gathers weights; the last prompt may repeat.
        rounds = -(-len(self.questions) // num_ranks)
        mine = [min(index * num_ranks + rank, len(self.questions) - 1) for index in range(rounds)]
        batch = _BATCH if takes_mask(model) and self.encoder.image_id is None else 1
        texts: list[str] = []
        for start in range(0, rounds, batch):
            indexes = mine[start : start + batch]
            pixels = self.pixels[indexes[0]] if batch == 1 else {}
            texts += self._answers(model, [self.questions[index] for index in indexes], pixels)
            self.consensus.leave_together()
        gathered: list[list[tuple[int, str]]] = [[] for _ in range(num_ranks)]
        dist.all_gather_object(gathered, list(zip(mine, texts, strict=True)))
        by_index = {index: text for of_rank in gathered for index, text in of_rank}
        answers = [by_index[index] for index in range(len(self.questions))]
        if rank == 0:
            self._write(answers, step)
        return {f"eval_{name}": value for name, value in answer_metrics(answers, self.right).items()}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _answers(self, model: PreTrainedModel, ids: list[torch.Tensor], pixels: dict[str, torch.Tensor]) -> list[str]:
        padding = {"batch_first": True, "padding_side": "left"}
        ids_BT = pad_sequence(ids, padding_value=self.encoder.pad_id, **padding).to(model.device)
        mask_BT = pad_sequence([torch.ones_like(prompt_ids) for prompt_ids in ids], **padding).to(model.device)
        generation = copy.deepcopy(model.generation_config)
        stop_where_answers_end(generation, self.encoder)
        ask_for_one_answer(generation)
        written_BT = model.generate(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            **on_device(model, pixels),
            generation_config=generation,
            stopping_criteria=StoppingCriteriaList([self.consensus.ends_generation]),
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=self.encoder.pad_id,
        )
        answers_BT = written_BT[:, ids_BT.shape[1] :].tolist()
        return [self.encoder.decode(answer_ids, skips_special=True).strip() for answer_ids in answers_BT]

    def _write(self, answers: list[str], step: int) -> None:
        try:
            for prompt, right, answer in zip(self.prompts, self.right, answers, strict=True):
                line = {"step": step, "prompt": prompt, "right": right, "answer": answer}
                line["is_right"] = same_text(answer, right)
                append_line(self.run_dir.answers, json.dumps(line, ensure_ascii=False))
        except DiskError as error:  # a full disk must not cost the steps since the last checkpoint
            warn(self.run_dir, f"{error} Training continues without these answers.")
