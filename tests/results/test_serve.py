"""A served model says over HTTP what it says in chat, under its own name, and ends at Ctrl-C leaving nothing."""

from __future__ import annotations

import base64
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from click.testing import CliRunner

from tests.e2e.runs import environment
from tests.e2e.warm import Forked, warm
from tests.machine.gpus import CPU
from tests.models import vision
from tests.models.published import write_checkpoint
from tests.results.made import make_result
from tests.results.models import LLAMA, write_adapter, write_base
from tuner.cli import tuner
from tuner.errors import ModelError
from tuner.results import serve
from tuner.results.chat import Chat
from tuner.results.loaded_model import load, spec_of
from tuner.worker.generation import Settings

START_S = 120
QUESTION = "What is the capital of Denmark?"


@contextmanager
def served(scratch: Path, *arguments: object) -> Iterator[tuple[Forked, str]]:
    """Serve until it answers; yield the process and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = warm().start(["serve", *arguments, "--port", port], env=environment(TMPDIR=str(scratch)))
    try:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("recipe", "end"),
    [
        ("tiny_lora_sample_e1", signal.SIGINT),
        pytest.param("tiny_full_sample_e1", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_result_answers_openai_requests_as_it_does_in_chat(recipe: str, end: int, tmp_path: Path) -> None:
    for package in ("uvicorn", "fastapi"):
        pytest.importorskip(package)
    openai = pytest.importorskip("openai")
    run, _ = make_result(tmp_path / "my-run", recipe)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    body: dict[str, Any] = {
        "model": "my-run",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 8,
        "temperature": 0,
    }

    with served(scratch, run.path) as (process, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0)
        listed = [model.id for model in client.models.list()]
        whole = client.chat.completions.create(**body).choices[0].message.content
        parts = [part.choices[0].delta.content or "" for part in client.chat.completions.create(**body, stream=True)]
        with pytest.raises(openai.APIStatusError) as refused:
            client.chat.completions.create(**body | {"model": "another"})
        process.send_signal(end)
        text, _ = process.communicate(60)
        assert process.returncode == 0, text

    chat = Chat(load(spec_of(str(run.path), None), CPU), Settings(max_new_tokens=8, temperature=0))
    assert listed == ["my-run"], "and nothing of the hub's cache, which may not be there"
    assert whole == "".join(parts) == chat.ask(QUESTION, lambda _: None).text
    assert 400 <= refused.value.status_code < 500
    assert "Stopped." in text
    assert list(scratch.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(("kind", "mark"), [("qwen2_5_vl", "<|image_pad|>"), ("llava", "<image>")])
def test_an_image_of_a_request_is_seen_as_in_chat_and_no_address_is_opened(
    kind: str, mark: str, tmp_path: Path
) -> None:
    for package in ("uvicorn", "fastapi"):
        pytest.importorskip(package)
    openai = pytest.importorskip("openai")
    model = vision.make(kind, tmp_path / "seeing")
    picture = tmp_path / "red.png"
    PIL.Image.new("RGB", (90, 60), (200, 30, 30)).save(picture)
    uri = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    with served(scratch, model) as (_, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0)

        def ask(url: str, text: str = QUESTION) -> str:
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
            messages: Any = [{"role": "user", "content": parts}]
            reply = client.chat.completions.create(model="seeing", messages=messages, max_tokens=8, temperature=0)
            return str(reply.choices[0].message.content)

        answer = ask(uri)
        for refused, text, reason in (
            ("http://localhost/red.png", QUESTION, "data URI"),
            (str(picture), QUESTION, "data URI"),
            (f"file://{picture}", QUESTION, "data URI"),
            ("data:image/png;base64,AAAA", QUESTION, "known format"),
            (uri, f"What does {mark} mean?", "stands for an image"),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                ask(refused, text)
            assert reason in error.value.response.json()["detail"]

    chat = Chat(load(spec_of(str(model), None), CPU), Settings(max_new_tokens=8, temperature=0))
    chat.show(str(picture))
    assert answer == chat.ask(QUESTION).text


def test_the_packages_that_are_missing_are_told_before_a_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "is_serve_available", lambda: False)

    done = CliRunner().invoke(tuner, ["serve", "./nowhere", "--engine", "transformers"])

    assert "pip install 'tuner-deepspeed[serve]'" in str(done.exception)


def test_an_architecture_that_transformers_has_not_is_to_be_written_as_llama(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "internlm2")

    with pytest.raises(ModelError, match=r"InternLM2ForCausalLM.*--as llama"):
        serve.run_transformers(spec_of(str(tmp_path / "internlm2"), None), "mine", "127.0.0.1", 1, CPU, None)


def test_an_adapter_that_holds_more_than_lora_is_to_be_merged_first(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", LLAMA)
    adapter = write_adapter(tmp_path / "adapter", base, modules_to_save=["lm_head"])

    with pytest.raises(ModelError, match=r"lm_head.*tuner export SOURCE DEST --merge"):
        serve.check_servable(spec_of(str(base), str(adapter)))


def test_vllm_gets_the_adapter_with_its_rank_template_and_stop_tokens(tmp_path: Path) -> None:
    run, _ = make_result(tmp_path / "my-run", "tiny_lora_sample_e1", "adapter.r=24")
    spec = spec_of(str(run.path), None)

    argv = serve.vllm_argv("vllm", spec, "my-run", "127.0.0.1", 8000)

    assert argv[:3] == ["vllm", "serve", spec.path]
    assert f"--max-lora-rank 32 --lora-modules my-run={run.final}" in " ".join(argv)
    assert f"--chat-template {run.final / 'chat_template.jinja'}" in " ".join(argv)


def test_vllm_gets_a_whole_model_under_its_name_and_no_dora(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", LLAMA)
    named = ["--served-model-name", "mine"]
    dora = write_adapter(tmp_path / "dora", base, use_dora=True)

    argv = serve.vllm_argv("vllm", spec_of(str(base), None), "mine", "127.0.0.1", 8000)

    assert argv == ["vllm", "serve", str(base), "--host", "127.0.0.1", "--port", "8000", *named]
    with pytest.raises(ModelError, match="DoRA"):
        serve.vllm_argv("vllm", spec_of(str(base), str(dora)), "mine", "127.0.0.1", 8000)
