"""`tuner export --push`: what arrives on the hub, what is refused before that, and where the token is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

from tests.results.hub import NAME, TOKEN, Hub
from tests.results.hub import hub as hub
from tests.results.models import LLAMA, with_tokenizer, write_adapter, write_base
from tests.results.runs import finish, make_run
from tuner import api
from tuner.cli import tuner
from tuner.errors import TunerError, UsageError
from tuner.runs.directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A finished run, which trained an adapter."""
    base = with_tokenizer(write_base(tmp_path / "base", LLAMA))
    adapter = with_tokenizer(write_adapter(tmp_path / "adapter", base))
    made = make_run(tmp_path / "run", "tiny_lora_sample_e1", base)
    finish(made, adapter)
    return made


ON_HUB = ("--base", "org/base")
"""An adapter whose base others have: exported in a moment, nothing is merged."""


def push(run: RunDirectory, *arguments: object, name: str = NAME) -> Result:
    return CliRunner().invoke(tuner, ["export", *map(str, (run.path, *arguments)), "--push", name])


def refusal(result: Result) -> TunerError:
    """Return the one mistake that a command told; anything else is a bug."""
    assert isinstance(result.exception, TunerError), result.output
    assert str(result.exception).count("\n") == 0
    assert TOKEN not in str(result.exception)
    return result.exception


def test_an_export_arrives_whole_with_its_card_and_manifest(
    hub: Hub, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()

    done = push(run, "--merge")

    assert done.exit_code == 0, done.output
    assert hub.files and {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= hub.files.keys()
    manifest = json.loads(hub.files["manifest.json"])["files"]
    assert {name: entry["bytes"] for name, entry in manifest.items()} == {
        name: len(content) for name, content in hub.files.items() if name != "manifest.json"
    }
    card = hub.files["README.md"].decode()
    assert "# my-model" in card and f'from_pretrained("{NAME}"' in card
    assert f"Uploaded: {constants.ENDPOINT}/{NAME}" in done.output
    assert not hub.private
    assert list((tmp_path / "t").iterdir()) == [], "what was exported for the upload alone is gone"


def test_python_uploads_too_and_keeps_the_folder(hub: Hub, run: RunDirectory, tmp_path: Path) -> None:
    api.export(run.path, tmp_path / "out", base="org/base", push=NAME, private=True)

    assert hub.files.keys() == {file.name for file in (tmp_path / "out").iterdir()}
    assert hub.private and TOKEN.encode() not in hub.sent


def test_python_refuses_what_the_command_refuses_before_it_writes(hub: Hub, run: RunDirectory, tmp_path: Path) -> None:
    for options in ({"push": NAME, "format": "gguf"}, {"private": True}, {"push": "someone/my-model"}):
        with pytest.raises(UsageError, match=r"does not support GGUF|needs push|neither the user"):
            api.export(run.path, tmp_path / "out", **options)  # type: ignore[arg-type]

    assert not hub.changed and not (tmp_path / "out").exists()


def test_the_token_is_sent_to_the_hub_and_written_nowhere(hub: Hub, run: RunDirectory, tmp_path: Path) -> None:
    done = push(run, tmp_path / "out", "--merge", "--private")

    assert done.exit_code == 0, done.output
    assert hub.tokens[f"/api/models/{NAME}/commit/main"] == f"Bearer {TOKEN}"
    storage = {token for path, token in hub.tokens.items() if path.startswith("/large/")}
    assert storage == {None}, "a signed address needs no token"
    assert hub.private
    assert TOKEN.encode() not in hub.sent and str(tmp_path).encode() not in hub.sent
    assert TOKEN not in done.output
    kept = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert kept and not any(TOKEN.encode() in content for content in kept)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-model", "has no owner"),
        ("a/b/c", "must be in the form"),
        ("my-org/my model", "alphanumeric"),
        ("my-org/../x", "must be in the form"),
        ("someone/my-model", "neither the user of this token nor one of their organizations"),
    ],
)
def test_a_name_that_cannot_be_published_under_is_refused_before_anything_is_sent(
    hub: Hub, run: RunDirectory, tmp_path: Path, name: str, said: str
) -> None:
    error = refusal(push(run, tmp_path / "out", name=name))

    assert said in error.what and error.exit_code == 2 and error.fix
    assert not hub.changed and not (tmp_path / "out").exists()


