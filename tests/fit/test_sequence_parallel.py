"""Which runs may share samples, what that saves on paper, and the longest rows that fit."""

from __future__ import annotations

import pytest

from tests.fit.recipes import architecture_of, lightest
from tests.refused import refused
from tuner.errors import ModelError, TunerError
from tuner.fit import summary
from tuner.fit.activations import of_recipe
from tuner.fit.advice import fit_of_preset
from tuner.fit.levels import Machines
from tuner.fit.splits import data_parallel_ranks, sizes
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.long_context import refuse_tiles
from tuner.zero import presets

H100 = Machines(8, 80 * 2**30, 1, 1900 * 10**9)


def recipe(*sets: str, name: str = "llama2_7b_full_alpaca_e3") -> RecipeConfig:
    return lightest(name, *sets)


def refusal(num_ranks: int, *sets: str, name: str = "llama2_7b_full_alpaca_e3") -> list[str]:
    with pytest.raises(TunerError) as found:
        data_parallel_ranks(recipe(*sets, name=name), num_ranks)
    return [str(error) for error in (found.value, *found.value.others)]


def test_ranks_that_share_samples_count_once() -> None:
    assert data_parallel_ranks(recipe(), 8) == 8
    assert data_parallel_ranks(recipe("sequence_parallel_size=4"), 8) == 2


def test_what_does_not_divide_is_refused_with_the_numbers_and_what_works() -> None:
    (ranks, heads) = refusal(8, "sequence_parallel_size=3")

    assert "8 ranks cannot be grouped by 3" in ranks and "Use 9 ranks, or set it to one of 1, 2, 4, 8" in ranks
    assert "32 heads and 32 key-value heads" in heads


def test_fewer_key_value_heads_than_ranks_are_copied_where_that_divides() -> None:
    """Qwen3 8B has 32 heads and 8 key-value heads."""
    assert sizes(architecture_of(recipe(name="qwen3_8b_full_alpaca_e3")), 96) == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    ("name", "sets", "said"),
    [
        ("llama2_7b_dpo_full_custom_e3", ("train_dataloader.dataset.path=my.jsonl",), "this is dpo"),
        ("llama2_7b_full_alpaca_e3", ("attn_implementation=eager",), "eager does not support"),
        ("qwen3_next_80b_a3b_instruct_lora_alpaca_e3", (), "is not tested with qwen3_next models"),
        ("llama2_7b_full_alpaca_e3", ("torch_compile=True",), "torch.compile is not tested"),
    ],
)
def test_what_would_not_learn_the_same_is_refused(name: str, sets: tuple[str, ...], said: str) -> None:
    assert said in refusal(8, "sequence_parallel_size=2", *sets, name=name)[0]


def test_experts_are_not_computed_in_tiles() -> None:
    config = recipe(name="mixtral_8x7b_full_alpaca_e3")
    assert config.architecture and not summary.with_everything(config, config.architecture).train_cfg.tiled_mlp
    with refused(ModelError, "train_cfg.tiled_mlp"):
        refuse_tiles(recipe("tiled_mlp=True", name="mixtral_8x7b_full_alpaca_e3"), "mixtral")


def test_a_rank_keeps_its_part_of_the_tokens() -> None:
    long, facts = "max_length=65536", architecture_of(recipe())

    whole, part = (of_recipe(recipe(long, f"sequence_parallel_size={size}", "packing=False"), facts) for size in (1, 4))

    of_head = 4 * facts.hidden_size * facts.vocab_size  # its gradient in fp32 has no tokens
    assert whole.kept == 4 * part.kept
    assert whole.at_loss - of_head == 4 * (part.at_loss - of_head)


def test_offloaded_activations_are_the_hosts() -> None:
    facts = architecture_of(recipe())

    whole = of_recipe(recipe(), facts)
    offloaded = of_recipe(recipe("activation_offloading=True"), facts)

    assert offloaded.kept + offloaded.offloaded == whole.kept
    assert offloaded.kept < whole.kept / 4


def test_the_longest_rows_are_near_those_that_were_published_for_llama_8b() -> None:
    """Jacobs et al., ALST, 2025 (arXiv:2506.13996): 500 thousand on one H100, 3.7 million on 8."""
    config = recipe(name="llama3_1_8b_full_alpaca_e3")
    facts = architecture_of(config)
    config = summary.with_everything(config, facts)

    one_gpu = summary.longest(config, facts, H100._replace(gpus_per_node=1))
    eight_gpus = summary.longest(config, facts, H100)

    assert max(found.tokens for found in one_gpu) == pytest.approx(500_000, rel=0.25)
    assert max(found.tokens for found in eight_gpus) == pytest.approx(3_700_000, rel=0.25)
    assert {found.sequence_parallel_size for found in eight_gpus} == {1, 2, 4, 8}
    assert len(eight_gpus) == 4 * len(presets.rungs())


def test_a_longer_row_than_the_longest_does_not_fit() -> None:
    config = recipe("attn_implementation=flash_attention_2", "loss=chunked")
    facts = architecture_of(config)

    every = summary.longest(config, facts, H100)
    found = {
        context.level: context.tokens
        for context in every
        if context.sequence_parallel_size == 1 and context.level != "none"
    }

    for level, tokens in found.items():
        longest, longer = (
            recipe("attn_implementation=flash_attention_2", "loss=chunked", f"max_length={length}")
            for length in (tokens, tokens + summary.UNIT)
        )
        assert fit_of_preset(longest, facts, H100, level).fits, level
        assert not fit_of_preset(longer, facts, H100, level).fits, level
