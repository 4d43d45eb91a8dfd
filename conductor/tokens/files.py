"""What a model's directory says about its tokenizer: the files, read the way transformers 5 reads them.

Beside a tokenizer.json, `add_bos_token` and `add_eos_token` of the configuration count for nothing there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 256 * 2**20
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Named special tokens: template variables, and matched in text even where tokenizer.json does not say so."""

OWN_RENDERERS = frozenset({"gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "inkling"})
"""Model types whose conversations the engines write by a program of their own instead of a Jinja template."""


class UnusableTokenizer(Exception):
    """The files are missing or are not a tokenizer; the message says which, and what is expected."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The readable part of a tokenizer; the vocabulary stays in `tokenizer_json`, which only Rust reads."""

    tokenizer_json: Path
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """By name, such as {"bos_token": "<s>"}."""
    added_tokens: tuple[Mapping[str, Any], ...] = ()
    """Tokens that the configuration adds to those of tokenizer.json, or changes: `content` and flags."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Chat templates by name; "default", and "tool_use" for requests with tools, where there are several."""


def read_files(path: Path, chat_template: Path | None = None) -> TokenizerFiles:
    """`path` is a model's directory or its tokenizer.json; `chat_template` a file that replaces its template.

    Raises `UnusableTokenizer`.
    """
    tokenizer = path / "tokenizer.json" if path.is_dir() else path
    if not tokenizer.is_file():
        raise UnusableTokenizer(
            f"{tokenizer} is missing; a directory with tokenizer.json, or that file, is expected"
        )
    if tokenizer.stat().st_size > MAX_FILE_BYTES:
        raise UnusableTokenizer(f"{tokenizer} is larger than {MAX_FILE_BYTES} bytes")
    directory = tokenizer.parent
    config = _json(directory / "tokenizer_config.json")
    legacy = _json(directory / "special_tokens_map.json")
    special = _special_tokens({**legacy, **{k: v for k, v in config.items() if v is not None}})
    return TokenizerFiles(
        tokenizer,
        special,
        _added_tokens(config, special.values()),
        _templates(directory, config, chat_template),
    )


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UnusableTokenizer(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableTokenizer(f"{path} cannot be read as UTF-8 text: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    """An object, empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        read = json.loads(_text(path))
    except ValueError as error:
        raise UnusableTokenizer(f"{path} is not valid JSON: {error}") from None
    if not isinstance(read, dict):
        raise UnusableTokenizer(f"{path} does not hold a JSON object")
    return read


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Each is a string, or an object that has it as `content`."""
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _added_tokens(config: Mapping[str, Any], named: Iterable[str]) -> tuple[Mapping[str, Any], ...]:
    """By id those with flags of their own, then by name or list those that are only said to be special."""
    found: dict[str, Mapping[str, Any]] = {}
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
            if isinstance(token, dict) and isinstance(content := token.get("content"), str):
                flags = {name: token[name] for name in FLAGS if isinstance(token.get(name), bool)}
                found[content] = {"content": content, **flags}
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    more = [*more.values()] if isinstance(more, dict) else more if isinstance(more, list) else []
    for token in (*named, *more):
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found.setdefault(content, {"content": content, "special": True})
    return tuple(found.values())


def _templates(directory: Path, config: Mapping[str, Any], given: Path | None) -> dict[str, str]:
    """The one given, else files beside the configuration, else the template inside it."""
    model_type = _json(directory / "config.json").get("model_type")
    if model_type in OWN_RENDERERS or (directory / "tekken.json").exists():
        return {}
    if given is not None:
        return {"default": _text(given)}
    files = {"default": directory / "chat_template.jinja"}
    more = directory / "additional_chat_templates"
    if more.is_dir():
        files |= {path.stem: path for path in sorted(more.glob("*.jinja"))}
    found = {name: _text(path) for name, path in files.items() if path.is_file()}
    if found:
        return found
    inside = config.get("chat_template")
    if inside is None:
        inside = _json(directory / "chat_template.json").get("chat_template")
    if isinstance(inside, str):
        return {"default": inside}
    if isinstance(inside, list):
        return {
            entry["name"]: entry["template"]
            for entry in inside
            if isinstance(entry, dict) and isinstance(entry.get("template"), str) and "name" in entry
        }
    return {}
