"""The forms of the OpenAI HTTP API that are served, and one of our own: ``branches``.

A field that is not known, or not served, is refused by its name; of those that clients send with a meaning of
"nothing" (`NEUTRAL`) that value is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that change nothing of an answer."""
NEUTRAL: Mapping[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(IGNORED),
    "frequency_penalty": (None, 0), "presence_penalty": (None, 0), "repetition_penalty": (None, 1),
    "logit_bias": (None, {}), "min_p": (None, 0), "min_tokens": (None, 0),
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""), "echo": (None, False), "best_of": (None, 1), "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False), "reasoning_effort": (None, "none"),
}  # fmt: skip
UNSAID: Mapping[str, tuple[Any, ...]] = dict.fromkeys(
    ("refusal", "annotations", "audio", "function_call", "tool_calls"), (None, [])
)
"""Fields of a message that may be there with nothing in them: an answer is sent back as the official client
read it, with fields of what it was not."""

Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]


class RequestRefused(HTTPException):
    """A request that is not served: what OpenAI's error object says of it, and the status."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        text = message.encode(errors="replace").decode()  # half a surrogate pair may be quoted
        super().__init__(status, text, {"Retry-After": "1"} if status in (429, 503) else None)
        self.param, self.code = param, code

    def plain(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        if self.status_code == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {"description": "Not served", "content": {"application/json": {"schema": {
        "type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}
    }}}}
}  # fmt: skip
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}, "application/json": {"schema": {"type": "object"}}}}
}
"""How errors and answers are described, for OpenAPI."""


class ApiModel(BaseModel):
    """``neutral``: values of fields that are left out with them (None: any)."""

    model_config = ConfigDict(extra="forbid", strict=True)
    neutral: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {}

    @model_validator(mode="before")
    @classmethod
    def _with_meaning(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {
            name: value
            for name, value in fields.items()
            if (nothing := cls.neutral.get(name, ())) is not None and value not in nothing
        }


class Branched(ApiModel):
    """What is decoded side by side on the prompt: each branch begins with one of ``prompts``. With ``join``,
    all are put behind the prompt in their order, then ``join``, and the answer (choice 0) goes on from
    there."""

    prompts: Annotated[list[str | Tokens], Field(min_length=1, max_length=64)]
    max_tokens: Count = 16
    join: str | Tokens | None = None


class Promised(ApiModel):
    """Seconds until the first token and for each further one, which the policies try to keep."""

    ttft: Annotated[float, Field(gt=0)] | None = None
    tpot: Annotated[float, Field(gt=0)] | None = None


class StreamOptions(ApiModel):
    """Whether a stream ends with what was used, and tells with each event what was until then."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class _Both(ApiModel):
    """What completions and chat have in common."""

    neutral = NEUTRAL

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=4)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 30)] | None = None
    ignore_eos: bool = False
    branches: Branched | None = None
    objective: Promised | None = None

    @property
    def drawn(self) -> dict[str, Any]:
        """How tokens are, as far as the request says."""
        top_k = None if self.top_k is None else max(0, self.top_k)
        options = {"temperature": self.temperature, "top_p": self.top_p, "top_k": top_k}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) and self.stop else list(self.stop or ())


class Completion(_Both):
    """POST /v1/completions."""

    prompt: str | Tokens | Annotated[list[str], Field(min_length=1, max_length=256)] | Annotated[
        list[Tokens], Field(min_length=1, max_length=256)
    ]  # fmt: skip
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt  # type: ignore[list-item, return-value]

    @property
    def most(self) -> int | None:
        """Tokens of the answer at most; None: as many as the context allows."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens come with each one."""
        return self.logprobs


class MessagePart(ApiModel):
    type: Literal["text"]
    text: str


class Message(ApiModel):
    neutral = UNSAID

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[MessagePart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Chat(_Both):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, count: int | None, info: ValidationInfo) -> int | None:
        if count is not None and not info.data.get("logprobs"):
            raise PydanticCustomError("alone", "logprobs must be set to true if this parameter is used")
        return count

    @property
    def most(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Body = Completion | Chat


def named(error: RequestValidationError) -> RequestRefused:
    """What is wrong, by the name of the first field that is."""
    wrong = error.errors()
    same = [detail for detail in wrong if detail["loc"][1:2] == wrong[0]["loc"][1:2]]
    # of a field that may have several forms, what is wrong within one says more than that it has not another
    first = next((detail for detail in same if not detail["type"].endswith("_type")), wrong[0])
    path = [str(detail) for detail in first["loc"][1:] if detail != "str" and "[" not in str(detail)]
    param = path[0] if path else None
    if first["type"] == "json_invalid":
        return RequestRefused(f"The body is not JSON: {first['ctx']['error']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return RequestRefused(
            f"Unrecognized or unsupported request argument: {'.'.join(path)}", param=param, code="unsupported"
        )
    return RequestRefused(
        f"{'.'.join(path) or 'the body'}: {first['msg']}", param=param, code="invalid_value"
    )
