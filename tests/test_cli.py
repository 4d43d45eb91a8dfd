"""The command as a user starts it: exit status, what is printed where, and what is logged."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import yaml
from typer.testing import CliRunner

from kvroute import __version__
from kvroute.cli import app
from tests.kit import CHAT, Client, Engine, Received, Wire, ask, until
from tests.process import clean_environment, kvroute, serve

AT_ONCE = {"KVROUTE_SHUTDOWN__KEEP_SERVING_S": "0"}
CHAT_BODY = {"messages": [{"role": "user", "content": "x"}], "model": "m"}


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """`serve` in this process sets up logging to a stream that ends with the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """In this process: the same command without the second it takes to start Python."""
    unset = {"KVROUTE_CONFIG": None}
    result = CliRunner().invoke(app, list(arguments), env={**unset, **environment})
    return result.exit_code, result.stdout, result.stderr


def test_version() -> None:
    assert run("version") == (0, f"kvroute {__version__}\n", "")


def test_python_m_kvroute_is_the_command() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "kvroute", "version"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert out.stdout == f"kvroute {__version__}\n"


def test_config_prints_what_serve_would_use(tmp_path: Path) -> None:
    file = tmp_path / "kvroute.yaml"
    file.write_text("{port: 1, host: 10.0.0.1, api_key: hush, policy: random}")
    status, out, _ = run("config", "--config", str(file), KVROUTE_PORT="2")
    assert status == 0
    values = yaml.safe_load(out)
    assert (values["port"], values["host"], values["policy"]["name"]) == (2, "10.0.0.1", "random")
    assert values["health"]["unhealthy_after"] == 3
    assert "hush" not in out
    assert run("config", KVROUTE_CONFIG=str(file))[1] == run("config", "--config", str(file))[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "kvroute: prot: unknown field; accepted: host, port, "),
        ("port: [", "not valid YAML"),
        ("workers: [http://a:1, http://a:1/]", "kvroute: workers: listed more than once: http://a:1\n"),
        ("policy: ronud_robin", "kvroute: policy: unknown policy 'ronud_robin'; known: dynamo, "),
        (
            "policy: {name: random, options: {sede: 1}}",
            "kvroute: policy: policy 'random' has no option 'sede'; accepted: seed (default None)\n",
        ),
        ("shadow_policy: ronud_robin", "kvroute: shadow_policy: unknown policy 'ronud_robin'; known: "),
        ("prefix_index: {max_bytes: 1}", "kvroute: prefix_index.max_bytes: Input should be greater than or"),
        (
            "conductor: {services: [{endpoint: tcp://a:1, instance_id: i, modelname: m, block_size: 0}]}",
            "kvroute: conductor.services.0.block_size: Input should be greater than 0",
        ),
        ("upstream_ca_file: /nonexistent/ca.pem", "kvroute: upstream_ca_file: /nonexistent/ca.pem: "),
    ],
)
def test_a_wrong_configuration_exits_2_and_says_why(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "kvroute.yaml"
    file.write_text(text)
    for command in ("config", "serve"):
        status, out, err = run(command, "--config", str(file))
        assert (status, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--worker", "a:1"), "workers.0.url: worker url 'a:1' has scheme 'a'; accepted: http"),
        (("serve", "--worker", "http://a:1", "--worker", "http://a:1"), "workers: listed more than once"),
        (("serve", "--policy", "none"), "unknown policy 'none'; known: "),
        (("serve", "--port", "70000"), "port: Input should be less than or equal to 65535"),
        (("serve", "--log-level", "loud"), "log_level: Input should be 'debug', 'info', "),
        (("serve", "--config", "/nonexistent.yaml"), "/nonexistent.yaml: No such file or directory"),
        (("serve", "--host", "no.such.host.invalid", "--port", "0"), "cannot resolve 'no.such.host.invalid'"),
    ],
)
def test_a_wrong_flag_exits_2_and_says_why(arguments: tuple[str, ...], message: str) -> None:
    status, _, err = run(*arguments)
    assert status == 2
    assert err.startswith("kvroute: ")
    assert message in err


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_port_in_use_exits_2_and_names_it(flag: str) -> None:
    field = {"--port": "port", "--admin-port": "admin.port"}[flag]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = {"--port": "0", "--admin-port": "0", flag: str(port)}
        status, _, err = run("serve", *(part for pair in flags.items() for part in pair))
    assert status == 2
    assert err == f"kvroute: {field}: cannot listen on 127.0.0.1:{port}: Address already in use\n"


