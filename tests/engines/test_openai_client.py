"""The official client against the gateway with real engines behind it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from .fleet import CALL_LIMIT_S, MODEL, Server

pytestmark = pytest.mark.engines

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is a tuple?"}]


@pytest.fixture
def api(gateway: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="any", timeout=CALL_LIMIT_S, max_retries=0
    ) as client:
        yield client


def test_chat(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0)
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16


def test_chat_stream_says_what_the_whole_reply_says(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0)
    with api.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16


def test_completion(api: openai.OpenAI) -> None:
    reply = api.completions.create(model=MODEL, prompt="A list is", max_tokens=8, temperature=0)
    assert reply.choices[0].text


def test_completion_stream(api: openai.OpenAI) -> None:
    with api.completions.create(
        model=MODEL, prompt="A list is", max_tokens=8, temperature=0, stream=True
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == [MODEL]


def test_unknown_model(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL) as caught:
        api.chat.completions.create(model="other", messages=MESSAGES)
    assert isinstance(caught.value.body, dict)
    assert "other" in caught.value.body["message"]


def test_what_the_engine_refuses(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        api.completions.create(model=MODEL, prompt="A list is", max_tokens=-1)


def test_no_embeddings_from_a_text_model(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        api.embeddings.create(model=MODEL, input="text")
