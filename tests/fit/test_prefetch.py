"""The weights that ZeRO-3 has gathered, against cases worked out by hand; `test_simulated` compares whole steps."""

from __future__ import annotations

import pytest

from bench.simulate import MIXTRAL
from tests.fit.recipes import architecture_of, lightest
from tuner.fit.levels import Costs
from tuner.fit.parameters import Built, built, num_parameters, of_tower, parts_on_experts
from tuner.fit.prefetch import Gathered, gathered
from tuner.recipes.schema import RecipeConfig, Split
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.measured import Experts

NAME = "internlm2_chat_7b_{}_oasst1_e3"
LEVEL = Costs(3, prefetch=15_000_000, persistence=40_960)


def recipe_of(method: str, *, recompute: bool) -> tuple[RecipeConfig, Built]:
    recipe = lightest(NAME.format(method)).with_split(Split(1, 1, recompute=recompute))
    return recipe, built(architecture_of(recipe))


def of(recipe: RecipeConfig, costs: Costs, *, is_shared: bool = True) -> Gathered:
    return gathered(recipe, architecture_of(recipe), costs, 2, is_shared=is_shared)


def at_loss(recipe: RecipeConfig, costs: Costs) -> float:
    return of(recipe, costs).at_loss


def test_weights_are_gathered_ahead_until_as_many_are_live_as_allowed() -> None:
    recipe, model = recipe_of("full", recompute=True)
    largest = max(linear.weights for linear in model.all_linears())

    for live in (500_000_000, 1_000_000_000, 3_000_000_000):
        assert 2 * live <= at_loss(recipe, LEVEL._replace(max_live=live, max_reuse=0)) < 2 * (live + largest)

    weights = sum(linear.weights for linear in (*model.all_linears(), model.head)) + model.embeddings
    assert at_loss(recipe, LEVEL._replace(max_live=10**11)) == pytest.approx(2 * weights, rel=1e-3)


def test_the_head_stays_however_few_weights_may_be_live() -> None:
    recipe, model = recipe_of("full", recompute=True)

    fewest = at_loss(recipe, LEVEL._replace(max_live=1, max_reuse=3))
    assert fewest == pytest.approx(2 * model.head.weights, rel=1e-3)


def test_weights_that_are_too_small_to_shard_again_stay_however_few_may_be_live() -> None:
    recipe, model = recipe_of("full", recompute=True)

    weights = sum(linear.weights for linear in (*model.all_linears(), model.head)) + model.embeddings
    none_is_sharded = LEVEL._replace(max_live=1, max_reuse=3, persistence=10**9)
    assert at_loss(recipe, none_is_sharded) == pytest.approx(2 * weights, rel=1e-3)


def test_weights_of_frozen_first_layers_are_not_gathered_in_backward() -> None:
    recipe, model = recipe_of("full", recompute=True)
    recipe = recipe.with_values({"train_cfg.trainable_layers": 2})

    weights = model.head.weights + sum(linear.weights for layer in model.layers[-2:] for linear in layer.linears)
    assert at_loss(recipe, LEVEL._replace(max_live=10**11)) == pytest.approx(2 * weights, rel=1e-3)


@pytest.mark.parametrize(("recompute", "passes"), [(True, 3), (False, 2)])
def test_what_is_used_again_soon_stays_even_if_more_weights_are_live_than_allowed(recompute: bool, passes: int) -> None:
    recipe, model = recipe_of("full", recompute=recompute)
    largest = max(linear.weights for linear in model.all_linears())
    kept = at_loss(recipe, LEVEL._replace(max_live=1, max_reuse=3_000_000_000)) - 2 * model.head.weights

    between = (3_000_000_000 - model.head.weights) / passes
    assert 2 * between <= kept < 2 * (between + largest)


def test_with_an_adapter_and_recomputation_the_embeddings_and_their_bucket_come_at_the_first_layer() -> None:
    first = {}
    for recompute in (True, False):
        recipe, model = recipe_of("qlora", recompute=recompute)
        at_layers = of(recipe, LEVEL).at_layers
        assert len(at_layers) == len(model.layers)
        first[recompute] = at_layers[-1]

    both = 2 * (model.head.weights + 2 * model.embeddings)
    assert both < first[True] < both + model.layers[0].parameters
    assert first[False] < 2 * (model.head.weights + model.layers[0].parameters)


