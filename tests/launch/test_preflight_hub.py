"""A local server stands in for the hub: what it answers, refuses, cuts off or never says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
from huggingface_hub import constants

from tests.cli.command import runner
from tests.lab.test_isolation import UNKNOWN
from tests.launch.plans import NOW, PATH, TINY, made
from tests.launch.test_preflight_model import folder
from tests.machine.fake_slurm import FakeSlurm
from tests.machine.gpus import CPU
from tests.refused import refused
from tests.results.hub import NAME, Hub, serving
from tuner import hooks, model_folder
from tuner.errors import DataError, MachineError, ModelError, RecipeError, TunerError, UsageError
from tuner.hooks import Trial
from tuner.hub import config_file
from tuner.lab import tune
from tuner.lab.smoke import smoke
from tuner.launch.checks import Finding, inputs, model_files
from tuner.launch.meeting.joined import plan_of
from tuner.launch.resolve import resolve_start
from tuner.launch.resolved_run import Request, ResolvedRecipe, ResolvedRun
from tuner.machine.topology import LaunchFlags, Topology
from tuner.recipes import catalog
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides

ID = "someone/some-model"
Answer = Callable[[BaseHTTPRequestHandler], None]
Serve = Callable[[Answer], list[str]]


def status(code: int, error: str | None = None) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        if error:
            request.send_header("X-Error-Code", error)
        request.send_header("ETag", '"x"')
        request.end_headers()

    return answer


def cut_off(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\nETag: ")


def _point_to(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    # What HF_ENDPOINT sets when the library is imported.
    template = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that starts a hub with one answer to everything, and gives the paths that it is asked for."""
    asked: list[str] = []
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> list[str]:
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                asked.append(self.path)
                answer(self)

            do_GET = do_HEAD

            def log_message(self, *args: object) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        _point_to(monkeypatch, servers[-1].server_port)
        return asked

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def found(model: str = ID, data: str | None = None) -> list[Finding]:
    sets = [f"train_dataloader.dataset.path={data}"] if data else []
    return list(inputs.reachable(made(*sets, model=model)))


def test_a_model_that_may_be_read_is_asked_for_once_and_passes(serve: Serve) -> None:
    asked = serve(status(200))

    assert found() == []
    assert asked == [f"/{ID}/resolve/main/config.json"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (status(403, "GatedRepo"), "is gated"),
        (status(401, "RepoNotFound"), "no model 'someone/some-model', or this user has no access to it"),
        (status(404, "RepoNotFound"), "no model 'someone/some-model', or this user has no access to it"),
        (status(404, "EntryNotFound"), "holds no config.json"),
        (status(404, "RevisionNotFound"), "has no revision"),
        (status(403), "(403)"),
    ],
)
def test_what_the_hub_refuses_is_a_wrong_recipe(serve: Serve, answer: Answer, said: str) -> None:
    serve(answer)

    (error,) = found()

    assert isinstance(error, ModelError)
    assert said in str(error)
    assert error.fix


@pytest.mark.parametrize("answer", [status(500), status(503), status(429), cut_off])
def test_a_hub_in_trouble_is_told_and_does_not_stop_the_run(serve: Serve, answer: Answer) -> None:
    serve(answer)

    (warning,) = found()

    assert isinstance(warning, str)
    assert "the run will try again." in warning


def test_a_hub_that_never_answers_is_not_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    over = Event()
    monkeypatch.setattr(inputs, "DEADLINE_S", 0.3)

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not over.wait(0.05):  # never silent for long enough for a client's time-out
            request.wfile.write(b"X: 1\r\n")

    serve(drip)
    started = time.monotonic()

    (warning,) = found()
    over.set()

    assert isinstance(warning, str)
    assert "did not answer" in warning
    assert time.monotonic() - started < 30


