"""What is found out about a tokenizer before it is trusted."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import AddedToken

from kvroute.conductor.tokens import check as check_module
from kvroute.conductor.tokens.check import check, judge
from kvroute.conductor.tokens.encoder import FastEncoder
from kvroute.conductor.tokens.files import TokenizerFiles, UnusableTokenizer, read_files

from .tiny import SIMPLE, SPECIAL, exact, ids, train, write


def test_files(tmp_path: Path) -> None:
    files = read_files(write(tmp_path, pad_token=None))
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert files.templates == {"default": SIMPLE}
    assert read_files(tmp_path / "tokenizer.json") == files
    (tmp_path / "mine").write_text("given")
    assert read_files(tmp_path, tmp_path / "mine").templates == {"default": "given"}
    (tmp_path / "chat_template.jinja").write_text("beside")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools")
    assert read_files(tmp_path).templates == {"default": "beside", "tool_use": "tools"}
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert read_files(tmp_path, tmp_path / "mine").templates == {}


def test_templates_by_name_and_special_tokens_of_old(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}, {"name": "x"}]
    write(tmp_path, chat_template=named)  # type: ignore[arg-type]
    (tmp_path / "special_tokens_map.json").write_text(
        '{"bos_token": "old", "unk_token": {"content": "<unk>"}}'
    )
    files = read_files(tmp_path)
    assert files.templates == {"default": "a", "tool_use": "b"}
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "does not hold a JSON object"),
        ("tokenizer_config.json", "\udcff", "cannot be read as UTF-8"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    path = write(tmp_path) / name
    path.unlink() if text is None else path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UnusableTokenizer, match=message):
        read_files(tmp_path)


async def test_check_in_a_child(tmp_path: Path) -> None:
    files = read_files(write(tmp_path, pad_token="<pad>"))
    verdict = await check(files, seed=3, limit_s=60)
    again = judge(files, seed=3, fuzz_s=0)  # which compares fewer texts, as many as there is time for
    assert replace(verdict, texts=0) == replace(again, texts=0)
    assert (verdict.prefix, verdict.suffix) == ([0], [])
    assert verdict.added == [{"content": "<pad>", "special": True}]
    assert set(verdict.cuts) == {*SPECIAL, "<pad>"}
    assert verdict.not_fast is None
    assert verdict.minijinja == ["default"]
    assert verdict.texts >= 50


async def test_check_that_takes_too_long_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = read_files(write(tmp_path))
    children: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def remembered(*command: str, **options: Any) -> asyncio.subprocess.Process:
        children.append(await start(*command, **options))
        return children[0]

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", remembered)
        with pytest.raises(UnusableTokenizer, match="took more than"):
            await check(files, seed=3, limit_s=0.01)
    assert children[0].returncode == -signal.SIGKILL
    files.tokenizer_json.write_text('{"model": {"type": "nonsense"}}')
    with pytest.raises(UnusableTokenizer, match="is not a tokenizer"):
        await check(files, seed=3, limit_s=60)


def test_tokens_that_the_configuration_adds_or_changes(tmp_path: Path) -> None:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    declared = {
        "9000": {"content": "<tool>", "special": False, **flags},
        "2": {"content": SPECIAL[2], "special": True, **flags, "rstrip": True},
        "3": {"content": SPECIAL[3], "special": True, **flags},
    }
    write(
        tmp_path,
        added_tokens_decoder=declared,
        additional_special_tokens=["<x>", {"content": "<y>"}, SPECIAL[0]],
    )
    verdict = judge(read_files(tmp_path), seed=1, fuzz_s=0)
    assert [token["content"] for token in verdict.added] == [SPECIAL[2], "<tool>", "<x>", "<y>"]
    assert verdict.not_fast is None
    made = exact(tmp_path)
    text = f"a{SPECIAL[2]}  b<tool>c<x>d"
    reference = train()
    reference.add_tokens([AddedToken(**token) for token in verdict.added])
    expected = reference.encode(text).ids
    assert ids(made.encode(b"/v1/completions", {"prompt": text})) == [expected]
    assert expected != train().encode(text).ids
    (tmp_path / "tokenizer_config.json").write_text('{"extra_special_tokens": {"image_token": "<img>"}}')
    assert judge(read_files(tmp_path), seed=1, fuzz_s=0).added == [{"content": "<img>", "special": True}]


def test_ends_come_from_the_post_processor_alone(tmp_path: Path) -> None:
    verdict = judge(read_files(write(tmp_path, add_bos_token=False, add_eos_token=True)), seed=1, fuzz_s=0)
    assert (verdict.prefix, verdict.suffix) == ([0], [])


class _Off(FastEncoder):
    """Wrong where a text holds an é."""

    def encode(self, text: str) -> bytes:
        return super().encode(text.replace("é", "e"))


class _Broken(FastEncoder):
    def __init__(self, files: TokenizerFiles, added: object, cache_bytes: int) -> None:
        raise ValueError("unsupported")


@pytest.mark.parametrize(
    ("encoder", "reason"), [(_Off, "other ids for"), (_Broken, "ValueError: unsupported")]
)
def test_fastokens_is_not_used_where_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: type[FastEncoder], reason: str
) -> None:
    monkeypatch.setattr(check_module, "FastEncoder", encoder)
    verdict = judge(read_files(write(tmp_path)), seed=1)
    assert verdict.not_fast is not None
    assert reason in verdict.not_fast
    tokenizer = exact(tmp_path)
    assert tokenizer.encoder.name == "tokenizers"
    expected = train().encode("<|im_start|>café", add_special_tokens=True).ids
    assert ids(tokenizer.encode(b"/v1/completions", {"prompt": "<|im_start|>café"})) == [expected]


def test_no_cuts_where_they_change_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the rules wrong about a token, the fuzz would find it."""
    monkeypatch.setattr(check_module, "cut_tokens", lambda _: ("the", "é"))
    assert judge(read_files(write(tmp_path)), seed=1).cuts == []


def test_verdict_of_a_tokenizer_without_special_tokens(tmp_path: Path) -> None:
    write(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw.update(added_tokens=[], post_processor=None)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    verdict = judge(read_files(tmp_path), seed=1, fuzz_s=0)
    assert (verdict.prefix, verdict.suffix, verdict.cuts, verdict.minijinja) == ([], [], [], [])
