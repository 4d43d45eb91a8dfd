"""Keys of a prompt whose tokens are known, and why they are made of bytes where they are not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from kvroute.conductor.keys import Namespace, pack_ids, token_keys
from kvroute.conductor.tokens.outcome import Unavailable
from kvroute.router.parsed_request import MAX_KEYED_PROMPTS, ParsedRequest, TokenIds
from kvroute.router.request_view import parse_request
from kvroute.types import KeyMode

PATH = b"/v1/completions"
JSON = {b"content-type": b"application/json"}
IDS = list(range(100))


def parse(ids: TokenIds | Unavailable | None, **fields: Any) -> ParsedRequest:
    def source(model: str | None, path: bytes, given: Mapping[str, Any]) -> TokenIds | Unavailable:
        assert (model, path, given["prompt"]) == ("m", PATH, "x" * 4000)
        assert ids is not None
        return ids

    body = json.dumps({"model": "m", "prompt": "x" * 4000, **fields}).encode()
    return parse_request(PATH + b"?v=1", JSON, body, None if ids is None else source)


def known(*prompts: list[int], model: str = "base", adapter: str | None = None) -> TokenIds:
    return TokenIds(tuple(map(pack_ids, prompts)), model, adapter)


def test_one_set_of_keys_per_block_size() -> None:
    request = parse(known(IDS))
    assert request.view.prompt_tokens == 100
    assert request.no_tokens is None
    (sets,), reason = request.prompt_keys(512, (16, 32, 128))
    assert reason is None
    root = Namespace(model="base").root("ids")
    assert sets == {16: token_keys(IDS, root, 16), 32: token_keys(IDS, root, 32)}
    assert {keys.mode for keys in sets.values()} == {KeyMode.TOKENS}


def test_keys_are_made_again_for_other_block_sizes_only() -> None:
    request = parse(known(IDS))
    first, _ = request.prompt_keys(512, (16,))
    assert request.prompt_keys(512, (16,))[0] is first
    assert list(request.prompt_keys(512, (32,))[0][0]) == [32]


@pytest.mark.parametrize(
    ("ids", "fields", "namespace"),
    [
        (known(IDS, adapter="lora"), {}, Namespace(model="base", adapter="lora")),
        (known(IDS), {"lora_path": "lora"}, Namespace(model="base", adapter="lora")),
        (known(IDS), {"cache_salt": "lora"}, Namespace(model="base", cache_salt="lora")),
        (
            known(IDS, adapter="lora"),
            {"cache_salt": "s", "lora_path": "other"},
            Namespace(model="base", adapter="lora", cache_salt="s"),
        ),
    ],
)
def test_adapter_and_salt_keep_equal_tokens_apart(
    ids: TokenIds, fields: dict[str, Any], namespace: Namespace
) -> None:
    (sets,), _ = parse(ids, **fields).prompt_keys(512, (16,))
    assert sets[16].keys == token_keys(IDS, namespace.root("ids"), 16).keys


def test_each_prompt_of_a_batch_has_keys_and_short_ones_have_none() -> None:
    request = parse(known(IDS, [1, 2, 3], IDS[::-1]))
    assert request.view.prompt_tokens == 203
    sets, _ = request.prompt_keys(512, (16,))
    assert [one[16].prompt_tokens for one in sets] == [100, 100]
    assert sets[0][16].keys[0] != sets[1][16].keys[0]


def test_a_batch_is_keyed_up_to_a_limit() -> None:
    sets, _ = parse(known(*[IDS] * (MAX_KEYED_PROMPTS + 5))).prompt_keys(512, (16,))
    assert len(sets) == MAX_KEYED_PROMPTS


def test_tokens_shorter_than_a_block_are_short() -> None:
    request = parse(known(IDS[:15]))
    assert request.prompt_keys(512, (16,)) == ((), "short")
    assert request.prompt_keys(512, (16,)) == ((), "short")


@pytest.mark.parametrize(
    ("ids", "reason", "foretold_tokens"),
    [
        (Unavailable("template"), "template", 0),
        (Unavailable("mismatch", 77), "mismatch", 77),
        (None, "no_tokenizer", 0),
    ],
)
def test_without_tokens_the_keys_are_of_bytes_and_say_why(
    ids: Unavailable | None, reason: str, foretold_tokens: int
) -> None:
    request = parse(ids)
    assert request.foretold_tokens == foretold_tokens
    assert request.no_tokens == reason
    (sets,), _ = request.prompt_keys(512, (16,))
    ((block_tokens, keys),) = sets.items()
    assert (block_tokens, keys.mode, len(keys.keys)) == (128, KeyMode.BYTES, 7)