async def test_serve_answers_and_logs_one_json_object_a_line() -> None:
    async def cut(_request: Received, wire: Wire) -> None:
        wire.reset()

    async with (
        Engine() as good,
        Engine(models=("bad",), script=cut) as bad,
        serve("--worker", good.url, "--worker", bad.url, "--policy", "round_robin", **AT_ONCE) as serving,
    ):
        await until(lambda: sum(e.get("state") == "ready" for e in serving.events) == 2)
        assert (await ask(serving.url, CHAT, CHAT_BODY)).status == 200
        failed = await ask(serving.url, CHAT, {**CHAT_BODY, "model": "bad"}, "X-Request-Id: mine-7")
        assert failed.status == 502
        await until(lambda: any(e.get("request_id") == "mine-7" for e in serving.events))
        garbage = await Client.connect(serving.admin_url)
        garbage.writer.write(b"\x00\x01 this is no HTTP\r\n\r\n")
        await garbage.reader.read()
        garbage.close()
        serving.signal()
        assert await serving.exit_status() == 0
    for event in serving.events:
        assert {"event", "level", "timestamp"} <= event.keys(), event
    failure = next(e for e in serving.events if e.get("request_id") == "mine-7")
    assert (failure["event"], failure["reason"], failure["level"]) == (
        "request failed",
        "upstream_reset",
        "warning",
    )
    assert any("HTTP" in event["event"] and event["level"] == "warning" for event in serving.events)


async def test_serve_takes_the_environment_for_what_flags_leave_open() -> None:
    async with serve(KVROUTE_POLICY="session", **AT_ONCE) as serving:
        assert serving.events[0]["policy"] == "session"
        serving.signal()
        assert await serving.exit_status() == 0


async def test_a_fault_in_a_real_process_is_one_line_without_a_traceback() -> None:
    status, out, err = await kvroute("serve", KVROUTE_PORT="x")
    assert (status, out) == (2, "")
    assert err.startswith("kvroute: port: Input should be a valid integer")
    assert err.count("\n") == 1


def test_bench_index_has_the_figures_that_reports_read(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = [
        "--workers",
        "2",
        "--blocks",
        "10000",
        "--shape",
        "shared",
        "--reps",
        "4",
        "--event-blocks",
        "7",
    ]
    result = CliRunner().invoke(app, ["bench", "index", *arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert json.loads(result.stdout) == figures
    assert figures["apply_entries_per_s"] > 0
    assert figures["bytes_per_entry"] >= 0  # of resident memory, which so few may not move
    assert figures["own_bytes_per_entry"] > 0
    assert {(row["kind"], row["n"]) for row in figures["find"]} == {
        (kind, n) for kind in ("hit", "miss0", "half") for n in (100, 1000, 5000)
    }
    assert all(row[name] > 0 for row in figures["find"] for name in ("p50_us", "p99_us", "cpu_us"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "round"], "shape must be one of disjoint, shared, chat"),
        (["--workers", "0"], "workers must be at least 1"),
        (["--json", "/nowhere/at/all", "--blocks", "1000", "--reps", "1"], "--json: /nowhere/at/all"),
    ],
)
def test_bench_index_names_what_it_cannot_use(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "index", *arguments])
    assert result.exit_code == 2
    assert said in result.output
