"""Pairs of members that no connection is ever made to."""

from __future__ import annotations

import uuid
from typing import Any

from kvroute.config_groups import WorkerConfig
from kvroute.router.pd.connector import Pair
from kvroute.router.workers import Member
from tests.router.registry import Fleet

PREFILL, DECODE = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


def member(url: str, data_parallel_size: int = 1, **config: Any) -> Member:
    registry = Fleet().registry
    one = registry.add(WorkerConfig(url=url, **config))
    registry.update(one, data_parallel_size=data_parallel_size)
    return one


def pair(prefill: Member | None = None, decode: Member | None = None, **fields: Any) -> Pair:
    """Each has an id of its own."""
    id = fields.pop("id", uuid.uuid4().hex)
    return Pair(prefill or member(PREFILL), decode or member(DECODE), id, **fields)
