"""A recipe's name is its parts: every one reads back, none reads two ways, and a wrong one says which is near."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.refused import refused
from tuner import assets
from tuner.errors import RecipeError, visible
from tuner.recipes import catalog, loading
from tuner.recipes.catalog import Parts, default_objective, names, suggest
from tuner.recipes.recipe_file import read_part

TRAININGS = list(itertools.product(names("objectives"), names("methods")))
COMPOSED = [
    *(
        Parts(model, *training, dataset, 3)
        for (model, training), dataset in zip(
            itertools.product(names("models"), TRAININGS), itertools.cycle(names("datasets"))
        )
    ),
    *(Parts("tiny", *training, dataset, 3) for training, dataset in itertools.product(TRAININGS, names("datasets"))),
]
"""Every model and every data set with every training; not the product of all three, which is a million."""


def composed_parts(name: str) -> Parts | None:
    """Return the parts that a name is composed of, also of one that is a recipe of the catalog."""
    reading = catalog.find(name)
    if reading and isinstance(reading.base, str):
        reading = catalog.find(name, hidden=reading.base)
    return reading.base if reading and isinstance(reading.base, Parts) else None


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_every_composed_name_reads_back_to_its_parts(step: int) -> None:
    assert [parts for parts in COMPOSED[::step] if composed_parts(parts.name) != parts] == []


def test_what_follows_a_model_s_name_in_a_longer_one_begins_no_training() -> None:
    # With this no composed name can have a second reading, whatever its parts are.
    trainings = [Parts("", objective, method, "", 3).name.split("__")[0][1:] for objective, method in TRAININGS]
    models = set(names("models"))
    tails = {tail for model in models for start, tail in splits(model) if start in models}

    assert [tail for tail in tails for training in trainings if begin_alike(tail, training)] == []
    assert [pair for pair in itertools.combinations(trainings, 2) if begin_alike(*pair)] == []


def splits(name: str) -> list[tuple[str, str]]:
    """Return every (head, tail) of a name around one underscore."""
    tokens = name.split("_")
    return [("_".join(tokens[:end]), "_".join(tokens[end:])) for end in range(1, len(tokens))]


def begin_alike(name: str, other: str) -> bool:
    return f"{name}_".startswith(f"{other}_") or f"{other}_".startswith(f"{name}_")


def test_a_recipe_of_the_catalog_hides_only_the_composition_it_builds_on() -> None:
    for name in names("recipes"):
        composed = composed_parts(f"{name}_e3")
        base = composed_parts(read_part("recipes", name).values["_base_"])
        assert composed is None or (base and base._replace(epochs=3) == composed)


@pytest.mark.parametrize("epochs", [1, 9, 10, 9999])
def test_epochs_stand_in_the_name(epochs: int) -> None:
    parts = composed_parts(f"tiny_full_custom_e{epochs}")
    assert parts and parts.epochs == epochs
    assert loading.load(f"tiny_full_custom_e{epochs}").config.train_cfg.max_epochs == epochs


def test_a_recipe_of_the_catalog_takes_epochs_from_its_name() -> None:
    plain, one_epoch = loading.load("tiny_full_sample"), loading.load("tiny_full_sample_e1")

    assert plain.config.train_cfg.max_epochs == 3
    assert one_epoch.config.train_cfg.max_epochs == 1
    assert one_epoch.origins["train_cfg.max_epochs"].text == "name tiny_full_sample_e1"
    assert one_epoch.config.optim_wrapper == plain.config.optim_wrapper
    assert one_epoch.origins["optim_wrapper.optimizer.lr"].text == "configs/recipes/tiny_full_sample.py:6"


def test_the_default_objective_is_not_written_in_names() -> None:
    assert Parts("tiny", default_objective(), "full", "sample", 3).name == "tiny_full_sample_e3"
    assert catalog.find("tiny_sft_full_sample_e3") is None
    assert suggest("tiny_sft_full_sample_e3") == "tiny_full_sample_e3"


def test_the_parts_are_merged_in_the_order_of_the_name() -> None:
    parts = composed_parts("tiny_pretrain_qlora_sample_e3")
    files = [f"{kind}/{name}" for kind, name in parts.kinds()] if parts else []

    assert files == ["models/tiny", "methods/qlora", "objectives/pretrain", "datasets/sample"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen3_8b_qlra_alpaca_e3", "qwen3_8b_qlora_alpaca_e3"),
        ("qwen3_8b_qlora_alpacca_e3", "qwen3_8b_qlora_alpaca_e3"),
        ("qwen38b_qlora_alpaca_e3", "qwen3_8b_qlora_alpaca_e3"),
        ("qwn3_8b_qlora_alpaca_e5", "qwen3_8b_qlora_alpaca_e5"),
        ("qwen3-8b-qlora-alpaca-e3", "qwen3_8b_qlora_alpaca_e3"),
        ("Qwen3_8B_QLoRA_Alpaca_E3", "qwen3_8b_qlora_alpaca_e3"),
        ("qwen3.8b_qlora_alpaca_e3", "qwen3_8b_qlora_alpaca_e3"),
        ("qwen3_8b_qlora_alpaca", "qwen3_8b_qlora_alpaca_e3"),
        ("qwen3_8b_qlora_alpaca_e", "qwen3_8b_qlora_alpaca_e3"),
        ("qwen3_8b_qlora_alpaca_e0", "qwen3_8b_qlora_alpaca_e3"),
        ("qwen3_8b_qlora_alpaca_e-1", "qwen3_8b_qlora_alpaca_e3"),
        ("internlm2_chat_7b_qlora_oasst_e3", "internlm2_chat_7b_qlora_oasst1_e3"),
        ("internml2_chat_7b_qlora_oasst1_e3", "internlm2_chat_7b_qlora_oasst1_e3"),
        ("internlm2_chat_7b_qlora_oasst1_e03", "internlm2_chat_7b_qlora_oasst1_e3"),
        ("tiny_pretrain_ful_sample_e2", "tiny_pretrain_full_sample_e2"),
        ("tiny_pretran_full_sample_e2", "tiny_pretrain_full_sample_e2"),
        ("tinny_full_sample_e1", "tiny_full_sample_e1"),
        ("tiny_full_sampl", "tiny_full_sample_e3"),
        ("tiny_full_sample_e1\n", "tiny_full_sample_e1"),
        (" tiny_full_sample_e1", "tiny_full_sample_e1"),
    ],
)
def test_a_typing_error_in_any_part_finds_the_name_that_was_meant(name: str, meant: str) -> None:
    with refused(RecipeError, None, repr(name), repr(meant)):
        loading.load(name)
    loading.load(meant)


@pytest.mark.parametrize("kind", ["models", "methods", "datasets"])
def test_a_lost_letter_in_any_part_is_found(kind: str) -> None:
    for part in [part for part in names(kind) if len(part) > 4][::9]:
        typo = part[:1] + part[2:]
        known = [other for other in names(kind) if typo in {other[:i] + other[i + 1 :] for i in range(len(other))}]
        if typo not in names(kind):
            meant = {compose({kind: other}) for other in known}
            assert suggest(compose({kind: typo})) in meant, typo


def compose(parts: dict[str, str]) -> str:
    model, method, dataset = (parts.get(kind, name) for kind, name in PLAIN.items())
    return f"{model}_{method}_{dataset}_e3"


PLAIN = {"models": "tiny", "methods": "qlora", "datasets": "alpaca"}


@pytest.mark.parametrize("parts", COMPOSED[:: len(COMPOSED) // 40], ids=lambda parts: parts.name)
def test_a_right_name_suggests_itself(parts: Parts) -> None:
    assert suggest(parts.name) == parts.name


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("deepspeed_zero2", "is a DeepSpeed preset, not a recipe", "tuner train RECIPE --deepspeed deepspeed_zero2"),
        ("zero3_offload", "is a DeepSpeed preset, not a recipe", "tuner train RECIPE --deepspeed zero3_offload"),
        ("my_ds.json", "there is no file 'my_ds.json'", "tuner list"),
        ("tiny", "is a model, not a recipe", "tuner train --model package:tiny --data FILE"),
        ("qlora", "is a method, not a recipe", "tuner train --model MODEL --method qlora --data FILE"),
        ("pretrain", "is an objective, not a recipe", "tuner train --model MODEL --method pretrain_lora --data FILE"),
        ("oasst1", "is a data set, not a recipe", "qwen3_8b_lora_oasst1_e3"),
        ("", "no recipe ''", "tuner list"),
        (" ", "no recipe ' '", "tuner list"),
        ("\n", "no recipe '\\n'", "tuner list"),
        ("a\0b", "no recipe 'a\\x00b'", "tuner list"),
        ("\udcff", "no recipe '\\udcff'", "tuner list"),
        ("base", "no recipe 'base'", "tuner list"),
        ("tiny_full_sample_e10000", "no recipe", "tiny_full_sample_e"),
        ("tiny_full_sample_e１", "no recipe", "tuner list"),
        ("qwen3_8b_ppo_lora_alpaca_e1", "tuner has no objective 'ppo'", "Use grpo or rloo"),
        ("tiny_nash_md_lora_sample_e1", "tuner has no objective 'nash_md'", "with a reward"),
        ("tiny__full_sample_e1", "no recipe", "'tiny_full_sample_e1'"),
        ("x" * 5000, "no recipe", "tuner list"),
        ("_" * 5000, "no recipe", "tuner list"),
    ],
)
def test_a_name_of_no_recipe_is_one_message(name: str, what: str, fix: str) -> None:
    with pytest.raises(RecipeError) as caught:
        loading.load(name)

    assert what in caught.value.what
    assert fix in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("../x", ""),
        ("../tiny_full_sample_e3", ""),
        ("tiny_full_sample.py", ""),
        ("/etc/passwd", "passwd:1"),
        ("a\0/b", ""),
        ("n" * 300 + ".py", ""),
    ],
)
def test_a_path_is_a_file_and_never_a_name(name: str, where: str) -> None:
    with refused(RecipeError, where) as caught:
        loading.load(name)

    assert visible(name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("x_e3", ("x", 3)),
        ("x", ("x", None)),
        ("x_e0", ("x_e0", None)),
        ("_e3", ("_e3", None)),
        ("x_e1_e2", ("x_e1", 2)),
    ],
)
def test_epochs_are_the_number_at_the_end(name: str, split: tuple[str, int | None]) -> None:
    assert catalog.with_epochs(name) == split


def test_every_part_says_in_its_first_line_what_it_is() -> None:
    for kind in catalog.KINDS:
        for name in names(kind):
            assert len(catalog.summary(catalog.part_file(kind, name))) > 10


def test_an_asset_is_a_file_of_the_package() -> None:
    assert Path(assets.asset("package:sample/train.jsonl")).is_file()
    assert assets.asset("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_a_chat_template_is_a_name_a_file_or_a_text(tmp_path: Path) -> None:
    (tmp_path / "my.jinja").write_text("{{ mine }}")
    known = sorted(path.stem for path in (assets.CONFIGS / "chat_templates").glob("*.jinja"))

    assert known
    assert "messages" in catalog.chat_template(known[0])
    assert catalog.chat_template(str(tmp_path / "my.jinja")) == "{{ mine }}"
    assert catalog.chat_template("{% for one in messages %}{% endfor %}") == "{% for one in messages %}{% endfor %}"
    for name in (known[0] + "x", str(tmp_path / "no.jinja"), "../base", ""):
        with refused(RecipeError, "model.chat_template") as caught:
            catalog.chat_template(name)
        assert known[0] in (caught.value.fix or "")
