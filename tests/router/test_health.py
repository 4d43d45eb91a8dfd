"""Probes: who gets ready when, who is left alone, and what probing must not touch."""

from __future__ import annotations

import asyncio
import errno
import itertools
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvroute.config_groups import WorkerConfig
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.router.workers import State
from tests.kit import CHAT, HANG_S, Engine, Received, Wire, ask, gateway, until
from tests.loadtests.virtual_time import GATEWAY, run_virtually

from .probed import Held, Probed, member_of

BODY = {"model": "m", "messages": [{"role": "user", "content": "x" * 4000}]}


async def test_no_traffic_before_health_and_models_answer() -> None:
    async with (
        Engine() as other,
        Probed(health=503, models_status=500) as engine,
        gateway(engine, other, ready=False) as server,
    ):
        await until(lambda: member_of(server, other).state is State.READY)
        for step in (lambda: engine.targets("/health"), lambda: engine.targets("/v1/models")):
            before = len(step())
            await until(lambda before=before, step=step: len(step()) >= before + 2)  # type: ignore[misc]
            assert member_of(server, engine).state is State.STARTING
            for _ in range(4):
                assert (await ask(server.url, CHAT, BODY)).header("x-kvroute-worker") == other.url
            engine.health = 200
        engine.models_status = 200
        await until(lambda: member_of(server, engine).state is State.READY)
        assert engine.received == []
        used = {(await ask(server.url, CHAT, BODY)).header("x-kvroute-worker") for _ in range(4)}
        assert used == {engine.url, other.url}


async def test_a_gateway_is_ready_with_one_worker_of_two() -> None:
    async with (
        Engine() as alive,
        gateway(alive, ready=False, workers=[alive.url, "http://127.0.0.1:9"]) as server,
    ):
        await until(lambda: server.registry.usable)
        assert (await ask(server.url, "/readyz", method="GET")).json() == {
            "status": "ready",
            "workers": {"starting": 1, "ready": 1},
        }
        for _ in range(4):
            assert (await ask(server.url, CHAT, BODY)).status == 200


async def test_one_failed_probe_of_three_changes_nothing() -> None:
    async with Probed(statuses=itertools.cycle([200, 200, 500])) as engine, gateway(engine) as server:
        states: list[State] = []
        server.registry.on_change(lambda member: states.append(member.state))
        await until(lambda: len(engine.targets("/health")) >= 12)
        assert set(states) <= {State.READY}
        assert len(server.registry.members) == 1


async def test_thresholds_both_ways() -> None:
    async with (
        Probed() as engine,
        gateway(engine, health={"unhealthy_after": 3, "healthy_after": 2}) as server,
    ):
        member = member_of(server, engine)
        engine.health = 500
        at = len(engine.seen)
        await until(lambda: member.state is State.UNHEALTHY)
        assert sum(probe.target == "/health" for probe in engine.seen[at:]) in (3, 4)
        engine.health = 200
        at = len(engine.seen)
        await until(lambda: member.state is State.READY)
        assert sum(probe.target == "/health" for probe in engine.seen[at:]) in (2, 3)


async def test_a_sole_worker_whose_health_hangs_still_serves() -> None:
    async with Engine() as engine, gateway(engine, health={"timeout_s": 0.05, "interval_s": 0.05}) as server:
        engine.health = None
        member = member_of(server, engine)
        await until(lambda: member.state is State.UNHEALTHY)
        assert (await ask(server.url, "/readyz", method="GET")).status == 200
        assert (await ask(server.url, CHAT, BODY)).status == 200
        assert member.state is State.READY, "traffic that succeeds counts"


async def test_a_server_without_a_health_route_is_healthy() -> None:
    async with Engine(health=404) as engine, gateway(engine) as server:
        assert (await ask(server.url, CHAT, BODY)).status == 200


