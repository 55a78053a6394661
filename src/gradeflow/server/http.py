"""OpenAI's chat API over HTTP, for adapters under the keys that the catalogue gives them."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gradeflow.prompt import Message
from gradeflow.server.chat import MAX_TOP, Answer, Chat, PromptError, Question, Token
from gradeflow.server.gateway import ApiError

if TYPE_CHECKING:
    from fastapi import FastAPI, Response


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


class _StreamOptions(_Body):
    include_usage: bool | None = None


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
    stream_options: _StreamOptions | None = None
    n: Literal[1] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None


def app(chat: Chat, *, max_tokens: int) -> "FastAPI":
    """The application. `max_tokens` is how long a reply is where the request does not say."""
    from fastapi import FastAPI
    from fastapi import Response as Reply
    from fastapi.responses import JSONResponse, StreamingResponse
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    api = FastAPI(title="Gradeflow", docs_url=None, redoc_url=None)
    reader = ThreadPoolExecutor(1, thread_name_prefix="prompts")  # a long one takes a while, and others are answered
    _answer_errors(api)

    @api.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @api.get("/metrics", response_model=None)
    async def metrics() -> "Response":
        return Reply(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @api.post("/v1/chat/completions", response_model=None)
    async def complete(request: ChatRequest) -> "Response":
        loop = asyncio.get_running_loop()
        asked = await loop.run_in_executor(reader, question, request, chat, request.model, max_tokens)
        if request.stream:
            pieces = stream(request, asked, chat)
            return StreamingResponse(pieces, media_type="text/event-stream")
        return JSONResponse(completion(request.model, await chat.ask(asked)))

    return api


def question(request: ChatRequest, chat: Chat, adapter: str, most: int) -> Question:
    """What the model is asked; a reply has at most so many tokens.

    Raises:
        ApiError: the request does not fit the model.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs", code="invalid_value", param="top_logprobs")
    if request.stream_options and not request.stream:
        raise ApiError(400, "stream_options: needs stream", code="invalid_value", param="stream_options")
    try:
        tokens = chat.encode([message.plain() for message in request.messages])
    except PromptError as error:
        raise ApiError(400, str(error), code="context_length_exceeded", param="messages") from None
    asked = request.max_completion_tokens or request.max_tokens
    if asked is not None and asked > most:
        raise ApiError(400, f"max_tokens is {asked}; at most {most} here", code="invalid_value", param="max_tokens")
    return Question(
        adapter=adapter,
        tokens=tokens,
        max_tokens=min(asked or most, chat.context - len(tokens)),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=request.seed,
        stop=tuple(filter(None, (request.stop,) if isinstance(request.stop, str) else request.stop or ())),
        top=(request.top_logprobs or 0) if request.logprobs else None,
    )


def completion(name: str, answer: Answer) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer.text},
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer),
    }
    return _head(name, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


async def stream(request: ChatRequest, asked: Question, chat: Chat) -> AsyncIterator[str]:
    """The reply as server-sent events, as its tokens are drawn; their log-probabilities come with the last one."""
    news: asyncio.Queue[str | None] = asyncio.Queue()
    answering = asyncio.create_task(chat.ask(asked, news.put_nowait))
    answering.add_done_callback(lambda _: news.put_nowait(None))
    head, sent = _head(request.model, "chat.completion.chunk"), ""
    try:
        yield _event(head | {"choices": [_delta({"role": "assistant", "content": ""})]})
        while (text := await news.get()) is not None:
            if len(text) > len(sent):
                yield _event(head | {"choices": [_delta({"content": text[len(sent) :]})]})
                sent = text
        try:
            answer = answering.result()
        except Exception:  # noqa: BLE001 - the reply has begun: there is no other way to tell
            failed = ApiError(500, "the server failed; its log says how", code="internal_error")
            yield _event(failed.body())
            return
        for event in _last(
            head, answer, sent, asks_usage=bool(request.stream_options and request.stream_options.include_usage)
        ):
            yield _event(event)
        yield "data: [DONE]\n\n"
    finally:
        answering.cancel()


def _last(head: dict[str, Any], answer: Answer, sent: str, *, asks_usage: bool) -> Iterator[dict[str, Any]]:
    if rest := answer.text[len(sent) :]:
        yield head | {"choices": [_delta({"content": rest})]}
    yield head | {"choices": [_delta({}) | {"finish_reason": answer.finish_reason, "logprobs": _logprobs(answer)}]}
    if asks_usage:
        yield head | {"choices": [], "usage": _usage(answer)}


def _head(name: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": None,
    }


def _delta(delta: dict[str, str]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}


def _event(tree: dict[str, Any]) -> str:
    return f"data: {json.dumps(tree, separators=(',', ':'), ensure_ascii=False)}\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    return None if answer.tokens is None else {"content": [_told(one) for one in answer.tokens]}


def _told(token: Token) -> dict[str, Any]:
    top = [{"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in token.top]
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": top}


def _answer_errors(api: "FastAPI") -> None:
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    @api.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status)

    @api.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        where, said = _first_problem(error.errors())
        return JSONResponse(ApiError(400, f"{where}: {said}", code="invalid_request", param=where).body(), 400)

    @api.exception_handler(HTTPException)
    async def no_route(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(ApiError(error.status_code, error.detail, code="http_error").body(), error.status_code)

    @api.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse(ApiError(500, "the server failed; its log says how", code="internal_error").body(), 500)


def _first_problem(problems: Sequence[Any]) -> tuple[str, str]:
    where = ".".join(str(part) for part in problems[0]["loc"][1:]) or "body"
    return where.encode(errors="replace").decode(), str(problems[0]["msg"]).removeprefix("Value error, ")
