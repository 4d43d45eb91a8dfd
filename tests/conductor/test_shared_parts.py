"""The parts of the shared state that need no server."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.conductor.shared import (
    Dropped,
    Ignored,
    Intent,
    LocalWorker,
    Lost,
    OthersLoad,
    SharedOptions,
    SharedState,
    SharedStats,
    SharedWorker,
    inbox,
    ledger,
    loads,
)
from kvroute.conductor.shared.host import HostFailures
from kvroute.conductor.shared.inbox import Inbox
from kvroute.conductor.shared.ledger import AHEAD_MS, REMEMBERED_MS, Ledger
from kvroute.conductor.shared.link import Direction, Link
from kvroute.conductor.shared.loads import OthersLoads
from kvroute.conductor.shared.messages import (
    ENTRY_BYTES,
    MAX_ENTRY_BYTES,
    MAX_KEYS,
    VERSION,
    Decisions,
    LoadReport,
    Reader,
    Routed,
    RoutedBatch,
    Unreadable,
    WorkerShare,
    encode,
    split,
)
from kvroute.conductor.shared.outbox import Outbox
from kvroute.types import KeyMode, PromptKeys
from tests.conductor.sharing import URL, Replica, prompt

OTHER_URL = "http://10.0.0.2:8000"
NOW_MS = 1_800_000_000_000


class Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "http://x"}, "url: scheme 'http'; accepted: redis://"),
        ({"url": "localhost:6379"}, "url: scheme 'localhost'; accepted: redis://"),
        ({"url": "redis://"}, "url: no host; accepted: redis://"),
        ({"url": "redis://h:0"}, "url: no port; accepted: redis://"),
        ({"url": "redis://h:99999"}, "url: Port out of range"),
        ({"url": "redis://h/zero"}, "url: '/zero' is no database number"),
        ({"url": "redis://h?db=x"}, "url: db 'x' is no database number"),
        ({"url": "redis://:a#b@h"}, "url: "),
        (
            {"url": "redis://h?socket_timeout=9"},
            "url: unknown query socket_timeout; accepted: db, ssl_ca_certs",
        ),
        ({"url": "unix:sock"}, "url: a unix socket needs an absolute path"),
        ({"url": "redis://:a@h", "password": "b"}, "password: given in url as well"),
        ({"url": "redis://h", "prefix": "a b"}, "prefix: 'a b'; accepted: 1 to 128"),
        ({"url": "redis://h", "timeout_s": 0}, "timeout_s: 0; accepted: 0.01 to 60"),
        ({"url": "redis://h", "timeout_s": float("nan")}, "timeout_s: nan; accepted"),
        ({"url": "redis://h", "warm_s": -1}, "warm_s: -1; accepted: 0 to 86400"),
        ({"url": "redis://h", "stream_bytes": 1}, "stream_bytes: 1; accepted: 1048576 to"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        SharedOptions(**fields)
    assert str(raised.value).startswith(message)


def test_options_show_no_secret() -> None:
    for options in (
        SharedOptions("rediss://user:s3cret@h:6380/2?ssl_ca_certs=/ca.pem"),
        SharedOptions("unix:///run/redis.sock?db=1", password="s3cret"),
    ):
        assert "s3cret" not in repr(options) + options.shown_url
    assert SharedOptions("redis://u:p@[::1]:6379/1").shown_url == "redis://[::1]:6379/1"


def test_a_replica_needs_a_name() -> None:
    for name in ("", "x" * 129, "a\nb", "é"):
        with pytest.raises(ValueError, match="replica_id: "):
            SharedState(SharedOptions("redis://h"), name, Replica())


# --- messages ----------------------------------------------------------------------------------


def test_the_bytes_of_a_message_are_fixed() -> None:
    """Replicas of different releases read each other."""
    batch = RoutedBatch("a/1", [Routed.of(URL, 1.5, PromptKeys(KeyMode.TOKENS, [1, 2**64 - 1], 16, 35))])
    keys = b"\x01" + b"\0" * 7 + b"\xff" * 8
    url = bytes([0xA0 + len(URL)]) + URL.encode()
    routed = b"\x96" + url + b"\xcb\x3f\xf8" + b"\0" * 6 + b"\xa6tokens\x10\x23\xc4\x10" + keys
    assert encode(batch) == b"\x92\xa3a/1\x91" + routed
    assert encode(LoadReport("a/1", [WorkerShare(URL, 3, 4)])) == b"\x92\xa3a/1\x91\x93" + url + b"\x03\x04"
    worker = b"\x97" + url + b"\xa7removed\xc0\x90\xc0\x05\xa1a"
    assert encode(Decisions("a", [SharedWorker(URL, Intent.REMOVED, version=5, origin="a")])) == (
        b"\x92\xa1a\x91" + worker
    )
    longer = b"\x93\xa3a/1\x91\x97" + routed[1:] + b"\xa3new" + b"\xa3new"
    assert Reader(RoutedBatch).read({VERSION: longer}) == batch


@settings(max_examples=100, derandomize=True)
@given(
    st.sampled_from([RoutedBatch, LoadReport, Decisions]),
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none()
            | st.integers(-(2**63), 2**64 - 1)
            | st.floats()
            | st.text(max_size=9)
            | st.binary(max_size=24),
            lambda inner: (
                st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=20,
        ).map(msgspec.msgpack.encode),
        st.lists(
            st.lists(
                st.sampled_from([URL, "tokens", "serving", 1.0, 16, 2**53, -1, None, b"12345678", b"1", []])
            )
        ).map(lambda items: msgspec.msgpack.encode(["x", items])),
    ),
)
def test_whatever_stands_in_redis_is_read_or_refused(kind: type[Any], data: bytes) -> None:
    try:
        message = Reader(kind).read({VERSION: data})
    except Unreadable:
        return
    assert isinstance(message, kind)
    assert Reader(kind).read({VERSION: encode(message)}) == message or "nan" in repr(message)


def test_large_and_foreign_entries_are_refused() -> None:
    for fields, reason in (
        ({VERSION: bytes(MAX_ENTRY_BYTES + 1)}, Ignored.TOO_LARGE),
        ({b"0": encode(LoadReport("x", []))}, Ignored.UNKNOWN_VERSION),
        ({}, Ignored.UNKNOWN_VERSION),
    ):
        with pytest.raises(Unreadable) as raised:
            Reader(LoadReport).read(fields)
        assert raised.value.reason is reason


def test_many_decisions_are_split_into_entries_that_can_be_read() -> None:
    models = tuple(f"model-{n}" * 10 for n in range(20))
    workers = [SharedWorker(f"http://h:{n}", Intent.SERVING, models=models) for n in range(1, 500)]
    messages = split("a", workers)
    assert 5 < len(messages) < 50
    assert max(map(len, messages)) < 2 * ENTRY_BYTES
    read = [Reader(Decisions).read({VERSION: message}).workers for message in messages]
    assert list(itertools.chain(*read)) == workers
    assert split("a", []) == []


# --- outbox ------------------------------------------------------------------------------------


def test_the_outbox_is_bounded_and_closed_while_nobody_listens() -> None:
    stats, woken = SharedStats(), []
    outbox = Outbox("a", 100_000, stats, lambda: woken.append(1))
    outbox.add(URL, None, prompt(1, seed=0))
    assert (len(outbox), stats.dropped) == (0, {Dropped.DISCONNECTED: 1})
    outbox.open()
    for n in range(100):
        outbox.add(URL, None, prompt(100, seed=n))
        assert stats.queue_bytes <= 100_000
    assert len(outbox) + stats.dropped[Dropped.QUEUE_FULL] == 100
    assert 10 < len(outbox) < 30
    assert woken == [1]
    held = len(outbox)
    outbox.close()
    assert (len(outbox), stats.queue_bytes, stats.dropped[Dropped.DISCONNECTED]) == (0, 0, 1 + held)


def test_the_outbox_packs_in_order_and_in_parts() -> None:
    stats = SharedStats()
    outbox = Outbox("a", 2**30, stats, lambda: None)
    outbox.open()
    prompts = [prompt(5000, seed=n) for n in range(20)]
    for keys in prompts:
        outbox.add(URL, 1.0, keys)
    outbox.add(URL, 1.0, prompts[3])
    outbox.add(URL, 2.0, prompts[3])
    taken = [outbox.take(200_000)]
    assert len(outbox) == 21 - sum(entry.prompts for entry in taken[0]) > 0
    while len(outbox):
        taken.append(outbox.take(200_000))
    entries = list(itertools.chain(*taken))
    assert max(len(entry.payload) for entry in entries) < ENTRY_BYTES + 8 * MAX_KEYS + 1000 < MAX_ENTRY_BYTES
    items = [item for entry in entries for item in Reader(RoutedBatch).read({VERSION: entry.payload}).items]
    assert [(item.started_at, item.prompt_keys()) for item in items] == [
        *((1.0, keys) for keys in prompts),
        (2.0, prompts[3]),
    ]
    assert (stats.queue_bytes, stats.coalesced) == (0, 1)


# --- inbox -------------------------------------------------------------------------------------


def make_inbox(replica: Replica) -> tuple[Inbox, SharedStats, Time]:
    stats, clock = SharedStats(), Time()
    return Inbox(replica, HostFailures(stats, clock), stats, clock), stats, clock


@pytest.mark.parametrize(
    ("said", "known", "first", "at_last"),
    [
        (None, None, "given", "given"),
        (None, 1.0, "given", "given"),
        (1.0, 1.0, "given", "given"),
        (1.0, None, "waits", "given"),
        (2.0, 1.0, "waits", Ignored.OTHER_INCARNATION),
        (1.0, 2.0, Ignored.OTHER_INCARNATION, Ignored.OTHER_INCARNATION),
        (float("nan"), 2.0, Ignored.OTHER_INCARNATION, Ignored.OTHER_INCARNATION),
        (1.0, "unknown", "waits", Ignored.UNKNOWN_WORKER),
    ],
)
async def test_who_a_prediction_is_given_to(
    said: float | None, known: float | str | None, first: str, at_last: str
) -> None:
    replica = Replica(workers={} if isinstance(known, str) else {URL: LocalWorker("w~1", known)})
    box, stats, clock = make_inbox(replica)

    def outcome() -> str:
        if stats.ignored:
            return next(iter(stats.ignored))
        return "given" if replica.predicted else "waits"

    box.take(Routed.of(URL, said, prompt(2, seed=1)))
    assert outcome() == first
    clock.now_s += inbox.WAIT_S - 0.1
    await box.retry()
    assert outcome() == first
    clock.now_s += 0.1
    await box.retry()
    assert outcome() == at_last
    await box.retry()
    assert stats.waiting_bytes == 0
    assert sum(stats.ignored.values()) + len(replica.predicted) == 1


async def test_what_waits_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MAX_WAITING_BYTES", 50_000)
    replica = Replica(workers={})
    box, stats, _ = make_inbox(replica)
    for n in range(200):
        box.take(Routed.of(URL, None, prompt(50, seed=n)))
        assert stats.waiting_bytes <= 50_000
    replica.workers = {URL: LocalWorker("w~1", None)}
    await box.retry()
    assert [keys for _, keys in replica.predicted] == [prompt(50, seed=n) for n in range(150, 200)]
    assert stats.ignored == {Ignored.WAITING_FULL: 150}
    assert stats.waiting_bytes == 0


# --- loads -------------------------------------------------------------------------------------


def test_totals_are_the_sum_of_living_replicas() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    generator = random.Random(seed)
    clock = Time()
    others = OthersLoads(3.0, clock)
    urls = [f"http://h:{n}" for n in range(1, 6)]
    reports: dict[str, tuple[float, dict[str, tuple[int, int]]]] = {}
    seen: dict[str, OthersLoad] = {}
    for _ in range(500):
        clock.now_s += generator.random()
        if generator.random() < 0.8:
            sender = f"r{generator.randrange(4)}"
            carried = {
                url: (generator.randrange(3), generator.randrange(100) * generator.randrange(2))
                for url in generator.sample(urls, generator.randrange(5))
            }
            reports[sender] = (clock.now_s + 3.0, carried)
            changed = others.report(LoadReport(sender, [WorkerShare(url, *s) for url, s in carried.items()]))
        else:
            changed = others.expire()
            reports = {sender: report for sender, report in reports.items() if report[0] > clock.now_s}
        seen.update({url: others.of(url) for url in changed or ()})
        for url in urls:
            shares = [carried.get(url, (0, 0)) for _, carried in reports.values()]
            total = OthersLoad(sum(s[0] for s in shares), sum(s[1] for s in shares))
            assert others.of(url) == total == seen.get(url, OthersLoad())
        assert others.replicas == len(reports)
    clock.now_s += 10
    others.expire()
    assert others._totals == {}


def test_reports_too_old_or_too_many_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MAX_REPLICAS", 2)
    clock = Time()
    others = OthersLoads(3.0, clock)
    twice = [WorkerShare(URL, 1, 5), WorkerShare(URL, 1, 0)]
    assert others.report(LoadReport("a", twice), age_s=3.5) == []
    assert others.report(LoadReport("a", twice), age_s=2.5) == [URL]
    assert others.of(URL) == OthersLoad(2, 5)
    clock.now_s += 0.6
    assert others.expire() == [URL]
    assert others.report(LoadReport("a", twice)) == [URL]
    assert others.report(LoadReport("b", twice)) == [URL]
    assert others.report(LoadReport("c", twice)) is None
    assert others.of(URL) == OthersLoad(4, 10)


# --- ledger ------------------------------------------------------------------------------------


def test_replicas_agree_in_whatever_order_they_hear_of_decisions() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    generator = random.Random(seed)
    ledgers = [Ledger(f"r{n}", lambda: NOW_MS) for n in range(3)]
    urls = [f"http://10.0.0.{n}:80" for n in range(1, 5)]
    said: list[SharedWorker] = []
    for _ in range(300):
        if generator.random() < 0.5:
            worker = SharedWorker(generator.choice(urls), generator.choice(list(Intent)))
            decided = generator.choice(ledgers).decide(worker)
            said += [decided] if decided else []
        elif said:
            generator.choice(ledgers).merge(generator.choice(said))
    for one, other in itertools.permutations(ledgers, 2):
        for worker in generator.sample(one.all(), len(one.all())):
            other.merge(worker)
    contents = [{worker.url: worker for worker in each.all()} for each in ledgers]
    assert contents[0] == contents[1] == contents[2]
    for worker in said:
        held = contents[0][worker.url]
        assert (held.version, held.origin) >= (worker.version, worker.origin)


def test_a_later_decision_holds_whatever_the_clocks_say() -> None:
    ahead, behind = Ledger("a", lambda: NOW_MS + 60_000), Ledger("b", lambda: NOW_MS)
    added = ahead.decide(SharedWorker(URL, Intent.SERVING))
    assert added is not None
    assert behind.merge(added) is True
    assert behind.merge(added) is False
    removed = behind.decide(SharedWorker(URL, Intent.REMOVED))
    assert removed is not None
    assert removed.version == added.version + 1
    assert ahead.merge(removed) is True
    assert ahead.merge(added) is False
    assert behind.decide(SharedWorker(URL, Intent.REMOVED, version=77)) is None


def test_decisions_that_are_not_taken() -> None:
    book = Ledger("a", lambda: NOW_MS)
    for url in ("gopher://x", "HTTP://h:80", "http://h", "http://h:80/v1", "x"):
        assert book.merge(SharedWorker(url, Intent.SERVING, version=1)) is Ignored.BAD_URL
    later = SharedWorker(URL, Intent.SERVING, version=NOW_MS + AHEAD_MS + 1)
    assert book.merge(later) is Ignored.FROM_THE_FUTURE
    assert book.all() == []


def test_removals_are_forgotten_after_a_day_or_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_WORKERS", 3)
    now_ms = NOW_MS
    book = Ledger("a", lambda: now_ms)
    old = SharedWorker(URL, Intent.REMOVED, version=NOW_MS - REMEMBERED_MS - 1)
    assert book.merge(old) is False
    book.decide(SharedWorker(URL, Intent.REMOVED))
    now_ms += 1
    book.decide(SharedWorker(OTHER_URL, Intent.REMOVED))
    for n in (3, 4):
        now_ms += 1
        assert book.decide(SharedWorker(f"http://10.0.0.{n}:80", Intent.SERVING))
    assert [worker.url for worker in book.all()] == [OTHER_URL, "http://10.0.0.3:80", "http://10.0.0.4:80"]
    now_ms += REMEMBERED_MS + 1
    assert [worker.intent for worker in book.all()] == [Intent.SERVING, Intent.SERVING]
    book.decide(SharedWorker(URL, Intent.DRAINING))
    assert book.decide(SharedWorker(OTHER_URL, Intent.SERVING)) is None
    assert book.merge(SharedWorker(OTHER_URL, Intent.SERVING, version=5)) is Ignored.TOO_MANY_WORKERS


# --- link --------------------------------------------------------------------------------------


def test_the_link_is_up_when_both_directions_are() -> None:
    stats = SharedStats()
    link = Link(SharedOptions("redis://h"), stats)
    link.works(Direction.READ)
    assert not stats.connected
    link.works(Direction.WRITE)
    link.works(Direction.WRITE)
    assert stats.connected
    for error in (TimeoutError(), OSError(), ValueError("what is this")):
        link.fails(Direction.READ, error)
    assert not stats.connected
    link.works(Direction.READ)
    assert stats.connected
    assert (stats.connects, stats.disconnects, link.losses) == (2, 1, 3)
    assert stats.lost == {Lost.TIMEOUT: 1, Lost.UNREACHABLE: 1, Lost.PROTOCOL: 1}