def test_a_bucket_of_the_embeddings_stays_from_the_loss_on_if_the_forward_pass_gathers_them() -> None:
    recipe, model = recipe_of("full", recompute=True)
    weights = sum(linear.weights for linear in (*model.all_linears(), model.head)) + model.embeddings
    enough = LEVEL._replace(max_live=10**11, prefetch=10**9)

    forgotten, kept = (at_loss(recipe, enough._replace(max_reuse=reuse)) for reuse in (3, 10**11))
    assert kept == pytest.approx(2 * weights, rel=1e-3), "each is gathered once, by its own module"
    assert forgotten > 2 * (weights + model.embeddings), "the embeddings again, in one buffer with others"


def test_a_bucket_takes_the_place_of_one_weight_where_as_many_are_live_as_allowed() -> None:
    recipe, model = recipe_of("full", recompute=True)
    largest = max(linear.weights for linear in model.all_linears())
    one_weight, layer, all_weights = (
        at_loss(recipe, LEVEL._replace(prefetch=ahead)) for ahead in (largest, 4 * largest, 10**9)
    )

    assert one_weight == layer == all_weights


def test_a_single_rank_that_offloads_has_no_buckets() -> None:
    recipe, _ = recipe_of("qlora", recompute=True)

    of_two, of_one = (of(recipe, LEVEL, is_shared=several) for several in (True, False))
    assert max(of_two.at_layers) > max(of_one.at_layers)


def test_weights_of_4_bits_that_no_layer_computes_again_stay_until_its_backward_pass() -> None:
    recipe, model = recipe_of("qlora", recompute=False)
    at_layers = of(recipe, LEVEL._replace(max_live=1, max_reuse=2)).at_layers

    of_layer = sum(linear.weights for linear in model.layers[-1].linears) / 2
    assert at_layers[0] == pytest.approx(2 * model.head.weights + len(model.layers) * of_layer, rel=0.05)
    assert at_layers[1] - at_layers[2] == pytest.approx(of_layer)


def test_a_saved_weight_that_is_still_gathered_counts_once() -> None:
    recipe, _ = recipe_of("qlora", recompute=False)
    few, none_again = ({"max_live": 1, "max_reuse": 2}, {"max_live": 1, "max_reuse": 10**11})

    assert at_loss(recipe, LEVEL._replace(**none_again)) == pytest.approx(
        at_loss(recipe, LEVEL._replace(**few)), rel=0.1
    )


def test_the_tower_and_the_projector_are_gathered_after_the_layers() -> None:
    recipe = lightest("llava_1_5_7b_full_sample_images_e1").with_split(Split(1, 1, recompute=True))

    weights = num_parameters(architecture_of(recipe))
    assert at_loss(recipe, LEVEL._replace(max_live=10**11)) == pytest.approx(2 * weights, rel=1e-3)
    frozen = recipe.with_values({"model.freeze": ("vision",)})
    tower = of_tower(architecture_of(recipe))["vision"]
    assert at_loss(frozen, LEVEL._replace(max_live=10**11)) == pytest.approx(2 * (weights - tower), rel=1e-3)


@pytest.mark.parametrize("recompute", [True, False])
def test_experts_that_no_layer_computes_again_stay_until_its_backward_pass(recompute: bool) -> None:
    recipe = lightest("qwen3_30b_a3b_full_alpaca_e3").with_split(Split(1, 1, recompute=recompute))
    at_layers = of(recipe, LEVEL._replace(max_live=1, max_reuse=2)).at_layers

    experts = built(architecture_of(recipe)).layers[-1].experts
    assert experts is not None
    assert at_layers[1] - at_layers[2] == (0 if recompute else 2 * experts.parameters)


def test_two_weights_of_4_bits_count_as_one() -> None:
    recipe, model = recipe_of("qlora", recompute=True)
    live = 2_000_000_000

    # Bytes are one an element, but for the head.
    without_head = at_loss(recipe, LEVEL._replace(max_live=live)) - 2 * model.head.weights
    assert without_head == pytest.approx(live - model.head.weights, rel=0.15)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_with_an_adapter_the_embeddings_are_gathered_in_backward_only_where_checkpoints_are_reentrant(
    kind: str,
) -> None:
    recipe, _ = recipe_of("lora", recompute=True)
    architecture = Architecture.model_validate({**MIXTRAL, "model_type": kind, "num_hidden_layers": 2})
    model = built(architecture)
    level = LEVEL._replace(max_live=10**11)

    first = gathered(recipe.with_values({"architecture": architecture}), architecture, level, 2).at_layers[-1]

    least = 2 * (model.head.weights + model.layers[0].parameters)
    assert (first > least + model.embeddings) == (kind == "llama"), "a router's loss needs the other checkpoints"


