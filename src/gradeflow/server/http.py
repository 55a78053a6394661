"""OpenAI's chat API over HTTP, for one adapter under its names."""

import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gradeflow.prompt import Message
from gradeflow.server.chat import Answer, Chat, PromptError, Question

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

DIGEST_HEADER = "x-gradeflow-adapter"


@dataclass(frozen=True, slots=True)
class Card:
    """What /v1/models says: the names under which clients ask, and which adapter answers them."""

    names: tuple[str, ...]
    digest: str
    base: str


def _unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair; no tokenizer and no reply can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not valid Unicode: half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_unicode)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _TextPart(_Body):
    type: Literal["text"]
    text: Text


class _ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[_TextPart]
    name: str | None = None

    def plain(self) -> Message:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(_Body):
    """What clients may send. What would be ignored is refused, unless it changes no answer (`user`, ...)."""

    model: Text
    messages: Annotated[list[_ChatMessage], Field(min_length=1, max_length=1000)]
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    max_completion_tokens: Annotated[int, Field(gt=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = None
    stream: bool | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None


class ApiError(Exception):
    """An answer in OpenAI's shape for errors."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def app(chat: Chat, card: Card, *, max_tokens: int, key: str = "") -> "FastAPI":
    """The application. `max_tokens` bounds each reply; with a `key` all of /v1 asks for it."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    started = int(time.time())
    api = FastAPI(title="Gradeflow", docs_url=None, redoc_url=None)
    _answer_errors(api)

    @api.middleware("http")
    async def guard(request: Request, call_next: "Callable[[Request], Awaitable[Response]]") -> "Response":
        if key and request.url.path.startswith("/v1") and not _authorised(request.headers.get("authorization"), key):
            refusal = ApiError(401, "a valid API key is needed: Authorization: Bearer <key>", code="invalid_api_key")
            return JSONResponse(_shape(refusal), 401)
        response = await call_next(request)
        response.headers[DIGEST_HEADER] = card.digest
        return response

    @api.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "adapter": card.digest}

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name, card, started) for name in card.names]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model(_known(name, card), card, started)

    @api.post("/v1/chat/completions")
    async def complete(request: ChatRequest) -> dict[str, Any]:
        name = _known(request.model, card)
        answer = await chat.ask(question(request, chat, max_tokens))
        return completion(name, answer, card)

    return api


def _model(name: str, card: Card, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "gradeflow",
        "parent": card.base,
        "digest": card.digest,
    }


def _known(name: str, card: Card) -> str:
    if name.removeprefix("models:/") not in card.names:
        known = ", ".join(card.names)
        raise ApiError(
            404,
            f"the model {name!r} is not served here; there are: {known}",
            code="model_not_found",
            param="model",
        )
    return name


def question(request: ChatRequest, chat: Chat, most: int) -> Question:
    """What the model is asked; a reply has at most so many tokens.

    Raises:
        ApiError: the request does not fit the model.
    """
    if request.stream:
        raise ApiError(400, "replies are not streamed here; the vllm backend does", code="unsupported", param="stream")
    try:
        tokens = chat.encode([message.plain() for message in request.messages])
    except PromptError as error:
        raise ApiError(400, str(error), code="context_length_exceeded", param="messages") from None
    asked = request.max_completion_tokens or request.max_tokens
    if asked is not None and asked > most:
        raise ApiError(400, f"max_tokens is {asked}; at most {most} here", code="invalid_value", param="max_tokens")
    return Question(
        tokens=tokens,
        max_tokens=min(asked or most, chat.context - len(tokens)),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=request.seed,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
    )


def completion(name: str, answer: Answer, card: Card) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": card.digest[:12],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": answer.text},
                "finish_reason": answer.finish_reason,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def _authorised(header: str | None, key: str) -> bool:
    return secrets.compare_digest((header or "").encode(), f"Bearer {key}".encode())


def _shape(error: ApiError) -> dict[str, Any]:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def _answer_errors(api: "FastAPI") -> None:
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    @api.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(_shape(error), error.status)

    @api.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        where, said = _first_problem(error.errors())
        return JSONResponse(_shape(ApiError(400, f"{where}: {said}", code="invalid_request", param=where)), 400)

    @api.exception_handler(HTTPException)
    async def no_route(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(_shape(ApiError(error.status_code, error.detail, code="http_error")), error.status_code)

    @api.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse(_shape(ApiError(500, "the server failed; its log says how", code="internal_error")), 500)


def _first_problem(problems: Sequence[Any]) -> tuple[str, str]:
    where = ".".join(str(part) for part in problems[0]["loc"][1:]) or "body"
    return where.encode(errors="replace").decode(), str(problems[0]["msg"]).removeprefix("Value error, ")
