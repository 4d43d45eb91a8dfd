"""What an engine says about itself: model cards, kind, block size, ranks, load."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from typing import Any

from kvroute.types import EngineKind

# A vLLM scrape is 64 KiB, of which five series are wanted: reading all of it with a full parser costs some
# 10 ms of the event loop per worker and poll, this about 0.2 ms.
_SAMPLE = re.compile(
    r"^(?:(?P<engine>vllm|sglang):)?(?P<name>num_requests_running|num_requests_waiting|num_running_reqs|num_queue_reqs"
    r"|kv_cache_usage_perc|gpu_cache_usage_perc|token_usage|cache_config_info|process_start_time_seconds"
    r"|nixl_num_kv_expired_reqs_total)"
    r"(?:\{(?P<labels>[^\n]{0,4096}?)\})? (?P<value>[^\s]+)",
    re.MULTILINE,
)
MAX_VALUE = 1e15
_LABEL = re.compile(r'(?:^|,)\s*+(\w++)="((?:[^"\\]|\\.)*+)"')
_RUNNING = ("num_requests_running", "num_running_reqs")
_WAITING = ("num_requests_waiting", "num_queue_reqs")
_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage")


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One scrape; None is "not reported"."""

    engine: EngineKind | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage_ratio: float | None = None
    """Mean over data-parallel ranks, 0..1."""
    block_size_tokens: int | None = None
    kv_tokens: int | None = None
    """KV room of one rank."""
    data_parallel_size: int = 1
    started_at: float | None = None
    kv_expired: int | None = None
    """Handoffs of a prefill worker (NIXL) whose KV nobody fetched in time."""


def read_metrics(text: str) -> EngineMetrics:
    """Pick the wanted series out of a Prometheus text exposition; ranks are summed."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    kind: EngineKind | None = None
    for sample in _SAMPLE.finditer(text):
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        if not isfinite(value) or abs(value) > MAX_VALUE:
            continue
        if sample["engine"]:
            kind = EngineKind(sample["engine"])
        found.setdefault(sample["name"], []).append((dict(_LABEL.findall(sample["labels"] or "")), value))
    usage = _first(found, _USAGE)
    config = found.get("cache_config_info", [({}, 0.0)])[0][0]
    block_tokens = _count(config.get("block_size") or config.get("page_size"))
    blocks = _count(config.get("num_gpu_blocks") or config.get("num_pages"))
    started = found.get("process_start_time_seconds")
    ranks = _first(found, _RUNNING) or []
    return EngineMetrics(
        engine=kind,
        running=_sum(_first(found, _RUNNING)),
        waiting=_sum(_first(found, _WAITING)),
        kv_usage_ratio=sum(v for _, v in usage) / len(usage) if usage else None,
        block_size_tokens=block_tokens,
        kv_tokens=blocks * block_tokens if blocks and block_tokens else None,
        data_parallel_size=max(
            1, len({labels.get("engine", labels.get("dp_rank", "0")) for labels, _ in ranks})
        ),
        started_at=started[0][1] if started else None,
        kv_expired=_sum(found.get("nixl_num_kv_expired_reqs_total")),
    )


def _count(label: str | None) -> int | None:
    return int(label) if label and label.isdecimal() and 0 < int(label) < MAX_VALUE else None


def _first(
    found: dict[str, list[tuple[dict[str, str], float]]], names: tuple[str, ...]
) -> list[tuple[dict[str, str], float]] | None:
    return next((found[name] for name in names if name in found), None)


def _sum(samples: list[tuple[dict[str, str], float]] | None) -> int | None:
    return None if samples is None else int(sum(value for _, value in samples))


def read_cards(answer: Any) -> list[dict[str, Any]]:
    """The cards of a /v1/models answer; [] when it is not one."""
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list):
        return []
    return [card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str)]


def engine_of(cards: list[dict[str, Any]]) -> EngineKind | None:
    """vLLM and SGLang put their name into `owned_by`."""
    owners = {card.get("owned_by") for card in cards}
    return next((kind for kind in (EngineKind.VLLM, EngineKind.SGLANG) if kind.value in owners), None)


def read_server_info(answer: Any) -> int | None:
    """Block (page) size in tokens from SGLang's or vLLM's /server_info; None when it is not there."""
    if not isinstance(answer, dict):
        return None
    cache = answer.get("vllm_config", {})
    cache = cache.get("cache_config", {}) if isinstance(cache, dict) else {}
    size = answer.get("page_size") or (cache.get("block_size") if isinstance(cache, dict) else None)
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def read_event_sources(answer: Any) -> dict[str, dict[str, Any]]:
    """vLLM's /kv_event_sources: rank -> endpoint, replay_endpoint, topic; {} when it is not that."""
    if not isinstance(answer, dict):
        return {}
    return {
        rank: source
        for rank, source in answer.items()
        if isinstance(source, dict) and isinstance(source.get("endpoint"), str)
    }