def test_a_hub_that_cannot_be_reached_ends_the_run(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    _point_to(monkeypatch, 9)

    (error,) = found()

    assert isinstance(error, MachineError)
    assert "cannot be reached" in str(error)


def test_data_on_the_hub_is_asked_for_too(serve: Serve) -> None:
    asked = serve(status(403, "GatedRepo"))

    errors = found(data="someone/some-data")

    assert {type(error) for error in errors} == {ModelError, DataError}
    assert "/datasets/someone/some-data/resolve/main/.gitattributes" in asked


def test_local_models_and_data_ask_nobody(serve: Serve, tmp_path: Path) -> None:
    asked = serve(status(404, "RepoNotFound"))

    assert found(model=str(folder(tmp_path / "here"))) == []
    assert asked == []


def test_ranks_that_do_not_lead_ask_nobody(serve: Serve) -> None:
    asked = serve(status(404, "RepoNotFound"))
    plan = made(model=ID)
    topology = Topology("slurm", 1, 0, 2, 2, rank=1, local_rank=1)
    plan = replace(plan, machines=plan.machines._replace(topology=topology))

    assert list(inputs.reachable(plan)) == []
    assert asked == []


def cached(cache: Path, *, weights: bool = True) -> None:
    """Put a model into the hub's cache, as a download leaves it."""
    repo = cache / "models--someone--some-model"
    (repo / "snapshots").mkdir(parents=True)
    folder(repo / "snapshots" / ("a" * 40), weights=weights)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)


