from __future__ import annotations

import pytest

from kvroute.router.request_headers import (
    MAX_PRIORITY,
    MAX_TENANT_BYTES,
    NOTHING_SAID,
    MalformedRequest,
    read_headers,
)
from kvroute.types import RequestView
from tests.kit import CHAT, Engine, ask, gateway

EVERYTHING = {
    b"x-session-id": b"s",
    b"x-kvroute-tenant": b"team-a",
    b"x-kvroute-priority": b"-3",
    b"x-kvroute-session-continues": b"True",
    b"x-slo-ttft-ms": b"250",
    b"x-slo-itl-ms": b"12.5",
    b"x-slo-e2e-ms": b"60000",
}


def test_every_header_has_its_field() -> None:
    view = RequestView(
        session_id="s",
        tenant="team-a",
        priority=-3,
        ttft_limit_s=0.25,
        itl_limit_s=0.0125,
        e2e_limit_s=60.0,
        continues=True,
    )
    assert read_headers({b"host": b"h", **EVERYTHING}) == (view, -3)


def test_other_headers_say_nothing() -> None:
    view, priority = read_headers({b"host": b"h", b"x-slo-ttft": b"1", b"x-kvroute": b"2"})
    assert view is NOTHING_SAID
    assert priority is None


@pytest.mark.parametrize(
    ("headers", "field", "value"),
    [
        ({b"x-llm-d-slo-ttft-ms": b"300"}, "ttft_limit_s", 0.3),
        ({b"x-llm-d-slo-ttft-ms": b"300", b"x-slo-ttft-ms": b"200"}, "ttft_limit_s", 0.2),
        ({b"x-slo-tpot-ms": b"20"}, "itl_limit_s", 0.02),
        ({b"x-slo-tpot-ms": b"20", b"x-slo-itl-ms": b"10"}, "itl_limit_s", 0.01),
        ({b"x-llm-d-slo-tpot-ms": b"30"}, "itl_limit_s", 0.03),
        ({b"x-gateway-inference-fairness-id": b"old"}, "tenant", "old"),
        (
            {b"x-gateway-inference-fairness-id": b"old", b"x-llm-d-inference-fairness-id": b"new"},
            "tenant",
            "new",
        ),
        ({b"x-llm-d-inference-fairness-id": b"new", b"x-kvroute-tenant": b"own"}, "tenant", "own"),
        ({b"x-kvroute-tenant": b"", b"x-llm-d-inference-fairness-id": b"new"}, "tenant", "new"),
        ({b"x-kvroute-tenant": b"t" * MAX_TENANT_BYTES}, "tenant", "t" * MAX_TENANT_BYTES),
        ({b"x-kvroute-tenant": b"caf\xe9"}, "tenant", "caf\xe9"),
        ({b"x-kvroute-priority": b"+7"}, "priority", 7),
        ({b"x-kvroute-session-continues": b"FALSE"}, "continues", False),
        ({b"x-slo-ttft-ms": b""}, "ttft_limit_s", None),
        ({b"x-kvroute-session-continues": b""}, "continues", None),
    ],
)
def test_names_and_their_order(headers: dict[bytes, bytes], field: str, value: object) -> None:
    assert getattr(read_headers(headers)[0], field) == value


def test_a_priority_of_zero_is_said_all_the_same() -> None:
    assert read_headers({b"x-kvroute-priority": b"0"})[1] == 0
    assert read_headers({b"x-kvroute-priority": b""})[1] is None


MILLISECONDS = "a number of milliseconds above 0, such as 250 or 12.5, is expected"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(
            ("x-slo-ttft-ms", value, f"is {value!r}; {MILLISECONDS}")
            for value in ("0", "0.0", "-1", "1e3", "nan", "inf", "1_0", "250ms", "1,5", "1" * 10, ".5", "5.")
        ),
        ("x-slo-tpot-ms", "fast", f"is 'fast'; {MILLISECONDS}"),
        ("x-slo-e2e-ms", "x" * 99, f"is '{'x' * 40}'...; {MILLISECONDS}"),
        ("x-kvroute-tenant", "t" * 129, "is 129 bytes long; up to 128 are accepted"),
        *(
            (
                "x-kvroute-priority",
                value,
                f"is {value!r}; an integer from -{MAX_PRIORITY} to {MAX_PRIORITY} is",
            )
            for value in ("high", "1.5", str(MAX_PRIORITY + 1), "--1", "0x1")
        ),
        ("x-kvroute-session-continues", "yes", "is 'yes'; true or false is expected"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(MalformedRequest) as refused:
        read_headers({name.encode(): value.encode()})
    assert str(refused.value).startswith(f"header {name} {message}")
    assert refused.value.field == name


async def test_they_pass_on_to_the_worker_as_they_came() -> None:
    async with Engine() as engine, gateway(engine) as server:
        lines = [f"{name.decode()}: {value.decode()}" for name, value in EVERYTHING.items()]
        assert (await ask(server.url, CHAT, {"model": "m"}, *lines)).status == 200
        for name, value in EVERYTHING.items():
            assert engine.received[0].header(name.decode()) == value.decode()


@pytest.mark.parametrize("target", [CHAT, "/v1/anything"])
async def test_the_client_is_told_which_header_is_wrong(target: str) -> None:
    async with Engine() as engine, gateway(engine) as server:
        answer = await ask(server.url, target, {"model": "m"}, "X-SLO-TTFT-ms: soon")
        error = answer.json()["error"]
        assert (answer.status, answer.code, error["param"]) == (400, "malformed_request", "x-slo-ttft-ms")
        assert error["message"] == f"header x-slo-ttft-ms is 'soon'; {MILLISECONDS}"
        assert not engine.received
