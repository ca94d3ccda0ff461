"""What a loaded model is worth on rows: loss and perplexity, how it judges pairs of answers, what it answers.

It knows no benchmark.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tuner.data.batches import SampleCollator, lays_end_to_end
from tuner.data.prepared import Prepared
from tuner.data.sample import IGNORED, Message
from tuner.errors import DataError, TunerError, UsageError
from tuner.machine.hardware import Hardware
from tuner.models.load import source
from tuner.recipes.objective import Dpo, Kto
from tuner.recipes.schema import Dataset, RecipeConfig, one_data_set
from tuner.results.chat import answer, check_can_answer, check_room
from tuner.results.model import LoadedModel, ModelSpec, load_frozen
from tuner.worker.compat import takes_mask
from tuner.worker.generation import Settings, prompt_ids
from tuner.worker.samples import prompts, shown
from tuner.worker.trainer_setup import evaluator
from tuner.worker.trainers import num_trained

_LENGTH = 2048
"""Tokens of a sample, where neither a recipe nor the model says how many there may be."""
_JUDGED, _REWARDS = ("eval_loss", "eval_accuracy", "eval_margin"), "eval_rewards/"
_MOST_NATS = 700.0
"""Above it, exp(loss) is more than a float holds."""


def rows_of(
    spec: ModelSpec,
    data: str | None = None,
    row_format: str | None = None,
    split: str | None = None,
    max_rows: int | None = None,
) -> Dataset:
    """Return the rows to judge a model on: the user's, or the validation rows of the run that it comes from.

    None: as the recipe, or a data set, says.

    Raises:
        UsageError: the user names none, and there are none.
    """
    recipe = spec.recipe
    if data is not None:
        context = spec.context_tokens or _LENGTH
        block = recipe.train_dataloader.dataset if recipe else Dataset(path=None, max_length=context, packing=False)
        block = block.model_copy(update=one_data_set(data) | {"format": row_format, "val_split": None})
    elif recipe and recipe.val_dataloader:
        block = recipe.val_dataloader.dataset
    else:
        what = f"{spec.description} has no validation data"
        raise UsageError(what, where="--data", fix="Give some: --data FILE, or an id on the hub.")
    given = {"split": split, "max_rows": max_rows}
    return block.model_copy(update={name: value for name, value in given.items() if value is not None})


def likelihood(loaded: LoadedModel, prepared: Prepared, batch_size: int) -> dict[str, float]:
    """Return the loss in nats, the mean over all trained tokens as in training's validation, and its exponential.

    Raises:
        TunerError: the loss is no number.
    """
    pad_id, end_to_end = loaded.tokenizer.pad_token_id, lays_end_to_end(loaded.model)
    collate = SampleCollator(DataCollatorForLanguageModeling(pad_id, end_to_end), takes_mask(loaded.model))
    total, num_tokens = 0.0, 0
    for batch in DataLoader(prepared.dataset, batch_size, collate_fn=collate):
        inputs = send_to_device(batch, loaded.model.device)
        labels_BT = inputs.pop("labels")
        with torch.inference_mode():
            logits_BTV = loaded.model(**inputs, use_cache=False).logits
        total += _nats(logits_BTV, labels_BT)
        num_tokens += num_trained(labels_BT)
    mean = _finite(total / num_tokens, loaded)
    return {"loss": mean, "perplexity": math.exp(min(mean, _MOST_NATS)), "tokens": num_tokens}


def _nats(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> float:
    """Return the sum over trained tokens; the model's own loss may have a mixture of experts' load balancing in it."""
    logits_TV, labels_T = logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten().to(logits_BTV.device)
    is_trained_T = labels_T != IGNORED
    return float(F.cross_entropy(logits_TV[is_trained_T].float(), labels_T[is_trained_T], reduction="sum"))


def _finite(loss: float, loaded: LoadedModel) -> float:
    if not math.isfinite(loss):
        what = f"the loss of {loaded.spec.description} is {loss}"
        raise TunerError(what, fix="Its weights are damaged, or overflow fp16.")
    return loss


def judged(
    loaded: LoadedModel, config: RecipeConfig, prepared: Prepared, batch_size: int, hardware: Hardware
) -> dict[str, float]:
    """Return what TRL's trainer of the recipe's objective measures on pairs or judged answers, by TRL's names.

    `rewards/accuracies` (`accuracy` of a reward model) is the part of the pairs whose chosen answer it prefers. Each is
    a mean over rows; to kto's loss, which sets answers against others of their batch, the size of a batch matters.

    Raises:
        TunerError: the loss is no number.
        ModelError, MachineError: the model that it is compared with cannot be loaded.
    """
    models = (loaded.model, _reference(loaded, config, hardware))
    with tempfile.TemporaryDirectory() as folder:
        trainer = evaluator(config, models, loaded.tokenizer, prepared.dataset, batch_size, folder)
        found = trainer.evaluate()
    _finite(found["eval_loss"], loaded)
    names = (name for name in sorted(found) if name in _JUDGED or name.startswith(_REWARDS))
    return {name.removeprefix("eval_"): found[name] for name in names}


def _reference(loaded: LoadedModel, config: RecipeConfig, hardware: Hardware) -> Any | None:
    """Return the model that training began with; of an adapter that is its base, the adapter switched off."""
    if loaded.spec.adapter or not isinstance(config.objective, Dpo | Kto):
        return None
    return load_frozen(config.model, source(config.model), loaded.dtype, hardware, None, scores=False).eval()


def questions(spec: ModelSpec, tokenizer: Any, dataset: Dataset, count: int) -> list[list[Message]]:
    """Return `count` conversations that end in a right answer, or all that there are; the model can be asked each.

    Raises:
        DataError: the data set or a row of it is wrong, it asks nothing, or the chat template refuses it.
        UsageError: a prompt is longer than the context.
        ModelError: the model cannot be asked.
    """
    check_can_answer(spec, tokenizer)
    asked = prompts(dataset, count, spec.objective)
    if not asked:
        raise DataError("the rows have no prompts", where="--generate", fix="Give rows of conversations: --data FILE.")
    for messages in asked:
        check_room(spec, prompt_ids(tokenizer, messages[:-1]))
    return asked


def generations(loaded: LoadedModel, asked: list[list[Message]], settings: Settings) -> list[dict[str, Any]]:
    """Return the model's answers to what `questions` returned, beside the right ones."""
    found = []
    for *prompt, right in asked:
        said = answer(loaded, prompt_ids(loaded.tokenizer, prompt), settings)
        told = {"answer": said.text, "tokens": said.num_tokens, "is_whole": said.is_whole}
        found.append({"prompt": shown(prompt), "right": right["content"], **told})
    return found