async def test_probes_never_write_the_load() -> None:
    held = Held()
    async with (
        Probed(script=held, metrics="vllm:num_requests_running 0\n") as engine,
        gateway(engine) as server,
    ):
        member = member_of(server, engine)
        requests = [asyncio.create_task(ask(server.url, CHAT, BODY)) for _ in range(10)]
        await until(lambda: held.count == 10)
        at = len(engine.targets("/health")), len(engine.targets("/metrics"))
        await until(lambda: len(engine.targets("/health")) >= at[0] + 3)
        await until(lambda: len(engine.targets("/metrics")) >= at[1] + 3)
        assert member.load.reported_running == 0
        assert member.load.requests == 10
        held.release()
        assert {answer.status for answer in await asyncio.gather(*requests)} == {200}
        await until(lambda: member.load.requests == 0)


async def test_a_request_does_not_wait_for_a_metrics_page() -> None:
    async with Probed(metrics=None) as engine, gateway(engine, health={"timeout_s": 2 * HANG_S}) as server:
        await until(lambda: len(engine.targets("/metrics")) == 1)
        assert (await asyncio.wait_for(ask(server.url, CHAT, BODY), HANG_S)).status == 200
        assert len(engine.targets("/metrics")) == 1, "it is still asked for"


async def test_a_slow_metrics_page_is_asked_for_less_and_less() -> None:
    async with (
        Probed(metrics=None) as engine,
        gateway(engine, health={"timeout_s": 0.1, "metrics_interval_s": 0.05}) as server,
    ):
        await until(lambda: len(engine.targets("/metrics")) >= 1)
        await until(lambda: len(engine.targets("/metrics")) >= 4)
        at = [probe.at_s for probe in engine.targets("/metrics")]
        gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
        paused_s = [0.05 * 2 * 0.9, 0.05 * 4 * 0.9, 0.05 * 8 * 0.9]  # a pause is 10 % off at most
        assert all(gap >= 0.09 + pause_s for gap, pause_s in zip(gaps, paused_s, strict=False)), gaps
        assert member_of(server, engine).state is State.READY


async def test_a_stale_sample_is_unknown() -> None:
    text = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:kv_cache_usage_perc{engine="0"} 1.0\n'
    async with (
        Engine(metrics=text) as engine,
        gateway(engine, health={"stale_after_s": 0.3, "timeout_s": 0.1}) as server,
    ):
        load = member_of(server, engine).load
        await until(lambda: (load.reported_running, load.kv_usage_ratio) == (3, 1.0))
        engine.metrics = None
        assert await until(lambda: load.reported_running is None) > 0.1
        assert load.kv_usage_ratio is None
        assert (await ask(server.url, CHAT, BODY)).status == 200
        engine.metrics = text
        await until(lambda: load.reported_running == 3)


async def restarted(engine: Engine) -> None:
    await engine.stop()
    await asyncio.sleep(0.15)  # longer than a probe interval: what a real restart always is
    await engine.start()


async def test_an_engine_that_restarts_at_its_address_is_a_new_incarnation_and_soon_in_use() -> None:
    async with Engine() as engine, gateway(engine, policy="prefix_affinity") as server:
        for _ in range(2):
            answer = await ask(server.url, CHAT, BODY)
        assert "reason=match" in (answer.header("x-kvroute-decision") or "")
        old = member_of(server, engine)
        assert server.knowledge.index.held_blocks(old.worker.id) > 0
        await restarted(engine)
        await until(lambda: old.state is State.GONE)
        assert server.knowledge.index.held_blocks(old.worker.id) == 0
        await until(lambda: any(m.state is State.READY for m in server.registry.members.values()))
        answer = await ask(server.url, CHAT, BODY)
        assert answer.status == 200
        assert "reason=miss; matched_tokens=0" in (answer.header("x-kvroute-decision") or "")
        assert member_of(server, engine).worker.id != old.worker.id


async def test_a_start_time_that_moved_tells_of_a_restart_too_quick_to_see() -> None:
    async with Engine(metrics="process_start_time_seconds 1.5e9\n") as engine, gateway(engine) as server:
        old = member_of(server, engine)
        await until(lambda: old.started_at == 1.5e9)
        engine.metrics = "process_start_time_seconds 1.6e9\n"
        await until(lambda: old.state is State.GONE)
        new = member_of(server, engine)
        assert new.worker.id != old.worker.id
        await until(lambda: new.state is State.READY)
        await until(lambda: new.started_at == 1.6e9)
        assert list(server.registry.members.values()) == [new]


