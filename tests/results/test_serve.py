"""A served model answers OpenAI's client as it does in chat, refuses what it cannot do, and ends leaving nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import stat
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import PIL.Image
import psutil
import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GenerationConfig,
    LogitsProcessorList,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.e2e.runs import environment, free_port
from tests.e2e.warm import Forked, warm
from tests.machine.gpus import CPU
from tests.models import vision
from tests.results.made import make_result
from tests.results.models import GPT2, LLAMA, MIXTURE, SMALL, write_adapter, write_base
from tests.results.scripted import CALL, CONTEXT, DICE, write_scripted
from tuner.cli import tuner
from tuner.errors import ModelError, UsageError
from tuner.results import serve
from tuner.results.chat import Chat
from tuner.results.loaded_model import encoder_of, load, spec_of
from tuner.results.serving import engine, prompts, vllm
from tuner.results.serving.answers import AnswerText
from tuner.results.serving.app import Hosts
from tuner.results.serving.requests import Refused
from tuner.worker.generation import Settings

openai = pytest.importorskip("openai")

START_S = 120
END_S = 30
"""How long Ctrl-C may take: seconds, not the minutes of what is being generated."""
KEY = "sk-of-the-tests"
QUESTION = "What is the capital of Denmark?"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@contextmanager
def served(scratch: Path, *arguments: object, code: str = "", **more: str) -> Iterator[tuple[Forked, str]]:
    """Serve, with other limits if code sets them, until it answers; yield the process and its address."""
    port = free_port()
    env = environment(TMPDIR=str(scratch), TUNER_API_KEY=KEY, **more)
    process = warm().start(["serve", *arguments, "--port", port], code=code, env=env)
    try:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def client_of(address: str, key: str = KEY) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, timeout=60, max_retries=0)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Forked, str]]:
    """A server of the scripted model, for all tests of this module."""
    folder = tmp_path_factory.mktemp("served")
    with served(folder, write_scripted(folder / "scripted"), "--name", "scripted") as server:
        yield server


@pytest.fixture
def client(scripted: tuple[Forked, str]) -> Iterator[Any]:
    with client_of(scripted[1]) as client:
        yield client


def ask(client: Any, content: Any, **more: Any) -> Any:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    body = {"model": "scripted", "messages": messages, "temperature": 0} | more
    return client.chat.completions.create(**body)


def test_the_client_lists_the_served_model_alone(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]


def test_an_answer_ends_where_the_model_ends_it_and_its_tokens_are_counted(client: Any) -> None:
    reply = ask(client, "[count]")

    assert reply.object == "chat.completion"
    assert reply.choices[0].message.content == "one two three four"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == 5, "with the one that ends it"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 5


def test_a_limit_of_tokens_is_a_finish_reason(client: Any) -> None:
    for limit in ("max_tokens", "max_completion_tokens"):
        choice = ask(client, "[count]", **{limit: 2}).choices[0]

        assert (choice.message.content, choice.finish_reason) == ("one two", "length")


@pytest.mark.parametrize("question", ["[count]", "[smile]"])
def test_a_stream_is_the_same_answer_in_parts(client: Any, question: str) -> None:
    whole = ask(client, question)

    parts = list(ask(client, question, stream=True, stream_options={"include_usage": True}))

    choices = [part.choices[0] for part in parts if part.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert len([choice for choice in choices if choice.delta.content]) > 1
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert parts[-1].usage == whole.usage
    assert len({part.id for part in parts}) == 1


@pytest.mark.parametrize("stop", [" three", ["wo thr", "nothing"], "e t"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_not_in_it(client: Any, stop: Any, stream: bool) -> None:
    reply = ask(client, "[count]", stop=stop, stream=stream)

    if stream:
        choices = [part.choices[0] for part in reply]
        text, finish = "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
    else:
        text, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
    first = stop if isinstance(stop, str) else stop[0]
    assert (text, finish) == ("one two three four".partition(first)[0], "stop")


def test_n_choices_are_drawn_by_themselves_and_a_seed_draws_them_again(client: Any) -> None:
    def drawn(**more: Any) -> list[str]:
        return [choice.message.content for choice in ask(client, "[dice]", n=8, temperature=1, **more).choices]

    once = drawn(seed=7)

    assert len(once) == 8
    assert set(once) <= set(DICE)
    assert len(set(once)) > 1
    assert drawn(seed=7) == once
    assert [ask(client, "[dice]", n=1, temperature=1, seed=7).choices[0].message.content] == once[:1]
    assert len({tuple(drawn()) for _ in range(3)}) > 1, "without a seed another answer each time"


def test_log_probabilities_are_those_of_the_model(client: Any) -> None:
    logprobs = ask(client, "[dice]", logprobs=True, top_logprobs=7).choices[0].logprobs.content

    assert len(logprobs) == 1, "the token that ends the answer has no text"
    assert {likely.token for likely in logprobs[0].top_logprobs} >= set(DICE)
    assert logprobs[0].logprob == pytest.approx(-1.79, abs=0.01), "ln(1/6)"
    assert bytes(logprobs[0].bytes).decode() == logprobs[0].token
    parts = list(ask(client, "[count]", logprobs=True, stream=True, stop=" three"))
    tokens = [
        sampled.token for part in parts if part.choices[0].logprobs for sampled in part.choices[0].logprobs.content
    ]
    assert tokens == ["one", " two"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_parsed(client: Any, stream: bool) -> None:
    reply = ask(client, "[call]", tools=[TOOL], stream=stream)

    choices = [part.choices[0] for part in reply] if stream else [reply.choices[0]]
    said = [choice.delta if stream else choice.message for choice in choices]
    calls = [call for delta in said for call in delta.tool_calls or ()]
    assert [(call.type, call.function.name) for call in calls] == [("function", "weather")]
    assert json.loads(calls[0].function.arguments) == json.loads(CALL)["arguments"]
    assert calls[0].id
    assert not any(delta.content for delta in said)
    assert choices[-1].finish_reason == "tool_calls"


def test_an_answer_that_is_no_call_stays_text(client: Any) -> None:
    for question in ("[broken]", "[count]"):
        plain = ask(client, question).choices[0].message.content

        choice = ask(client, question, tools=[TOOL]).choices[0]

        assert (choice.message.content, choice.message.tool_calls) == (plain, None)
        assert choice.finish_reason == "stop"
    assert "<tool_call>" in ask(client, "[call]", tools=[TOOL], tool_choice="none").choices[0].message.content


def test_a_result_of_a_tool_goes_back_into_the_conversation(client: Any) -> None:
    question = {"role": "user", "content": "[call]"}
    message = ask(client, [question], tools=[TOOL]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "[count]"}

    reply = ask(client, [question, message, result], tools=[TOOL])

    assert reply.choices[0].message.content == "one two three four"


def test_a_turn_of_the_developer_is_the_system_s(client: Any) -> None:
    turns = [
        [{"role": role, "content": "Be brief."}, {"role": "user", "content": "[count]"}]
        for role in ("developer", "system")
    ]

    replies = [ask(client, messages) for messages in turns]

    assert replies[0].choices == replies[1].choices
    assert replies[0].usage == replies[1].usage


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "object"}}}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("logit_bias", {"5": 10}),
        ("tool_choice", "required"),
        ("parallel_tool_calls", False),
        ("reasoning_effort", "low"),
        ("store", True),
        ("n", 0),
        ("temperature", 3),
        ("temperature", "warm"),
        ("top_p", -1),
        ("max_tokens", 0),
        ("top_logprobs", 2),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {}),
    ],
)
def test_what_cannot_be_done_is_an_error_that_names_the_parameter(client: Any, parameter: str, value: Any) -> None:
    more = {"tools": [TOOL]} if "tool" in parameter else {}

    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "[count]", **more, extra_body={parameter: value})

    assert refused.value.param == parameter
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("response_format", {"type": "text"}),
        ("frequency_penalty", 0),
        ("logit_bias", {}),
        ("tool_choice", "auto"),
        ("user", "someone"),
        ("store", False),
        ("metadata", {"of": "mine"}),
        ("stop", None),
        ("logprobs", False),
    ],
)
def test_what_asks_for_nothing_special_is_taken(client: Any, parameter: str, value: Any) -> None:
    reply = ask(client, "[count]", extra_body={parameter: value})

    assert reply.choices[0].message.content == "one two three four"


def test_errors_have_the_client_s_own_classes(scripted: tuple[Forked, str], client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, "[count]", model="another")
    with pytest.raises(openai.AuthenticationError) as stranger, client_of(scripted[1], "sk-wrong") as other:
        other.models.list()
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, "one two " * CONTEXT)

    assert unknown.value.code == "model_not_found"
    assert stranger.value.code == "invalid_api_key"
    assert long.value.code == "context_length_exceeded"
    assert long.value.param == "messages"


def test_completions_continue_texts_and_tokens(client: Any) -> None:
    ask = client.completions.create
    body = {"model": "scripted", "temperature": 0}

    reply = ask(**body, prompt=["[count]", "[call]"], n=2, logprobs=1)

    assert [choice.text for choice in reply.choices][:2] == ["one two three four"] * 2
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[0].logprobs.tokens == ["one", " two", " three", " four"]
    assert reply.choices[0].logprobs.text_offset == [0, 3, 7, 13]
    parts = ask(**body, prompt="[count]", stream=True, stop=" four")
    assert "".join(part.choices[0].text for part in parts) == "one two three"
    for prompt in ([-1], [10**6], [], "", [[]]):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(**body, prompt=prompt)
        assert refused.value.param == "prompt"


def test_a_request_is_answered_while_a_long_one_is_generated(client: Any) -> None:
    with ask(client, "[loop]", stream=True) as long:
        next(iter(long))

        reply = ask(client, "[count]", timeout=20)

    assert reply.choices[0].message.content == "one two three four"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(scripted: tuple[Forked, str], client: Any, stream: bool) -> None:
    server = psutil.Process(scripted[0].pid)
    if stream:
        with ask(client, "[loop]", stream=True, n=2) as reply:
            next(iter(reply))
    else:
        with pytest.raises(openai.APITimeoutError):
            ask(client, "[loop]", timeout=1)

    deadline = time.monotonic() + 20
    while (share := server.cpu_percent(0.5)) > 20 and time.monotonic() < deadline:  # per cent of a processor
        pass
    assert share <= 20, "8,000 tokens take more than that"


@pytest.mark.parametrize(
    ("recipe", "end"),
    [
        ("tiny_lora_sample_e1", signal.SIGINT),
        pytest.param("tiny_full_sample_e1", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_result_answers_as_it_does_in_chat_and_ends_at_once(recipe: str, end: int, tmp_path: Path) -> None:
    run, _ = make_result(tmp_path / "my-run", recipe)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    messages: Any = [{"role": "user", "content": QUESTION}]

    with served(scratch, run.path) as (process, address), client_of(address) as client:
        create = client.chat.completions.create
        reply = create(model="my-run", messages=messages, max_tokens=8, temperature=0)
        long = create(model="my-run", messages=messages, stream=True)
        next(iter(long))
        process.send_signal(end)
        start = time.monotonic()
        text, _ = process.communicate(60)
        took_s = time.monotonic() - start

    chat = Chat(load(spec_of(str(run.path), None), CPU), Settings(max_new_tokens=8, temperature=0))
    assert reply.choices[0].message.content == chat.ask(QUESTION, lambda _: None).text
    assert process.returncode == 0, text
    assert took_s < END_S
    assert "Stopped." in text
    assert "Traceback" not in text
    assert KEY not in text
    assert list(scratch.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(("kind", "mark"), [("qwen2_5_vl", "<|image_pad|>"), ("llava", "<image>")])
def test_an_image_of_a_request_is_seen_as_in_chat_and_no_address_is_opened(
    kind: str, mark: str, tmp_path: Path
) -> None:
    model = vision.make(kind, tmp_path / "seeing")
    picture = tmp_path / "red.png"
    PIL.Image.new("RGB", (90, 60), (200, 30, 30)).save(picture)
    uri = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    with served(scratch, model) as (_, address), client_of(address) as client:

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
            assert reason in error.value.message

    chat = Chat(load(spec_of(str(model), None), CPU), Settings(max_new_tokens=8, temperature=0))
    chat.show(str(picture))
    assert answer == chat.ask(QUESTION).text


def test_packages_that_are_missing_are_told_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    monkeypatch.setattr(serve, "find_spec", lambda name: None)

    done = CliRunner().invoke(tuner, ["serve", "./model", "--engine", "transformers"])

    assert "pip install 'tuner-deepspeed[serve]'" in str(done.exception)


@pytest.mark.parametrize("key", ["", "two words", "k\u00e9y", "line\n"])
def test_a_key_that_no_header_holds_is_refused(key: str) -> None:
    with pytest.raises(UsageError):
        serve.check_key(key)

    serve.check_key(serve.new_key())
    assert serve.new_key() != serve.new_key()


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = serve.Address("127.0.0.1", taken.getsockname()[1], KEY)

        with pytest.raises(UsageError) as refused:
            serve._bound(address)

    assert refused.value.where == "--port"


GREEDY = engine.Sampler(LogitsProcessorList(), draws=False, device=torch.device("cpu")).choose


async def _tokens(generating: engine.Engine, ids: list[int], limit: int, choose: Any = GREEDY) -> list[int]:
    return [token async for token in generating.tokens(engine.Prompt(ids), choose, limit)]


@contextmanager
def ended(generating: engine.Engine) -> Iterator[engine.Engine]:
    try:
        yield generating
    finally:
        assert generating.close()


PROMPTS = [[1, 5, 9, 33, 70, 11, 4, 8], [1, 7, 7, 20, 3]]


@pytest.mark.parametrize(
    ("config", "is_batched"),
    [
        (LLAMA, True),
        (MistralConfig(hidden_size=32, intermediate_size=48, num_key_value_heads=2, sliding_window=4, **SMALL), True),
        (MIXTURE, True),
        (GPT2, None),
        (BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=96), False),
        (MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96, state_size=4), False),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_an_engine_gives_the_model_s_own_tokens_or_is_not_taken(
    config: PreTrainedConfig, is_batched: bool | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():  # random layers of usual weights add next to nothing to an embedding
            weight.mul_(8 if weight.dim() > 1 else 1)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    wanted = [model.generate(torch.tensor([ids]), max_new_tokens=6)[0, len(ids) :].tolist() for ids in PROMPTS]

    with ended(engine.of_model(model, 64, [], PROMPTS)) as generating:
        assert is_batched is None or isinstance(generating, engine.Continuous) == is_batched
        assert [asyncio.run(_tokens(generating, ids, 6)) for ids in PROMPTS] == wanted


def test_eight_requests_are_generated_in_one_batch() -> None:
    model = AutoModelForCausalLM.from_config(LLAMA).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    passes: list[object] = []

    async def all_at_once() -> list[list[int]]:
        return await asyncio.gather(*(_tokens(generating, PROMPTS[0], 40) for _ in range(8)))

    with ended(engine.of_model(model, 64, [], PROMPTS)) as generating:
        model.register_forward_hook(lambda *_: passes.append(None))
        assert [len(tokens) for tokens in asyncio.run(all_at_once())] == [40] * 8
    assert 40 <= len(passes) < 4 * 40, "one after the other they take 320 forward passes"


def test_penalties_of_the_model_s_own_generation_config_count_as_in_chat(tmp_path: Path) -> None:
    folder = write_scripted(tmp_path / "scripted")
    config = GenerationConfig.from_pretrained(folder)
    config.repetition_penalty, config.no_repeat_ngram_size = 1.3, 2
    config.save_pretrained(folder)
    chat = Chat(load(spec_of(str(folder), None), CPU), Settings(max_new_tokens=12, temperature=0))
    wanted = chat.ask("[loop]").text
    loaded = load(spec_of(str(folder), None), CPU)
    sampling = engine.Sampling(loaded.model)
    prompt = engine.Prompt(loaded.encoder.prompt([{"role": "user", "content": "[loop]"}])[0].tolist())
    sampler = sampling.sampler(prompt, temperature=0, top_p=None, seed=None, num_logprobs=None)

    with ended(engine.begin(loaded.model, loaded.encoder, CONTEXT)) as generating:
        said = asyncio.run(_tokens(generating, prompt.ids, 12, sampler.choose))

    assert loaded.encoder.decode(said, skips_special=True) == wanted
    assert wanted.count(" tick tock") < 3, "the penalty has changed something"


def test_the_answers_of_an_adapter_end_as_it_learned(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", LLAMA)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), write_adapter(tmp_path / "a", base))
    adapted.generation_config = GenerationConfig(eos_token_id=[2, 7])

    model = engine.whole_model(adapted)

    assert isinstance(model, PreTrainedModel)
    assert engine.Sampling(model).ends == {2, 7}


def test_a_stranger_that_has_the_port_is_not_told_the_key() -> None:
    received = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                received.append(connection.recv(65_536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        stranger = threading.Thread(target=answer)
        stranger.start()
        with pytest.raises(UsageError):
            serve.Server([], f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "it", KEY)
        stranger.join()

    assert received and KEY.encode() not in received[0]


def _failing(ids: object, scores_V: torch.Tensor) -> int:
    raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")


def test_scores_that_are_no_numbers_end_their_request_alone() -> None:
    model = AutoModelForCausalLM.from_config(LLAMA).eval()

    with ended(engine.of_model(model, 64, [], PROMPTS)) as generating:
        assert isinstance(generating, engine.Continuous)
        with pytest.raises(engine.GenerationFailed, match="nan"):
            asyncio.run(_tokens(generating, PROMPTS[0], 4, _failing))
        assert len(asyncio.run(_tokens(generating, PROMPTS[1], 4))) == 4
        assert generating.is_alive


def test_a_prompt_that_does_not_fit_the_memory_of_the_batch_is_not_taken() -> None:
    model = AutoModelForCausalLM.from_config(LLAMA).eval()

    with ended(engine.of_model(model, 10**6, [], PROMPTS)) as generating:
        assert generating.context_tokens is not None
        assert generating.context_tokens <= 10**6


def test_a_prompt_that_is_never_made_is_given_up_and_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_MAX_S", 1)
    encoder = encoder_of(spec_of("package:tiny", None))
    encode = encoder.prompt

    def prompt(text: Any, tools: Any = None) -> Any:
        if text == "hang":
            time.sleep(60)
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(text, tools)

    monkeypatch.setattr(encoder, "prompt", prompt)
    making = prompts.Prompts(encoder, 512)

    async def run() -> list[int]:
        for text in ("hang", "die", "hang"):
            with pytest.raises(Refused) as refused:
                await making.of_text(text)
            assert refused.value.status == 400
        return (await making.of_text("go on")).ids

    try:
        assert asyncio.run(run()) == encode("go on")[0].tolist()
    finally:
        making.end()


@pytest.mark.parametrize("stops", [[], ["ab"], ["b", "abc"], ["🙂"], ["zz"]])
def test_parts_of_a_text_are_the_text_up_to_its_stop(stops: list[str]) -> None:
    encoder = encoder_of(spec_of("package:tiny", None))
    whole = "aab abab 🙂 c zz"
    ids = encoder.tokenizer(whole, add_special_tokens=False)["input_ids"]
    text, parts = AnswerText(encoder, stops), []

    for token in ids:
        text.add(token)
        if text.is_stopped:
            break
        parts.append(text.take())
    text.end()
    parts.append(text.take(is_last=True))

    places = [place for stop in stops if (place := whole.find(stop)) >= 0]
    assert "".join(parts) == text.text == whole[: min(places, default=len(whole))]
    assert text.is_stopped == bool(places)


@pytest.mark.parametrize(
    ("host", "allowed", "taken", "refused"),
    [
        (
            "127.0.0.1",
            (),
            ("127.0.0.1:8000", "localhost", "[::1]:8000", "LOCALHOST:1"),
            ("evil.example", "10.0.0.1", ""),
        ),
        ("gpu-1", (), ("gpu-1:8000", "localhost"), ("gpu-2", "gpu-1.evil.example", "evil.example:8000")),
        ("0.0.0.0", ("gpu-1",), ("10.0.0.1:80", "[fe80::1]:80", "gpu-1"), ("evil.example", "127.0.0.1.evil.example")),  # noqa: S104
        ("::", (), ("10.0.0.1", "localhost"), ("evil.example:8000", "gpu-1")),
    ],
)
def test_a_host_is_answered_by_name_or_by_address(
    host: str, allowed: tuple[str, ...], taken: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    hosts = Hosts(host, allowed)

    assert [header for header in taken if not hosts.allow(header)] == []
    assert [header for header in refused if hosts.allow(header)] == []


# vLLM: no machine of the suite has it. A program of that name with its protocol stands in.

STAND_IN = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200, b"")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen = {"argv": sys.argv, "body": body, "path": self.path, "key": os.environ.get("TUNER_API_KEY")}
        if self.headers["Authorization"] != "Bearer " + os.environ["VLLM_API_KEY"]:
            self.reply(401, b"{}")
        elif body.get("seed") == 13:
            error = {"message": "not that seed", "type": "BadRequestError", "param": "seed", "code": 400}
            self.reply(400, json.dumps({"error": error}).encode())
        elif body.get("stream"):
            part = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "it", "choices": [
                {"index": 0, "delta": {"content": "hello"}, "finish_reason": None}]}
            self.reply(200, b"data: " + json.dumps(part).encode() + b"\\n\\ndata: [DONE]\\n\\n", "text/event-stream")
        else:
            message = {"role": "assistant", "content": json.dumps(seen)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {"id": "1", "object": "chat.completion", "created": 1, "model": "it", "choices": [choice]}
            self.reply(200, json.dumps(whole).encode())
    def reply(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_vllm_answers_behind_the_same_app_and_is_told_its_key_by_no_argument(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{STAND_IN}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = f"{program.parent}:{os.environ['PATH']}"

    with (
        served(tmp_path, write_scripted(tmp_path / "it"), "--engine", "vllm", PATH=path) as (process, address),
        client_of(address) as client,
    ):

        def ask(content: str, **more: Any) -> Any:
            turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": content}]
            return client.chat.completions.create(model="it", messages=turns, **more)

        seen = json.loads(ask("hi", response_format={"type": "json_object"}).choices[0].message.content)
        parts = "".join(part.choices[0].delta.content for part in ask("hi", stream=True))
        with pytest.raises(openai.BadRequestError) as refused:
            ask("hi", seed=13)
        with pytest.raises(openai.BadRequestError) as long:
            ask("one two " * CONTEXT)
        inner = seen["argv"][seen["argv"].index("--port") + 1]
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(60)

    assert parts == "hello"
    assert refused.value.param == "seed"
    assert long.value.code == "context_length_exceeded"
    assert seen["body"]["messages"][0]["role"] == "system"
    assert seen["body"]["response_format"] == {"type": "json_object"}, "vLLM can do more"
    assert inner != address.rpartition(":")[2]
    assert seen["argv"][seen["argv"].index("--host") + 1] == "127.0.0.1"
    assert not any("key" in word.lower() for word in seen["argv"])
    assert seen["key"] is None, "the key of the clients is none of vLLM's"
    assert KEY not in text
    assert process.returncode == 0


def test_vllm_loads_lora_alone_and_no_dora(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", LLAMA)
    more = write_adapter(tmp_path / "more", base, modules_to_save=["lm_head"])
    dora = write_adapter(tmp_path / "dora", base, use_dora=True)

    for adapter, name in ((more, "lm_head"), (dora, "DoRA")):
        spec = spec_of(str(base), str(adapter))
        with pytest.raises(ModelError, match=rf"{name}.*tuner export SOURCE DEST --merge"):
            serve.check_servable(spec, by_vllm=True)
        serve.check_servable(spec, by_vllm=False)


def test_vllm_gets_a_model_under_its_name_and_an_adapter_with_its_rank_template_and_stop_tokens(tmp_path: Path) -> None:
    run, _ = make_result(tmp_path / "my-run", "tiny_lora_sample_e1", "adapter.r=24")
    spec = spec_of(str(run.path), None)

    argv = vllm.argv("vllm", spec, "my-run", "127.0.0.1", 8000)

    assert argv[:3] == ["vllm", "serve", spec.path]
    assert f"--max-lora-rank 32 --lora-modules my-run={run.final}" in " ".join(argv)
    assert f"--chat-template {run.final / 'chat_template.jinja'}" in " ".join(argv)
    base = write_base(tmp_path / "base", LLAMA)
    argv = vllm.argv("vllm", spec_of(str(base), None), "mine", "127.0.0.1", 8000)
    assert argv == ["vllm", "serve", str(base), "--host", "127.0.0.1", "--port", "8000", "--served-model-name", "mine"]
