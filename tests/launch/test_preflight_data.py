"""Local data whose first rows do not fit is told before a rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import made
from tests.refused import refused
from tuner.errors import DataError, RecipeError, TunerError
from tuner.launch import preflight, row_counts
from tuner.launch.checks import inputs, settings
from tuner.launch.resolved_run import ResolvedRun

SFT = "tiny_full_custom_sft_e1"
GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def check(path: Path, *sets: str, recipe: str = "tiny_full_custom_sft_e1") -> None:
    raise_first(made(f"train_dataloader.dataset.path={path}", *sets, recipe=recipe))


def raise_first(plan: ResolvedRun) -> None:
    for mistake in inputs.first_rows(plan):
        assert isinstance(mistake, DataError)
        raise mistake


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_columns_that_fit_no_format_are_refused_with_the_nearest(tmp_path: Path) -> None:
    path = written(tmp_path / "bad.jsonl", {"mesages": GOOD["messages"]})

    with refused(DataError, "bad.jsonl", "mesages"):
        check(path, "train_dataloader.dataset.format=None")
    with pytest.raises(DataError) as caught:
        preflight.check(made(f"train_dataloader.dataset.path={path}", recipe="tiny_full_custom_sft_e1"))
    assert caught.value.exit_code == 2


def test_a_row_that_does_not_fit_is_named_with_its_line(tmp_path: Path) -> None:
    with refused(DataError, "bad.jsonl:2"):
        check(written(tmp_path / "bad.jsonl", GOOD, {"messages": "none"}), "train_dataloader.dataset.format=messages")


def test_all_wrong_ones_of_the_first_rows_are_named_at_once(tmp_path: Path) -> None:
    path = written(tmp_path / "bad.jsonl", GOOD, {"messages": "none"}, GOOD, {"messages": [{"role": "usr"}]})
    plan = made(f"train_dataloader.dataset.path={path}", "train_dataloader.dataset.format=messages", recipe=SFT)

    with pytest.raises(DataError) as caught:
        preflight.check(plan)
    assert [error.where.rpartition(":")[2] for error in caught.value.each() if error.where] == ["2", "4"]
    mistakes = [str(finding) for finding in preflight.inspect(plan) if isinstance(finding, TunerError)]
    assert [mistake.partition("bad.jsonl:")[2][0] for mistake in mistakes] == ["2", "4"]


def test_a_check_calls_the_rewards_on_the_first_rows(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def boom(completions, **columns):\n    raise ValueError('no')\n")
    path = written(tmp_path / "sums.jsonl", {"prompt": "1 + 1 =", "answer": "2"})
    rewards = f"objective.rewards=['{tmp_path}/mine.py:boom']"
    plan = made(f"train_dataloader.dataset.path={path}", rewards, recipe="tiny_grpo_full_custom_e1")

    (mistake,) = [finding for finding in preflight.inspect(plan) if isinstance(finding, TunerError)]

    assert "the reward 'boom' failed on the first rows: ValueError: no" in str(mistake)


def test_rows_that_the_objective_does_not_learn_from_are_refused(tmp_path: Path) -> None:
    messages = "train_dataloader.dataset.format=messages"

    with refused(DataError, "chats.jsonl:1"):
        check(written(tmp_path / "chats.jsonl", GOOD), messages, recipe="tiny_dpo_full_sample_preferences_e1")


def test_a_file_of_another_kind_and_a_row_function_are_left_to_the_ranks(tmp_path: Path) -> None:
    check(written(tmp_path / "bad.jsonl", {"x": 1}), "train_dataloader.dataset.format=no_such_module:function")


def test_every_data_set_of_a_mixture_is_read(tmp_path: Path) -> None:
    good, bad = written(tmp_path / "good.jsonl", GOOD), written(tmp_path / "bad.jsonl", {"x": 1})

    with refused(DataError, "bad.jsonl"):
        raise_first(made(f"train_dataloader.dataset.mixture=[dict(path={str(good)!r}), dict(path={str(bad)!r})]"))


def test_the_first_rows_of_a_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    written(tmp_path / "rows" / "bad.jsonl", {"x": 1})
    with refused(DataError, "bad.jsonl"):
        check(tmp_path / "rows", "train_dataloader.dataset.format=None")

    written(tmp_path / "rows" / "train.jsonl", GOOD)
    check(tmp_path / "rows", "train_dataloader.dataset.format=None")


def test_a_misspelt_format_of_data_on_the_hub_is_refused_with_the_nearest() -> None:
    plan = made("train_dataloader.dataset.format=alpca", recipe="tiny_full_alpaca_e1")

    with refused(DataError, "dataset.format", "alpaca"):
        raise_first(plan)


def test_rows_of_several_shapes_are_told_with_the_count_of_each(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", GOOD, {"instruction": "a", "output": "b"}, GOOD)

    with refused(DataError, "rows.jsonl", 2, "messages", 1, "alpaca"):
        check(path, "train_dataloader.dataset.format=None")


def few(path: Path, *sets: str) -> list[Any]:
    values = ("train_dataloader.batch_size=2", "accumulative_counts=4", "train_dataloader.dataset.packing=False")
    return list(settings.few_steps(made(f"train_dataloader.dataset.path={path}", *values, *sets, recipe=SFT)))


def test_a_run_of_too_few_steps_is_told_by_a_dry_run_and_a_submission(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", *[GOOD] * 20)

    (told,) = few(path)

    assert told.startswith("This run makes only 3 optimizer steps (20 samples, global batch 8, 1 epoch)")
    assert told.endswith("--batch-size 1 (20 steps) or --epochs 10 (30 steps)")
    plan = made(f"train_dataloader.dataset.path={path}", recipe=SFT)
    assert any("will learn very little" in finding for finding in preflight.foresee(plan))
    assert any("will learn very little" in finding for finding in preflight.check_elsewhere(plan, quick=True))


def test_enough_steps_and_steps_that_the_recipe_sets_are_not_told(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", *[GOOD] * 20)

    assert few(path, "max_epochs=10") == []
    assert few(path, "max_steps=2") == []


def streamed(place: object) -> str:
    sets = (f"train_dataloader.dataset.path={place}", "train_dataloader.dataset.streaming=True", "max_steps=3")
    with pytest.raises(DataError) as caught:
        preflight.check(made(*sets, recipe=SFT))
    return str(caught.value)


def test_what_cannot_be_streamed_is_refused_with_the_nearest_thing_that_can(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("messages\n")
    assert "'rows.csv' cannot be streamed" in streamed(tmp_path / "rows.csv")
    assert "Save its rows as .jsonl or .parquet" in streamed(tmp_path / "rows.csv")
    assert "hf download --repo-type dataset" in streamed("OWNER/NAME")


def test_files_that_can_be_streamed_pass_and_their_rows_are_not_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", *[GOOD] * 20)
    streaming = "train_dataloader.dataset.streaming=True"
    plan = made(f"train_dataloader.dataset.path={path}", streaming, "max_steps=3", recipe=SFT)

    assert list(inputs.streamed(plan)) == []
    assert (plan.steps.rows.value, plan.steps.total.value) == (None, 3)
    assert "they are streamed" in str(plan.steps.rows)


def chats(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": "b"}]}
        for number in range(count)
    ]


def places_of_bad_rows(path: Path, *sets: str) -> list[str]:
    values = (f"train_dataloader.dataset.path={path}", "train_dataloader.dataset.format=messages", *sets)
    findings = inputs.first_rows(made(*values, recipe=SFT))
    return [str(error.where).rpartition(":")[2] for error in findings if isinstance(error, DataError)]


def test_all_rows_of_a_counted_file_are_read_before_a_start(tmp_path: Path) -> None:
    rows: list[Any] = chats(300)
    rows[99], rows[250] = {"messages": "none"}, {"messages": [{"role": "usr", "content": "x"}]}
    path = written(tmp_path / "rows.jsonl", *rows)
    with path.open("a") as stream:
        stream.write('{"messages": [\n')

    assert places_of_bad_rows(path) == ["100", "251", "301"]
    assert places_of_bad_rows(path, "bad_rows=2") == ["100", "251", "301"]
    assert places_of_bad_rows(path, "bad_rows=3") == []
    assert places_of_bad_rows(path, "max_rows=200") == ["100"]
    assert places_of_bad_rows(path, "val_split=0.1") == ["100", "251", "301"]


def test_the_way_to_leave_bad_rows_out_is_named_with_their_number(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", *chats(20), *[{"messages": "none"}] * 30)
    plan = made(f"train_dataloader.dataset.path={path}", "train_dataloader.dataset.format=messages", recipe=SFT)

    mistakes = [finding for finding in inputs.first_rows(plan) if isinstance(finding, DataError)]

    assert len(mistakes) == 20
    assert "bad_rows=30" in str(mistakes[-1].fix)


def test_a_stream_and_a_dry_run_read_no_more_than_the_first_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "rows.jsonl", *chats(20), {"messages": "none"})
    assert places_of_bad_rows(path, "train_dataloader.dataset.streaming=True", "max_steps=3") == []

    monkeypatch.setattr(inputs, "first_rows", lambda run: pytest.fail("a dry run reads no rows"))
    preflight.foresee(made(f"train_dataloader.dataset.path={path}", recipe=SFT))


def test_reading_ends_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_READ_S", -1.0)

    assert places_of_bad_rows(written(tmp_path / "rows.jsonl", *chats(20), {"messages": "none"})) == []


def test_validation_rows_that_stand_in_the_training_rows_are_counted_by_the_plan(tmp_path: Path) -> None:
    train, val = written(tmp_path / "a.jsonl", *chats(20)), tmp_path / "b.csv"
    val.write_text("instruction,output\n5,B\n 7 ,b\n100,b\n")

    plan = made(
        f"train_dataloader.dataset.path={train}",
        "train_dataloader.dataset.format=None",
        f"val_dataloader=dict(dataset=dict(path={str(val)!r}, max_length=64, packing=False), batch_size=1)",
        recipe=SFT,
    )

    (warning,) = [text for text in plan.warnings if "validation rows" in text]
    assert warning.startswith("2 of the 3 validation rows")
    assert f"{val}:2 has those of {train}:6" in warning


def test_a_warm_up_that_is_longer_than_the_run_is_told_with_both_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", *[GOOD] * 20)
    sets = (f"train_dataloader.dataset.path={path}", "train_dataloader.dataset.packing=False", "global_batch_size=2")

    for given, is_told in (("warmup_steps=11", True), ("warmup_steps=10", False), ("warmup_ratio=0.9", False)):
        plan = made(*sets, given, recipe=SFT)
        told = [finding for finding in preflight.foresee(plan) if "warm-up" in finding]
        assert bool(told) is is_told, given
        assert told == [finding for finding in preflight.check_elsewhere(plan, quick=True) if "warm-up" in finding]
        assert not is_told or ("11 steps" in told[0] and "the run 10" in told[0])


def test_a_decay_that_the_warm_up_cuts_short_is_told_with_its_steps(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", *[GOOD] * 20)
    sets = (f"train_dataloader.dataset.path={path}", "train_dataloader.dataset.packing=False", "global_batch_size=2")
    decays = ("param_scheduler.type=warmup_stable_decay", "decay_ratio=0.7")

    for warm_up, is_told in (("warmup_steps=4", True), ("warmup_steps=3", False)):
        told = [
            finding for finding in preflight.foresee(made(*sets, *decays, warm_up, recipe=SFT)) if "decay" in finding
        ]
        assert bool(told) is is_told, warm_up
        assert not is_told or ("the 6 after it, not 7" in told[0])


@pytest.mark.parametrize(("rate", "is_refused"), [("1e-7", True), ("5e-8", True), ("2e-7", False)])
def test_a_rate_that_the_polynomial_schedule_cannot_begin_with_is_refused(rate: str, is_refused: bool) -> None:
    plan = made("param_scheduler.type=polynomial", f"optimizer.lr={rate}")

    found = [finding for finding in preflight.inspect(plan) if isinstance(finding, RecipeError)]

    assert [finding.where for finding in found] == ["param_scheduler.type"] * is_refused
    assert not list(settings.polynomial(made("param_scheduler.type=linear", f"optimizer.lr={rate}")))


def test_copies_of_more_rows_than_the_plan_reads_are_counted_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_counts, "_MAX_READ", 4)
    turn = {"role": "assistant", "content": "b"}
    rows = [{"messages": [{"role": "user", "content": text}, turn]} for text in ("a", "A ", "c", "d", "e")]

    def told(count: int, *sets: str) -> list[str]:
        path = written(tmp_path / "rows.jsonl", *rows[:count])
        plan = made(f"train_dataloader.dataset.path={path}", *sets, recipe=SFT)
        assert not any("another row" in finding for finding in preflight.foresee(plan)), "a dry run reads few rows"
        return [finding for finding in inputs.first_rows(plan) if isinstance(finding, str)]

    assert [text.split(" rows")[0] for text in told(5)] == ["2 of the 5"]
    assert told(4) == [], "the plan counts them"
    assert told(5, "train_dataloader.dataset.streaming=True", "max_steps=1") == []
    monkeypatch.setattr(inputs, "_READ_S", -1.0)
    monkeypatch.setattr(inputs, "_NUM_ROWS", 2)
    assert told(5) == [], "not all rows are read in the time"