async def test_an_adapter_loaded_later_is_routed_by_its_name() -> None:
    async with Engine() as plain, Engine() as engine, gateway(plain, engine) as server:
        unknown = await ask(server.url, CHAT, {**BODY, "model": "lora-1"})
        assert (unknown.status, unknown.code) == (404, "model_not_found")
        engine.models = ("m", "lora-1")
        await until(lambda: "lora-1" in server.registry.models)
        for _ in range(4):
            answer = await ask(server.url, CHAT, {**BODY, "model": "lora-1"})
            assert (answer.status, answer.header("x-kvroute-worker")) == (200, engine.url)
        engine.models = ("m",)
        await until(lambda: "lora-1" not in server.registry.models)
        assert (await ask(server.url, CHAT, {**BODY, "model": "lora-1"})).status == 404


async def test_what_an_engine_is_gets_discovered() -> None:
    metrics = "".join(f'vllm:num_requests_running{{engine="{rank}"}} 1.0\n' for rank in (0, 1))
    cards = [{"id": "m", "owned_by": "vllm"}]
    info = {"vllm_config": {"cache_config": {"block_size": 16}}}
    async with Probed(metrics=metrics, cards=cards, server_info=info) as engine, gateway(engine) as server:
        member = member_of(server, engine)
        assert (member.worker.engine.value, member.worker.block_size_tokens) == ("vllm", 16)
        await until(lambda: member.worker.data_parallel_size == 2)
        assert member_of(server, engine) is member, "learning is no new incarnation"


async def test_an_engine_kind_that_is_configured_stays() -> None:
    async with Engine() as engine:
        workers = [{"url": engine.url, "engine": "sglang"}]
        async with gateway(engine, workers=workers) as server:
            assert member_of(server, engine).worker.engine.value == "sglang"


async def test_a_worker_that_left_is_probed_no_more() -> None:
    async with Probed() as engine, Probed() as other, gateway(engine, other) as server:
        server.registry.remove(member_of(server, engine))
        left, at = len(engine.seen), len(other.targets("/health"))
        await until(lambda: len(other.targets("/health")) >= at + 5)
        assert len(engine.seen) <= left + 1


async def test_probes_of_many_hung_workers_do_not_hold_up_the_others() -> None:
    async def hang(_request: Received, _wire: Wire) -> None:
        await asyncio.sleep(3600)

    async with Engine(script=hang) as dead, Engine() as engine:
        workers = [*(f"{dead.url}/{number}" for number in range(120)), engine.url]
        async with gateway(engine, ready=False, workers=workers, health={"timeout_s": 2 * HANG_S}) as server:
            await until(lambda: member_of(server, engine).state is State.READY)
            assert (await ask(server.url, CHAT, BODY)).status == 200


async def test_a_worker_that_joins_gets_less_than_its_share_at_first() -> None:
    async with Engine() as a, Engine() as b, Engine() as new:
        policy = {"name": "random", "options": {"seed": 1}}
        async with gateway(a, b, policy=policy, health={"slow_start_s": 60}) as server:

            def end_of_ramps() -> None:
                for member in server.registry.members.values():
                    member.ready_since_s -= 60

            end_of_ramps()
            server.registry.add(WorkerConfig(url=new.url))
            await until(lambda: member_of(server, new).state is State.READY)
            used = [(await ask(server.url, CHAT, BODY)).header("x-kvroute-worker") for _ in range(150)]
            assert used.count(new.url) < 150 / 3 / 2
            end_of_ramps()
            used = [(await ask(server.url, CHAT, BODY)).header("x-kvroute-worker") for _ in range(150)]
            assert used.count(new.url) == pytest.approx(50, abs=25)