MOST_MODULES = LEVEL._replace(max_live=1)


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_a_block_of_experts_that_deepspeed_gathers_whole_counts_nothing_between_two_uses_of_other_weights(
    kind: str,
) -> None:
    recipe, _ = recipe_of("full", recompute=True)
    sizes = {"moe_intermediate_size": 14336, "num_experts": 8, "head_dim": 128}
    architecture = Architecture.model_validate({**MIXTRAL, **sizes, "model_type": kind, "num_hidden_layers": 4})
    model = built(architecture)
    experts = model.layers[-1].experts
    assert experts is not None

    last = gathered(recipe.with_values({"architecture": architecture}), architecture, MOST_MODULES, 2).at_layers[0]

    attention = sum(linear.weights for linear in model.layers[-1].linears if linear.name.startswith("self_attn"))
    kept = 4 * attention + model.embeddings if kind == "mixtral" else 0
    assert last == pytest.approx(2 * (model.head.weights + experts.parameters + kept), rel=0.01)


@pytest.mark.parametrize(("method", "has_adapter"), [("qlora", True), ("qlora", False), ("lora", True)])
def test_no_experts_stay_gathered_after_the_backward_pass_of_their_layer(method: str, has_adapter: bool) -> None:
    recipe, _ = recipe_of(method, recompute=True)
    sizes = {"moe_intermediate_size": 14336, "num_experts": 8, "head_dim": 128}
    architecture = Architecture.model_validate({**MIXTRAL, **sizes, "model_type": "glm4_moe", "num_hidden_layers": 4})
    targets = ["gate_proj", "up_proj", "down_proj"] if has_adapter else ["q_proj"]
    recipe = recipe.with_values({"architecture": architecture, "adapter.target_modules": targets})

    at_layers = gathered(recipe, architecture, MOST_MODULES._replace(max_reuse=2), 2).at_layers

    assert at_layers[3] - at_layers[0] == pytest.approx(0, abs=1e8)


def test_while_a_layer_is_computed_again_its_weights_count_beside_what_it_has_kept_so_far() -> None:
    recipe, model = recipe_of("qlora", recompute=True)
    weights = of(recipe, LEVEL._replace(prefetch=10**9, max_reuse=2))

    largest = max(linear.weights for linear in model.all_linears()) / 2
    assert max(weights.arriving) > max(weights.at_layers[:-1]) + largest, "a bucket of several weights"


def lora_on_experts(num_experts: int, *, recompute: bool) -> tuple[RecipeConfig, Architecture, Experts]:
    """Return a recipe with LoRA on all parts of so many experts of a layer, its architecture, and these experts."""
    sizes = {"moe_intermediate_size": 14336, "num_experts": num_experts, "head_dim": 128}
    architecture = Architecture.model_validate({**MIXTRAL, **sizes, "model_type": "glm4_moe", "num_hidden_layers": 4})
    recipe, _ = recipe_of("lora", recompute=recompute)
    targets = ["gate_proj", "up_proj", "down_proj"]
    recipe = recipe.with_values({"architecture": architecture, "adapter.target_modules": targets})
    experts = built(architecture).layers[-1].experts
    assert experts is not None
    return recipe, architecture, experts


@pytest.mark.parametrize("recompute", [True, False])
def test_experts_with_an_adapter_are_all_gathered_while_their_backward_runs(recompute: bool) -> None:
    """PEFT's wrapper of their down layers is around that of the others: both begin before what is inside."""
    recipe, architecture, experts = lora_on_experts(8, recompute=recompute)
    on_experts = sum(parts_on_experts(recipe.adapter, built(architecture).family, experts))

    at_layers = gathered(recipe, architecture, MOST_MODULES._replace(max_reuse=2), 2).at_layers

    of_experts = 2 * (experts.parameters + on_experts)
    assert at_layers[0] == pytest.approx(2 * built(architecture).head.weights + of_experts, rel=0.01)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_buffer_of_the_down_layers_and_of_an_adapter_before_them_stays_through_the_backward_of_a_layer(
    recompute: bool,
) -> None:
    """The adapter of a layer's gate and up layers comes before the down layers of the layer below in the trace."""
    recipe, architecture, experts = lora_on_experts(4, recompute=recompute)

    costs = LEVEL._replace(max_live=10**9, max_reuse=10**9)
    at_loss = gathered(recipe, architecture, costs, 2).at_loss
    without = gathered(recipe, architecture, costs, 2, is_shared=False).at_loss

    _, on_inputs, _ = parts_on_experts(recipe.adapter, built(architecture).family, experts)
    assert at_loss - without == 2 * (experts.down + on_inputs), "one that copies each weight has no buffers"
