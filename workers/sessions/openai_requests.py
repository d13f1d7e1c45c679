"""Requests from agents, in the format of OpenAI's API and of vLLM's `/inference/v1/generate`.

Sampling parameters are set by the run, because the learner must know the distribution: an agent's are ignored, and the
response header `x-streamrl-ignored` lists them. Options that would make the answer differ from what was sampled
(several choices, grammars, forced tool calls) are refused. Unknown fields are accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

IGNORED: tuple[str, ...] = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
IGNORED += ("seed", "min_tokens", "parallel_tool_calls", "reasoning_effort", "ignore_eos", "cache_salt", "priority")
IGNORED += ("length_penalty", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
_REFUSED: tuple[str, ...] = (
    "logit_bias",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "guided_choice",
)
_REFUSED += ("bad_words", "functions", "function_call", "suffix", "chat_template", "chat_template_kwargs")
_REFUSED += ("continue_final_message", "add_special_tokens")  # completions honour the second
_REFUSED += ("allowed_token_ids", "truncate_prompt_tokens", "use_beam_search")
_REFUSED += ("features", "content_parts")  # images, as vLLM's token-in, token-out API takes them
_MAX_STOPS = 16

Count = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]
Form = TypeVar("Form", bound=BaseModel)


class Refused(Exception):
    """An error response in OpenAI's format."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class SamplingParams(BaseModel):
    """The sampling parameters that are honoured: they change no probability."""

    model_config = ConfigDict(extra="allow")

    n: Literal[1] | None = 1
    max_tokens: Count | None = None
    stop: str | Annotated[list[str], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = None  # the session compares them with the run's

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class _Request(SamplingParams):
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False

    @property
    def wants_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


def _function_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}')
    if not isinstance(function.get("parameters"), dict | None):
        raise ValueError("a function's `parameters` must be a JSON schema")
    return tool


def _only_prompt(prompt: Any) -> Any:
    """Unwrap a list of a single prompt, as some clients always send."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise ValueError("one prompt at a time: send a request for each")
        return prompt[0]
    return prompt


class ChatRequest(_Request):
    messages: Annotated[list[Any], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: list[Annotated[dict[str, Any], AfterValidator(_function_tool)]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: bool | None = False
    top_logprobs: Literal[0] | None = None
    add_generation_prompt: Literal[True] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Request):
    prompt: Annotated[str | Annotated[list[TokenId], Field(min_length=1)], BeforeValidator(_only_prompt)]
    echo: Literal[False] | None = False
    best_of: Literal[1] | None = None
    logprobs: Literal[0, 1] | None = None
    add_special_tokens: bool = True  # to a prompt of text


class _GenerateParams(SamplingParams):
    logprobs: Literal[0, 1] | None = None  # those of the sampled tokens are always there


class GenerateRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: _GenerateParams = Field(default_factory=_GenerateParams)
    stream: Literal[False] | None = False


def read_request(form: type[Form], body: bytes) -> tuple[Form, tuple[str, ...]]:
    """Parse a request; return it with the names of the ignored fields. Raises Refused."""
    try:
        request = form.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Refused(
            400, f"{place or 'the body'}: {first['msg']}", code="invalid_value", param=place or None
        ) from None
    extra_fields = {**(request.model_extra or {}), **(getattr(request, "sampling_params", request).model_extra or {})}
    response_format = extra_fields.get("response_format")
    for key in _REFUSED:
        if extra_fields.get(key):
            raise _unsupported(key)
    if extra_fields.get("prompt_logprobs") is not None:  # 0 asks for those of the prompt's own tokens
        raise _unsupported("prompt_logprobs")
    if isinstance(response_format, dict) and response_format.get("type") != "text":
        raise _unsupported("response_format")
    return request, tuple(key for key in IGNORED if extra_fields.get(key) is not None)


def _unsupported(key: str) -> Refused:
    message = f"{key} is not supported here: the run sets the chat template and the sampling, as in training"
    return Refused(400, message, code="unsupported_parameter", param=key)
