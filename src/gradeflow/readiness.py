"""Whether the sandbox isolates and the models answer, asked once before minutes are spent on what needs them."""

import asyncio
from collections.abc import Mapping

from gradeflow import llm, params
from gradeflow.errors import ProviderError
from gradeflow.sandbox import Sandbox

PATIENCE_S = 30.0
# An answer that is of no use here: the model is there, and real questions may fare better.
ANSWERED = {"empty_reply", "truncated_reply"}


async def check(sandbox: params.Sandbox, models: Mapping[str, params.Model]) -> None:
    """Run a line of code, and ask each model, by its name in the settings, for a word; `local` ones are not asked.

    Raises:
        SetupError: this machine cannot isolate, and how to mend that.
        ProviderError: a model does not answer: its name, its URL, and what to do.
    """
    trial = Sandbox(sandbox)
    try:
        await trial.run("pass")
    finally:
        await trial.close()
    for name, model in models.items():
        if model.url != llm.LOCAL:
            await ask(name, model)


async def ask(name: str, model: params.Model) -> None:
    """Ask a model, by its name in the settings, for a word; it is really asked, whatever is kept of earlier replies.

    Raises:
        ProviderError: it does not answer: its name, its URL, and what to do.
    """
    client = llm.connect(model.model_copy(update={"cache": ""}), None)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await client.chat([{"role": "user", "content": "Reply with one word: ready"}], temperature=0)
    except TimeoutError:
        said = f"{name}: {model.url} has not answered a short question within {PATIENCE_S:g} s; check the url"
        raise ProviderError(f"{said}, and that the server has room", cause="timeout") from None
    except ProviderError as error:
        if error.cause not in ANSWERED:
            raise ProviderError(f"{name}: {error}", cause=error.cause) from None
    finally:
        await client.close()
