"""What a report says, and what it lets no run do to it; test_browser.py looks at it in a browser."""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode
from collections.abc import Sequence
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import PIL.Image
import pytest

from tests.report import made
from tests.runs.made_records import run_json
from tuner.data import images
from tuner.data.sample import Image
from tuner.report import end, page
from tuner.report.gathered import gather, recipe_differences
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7 * 7 }}"
FILES = ("run.json", "status.json", "data.json", "metrics.jsonl", "samples.jsonl", "recipe.json", "deepspeed.json")


class Reader(HTMLParser):
    """Collects the text of each section, and every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._at, self._is_script = "head", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._at = str(dict(attrs)["id"])
        self._is_script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._is_script = False

    def handle_data(self, data: str) -> None:
        if not self._is_script:
            self.sections[self._at] = " ".join(f"{self.sections.get(self._at, '')} {data}".split())


def read(*runs: RunDirectory) -> Reader:
    return Reader(page.render(gather([run.path for run in runs])))


def test_one_run_is_told_whole(tmp_path: Path) -> None:
    told = read(made.trained(tmp_path / "run")).sections

    assert "done 300 0.5602 0.6602 40,835 54.2 GiB 1 h 37 min" in told["summary"]
    assert "weights of step 250" in told["summary"]
    assert "train 1,000 998 2 0 0 0 9 5" in told["data"]
    assert "dropped train there is no answer 2 0" in told["data"]
    assert "tensors only 72.6 GiB measured on the rank with the most, tensors only 54.2 GiB" in told["memory"]
    assert "optim_wrapper.optimizer.lr 2e-05 5e-06" in told["recipe"]
    assert "What is the capital of Spain? Madrid. The capital of Madrid. ✓" in told["samples"]
    assert re.search(r"250 \d+\.\d KiB yes \(the result\)", told["checkpoints"])
    assert "8 x NVIDIA H200" in told["machine"] and "transformers" in told["machine"]
    assert told["time"] == "Time What the time went into is not known."


def test_a_run_with_rewards_shows_their_curves_and_completions(tmp_path: Path) -> None:
    text = page.render(gather([made.rewarded(tmp_path / "run").path]))

    titles = ("Reward", "Spread of the rewards in a group", "Groups without a signal", "Length of a completion")
    for title in (*titles, "Clipped completions", "KL divergence from the reference", "Entropy"):
        assert title in text
    shown = re.findall(r"(\d) at (\d+)", Reader(text).sections["samples"])
    assert shown == [(answer, step) for step in ("1", "20") for answer in "7632"]
    calls = re.findall(r'add\(\{"a": 3, "b": 4\}\) . (seven|no result)', Reader(text).sections["samples"])
    assert calls == ["seven"] * 4 + ["no result"] * 4


def test_a_failed_run_tells_why_what_to_do_and_how_often_it_was_started(tmp_path: Path) -> None:
    told = read(made.failed(tmp_path / "run")).sections

    assert "gpu-out-of-memory: a GPU ran out of memory" in told["summary"]
    assert "Next: tuner train mine.py --set train_dataloader.batch_size=1" in told["summary"]
    assert f"Resume from step 4: tuner train {tmp_path}/run/recipe.py --resume {tmp_path}/run" in told["summary"]
    assert "This run may not fit" in told["warnings"] and "the tracker wandb is disabled" in told["warnings"]
    assert "no: model.safetensors is missing" in told["checkpoints"]
    assert "stopped stopped: at step 4 on request" in told["time"] and "4 6 0 failed gpu-out" in told["time"]
    assert "Peak memory of the rank with the most: 640.0 MiB. (No estimate: CPU run.)" in told["memory"]


def test_several_runs_are_named_by_where_they_differ_and_so_are_their_recipes(tmp_path: Path) -> None:
    first = made.trained(tmp_path / "a" / "first")
    other = made.trained(tmp_path / "b" / "first", "optim_wrapper.optimizer.lr=1e-5", num_steps=40)
    runs = gather([first.path, other.path])

    assert [run.name for run in runs] == ["a/first", "b/first"]
    assert recipe_differences(runs) == [("optim_wrapper.optimizer.lr", [5e-06, 1e-05])]
    told = read(first, other).sections
    assert "optim_wrapper.optimizer.lr 5e-06 1e-05" in told["recipe"]


@pytest.mark.parametrize("name", ["recipe", "folder"])
def test_nothing_that_a_run_holds_becomes_a_part_of_the_page(name: str, tmp_path: Path) -> None:
    path = tmp_path / (HOSTILE.replace("/", "") if name == "folder" else "run")
    run = made.trained(path, name=HOSTILE)
    sample = {"prompt": HOSTILE, "right": HOSTILE, "before": HOSTILE, "answer": HOSTILE}
    (path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    run.ranks.mkdir()
    run.log_warning(HOSTILE)
    facts = {**run.read_json(run.run_json), "command": ["tuner", HOSTILE], "platform": HOSTILE}
    run.run_json.write_text(json.dumps(facts))
    run.write_status(
        RunStatus(state="failed", message=HOSTILE, diagnosis={"cause": HOSTILE, "what": "x", "next_command": HOSTILE})
    )

    text = page.render(gather([path]))

    plain = page.render(gather([made.trained(tmp_path / "plain").path]))
    scripts = [len(re.findall(r"<script", html)) for html in (text, plain)]
    assert scripts[0] == scripts[1]
    told = Reader(text)
    assert "img" not in [tag for tag, _ in told.tags]
    assert not [attributes for _, attributes in told.tags if any(key.startswith("on") for key in attributes)]
    assert HOSTILE in told.sections["samples"] and HOSTILE in told.sections["summary"], "it is shown, as text"


def test_samples_have_a_column_of_answers_before_training_only_if_there_are_some(tmp_path: Path) -> None:
    run = made.trained(tmp_path / "run")
    assert "before training" in read(run).sections["samples"]

    (run.path / "samples.jsonl").write_text(json.dumps({"prompt": "a", "right": "b", "before": None, "answer": "c"}))

    assert read(run).sections["samples"].endswith("prompt reference after training right a b c ✗")


def test_a_samples_picture_is_shown_and_anything_else_in_its_place_is_not(tmp_path: Path) -> None:
    PIL.Image.radial_gradient("L").resize((300, 200)).save(tmp_path / "a.png")
    run, picture = made.trained(tmp_path / "run"), images.thumbnail(Image(path=str(tmp_path / "a.png")))
    pictures = [picture, HOSTILE, "http://example.com/a.png", f'{picture}" onerror="x', f"{picture}{'A' * 40_000}", 7]
    (run.path / "samples.jsonl").write_text(json.dumps({"prompt": "<image>What?", "images": pictures}) + "\n")

    told = read(run)

    assert [attributes["src"] for tag, attributes in told.tags if tag == "img"] == [picture]
    small = PIL.Image.open(BytesIO(b64decode(picture.partition(",")[2])))
    assert (small.size, len(picture) < 8_000) == ((96, 64), True)


def test_a_report_names_nothing_to_load(tmp_path: Path) -> None:
    told = read(made.trained(tmp_path / "run"))

    places = {key: value for _, attributes in told.tags for key, value in attributes.items() if key in ("src", "href")}
    assert places == {}
    policy = [attributes["content"] for tag, attributes in told.tags if tag == "meta" and "http-equiv" in attributes]
    assert policy and str(policy[0]).startswith("default-src 'none';")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["gone", "empty", "torn", "another kind", "binary"])
def test_a_damaged_run_still_has_a_report(name: str, damage: str, tmp_path: Path) -> None:
    run = made.failed(tmp_path / "run")
    made.trained(tmp_path / "sound")
    file = run.path / name
    content = {"empty": b"", "torn": b'{"a": [1, ', "another kind": b"[1]\n7\n", "binary": b"\xff\x00\xfe"}
    if damage == "gone":
        file.unlink(missing_ok=True)
    else:
        file.write_bytes(content[damage])

    assert "Machine and versions" in page.render(gather([run.path]))
    assert "Machine and versions" in page.render(gather([run.path, tmp_path / "sound"]))


def test_the_top_of_the_page_says_whether_it_learned_what_was_trained_and_on_what(tmp_path: Path) -> None:
    head = read(made.trained(tmp_path / "run")).sections["head"]

    assert "learned: held-out loss 0.693 -> 0.412, 1 of 2 samples right" in head
    assert "trained parameters 21,823,488" in head
    assert "machine 8 x NVIDIA H200" in head and "versions tuner" in head and "batch size" in head


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (3960, "1 h 06 min"), (100_000, "27 h 46 min")],
)
def test_a_duration_is_told_in_the_units_that_fit_it(seconds: float, text: str) -> None:
    assert page._duration(seconds) == text


def test_a_report_is_a_small_file(tmp_path: Path) -> None:
    assert len(page.render(gather([made.trained(tmp_path / "run").path])).encode()) < 150_000


def test_the_verdict_stands_first_and_the_loss_before_training_is_not_the_best(tmp_path: Path) -> None:
    run = made.trained(tmp_path / "run", num_steps=100)
    run.log_metrics({"step": 0, "eval_loss": 0.001})

    shown = page.render(gather([run.path]))

    assert shown.index("held-out loss 0.693 -&gt; 0.412") < shown.index("Result: <code>")
    assert "0.0010" not in shown


def test_the_time_and_the_peak_of_a_resumed_run_are_those_of_all_attempts_to_the_end(tmp_path: Path) -> None:
    run = made.trained(tmp_path / "run", num_steps=3)
    for number, facts in (("1", {"state": "failed", "seconds": 60.0}), ("2", {"state": "running"})):
        attempt = run.path / "attempts" / number
        (attempt / "ranks").mkdir(parents=True)
        (attempt / "status.json").write_text(json.dumps(facts))
        (attempt / "run.json").write_text(run_json(started="2026-01-01T00:00:00+00:00"))
        for file in ("status.json", "run.json"):
            os.utime(attempt / file, (1767225600, 1767225600 + 40))  # 40 s after its start it was killed
    run.write_status(RunStatus(state="done", seconds=5.0, peak_bytes=10**12))

    (found,) = gather([run.path])

    assert found.seconds == pytest.approx(60 + 40 + 5)
    assert found.peak_bytes == 10**12


def test_a_long_runs_curves_are_thinned_and_keep_their_extremes_and_their_ends(tmp_path: Path) -> None:
    run = made.trained(tmp_path / "run", num_steps=1)
    losses = {step: step / 100_000 for step in range(1, 20_001)} | {12_345: 9.0, 12_346: -9.0}
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    run.metrics.write_text("\n".join([*lines, '{"step": 20001, "lo']))  # it was killed while it wrote

    (found,) = gather([run.path])
    steps, values = page.drawn(found.curves["loss"])

    assert len(found.curves["loss"].steps) == 20_000 and 1000 < len(steps) < 2100
    assert {1, 12_345, 12_346, 20_000} < set(steps)
    assert all(losses[step] == value for step, value in zip(steps, values, strict=True))


def test_a_warning_at_the_start_of_a_long_run_and_long_samples_are_shown(tmp_path: Path) -> None:
    run = made.failed(tmp_path / "run")
    with (run.ranks / "0.log").open("a") as log:
        log.writelines(
            f"step {step}/100000  loss 1.2345  lr 1.98e-04  5,120 tokens/s  54.3 GiB\n" for step in range(2000)
        )
    samples = [{"prompt": f"question {number} " + "x" * 20_000, "answer": ""} for number in range(9)]
    (run.path / "samples.jsonl").write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))

    (found,) = gather([run.path])

    assert any("the tracker wandb is disabled" in warning for warning in found.warnings)
    assert [str(sample["prompt"])[:10] for sample in found.samples] == [f"question {number}" for number in range(9)]


def test_early_stopping_is_told_and_a_last_step_that_was_not_logged_is_no_best_one(tmp_path: Path) -> None:
    run = made.trained(tmp_path / "run")
    run.write_status(RunStatus(state="done", exit_code=0, step=306, max_steps=900, result_step=306))
    told = read(run).sections["summary"]

    assert "Early stopping: training ended at step 306 of 900" in told and "the lowest validation loss)" not in told
    run.write_status(RunStatus(state="done", exit_code=0, step=306, max_steps=306, result_step=306))
    assert "Early stopping" not in read(run).sections["summary"]


def test_a_folder_whose_name_is_no_text_has_a_report(tmp_path: Path) -> None:
    folder = made.failed(tmp_path / "run").path.rename(tmp_path / "caf\udce9")

    page.write([folder], folder / "report.html")

    assert "caf\\udce9" in (folder / "report.html").read_text()


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made.failed(tmp_path / "run")
    run.report.mkdir()

    end.write(run)

    assert capsys.readouterr().err.startswith("WARNING: no report: ")
    assert [path.name for path in run.path.glob(".report*")] == []
