"""Whom a conductor knows, from before a restart and since, and how far each is believed."""

from __future__ import annotations

import re

import pytest

from kvroute.conductor import queries
from kvroute.conductor.block_index import GPU
from kvroute.conductor.core import Conductor, Engine, Service
from kvroute.conductor.events import EventFeed, EventSource, Watermark
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import Namespace, pack_ids, token_keys
from kvroute.types import Trust
from tests.conductor.still_feed import still_conductor, store
from tests.kit import until

MODEL = Namespace(model="m")
IDS = range(64)
KEYS = token_keys(IDS, MODEL.root("ids"), 16)
SERVICE = Service("tcp://b:1", "p1", "m", 16)
ENGINE = Engine("http://a:1", MODEL, (EventSource("tcp://a:1"),), 16)


@pytest.mark.parametrize("worker", [SERVICE, ENGINE], ids=["service", "engine"])
async def test_until_it_is_followed_a_restored_worker_is_judged_by_load_alone(
    worker: Service | Engine,
) -> None:
    conductor, _ = still_conductor()
    other = Engine("http://a:2", MODEL, (EventSource("tcp://a:2"),), 16)
    followed = conductor.follow(other).worker_id
    restored = conductor.adopt(worker)
    for worker_id in (followed, restored):
        conductor.index.add_holder(Holder(worker_id), 16)
        store(conductor.index, Holder(worker_id), GPU, IDS)

    def trusts() -> dict[str, Trust]:
        matched = conductor.match([KEYS], [followed, restored])
        return dict(zip((followed, restored), [trust for _, trust in matched], strict=True))

    def looked_up() -> dict[str, str]:
        rows = queries.lookup(conductor, queries.Scope("m"), pack_ids(IDS), (), None)["holders"]
        return {row["worker"]: row["trust"] for row in rows}

    assert trusts() == {followed: Trust.EXACT, restored: Trust.LOAD_ONLY}
    assert looked_up() == {followed: "exact", restored: "load_only"}
    assert conductor.restoring == 1
    conductor.begin(restored, {0: Watermark(7, 77)})
    assert trusts() == {followed: Trust.EXACT, restored: Trust.EXACT}
    assert looked_up() == {followed: "exact", restored: "exact"}
    assert conductor.restoring == 0


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (Service("tcp://*:1", "p1", "m", 16, replay_endpoint="tcp://*:2"), "'tcp://*:2' names no host"),
        (Service("nowhere", "p1", "m", 16), "endpoint must be tcp://host:port or ipc://path, got 'nowhere'"),
        (Service("tcp://b:1", "p1", "m", 0), "block_tokens must be at least 1, got 0"),
        (Engine("http://a:1", MODEL, (EventSource("tcp://*:1"),), 16), "'tcp://*:1' names no host"),
        (Engine("http://a:1", MODEL, ENGINE.sources, 16, 0), "min_block_tokens must be at least 1, got 0"),
    ],
)
async def test_a_restored_worker_that_cannot_be_followed_is_not_half_known(
    worker: Service | Engine, said: str
) -> None:
    index = PrefixIndex(2**24, lambda: 0.0)
    conductor = Conductor(index, EventFeed(index))
    worker_id = conductor.adopt(worker)
    index.add_holder(Holder(worker_id), 16)
    store(index, Holder(worker_id), GPU, IDS)
    with pytest.raises(ValueError, match=re.escape(said)):
        conductor.begin(worker_id, None)
    assert not conductor.knows(worker)
    assert (conductor.members(), conductor.restoring, conductor.feed.followed) == ([], 0, ())
    await until(lambda: index.blocks.blocks == 0)
    conductor.begin(worker_id, None)  # there is nothing left to follow
    await conductor.close()


async def test_a_restored_engine_that_no_gateway_asks_for_goes() -> None:
    conductor, feed = still_conductor(linger_s=0.01)
    worker_id = conductor.adopt(ENGINE)
    conductor.begin(worker_id, None)
    assert [*feed.workers] == [worker_id]
    await until(lambda: not conductor.instances)
    assert not feed.workers
