"""The fields of each engine's own API that carry hints; pure.

vLLM's `kv_transfer_params` (experimental there) reach its connector whole: the native OffloadingConnector
reads `max_offload_tokens` and `max_load_tokens` (0: recompute what is not in the GPU), its p2p tier
`remote_kv_source`, LMCache's connector `lmcache.max_offload_tokens`. SGLang takes `session_id` (with
--enable-session-radix-cache: what live sessions hold is evicted last) or `priority` (with
--radix-eviction-policy priority: the lower value goes first; the queue is ordered by it as well).
TensorRT-LLM has such a setting in its Python API, and no HTTP field for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from kvroute.policies.retention import Keep, Retention
from kvroute.types import Decision, EngineKind, RequestView

KV_PARAMS = "kv_transfer_params"
MAX_OFFLOAD, MAX_LOAD, REMOTE_SOURCE = "max_offload_tokens", "max_load_tokens", "remote_kv_source"
LMCACHE_MAX_OFFLOAD = "lmcache.max_offload_tokens"
PRIORITY, SESSION = "priority", "session_id"

SMALL_TIER_RATIO = 1.0
"""Up to this ratio of CPU tier to GPU cache it pays, simulated, to keep one-offs out of the tier; at 2 it
costs."""
MAX_SESSION_CHARS = 256
_OPENAI = frozenset({b"/v1/completions", b"/v1/chat/completions"})
ROUTES = {EngineKind.VLLM: _OPENAI, EngineKind.SGLANG: _OPENAI | {b"/generate"}}
"""Where each engine takes its fields; engines that are not here take none."""


class HintOptions(Struct, frozen=True):
    """What the engines of this fleet are set up for."""

    offloading: Literal["native", "lmcache"] = "native"
    """Which connector keeps vLLM's lower tiers."""
    cpu_tier_ratio: float | None = None
    """Size of an engine's CPU tier over its GPU cache; None is unknown, and then no offload is limited."""
    sglang: Literal["session", "priority"] = "session"
    session_idle_s: float = 600.0
    """A session that sends nothing for so long is closed."""
    p2p: Mapping[str, str] = {}
    """By worker URL, host:port of its p2p tier."""
    p2p_port: int | None = None
    """Of all others, at the worker's own host; None: they have no such tier."""
    pull_floor_s: float = 1.0
    """What the first byte may take beyond three times what was expected, when there is a pull."""
    pull_max_s: float = 15.0
    """And what it may take at all."""


class Fields(Struct):
    """The hints for one attempt: what is to be set, and why the others are not."""

    top: dict[str, Any] = {}
    """Top-level fields."""
    kv: dict[str, Any] = {}
    """Inside `kv_transfer_params`."""
    passed_over: list[tuple[str, str]] = []
    """(hint, reason)"""

    def pass_all(self, reason: str) -> None:
        """Nothing is set after all."""
        self.passed_over += [(hint, reason) for hint in (*self.top, *self.kv)]
        self.top, self.kv = {}, {}

    def pass_kv(self, reason: str) -> None:
        """Nothing goes into `kv_transfer_params` after all."""
        self.passed_over += [(hint, reason) for hint in self.kv]
        self.kv = {}

    def spliced(self) -> dict[str, Any]:
        """What goes into the body."""
        return {KV_PARAMS: self.kv, **self.top} if self.kv else self.top


def fields_for(
    engine: EngineKind,
    view: RequestView,
    kept: Retention,
    decision: Decision,
    source: dict[str, Any] | None,
    options: HintOptions,
) -> Fields:
    """What to tell an engine of a request; `source` is the peer to pull from, as its p2p tier takes it."""
    fields = Fields()
    if engine is EngineKind.VLLM:
        _for_vllm(fields, kept, decision, source, options)
    elif engine is EngineKind.SGLANG:
        _for_sglang(fields, view, kept, options)
    return fields


def _for_vllm(
    fields: Fields,
    kept: Retention,
    decision: Decision,
    source: dict[str, Any] | None,
    options: HintOptions,
) -> None:
    native = options.offloading == "native"
    if kept.offload_limit_tokens is not None:
        hint = MAX_OFFLOAD if native else LMCACHE_MAX_OFFLOAD
        if options.cpu_tier_ratio is None:
            fields.passed_over.append((hint, "cpu_tier_unknown"))
        elif options.cpu_tier_ratio > SMALL_TIER_RATIO:
            fields.passed_over.append((hint, "cpu_tier_large"))
        else:
            fields.kv[hint] = kept.offload_limit_tokens
    if source is not None:
        fields.kv[REMOTE_SOURCE] = source
    if not decision.loads:
        if source is not None:  # what is pulled comes through the CPU tier: no loads, no pull
            fields.passed_over.append((MAX_LOAD, "pull"))
        elif not native:
            fields.passed_over.append((MAX_LOAD, "no_field"))
        else:
            fields.kv[MAX_LOAD] = 0
    if decision.candidate.prefill is not decision.candidate.decode:
        fields.pass_kv("split")  # the legs' own parameters are in there


def _for_sglang(fields: Fields, view: RequestView, kept: Retention, options: HintOptions) -> None:
    if options.sglang == "priority":
        fields.top[PRIORITY] = 0 if kept.keep is Keep.LOW else 1
    elif view.session_id is None:
        fields.passed_over.append((SESSION, "no_session"))
    elif len(view.session_id) > MAX_SESSION_CHARS or not view.session_id.isprintable():
        fields.passed_over.append((SESSION, "odd_session"))
    elif kept.keep is Keep.LOW:
        fields.passed_over.append((SESSION, kept.reason))
    else:
        fields.top[SESSION] = view.session_id