def test_without_a_token_or_a_network_the_hub_is_not_asked(
    hub: Hub, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE is set" in refusal(push(run)).what
    monkeypatch.delenv("HF_TOKEN")

    error = refusal(push(run))

    assert "no token" in error.what and "hf auth login" in str(error.fix) and error.exit_code == 3
    assert hub.asked == []


@pytest.mark.parametrize(
    ("where", "status", "said"),
    [
        ("/api/whoami-v2", 401, "rejects this token (401)"),
        ("/api/whoami-v2", 503, "answers 503"),
        ("/api/whoami-v2", 0, "cannot be reached"),
        ("/api/repos/create", 403, f"has no write access to {NAME} (403): says the hub"),
        ("/preupload/", 500, "answers 500"),
        ("/large/", 503, "answers 503"),
        ("/commit/", 409, "someone else changed "),
        ("/commit/", 413, f"rejects the upload to {NAME} (413): says the hub"),
        ("/commit/", 0, "cannot be reached"),
    ],
)
def test_what_the_hub_answers_is_told_in_one_message(
    hub: Hub, run: RunDirectory, where: str, status: int, said: str
) -> None:
    hub.refused[where] = status

    error = refusal(push(run, *ON_HUB))

    assert said in error.what and error.exit_code == 3 and error.fix
    assert not hub.files


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (httpx.ReadTimeout("late"), "did not answer in time"),
        # As hf_xet 1.8 tells of what broke off; it tries for minutes before.
        (ConnectionError("Network error: https://storage/x?signature=s"), f"upload to {NAME} failed: Network error"),
    ],
)
def test_an_upload_that_breaks_off_is_told_and_the_export_is_kept(
    hub: Hub, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", fail)

    error = refusal(push(run, tmp_path / "out", *ON_HUB))

    assert said in error.what and "signature" not in str(error)
    assert f"hf upload {NAME} {tmp_path / 'out'}" in str(error.fix)
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_the_same_again_replaces_its_files_and_leaves_the_others(hub: Hub, run: RunDirectory) -> None:
    theirs = {"LICENSE": b"theirs", "logs/x.safetensors": b"theirs"}
    hub.files = {"README.md": b"old", "model.safetensors": b"old", **theirs}

    done = push(run, "--merge")

    assert done.exit_code == 0, done.output
    assert hub.files.items() >= theirs.items()
    assert b"old" not in hub.files.values()
    assert "POST /api/repos/create" not in hub.asked


@pytest.mark.parametrize("other", ["model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_weights_that_would_be_loaded_beside_it_are_not_mixed_with_it(hub: Hub, run: RunDirectory, other: str) -> None:
    hub.files = {other: b"theirs"}

    error = refusal(push(run, *ON_HUB))

    assert other in error.what and f"hf repos delete-files {NAME} {other}" in str(error.fix)
    assert not hub.changed


def test_what_others_could_not_load_or_all_could_see_stays_here(hub: Hub, run: RunDirectory) -> None:
    hub.user["auth"] = {"accessToken": {"role": "read"}}
    assert "is read-only" in refusal(push(run, *ON_HUB)).what
    del hub.user["auth"]
    error = refusal(push(run))
    assert ", which others cannot load" in error.what and "--merge" in str(error.fix)
    hub.files = {}
    assert "already exists and is public" in refusal(push(run, "--private")).what
    assert not hub.changed


def test_flags_that_do_not_go_together_are_refused(hub: Hub, run: RunDirectory, tmp_path: Path) -> None:
    runner = CliRunner()

    assert "missing DEST" in refusal(runner.invoke(tuner, ["export", str(run.path)])).what
    assert "--push" in str(refusal(runner.invoke(tuner, ["export", str(run.path), "out", "--private"])).fix)
    assert "--push does not support GGUF, which has no model card" in refusal(push(run, "out", "--as", "gguf")).what
    assert hub.asked == []