def test_offline_only_a_cached_model_passes(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = serve(status(200))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    (error,) = found()
    cached(tmp_path / "cache")

    assert isinstance(error, MachineError)
    assert "HF_HUB_OFFLINE" in str(error)
    assert found() == []
    assert asked == []


def test_a_cached_model_asks_nobody(serve: Serve, tmp_path: Path) -> None:
    asked = serve(status(404, "RepoNotFound"))
    cached(tmp_path / "cache")

    assert found() == []
    assert asked == []


def test_offline_half_a_cached_model_is_refused(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached(tmp_path / "cache", weights=False)

    (error,) = found()

    assert "holds no weights" in str(error)


def test_online_the_rest_of_half_a_cached_model_is_asked_for(serve: Serve, tmp_path: Path) -> None:
    asked = serve(status(200))
    cached(tmp_path / "cache", weights=False)

    assert found() == []
    assert asked == [f"/{ID}/resolve/main/config.json"]


# --- What a start asks before it plans


def holds(config: dict[str, object]) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        body = json.dumps(config).encode()
        request.send_response(200)
        headers = {"ETag": '"x"', "X-Repo-Commit": "a" * 40, "Content-Length": str(len(body))}
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)

    return answer


def started(recipe: str = TINY, model: str | None = ID, **values: str) -> ResolvedRun:
    pairs = tuple(("--set", f"{key}={value}") for key, value in values.items())
    request = Request(identify(recipe), Overrides(model=model, pairs=pairs))
    return resolve_start(request, PATH, CPU, NOW)


def unknown(run: ResolvedRun) -> list[str]:
    return [warning for warning in run.warnings if f"config.json of {ID} is not here" in warning]


@pytest.mark.parametrize(("kind", "packs"), [("llama", True), ("opt", False), ("of_tomorrow", False)])
def test_a_plan_says_what_it_does_not_know_of_a_model_and_a_start_fetches_it_first(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: str, packs: bool
) -> None:
    monkeypatch.setattr(hooks, "trial_of", lambda *_: Trial(None, "tried today"))
    serve(holds({**UNKNOWN, "model_type": kind, "ffn_dim": 64}))

    planned = made(model=ID)
    assert len(unknown(planned)) == 1 and planned.recipe.config.architecture is None
    run = started()

    assert unknown(run) == []
    assert run.recipe.config.architecture and run.recipe.config.architecture.model_type == kind
    assert run.recipe.config.train_dataloader.dataset.packing is packs
    assert any("row of its own" in note for note in run.notes) is not packs, "it is said"


def test_of_a_teacher_it_fetches_it_too(serve: Serve) -> None:
    serve(holds(UNKNOWN | {"model_type": "llama"}))

    run = started("tiny_distill_full_sample_e1", None, **{"objective.teacher": ID})

    assert run.recipe.config.teacher_architecture


def test_tune_fetches_it_before_it_decides_and_says_what_it_does_not_know(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[ResolvedRecipe] = []
    warnings: list[str] = []
    monkeypatch.setattr(tune, "told", lambda *lines: warnings.extend(lines))
    monkeypatch.setattr(tune, "candidates", lambda base, *_: decided.append(base) or ())
    request = Request(identify(TINY), Overrides(model=ID))

    serve(status(404, "RepoNotFound"))
    tune.tune(request, PATH, print, steps=2, minutes=1, output=tmp_path / "tuned.py")
    (without,) = warnings
    warnings.clear()
    serve(holds(UNKNOWN | {"model_type": "llama"}))
    tune.tune(request, PATH, print, steps=2, minutes=1, output=tmp_path / "tuned.py")

    assert f"hf download {ID} config.json" in without and warnings == []
    assert [bool(base.recipe.config.architecture) for base in decided] == [False, True]


def test_a_smoke_test_which_asks_no_hub_names_the_command_that_fetches_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = serve(holds(UNKNOWN | {"model_type": "llama"}))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(ModelError) as caught:
        smoke(Request(identify(TINY), Overrides(model=ID)), PATH, print)

    assert caught.value.fix and f"hf download {ID} config.json" in caught.value.fix
    assert asked == []


def test_a_job_is_planned_with_it_and_a_dry_run_asks_no_hub(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeSlurm(tmp_path / "slurm")
    fake.says("812")
    monkeypatch.setenv("PATH", fake.path)
    monkeypatch.chdir(tmp_path)
    asked = serve(holds(UNKNOWN | {"model_type": "llama"}))
    tuner = runner(monkeypatch, capsys)
    job = ("submit", TINY, "--model", ID, "--gpus-per-node", 0, "--json")

    dry = json.loads(tuner(*job, "--dry-run").out)
    asked_by_dry = list(asked)
    submitted = json.loads(tuner(*job).out)

    assert asked_by_dry == [] and any(f"hf download {ID} config.json" in warning for warning in dry["warnings"])
    assert submitted["job"] == "812"
    assert not any("config.json" in warning for warning in submitted["warnings"])


def test_weights_that_are_published_in_fewer_bits_are_refused_before_they_are_downloaded(serve: Serve) -> None:
    said = {"quant_method": "mxfp4"}
    serve(holds(UNKNOWN | {"model_type": "llama", "quantization_config": said}))
    published = made(recipe="gpt_oss_20b_qlora_alpaca_e3", ignore_fit=True)
    fetched = started("tiny_qlora_sample_e1")

    for run in (published, fetched):
        (error,) = model_files.architecture(run)
        assert isinstance(error, ModelError) and error.where == "quantization" and "mxfp4" in str(error)
    for run in (made(recipe="gpt_oss_20b_lora_alpaca_e3", ignore_fit=True), started("tiny_lora_sample_e1")):
        assert list(model_files.architecture(run)) == []


def test_a_part_says_that_its_weights_have_fewer_bits_exactly_where_that_is_known_before_its_config_is_here() -> None:
    said = {
        catalog.path_of(name)
        for name in catalog.names("models")
        if "-bit " in catalog.summary(catalog.part_file("models", name))
    }

    assert said == {*map(catalog.path_of, catalog.names("models"))} & model_folder.PUBLISHED_IN.keys()


@pytest.mark.parametrize("answer", [status(403, "GatedRepo"), status(404, "RepoNotFound")])
def test_where_it_cannot_be_fetched_the_start_says_what_it_does_not_know(serve: Serve, answer: Answer) -> None:
    serve(answer)

    assert len(unknown(started())) == 1


def test_a_rank_that_could_not_fetch_it_begins_the_launch_of_those_that_could(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "trial_of", lambda *_: Trial(None, "tried today"))
    of_rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environ = {**PATH, **of_rank, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    without = made(model=ID, environ=environ, flags={"launcher": "env"})
    serve(holds({**UNKNOWN, "model_type": "opt", "ffn_dim": 64}))
    request = Request(identify(TINY), Overrides(model=ID), flags=LaunchFlags(launcher="env"))
    fetched = resolve_start(request, environ, CPU, NOW)

    assert without.recipe.config.architecture is None and fetched.recipe.config.architecture
    assert without.launch_id == fetched.launch_id
    assert plan_of(without) == plan_of(fetched), "as of nodes that meet"


def test_a_start_does_not_wait_for_a_hub_that_never_answers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    over = Event()
    monkeypatch.setattr(config_file, "DEADLINE_S", 0.2)
    monkeypatch.setattr(config_file, "_fetch", lambda *_: over.wait(60))

    assert len(unknown(started())) == 1
    over.set()


# --- A repository to push to


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub(), monkeypatch) as found:
        yield found


def about_pushing(*sets: str, **request: object) -> list[Finding]:
    return list(inputs.pushes(made(f"checkpoint.repository={NAME}", *sets, **request)))  # type: ignore[arg-type]


def test_a_repository_that_may_be_written_passes_and_nothing_is_created(there: Hub) -> None:
    assert about_pushing() == []
    assert about_pushing(model=ID, recipe="tiny_lora_sample_e1") == []
    assert there.asked and not there.changed


def test_a_run_that_pushes_nothing_asks_the_hub_nothing(there: Hub) -> None:
    assert list(inputs.pushes(made())) == []
    assert about_pushing(saves_result=False) == []
    assert there.asked == []


@pytest.mark.parametrize(
    ("recipe", "files", "refused"),
    [
        ("tiny_full_sample_e1", ("model-00001-of-00002.safetensors", "README.md"), ""),
        ("tiny_full_sample_e1", ("adapter_config.json",), "adapter_config.json"),
        ("tiny_lora_sample_e1", ("adapter_model.safetensors", "adapter_config.json"), ""),
        ("tiny_lora_sample_e1", ("model.safetensors",), "model.safetensors"),
    ],
)
def test_weights_of_another_kind_in_the_repository_are_found_before_the_start(
    there: Hub, recipe: str, files: tuple[str, ...], refused: str
) -> None:
    there.files = dict.fromkeys(files, b"theirs")

    try:
        found = [str(finding) for finding in about_pushing(recipe=recipe, model=ID)]
    except UsageError as error:
        found = [str(error)]

    assert bool(found) == bool(refused) and refused in "".join(found)


def test_an_adapter_on_a_model_that_nobody_else_has_is_found_before_the_start(there: Hub, tmp_path: Path) -> None:
    (finding,) = about_pushing(model=str(folder(tmp_path / "model")), recipe="tiny_lora_sample_e1")

    assert "the adapter's base is a local folder" in str(finding) and f"--merge --push {NAME}" in str(finding)
    assert there.asked == []


def test_a_repository_that_a_recipe_file_names_needs_the_users_word(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(f"_base_ = 'tiny_full_sample_e1'\ncheckpoint = dict(repository={NAME!r})\n")

    with refused(RecipeError, "mine.py:2", "--push", NAME, "--allow-code"):
        made(recipe=str(mine))
    assert made(recipe=str(mine), allow_code=True).recipe.config.checkpoint.repository == NAME


def test_a_plan_says_what_is_pushed() -> None:
    result, both = (made(f"checkpoint.repository={NAME}", f"checkpoint.push={push}").notes for push in (False, True))

    assert (
        f"push: the result goes to {NAME}." in result and f"push: each checkpoint and the result go to {NAME}." in both
    )


def test_checkpoints_are_pushed_only_to_a_repository_that_is_named() -> None:
    with refused(TunerError, "--set checkpoint.push=True"):
        made("checkpoint.push=True")
