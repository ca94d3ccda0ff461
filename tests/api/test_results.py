"""What the API's results show of themselves, rows as objects, callbacks, and the functions around a model."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

import tuner
from tests.e2e.runs import free_port
from tests.each import each
from tests.launch.rank import process
from tests.refused import refused
from tuner.errors import DataError, RecipeError, UsageError
from tuner.launch import render
from tuner.worker.callbacks import own_callback

TINY = "tiny_lora_sample_e1"
ROWS = [
    {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"It is {n + 1}."}]}
    for n in range(12)
]
DONE = "from tuner.runs.directory import *\nrun = RunDirectory(Path(sys.argv[1]))\n"
ENDS = "run.write_status(RunStatus(state='done', exit_code=0))\n"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what puts a few lines of Python in the place of the ranks of runs."""

    def run(code: str) -> None:
        monkeypatch.setattr(render, "argv", lambda resolved: process(resolved.run_path, DONE + code + ENDS))

    return run


def rows_of(path: str | None) -> list[Any]:
    assert path is not None
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


# Results


class _Cells(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.styles: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.style = dict(attrs).get("style") or ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.styles[text] = self.style


@each(
    [
        lambda: tuner.load_recipe(TINY, lr=1e-3, data="my.jsonl", **{"train_cfg.max_steps": 3}),
        lambda: tuner.plan("qwen3_8b_qlora_alpaca_e3", gpus=1, gpu="rtx4090"),
        lambda: tuner.plan("qwen3_8b_full_alpaca_e3", gpus=1, gpu_memory="7GB"),
        lambda: tuner.plan("qwen3_8b_full_alpaca_e3", gpus=8, gpu="h100", deepspeed="zero2"),
        lambda: tuner.check(TINY),
        lambda: tuner.check(TINY, deepspeed={f"key{n}": n for n in range(30)}),
        lambda: tuner.preview_data(ROWS, model="package:tiny", num_rows=12),
    ]
)
def test_a_result_shows_itself_in_less_than_20_lines_and_as_html(make: Callable[[], Any]) -> None:
    result = make()

    assert 1 <= repr(result).count("\n") + 1 < 20
    assert max(map(len, repr(result).splitlines())) < 300
    assert len(repr(result)) < 4_000
    assert not _Cells(result._repr_html_()).open


def test_a_recipe_shows_what_a_person_asks_first() -> None:
    shown = repr(tuner.load_recipe(TINY, lr=1e-3, max_steps=3, data="my.jsonl"))

    for text in (
        "package:tiny",
        "LoRA r=",
        "my.jsonl",
        "3 steps",
        "lr 0.001",
        "data='my.jsonl', lr=0.001, max_steps=3",
    ):
        assert text in shown


def test_a_plan_says_for_each_level_in_words_and_in_a_colour_of_its_own_whether_it_fits() -> None:
    plan = tuner.plan("qwen3_8b_full_alpaca_e3", gpus=1, gpu="rtx4090")

    styles = _Cells(plan._repr_html_()).styles
    # White on dark green and dark red: read on a light page and on a dark one, whatever its own text is.
    assert "color:#ffffff;background:#1a7f37" in styles["fits"]
    assert "color:#ffffff;background:#b42318" in styles["does not fit"]
    assert [line.split()[0] for line in repr(plan).splitlines()[2:4]] == ["none", "zero1"]
    assert 'recommended: deepspeed="deepspeed_zero3_offload"' in repr(plan)


def test_where_nothing_fits_a_plan_shows_arguments_to_change() -> None:
    shown = repr(tuner.plan("qwen3_8b_full_alpaca_e3", gpus=1, gpu_memory="7GB"))

    assert "Nothing fits." in shown
    assert "--" not in shown
    assert 'deepspeed="' in shown


def test_what_a_row_holds_is_text_in_html() -> None:
    rows = [{"messages": [{"role": "user", "content": "<script>x</script>"}, {"role": "assistant", "content": "<b>"}]}]

    html = tuner.preview_data(rows, model="package:tiny")._repr_html_()

    assert "<script>" not in html
    assert "&lt;script&gt;" in html


# Rows as objects


def test_rows_are_written_once_and_the_recipe_and_the_run_name_their_file(ranks: Any, tmp_path: Path) -> None:
    ranks("")

    run = tuner.train(model="package:tiny", data=ROWS, val=ROWS[:2], work_dir="run")
    again = tuner.load_recipe(model="package:tiny", data=ROWS)

    path = again.config.train_dataloader.dataset.path
    assert rows_of(path) == ROWS
    assert Path(str(path)).parent == tmp_path / "cache/rows"
    written = tuner.load_recipe(run.path / "recipe.py").config
    assert written.train_dataloader.dataset.path == path
    assert written.val_dataloader is not None
    assert rows_of(written.val_dataloader.dataset.path) == ROWS[:2]


def test_a_loaded_recipe_keeps_its_rows(ranks: Any) -> None:
    ranks("")
    recipe = tuner.load_recipe(TINY, data=ROWS, max_steps=2)

    run = tuner.train(recipe, work_dir="run", lr=1e-3)

    assert rows_of(tuner.load_recipe(run.path / "recipe.py").config.train_dataloader.dataset.path) == ROWS


def test_rows_and_paths_in_one_list_are_refused() -> None:
    with refused(DataError, "data[1]"):
        tuner.plan(model="package:tiny", data=[ROWS[0], "b.jsonl"])


def test_paths_in_a_list_are_a_mixture() -> None:
    recipe = tuner.load_recipe(model="package:tiny", data=["a.jsonl", Path("b.jsonl")])

    assert [data_set.path for data_set in recipe.config.train_dataloader.dataset.data_sets] == ["a.jsonl", "b.jsonl"]


@each(
    [
        ("batch_size", 16, "train_cfg.global_batch_size", 16),
        ("lora_rank", 4, "adapter.r", 4),
        ("max_length", 256, "train_dataloader.dataset.max_length", 256),
        ("save_every", 7, "checkpoint.interval", 7),
        ("report_to", "wandb", "log.trackers", ("wandb",)),
        ("report_to", ["wandb"], "log.trackers", ("wandb",)),
    ]
)
def test_an_option_of_every_day_is_an_argument_of_its_name(name: str, value: Any, key: str, set_to: Any) -> None:
    from operator import attrgetter

    assert attrgetter(key)(tuner.load_recipe(TINY, **{name: value}).config) == set_to


# Callbacks


def test_functions_get_every_event_of_a_run_in_this_process(ranks: Any) -> None:
    ranks("for step in (1, 2): run.log_metrics({'step': step, 'loss': 3.0 - step})\n")
    events: list[dict[str, Any]] = []

    tuner.train(TINY, work_dir="run", callbacks=[events.append])

    assert [(event["event"], event.get("loss")) for event in events] == [
        ("started", None),
        ("step", 2.0),
        ("step", 1.0),
        ("ended", None),
    ]
    assert (events[-1]["state"], events[0]["run"]) == ("done", str(Path("run").absolute()))


def test_a_function_that_fails_is_not_called_again_and_the_run_goes_on(
    ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks("run.log_metrics({'step': 1, 'loss': 3.0})\n")
    events: list[Any] = []

    def fails(event: dict[str, Any]) -> None:
        events.append(event["event"])
        raise ValueError("mine")

    run = tuner.train(TINY, work_dir="run", callbacks=[fails])

    assert (run.state, events) == ("done", ["started"])
    assert "ValueError: mine" in capsys.readouterr().err


@each([transformers.TrainerCallback, transformers.TrainerCallback(), 3])
def test_a_callback_that_cannot_reach_the_ranks_is_refused(callback: Any) -> None:
    with pytest.raises(UsageError) as caught:
        tuner.train(TINY, callbacks=[callback])

    assert "'my_module:MyCallback'" in str(caught.value.fix)


def test_an_import_path_is_what_the_ranks_load(ranks: Any) -> None:
    ranks("")

    run = tuner.train(TINY, work_dir="run", callbacks=["my_module:Mine"])

    assert tuner.load_recipe(run.path / "recipe.py").config.train_cfg.callbacks == ("my_module:Mine",)


def test_a_class_is_loaded_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_29.py").write_text(
        "from transformers import TrainerCallback\nclass Mine(TrainerCallback): pass\nother = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    assert type(own_callback("mine_29:Mine")).__name__ == "Mine"
    for name in ("mine_29:other", "mine_29:Absent", "mine_29", "no_module_29:Mine"):
        with pytest.raises(RecipeError):
            own_callback(name)


def test_a_file_of_somebody_else_names_no_class_of_an_installed_package(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        f"_base_ = {TINY!r}\ntrain_cfg = dict(callbacks=['transformers:EarlyStoppingCallback'])\n"
    )

    with refused(RecipeError, "theirs.py:2"):
        tuner.train(tmp_path / "theirs.py", work_dir="run")


# Around a model


def test_a_preview_holds_what_training_sees() -> None:
    preview = tuner.preview_data(ROWS, model="package:tiny", num_rows=2)

    (view,) = preview.views.values()
    assert (view.prepared.counts.read, len(view.samples)) == (12, 2)
    assert "[[It is 1." in repr(preview)
    assert json.loads(json.dumps(preview.to_json()))["data"]["train"]["samples"][0]["parts"]


def test_a_preview_tells_every_bad_row() -> None:
    rows = [*ROWS, {"messages": "a"}, {"messages": 3}]

    with pytest.raises(DataError) as caught:
        tuner.preview_data(rows, model="package:tiny")

    assert [str(error.where).rsplit(":")[-1] for error in caught.value.each()] == ["13", "14"]


@pytest.mark.e2e
def test_a_model_is_evaluated_on_rows_as_the_command_does() -> None:
    before = torch.get_rng_state().tolist()

    found = tuner.evaluate("package:tiny", data=ROWS, generate=2, max_new_tokens=4)

    assert found.metrics["loss"] > 0
    assert [generation["right"] for generation in found.generations] == ["It is 1.", "It is 7."]
    assert {"metrics", "num_generations", "answers"} <= found.to_json().keys()
    assert "perplexity" in repr(found)
    assert torch.get_rng_state().tolist() == before


def test_a_server_that_ends_before_it_answers_says_why() -> None:
    # A server that fails before its imports, which take seconds.
    with pytest.raises(tuner.TunerError, match="unknown option --no-such-flag") as caught:
        tuner.serve("--no-such-flag", port=18_431)

    assert "the server of --no-such-flag ended" in caught.value.what


@pytest.mark.e2e
@pytest.mark.long
def test_a_server_answers_under_its_name_until_its_block_ends() -> None:
    for package in ("uvicorn", "fastapi"):
        pytest.importorskip(package)
    openai, port = pytest.importorskip("openai"), free_port()

    with tuner.serve("package:tiny", port=port, name="mine") as server:
        with openai.OpenAI(base_url=server.url, api_key=server.api_key) as client:
            listed = [model.id for model in client.models.list()]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{server.url}/models")  # noqa: S310
        arguments = psutil.Process(server._process.pid).cmdline()
        with pytest.raises(UsageError, match="another server answers"):
            tuner.serve("package:tiny", port=port)
        assert "serving" in repr(server)

    assert listed == ["mine"]
    assert server.api_key not in " ".join(arguments)
    assert server.api_key not in repr(server)
    assert "stopped" in repr(server)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{server.url}/models")  # noqa: S310
