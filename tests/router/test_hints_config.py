"""The configuration of hints reaches them."""

from __future__ import annotations

import pytest

from kvroute.config import ConfigError, load
from kvroute.config_groups import WorkerConfig
from kvroute.types import EngineKind
from tests.kit import CHAT, Engine, ask
from tests.router.edge import edge
from tests.router.test_hints import body


async def test_hints_are_given_as_configured() -> None:
    async with (
        Engine() as worker,
        edge(
            worker,
            workers=[WorkerConfig(url=worker.url, engine=EngineKind.VLLM)],
            policy="prefix_affinity",
            retention={"hints": True, "cpu_tier_ratio": 1, "p2p": {"HTTP://a:1/": "h:5"}},
        ) as server,
    ):
        await ask(server.url, CHAT, body())
        assert worker.received[0].body.startswith(b'{"kv_transfer_params":{"max_offload_tokens":0},')
        assert server._hints is not None
        assert server._hints.options.p2p == {"http://a:1": "h:5"}


@pytest.mark.parametrize(
    ("retention", "field", "accepted"),
    [
        ({"p2p": {"http://a:1": "h"}}, "retention.p2p", "host:port"),
        ({"p2p_link": "wet string"}, "retention.p2p_link", "roce-100g"),
        ({"pull_max_s": 0}, "retention.pull_max_s", "greater than 0"),
        ({"offloading": "lm"}, "retention.offloading", "lmcache"),
    ],
)
def test_bad_options_are_named(retention: dict[str, object], field: str, accepted: str) -> None:
    with pytest.raises(ConfigError, match=field) as fault:
        load(None, {"retention": retention})
    assert accepted in str(fault.value)
