"""The requests that the server takes, as OpenAI's clients send them, and what it answers where it refuses one.

It generates nothing. A parameter that is not named here is refused: none is ignored in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

MAX_BODY_BYTES = 32 * 1024**2
_MAX_VALUES = 1_000_000
"""Of JSON in a body: pydantic takes a hundred bytes for each, so 32 MiB of brackets would take gigabytes."""
_MAX_TURNS, _MAX_PARTS = 4096, 1024
_MAX_STOPS, _MAX_STOP = 4, 256
"""OpenAI's limit of stop strings, and characters of each: all of them are looked for at every token."""
_MAX_CHOICES, _MAX_TOOLS, _MAX_TOP_LOGPROBS = 128, 128, 20
"""OpenAI's limits."""
_MAX_PROMPTS = 128


class Refused(Exception):
    """A request that gets no answer; `code` is OpenAI's word for the reason."""

    def __init__(self, status: int, problem: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(problem)
        self.status, self.problem, self.parameter, self.code = status, problem, parameter, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.problem, "type": kind, "param": self.parameter, "code": self.code}}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(_Part):
    type: Literal["text"]
    text: str


class ImageAddress(_Part):
    """A data URI: the server opens no files and no addresses."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(_Part):
    type: Literal["image_url"]
    image_url: ImageAddress


class CalledFunction(_Part):
    """A call, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(_Part):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


Content = (
    str | Annotated[list[Annotated[TextPart | ImagePart, Field(discriminator="type")]], Field(max_length=_MAX_PARTS)]
)


def _known_to_templates(role: str) -> str:
    return "system" if role == "developer" else role  # as in the rows of training


class Turn(_Part):
    """A turn of the conversation. What answers of OpenAI have beside, a client may send back where it is null."""

    role: Annotated[Literal["developer", "system", "user", "assistant", "tool"], AfterValidator(_known_to_templates)]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=_MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None


class Function(_Part):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(_Part):
    type: Literal["function"]
    function: Function


class StreamOptions(_Part):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


_Stop = Annotated[str, Field(min_length=1, max_length=_MAX_STOP)]


class _Request(_Part):
    model: str
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MAX_STOPS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def most_tokens(self) -> int | None:
        """The longest answer, in tokens; None: as long as the context."""
        return self.max_tokens


class ChatRequest(_Request):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=_MAX_TURNS)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: JsonValue = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, JsonValue] | None = None
    # They change nothing of an answer.
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def most_tokens(self) -> int | None:
        """The longest answer, in tokens; None: as long as the context."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """For how many tokens at each place the log probability is asked for; None: for none, 0: the chosen one's."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_none=True) for tool in tools]


class CompletionRequest(_Request):
    """The body of `/v1/completions`."""

    prompt: str | Annotated[list[str] | list[int] | list[list[int]], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """As for a conversation."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt[0], int) else prompt


def read_request(kind: type[ChatRequest | CompletionRequest], body: bytes) -> ChatRequest | CompletionRequest:
    """Return the request in a body. Raises Refused: it is no JSON, or not such a request."""
    if sum(map(body.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise Refused(400, f"the body holds more than {_MAX_VALUES:,} values")
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _misfit(error) from None
    if isinstance(request, CompletionRequest) and len(request.prompts) > _MAX_PROMPTS:
        raise Refused(400, f"at most {_MAX_PROMPTS} prompts are taken at once", parameter="prompt")
    if isinstance(request, CompletionRequest) and len(request.prompts) * (request.n or 1) > _MAX_CHOICES:
        raise Refused(400, f"at most {_MAX_CHOICES} choices of all prompts are generated at once", parameter="n")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise Refused(400, "top_logprobs needs logprobs = true", parameter="top_logprobs")
    if request.stream_options and not request.stream:
        raise Refused(400, "stream_options needs stream = true", parameter="stream_options")
    return request


def _misfit(error: ValidationError) -> Refused:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # A union's branch is in the place too: "stop.str" says no more than "stop".
    words = [str(word) for word in first["loc"] if not str(word).startswith(_BRANCHES)]
    place = _cut(".".join(words)) or None
    if first["type"] == "extra_forbidden":
        return Refused(400, f"this server has no parameter {place!r}", parameter=place, code="unknown_parameter")
    if first["type"] == "json_invalid":
        return Refused(400, f"the body is not JSON: {first['msg']}", code="invalid_json")
    return Refused(400, f"{place or 'the body'}: {first['msg']}", parameter=place)


def refuse_not_generated(request: ChatRequest | CompletionRequest) -> None:
    """Check that transformers' generation can do what a request asks. Raises Refused: it cannot."""
    asks_nothing: dict[str, tuple[object, ...]] = {
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto", "none"),
        "parallel_tool_calls": (True,) if getattr(request, "tools", None) else (True, False),
        "echo": (False,),
        "best_of": (request.n or 1,),
        "suffix": ("",),
    }
    for name, values in asks_nothing.items():
        value = getattr(request, name, None)
        if value is not None and value not in values:
            problem = f"this server cannot do {name} = {_cut(repr(value))}"
            raise Refused(400, problem, parameter=name, code="unsupported_parameter")


_BRANCHES = ("list[", "constrained-", "nullable", "str", "int")


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
