"""Pulls of KV from a peer's cache: who the peer is to the engine, and how long the pull may take; pure.

vLLM's p2p tier takes `remote_kv_source {kv_request_id, remote_host, remote_port}`. The id only names the
transfer, and has to be new for each: the peer finds the blocks by their hashes in its CPU tier. Its waits
have no deadline that a client could live with, so the gateway has one.
"""

from __future__ import annotations

import os
from typing import Any

from kvroute.endpoint import Endpoint
from kvroute.router.hints.fields import HintOptions
from kvroute.types import Prediction, Pull, RequestView

FACTOR = 3.0
"""Of what was expected; predictions of a first token are off by two now and then."""


def kv_source(pull: Pull, options: HintOptions) -> dict[str, Any] | None:
    """The peer as vLLM's p2p tier takes it; None where it is not known to have one."""
    if pull.source.data_parallel_size > 1:
        return None  # each rank listens at a port of its own, and which one holds the KV is not known here
    address = options.p2p.get(pull.source.url)
    if address is None:
        endpoint = Endpoint.parse(pull.source.url)
        if options.p2p_port is None or endpoint.unix_path is not None:
            return None
        host, port = endpoint.host, options.p2p_port
    else:
        name, _, number = address.rpartition(":")
        host, port = name.strip("[]"), int(number)
    return {
        "kv_request_id": f"kvroute-{os.urandom(12).hex()}",
        "remote_host": host,
        "remote_port": port,
    }


def has_p2p(url: str, options: HintOptions) -> bool:
    """Whether the worker at a URL can pull."""
    return url in options.p2p or options.p2p_port is not None


def first_byte_limit_s(
    pull: Pull, prediction: Prediction, view: RequestView, options: HintOptions
) -> float | None:
    """How long the first body byte of an attempt with a pull may take.

    None where a late pull could not be told from what else takes time: the first byte of an answer that is
    not streamed is its end, and one behind a long queue is late anyway.
    """
    expected_s = pull.expected_s + prediction.ttft_s
    if not view.stream:
        if view.max_output_tokens is None:
            return None
        expected_s += view.max_output_tokens * prediction.itl_s
    if expected_s + options.pull_floor_s > options.pull_max_s:
        return None
    return min(expected_s * FACTOR + options.pull_floor_s, options.pull_max_s)
