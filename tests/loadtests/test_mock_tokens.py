"""The mock engine's tokenizer, template and block keys."""

from __future__ import annotations

from array import array

import pytest

from kvroute.loadtests.mock_engine.block_keys import block_keys, root_key
from kvroute.loadtests.mock_engine.tokens import (
    Words,
    detokenize,
    plain_words,
    render_chat,
    tokenize,
    wide_words,
)


def test_four_bytes_are_one_token_and_text_comes_back() -> None:
    text = "The quick brown fox, naïve and 语言."
    ids = tokenize(text.encode())
    assert len(ids) == -(-len(text.encode()) // 4)
    assert detokenize(ids) == text
    assert max(ids) < 1 << 17


def test_a_templated_chat_reads_like_one() -> None:
    chat = render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert chat == b"<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n"


def test_the_next_turn_begins_with_the_earlier_prompt_and_its_answer() -> None:
    words = plain_words(0)
    turns = [{"role": "system", "content": "x"}, {"role": "user", "content": "first question"}]
    before = tokenize(render_chat(turns))
    answer = words.text(17, 9)
    turns += [{"role": "assistant", "content": answer.decode()}, {"role": "user", "content": "and then?"}]
    after = tokenize(render_chat(turns))
    assert after[: len(before) + 9] == before + words.tokens(17, 9)


def test_content_as_text_or_as_parts_is_the_same_prompt() -> None:
    plain = render_chat([{"role": "user", "content": "hello"}])
    parts = render_chat([{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    assert plain == parts
    images = [
        render_chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
        for url in ("data:,a", "data:,b", "data:,a")
    ]
    assert images[0] == images[2] != images[1]


@pytest.mark.parametrize("words", [plain_words(0), wide_words(0)])
def test_output_text_and_output_tokens_agree(words: Words) -> None:
    text = words.text(5, 3000)
    assert tokenize(text) == words.tokens(5, 3000)
    assert b"".join(words.piece(5 + i) for i in range(3000)) == text
    text.decode("utf-8")


def test_keys_chain_and_differ_by_engine_adapter_and_salt() -> None:
    tokens = array("I", range(70))
    keys = block_keys(tokens, 16, root_key(1, None, None))
    assert len(keys) == 4
    assert block_keys(tokens[:48], 16, root_key(1, None, None)) == keys[:3]
    assert block_keys(tokens[16:], 16, root_key(1, None, None))[0] != keys[1]
    roots = [root_key(1, None, None), root_key(2, None, None), root_key(1, "x", None)]
    roots += [root_key(1, None, "x"), root_key(1, "x", "x")]
    assert len({block_keys(tokens, 16, root)[0] for root in roots}) == 5
