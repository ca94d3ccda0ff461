"""vLLM as a process on loopback, behind the same app: it starts and ends it, and passes requests on.

It decides nothing about requests. No machine of the test suite has vLLM: the tests run a stand-in with its protocol.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess  # effect: vLLM is a program of its own, which ends with this one
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from tuner.errors import MachineError, Option
from tuner.machine.kernel import die_with_parent
from tuner.progress import POLL_S
from tuner.results.loaded_model import ModelSpec
from tuner.results.peft_adapter import read_config
from tuner.results.serving.engine import GenerationFailed
from tuner.results.serving.prompts import Prompts
from tuner.results.serving.requests import ChatRequest, CompletionRequest, Refused

_LOOPBACK = "127.0.0.1"
_STOP_S = 3.0
KEY_VARIABLE = "TUNER_API_KEY"
"""Holds the key of a server: unlike an argument, other users of the machine do not see it."""
_KEY = "VLLM_API_KEY"  # vLLM reads it: other users of this machine see the arguments of processes


def argv(vllm: str, spec: ModelSpec, name: str, host: str, port: int) -> list[str]:
    """Return the command that serves the model with vLLM."""
    revision = ["--revision", spec.model.revision] if spec.model.revision else []
    trusted = ["--trust-remote-code"] if spec.model.trust_remote_code else []
    command = [vllm, "serve", spec.path, "--host", host, "--port", str(port), *revision, *trusted]
    if spec.adapter is None:
        return [*command, "--served-model-name", name]
    config = read_config(spec.adapter)
    rank = max(8, 1 << (max([config.r, *config.rank_pattern.values()]) - 1).bit_length())  # vLLM accepts powers of two
    command += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"{name}={spec.adapter}"]
    template = spec.adapter / "chat_template.jinja"
    command += ["--chat-template", str(template)] if template.is_file() else []
    has_generation = (spec.adapter / "generation_config.json").is_file()
    return command + (["--generation-config", str(spec.adapter)] if has_generation else [])


class Vllm:
    """Answers requests with vLLM; `close` it."""

    def __init__(self, vllm: str, spec: ModelSpec, name: str, prompts: Prompts) -> None:
        """Start vLLM, and return when it answers. Raises MachineError: it ended before; its own messages say why."""
        import openai  # vLLM needs it too

        with socket.socket() as probe:
            probe.bind((_LOOPBACK, 0))
            port = probe.getsockname()[1]
        key = secrets.token_urlsafe(32)
        self._prompts = prompts
        inherited = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}  # effect: all else
        environment = {**inherited, _KEY: key}
        command = argv(vllm, spec, name, _LOOPBACK, port)
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
        )
        self._client = openai.AsyncOpenAI(base_url=f"http://{_LOOPBACK}:{port}/v1", api_key=key, max_retries=0)
        try:
            while not self._answers(port):
                if self._process.poll() is not None:
                    problem = f"vllm ended with code {self._process.returncode} before it answered"
                    raise MachineError(
                        problem, fix=f"Its messages above say why. Or use: {Option('engine', 'transformers')}."
                    )
                time.sleep(POLL_S)
        except BaseException:
            self.close()
            raise

    def _answers(self, port: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://{_LOOPBACK}:{port}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def begin(self, request: ChatRequest | CompletionRequest) -> Begun:
        if isinstance(request, ChatRequest):
            # vLLM renders the template once more, without limits: what passes them here takes as little there.
            await self._prompts.of_chat(request)
        else:
            for text in request.prompts:
                await self._prompts.of_text(text)
        return Begun(self._client, request)

    def close(self) -> bool:
        """End vLLM with its processes; return True: nothing runs any more."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        return True


class Begun:
    """A request that is passed on."""

    def __init__(self, client: Any, request: ChatRequest | CompletionRequest) -> None:
        self._request = request
        self._create = client.chat.completions.create if isinstance(request, ChatRequest) else client.completions.create

    async def _sent(self) -> Any:
        import openai  # as above

        try:
            return await self._create(**self._request.model_dump(exclude_none=True))
        except openai.APIStatusError as error:
            body: Any = error.body if isinstance(error.body, dict) else {}
            problem = str(body.get("message", "vllm refused the request"))
            raise Refused(error.status_code, problem, parameter=body.get("param")) from error
        except openai.APIConnectionError as error:
            raise GenerationFailed("vllm does not answer") from error

    async def whole(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self._sent()).model_dump(exclude_unset=True)
        return answer

    async def parts(self) -> AsyncIterator[dict[str, Any]]:
        async with await self._sent() as stream:
            async for part in stream:
                yield part.model_dump(exclude_unset=True)
