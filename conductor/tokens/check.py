"""What must hold before a tokenizer is trusted, found out in a process of its own.

    python -m kvroute.conductor.tokens.check FILES (as JSON on standard input)

`tokenizers` holds the GIL for half a second while it reads a large vocabulary, and the comparisons are
seconds of work: in the gateway's own process they would hold up every request. A child can also be ended
when it takes too long, a thread cannot.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError
from msgspec import Struct
from tokenizers import Tokenizer

from kvroute.conductor.keys import pack_ids
from kvroute.conductor.tokens.cases import conversations, texts
from kvroute.conductor.tokens.encoder import FastEncoder, load_reference
from kvroute.conductor.tokens.files import TokenizerFiles, UnusableTokenizer
from kvroute.conductor.tokens.segments import SegmentCache, cut_tokens
from kvroute.conductor.tokens.template import ChatTemplate, minijinja_agrees

FUZZ_ROUNDS = 40
FUZZ_TEXTS = 50
FUZZ_S = 2.0
CONVERSATIONS = 150
CACHE_BYTES = 2**20
"""Small enough to forget and to fill again while the fuzz runs."""
MAX_SPECIAL = 64


class Verdict(Struct, frozen=True):
    """What the check found."""

    prefix: list[int]
    """Ids that the tokenizer puts before a text of a completion (such as BOS)."""
    suffix: list[int]
    added: list[dict[str, Any]]
    """Tokens that the engines add to those of tokenizer.json, or change: their content and flags."""
    cuts: list[str]
    """Where a text can be cut; see `segments.cut_tokens`. Empty when the fuzz found a difference."""
    not_fast: str | None
    """Why fastokens is not used; None when it agreed with `tokenizers` on every text."""
    minijinja: list[str]
    """Names of the templates that minijinja renders as jinja2 does."""
    texts: int = 0
    """How many texts were compared."""


async def check(files: TokenizerFiles, seed: int, limit_s: float) -> Verdict:
    """Run the check in a child. Raises `UnusableTokenizer` with what went wrong, or that time ran out."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, str(seed),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(limit_s):
            out, err = await child.communicate(_to_json(files))
    except TimeoutError:
        raise UnusableTokenizer(f"checking {files.tokenizer_json} took more than {limit_s:.0f} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        last = err.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise UnusableTokenizer(f"{files.tokenizer_json} could not be checked: {last[:500]}")
    try:
        return msgspec.json.decode(out, type=Verdict)
    except msgspec.MsgspecError as error:
        raise UnusableTokenizer(f"the check of {files.tokenizer_json} said nothing usable: {error}") from None


def judge(files: TokenizerFiles, seed: int, fuzz_s: float = FUZZ_S) -> Verdict:
    """The check itself, in this process, on at least one batch of texts. Raises `UnusableTokenizer`."""
    try:
        raw = json.loads(files.tokenizer_json.read_bytes())
        added = _added(files, raw.get("added_tokens") or [])
        reference = load_reference(files, added)
    except Exception as error:  # `tokenizers` raises plain Exception
        raise UnusableTokenizer(f"{files.tokenizer_json} is not a tokenizer: {error}") from None
    everything = json.loads(reference.to_str()) if added else raw
    special = [t["content"] for t in everything.get("added_tokens") or [] if t.get("special")][:MAX_SPECIAL]
    prefix, suffix = _ends(files, reference)
    cuts, not_fast, compared = _fuzz(files, reference, added, cut_tokens(everything), special, seed, fuzz_s)
    return Verdict(prefix, suffix, added, cuts, not_fast, _minijinja(files, special, seed), compared)


def _added(files: TokenizerFiles, listed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Those that tokenizer.json does not list, or lists with other flags; without flags, listed is enough."""
    flags = {token["content"]: token for token in listed}
    return [
        dict(token)
        for token in files.added_tokens
        if token["content"] not in flags
        or (
            len(token) > 2
            and any(flags[token["content"]].get(name) != value for name, value in token.items())
        )
    ]


def _ends(files: TokenizerFiles, reference: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids put around a text; they must be the same around any."""
    bare = reference.encode("text", add_special_tokens=False).ids
    full = reference.encode("text", add_special_tokens=True).ids
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return full[:at], full[at + len(bare) :]
    raise UnusableTokenizer(f"{files.tokenizer_json}: what it adds around a text changes the text's own ids")


def _fuzz(
    files: TokenizerFiles,
    reference: Tokenizer,
    added: Sequence[Mapping[str, Any]],
    cuts: Sequence[str],
    special: Sequence[str],
    seed: int,
    fuzz_s: float,
) -> tuple[list[str], str | None, int]:
    """fastokens, and encoding by segments, against `tokenizers`: (cuts, why not fast, texts compared)."""
    fast, not_fast = None, None
    try:
        fast = FastEncoder(files, added, CACHE_BYTES)
    except BaseException as error:  # a panic in Rust is no Exception
        not_fast = f"{type(error).__name__}: {error}"[:200]
    segments = (
        SegmentCache(lambda batch: _reference_ids(reference, batch), cuts, CACHE_BYTES) if cuts else None
    )
    deadline, compared = time.monotonic() + fuzz_s, 0
    for turn in range(FUZZ_ROUNDS):
        batch = texts(seed + turn, FUZZ_TEXTS, special)
        for text, expected in zip(batch, _reference_ids(reference, batch), strict=True):
            compared += 1
            if fast is not None and fast.encode(text) != expected:
                fast, not_fast = None, f"other ids for {text[:80]!r}"
            if segments is not None and segments.encode(text) != expected:
                segments = None
        if time.monotonic() > deadline or (fast is None and segments is None):
            break
    return list(cuts) if segments is not None else [], not_fast, compared


def _reference_ids(reference: Tokenizer, batch: Sequence[str]) -> list[bytes]:
    return [pack_ids(e.ids) for e in reference.encode_batch_fast(list(batch), add_special_tokens=False)]


def _minijinja(files: TokenizerFiles, special: Sequence[str], seed: int) -> list[str]:
    agreed = []
    for name, source in files.templates.items():
        try:
            template = ChatTemplate(source, files.special_tokens, use_minijinja=False)
        except TemplateError:
            continue
        cases: list[dict[str, Any]] = []
        for parts in {template.takes_parts_vllm, template.takes_parts_sglang}:
            cases += conversations(seed, CONVERSATIONS, special, parts)
        if minijinja_agrees(source, files.special_tokens, cases):
            agreed.append(name)
    return agreed


def _to_json(files: TokenizerFiles) -> bytes:
    return json.dumps({**asdict(files), "tokenizer_json": str(files.tokenizer_json)}).encode()


def _from_json(data: Mapping[str, Any]) -> TokenizerFiles:
    return TokenizerFiles(**{**data, "tokenizer_json": Path(data["tokenizer_json"])})


if __name__ == "__main__":
    os.nice(5)
    sys.stdout.buffer.write(
        msgspec.json.encode(judge(_from_json(json.loads(sys.stdin.buffer.read())), int(sys.argv[1])))
    )
