"""Losses from whole logits against TRL's, a tile at a time: the same losses, gradients and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from tests.data.conftest import make_tokenizer
from tuner.data.text_encoder import TextEncoder
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.worker import trainer_setup
from tuner.worker.loss import METRICS, tiles_give_its_logits, use_whole_logits

IDS = torch.tensor([[3, 5, 6, 7, 8, 9], [10, 11, 12, 13, 0, 0]])
LABELS = torch.tensor([[-100, -100, 6, 7, 8, 9], [-100, 11, 12, 13, -100, -100]])


def model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=3000, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    made = LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        made.lm_head.weight.normal_(std=0.3)
    return made


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_whole_logits_give_what_trls_head_gives(dtype: torch.dtype, apart: float) -> None:
    found = {}
    for loss in ("chunked", "whole"):
        made = model(dtype)
        add_fused_lm_head(made, outputs=("log_probs", *METRICS))
        if loss == "whole":
            use_whole_logits(made, METRICS)
        outputs = made(input_ids=IDS, labels=LABELS, fused_lm_head=True)
        (-outputs.log_probs.sum() / 7).backward()
        found[loss] = outputs, made.lm_head.weight.grad, made.model.embed_tokens.weight.grad

    (chunked, *its_gradients), (whole, *gradients) = found.values()
    assert whole.log_probs.dtype == torch.float32
    assert torch.equal(whole.label_mask, chunked.label_mask) and torch.equal(whole.is_top1, chunked.is_top1)
    for name in ("log_probs", "entropy", "mean_logits", "log_sum_sq_probs"):
        torch.testing.assert_close(getattr(whole, name), getattr(chunked, name), rtol=apart, atol=apart)
    for one, other in zip(gradients, its_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=apart, atol=apart * float(other.abs().max()))


def test_training_and_validation_call_the_module_of_the_head_and_generation_stays_as_it_is() -> None:
    made, calls = model(), list[int]()
    add_fused_lm_head(made)
    plain = made(input_ids=IDS).logits
    use_whole_logits(made, ["is_top1"])
    made.lm_head.register_forward_hook(lambda *_: calls.append(1))

    training = made.train()(input_ids=IDS, labels=LABELS, fused_lm_head=True)
    with torch.no_grad():
        reference = made(input_ids=IDS, labels=LABELS, fused_lm_head=True)
        validation = made.eval()(input_ids=IDS, labels=LABELS, fused_lm_head=True)

    assert len(calls) == 3, "at ZeRO-3 its hooks gather the weight"
    assert torch.equal(training.log_probs, validation.log_probs)
    assert training.is_top1 is not None and validation.is_top1 is not None and reference.is_top1 is None
    assert torch.equal(made(input_ids=IDS).logits, plain)


SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
RECURRENT = {"lru_width": 32, "attention_window_size": 16, "block_types": ("recurrent", "attention")}
MPT = {"d_model": 32, "n_heads": 2, "n_layers": 1, "expansion_ratio": 2, "max_seq_len": 64, "vocab_size": 300}
XLSTM = {"embedding_dim": 32, "num_heads": 2, "num_blocks": 1, "chunkwise_kernel": "chunkwise--native_autograd"}
XLSTM |= {"sequence_kernel": "native_sequence__native", "step_kernel": "native", "mode": "inference"}


@pytest.mark.parametrize(
    ("model_type", "more", "is_matrix"),
    [
        ("llama", {}, True),
        ("llama", {"tie_word_embeddings": True}, True),
        ("gemma2", {"final_logit_softcapping": 5.0}, True),
        ("cohere", {"logit_scale": 0.25}, True),
        ("granite", {"logits_scaling": 4.0}, True),
        ("recurrent_gemma", {"logits_soft_cap": 5.0, **RECURRENT}, False),
        ("mpt", MPT, True),
        ("mpt", {**MPT, "logit_scale": 0.5}, False),  # transformers 5.23 leaves it out, TRL 1.16 does not
        ("mpt", {**MPT, "logit_scale": "inv_sqrt_d_model"}, False),
        ("xlstm", {"output_logit_soft_cap": 5.0, **XLSTM}, False),
    ],
)
def test_a_head_that_is_more_than_a_matrix_is_seen(model_type: str, more: dict[str, Any], is_matrix: bool) -> None:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL | more))
    with torch.no_grad():
        made.get_output_embeddings().weight.normal_(std=2.0)
    add_fused_lm_head(made)

    assert tiles_give_its_logits(made, made) is is_matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_difference_and_the_model_trains_on(dtype: torch.dtype) -> None:
    made = model(dtype)
    add_fused_lm_head(made)

    assert tiles_give_its_logits(made, made) and made.training


def one_loss(objective: str, loss: str, rows: list[dict[str, Any]], folder: Path) -> tuple[float, torch.Tensor]:
    """Return the loss of one micro-batch of the objective's trainer, and the gradient of the head."""
    recipe = load(f"tiny_{objective}full_custom_e1", Overrides(data=__file__)).config
    tokenizer = make_tokenizer()
    tokenizer.pad_token = "<s>"
    policy, reference = model(), model() if objective else None
    if reference is not None:
        with torch.no_grad():
            reference.lm_head.weight.mul_(1.01)
    made = trainer_setup.evaluator(
        recipe, (policy, reference), TextEncoder(tokenizer), datasets.Dataset.from_list(rows), len(rows), str(folder)
    )
    if loss == "whole":
        trainer_setup.use_whole_logits(made, (policy, reference), recipe)
    policy.train()
    made.current_gradient_accumulation_steps = 1
    found = made.compute_loss(policy, made.data_collator(rows), num_items_in_batch=torch.tensor(7))
    found.backward()
    return found.item(), policy.lm_head.weight.grad


SFT = [{"input_ids": [3, 5, 6, 7, 8, 9], "labels": [-100, -100, 6, 7, 8, 9], "seq_lengths": [6]}]
PAIR = [
    {
        "chosen_ids": [5, 6, 7, 8],
        "chosen_labels": [-100, -100, 7, 8],
        "rejected_ids": [5, 6, 9],
        "rejected_labels": [-100, -100, 9],
    }
]
JUDGED = [
    {"answer_ids": [5, 6, 7, 8], "answer_labels": [-100, -100, 7, 8], "is_good": True},
    {"answer_ids": [5, 6, 9], "answer_labels": [-100, -100, 9], "is_good": False},
]


@pytest.mark.parametrize(("objective", "rows"), [("", SFT), ("dpo_", PAIR), ("kto_", JUDGED)])
def test_an_objective_has_the_same_loss_and_gradient_either_way(
    objective: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    chunked, its_gradient = one_loss(objective, "chunked", rows, tmp_path)

    whole, gradient = one_loss(objective, "whole", rows, tmp_path)

    assert whole == pytest.approx(chunked, rel=1e-5)
    torch.testing.assert_close(gradient, its_gradient, rtol=1e-4, atol=1e-7)