async def test_a_fault_of_our_own_is_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptors left: nobody was refused, so what answers afterwards is no new process."""

    async def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with Engine(keeps_probes=False) as engine, gateway(engine) as server:
        member = member_of(server, engine)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "create_connection", fail)
            await until(lambda: "Too many open files" in (member.last_error or ""))
            await asyncio.sleep(0.5)  # several probes
            assert member.state is State.READY
        await until(lambda: member.last_error is None)
        assert member_of(server, engine) is member


async def test_a_worker_nobody_listens_at_is_told_of() -> None:
    async with Engine() as engine:
        await engine.stop()
        async with gateway(ready=False, workers=[engine.url]) as server:
            (member,) = server.registry.members.values()
            await until(lambda: member.last_error is not None)
            assert "nobody listens at the worker" in (member.last_error or "")
            assert member.state is State.STARTING


async def test_a_probe_that_breaks_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine() as engine, gateway(engine, ready=False) as server:
        broken = 0

        def breaks(_answer: object) -> list[dict[str, Any]]:
            nonlocal broken
            broken += 1
            raise RuntimeError("unforeseen")

        with monkeypatch.context() as patch:
            patch.setattr("kvroute.router.health.read_cards", breaks)
            await until(lambda: broken >= 2)
        member = member_of(server, engine)
        await until(lambda: member.state is State.READY)


async def test_event_sources_and_block_size_are_discovered_from_an_engine_that_speaks_vllm() -> None:
    options = MockOptions(engines=1, kv_events=True, block_size_tokens=32, speed=float("inf"))
    async with MockFleet(options) as fleet, gateway(ready=False, workers=fleet.urls) as server:
        (member,) = server.registry.members.values()
        await until(lambda: member.state is State.READY)
        assert member.worker.block_size_tokens == 32
        assert member.worker.engine == "vllm"
        assert member.kv_event_sources["0"]["endpoint"].startswith("tcp://")


def test_a_worker_that_answers_traffic_is_not_probed_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        now_s = asyncio.get_running_loop().time
        async with Engine() as engine, gateway(engine, health={"interval_s": 0.3}) as server:
            member = member_of(server, engine)
            probed = 0

            async def count(_member: object) -> None:
                nonlocal probed
                probed += 1

            server._prober._probe = count  # type: ignore[method-assign]
            await until(lambda: probed > 0)
            for _ in range(2):  # the first interval may have begun before traffic did
                before = probed
                until_s = now_s() + 0.7
                while now_s() < until_s:
                    assert (await ask(server.url, CHAT, BODY)).status == 200
                    await asyncio.sleep(0.05)
            assert probed == before
            await until(lambda: probed > before)  # traffic has ended
            assert member.state is State.READY

    run_virtually(main(), monkeypatch, *GATEWAY)


async def test_traffic_that_is_refused_tells_of_a_restart() -> None:
    async with Engine(keeps_probes=False) as engine, gateway(engine, health={"interval_s": 0.5}) as server:
        old = member_of(server, engine)
        await engine.stop()
        assert (await ask(server.url, CHAT, BODY)).code == "connect_refused"
        await engine.start()
        await until(lambda: old.state is State.GONE)
        await until(lambda: member_of(server, engine).state is State.READY)


async def test_what_keeps_a_worker_from_starting_is_said_once() -> None:
    async def no_list(_request: Received, wire: Wire) -> None:
        await wire.answer(200, b"{}")

    async with Engine(no_list) as engine:
        with capture_logs() as lines:
            async with gateway(ready=False, workers=[f"{engine.url}/base"]) as server:
                (member,) = server.registry.members.values()
                await until(lambda: len(engine.received) >= 10)
                assert member.state is State.STARTING
                assert member.last_error == "/health gave 200, /v1/models 200 and no list"
        assert [line["error"] for line in lines if line["event"] == "probe failed"] == [member.last_error]


async def test_an_answer_without_a_list_changes_no_list() -> None:
    async with Engine() as engine, gateway(engine) as server:
        member = member_of(server, engine)
        engine.models = ()
        before = engine.probes
        await until(lambda: engine.probes > before + 8)
        assert member.worker.models == ("m",)
        assert (await ask(server.url, CHAT, {**BODY, "model": "nobody's"})).status == 404
