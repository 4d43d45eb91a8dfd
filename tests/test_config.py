"""Where configuration comes from, which source wins, and what a wrong one is told."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from kvroute.config import Config, ConfigError, load, show


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVROUTE_"):
            monkeypatch.delenv(name)


def write(path: Path, text: str) -> Path:
    file = path / "kvroute.yaml"
    file.write_text(text)
    return file


def fault(path: Path | None = None, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, flags)
    return str(caught.value)


def test_flags_beat_the_environment_which_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "{host: 0.0.0.0, port: 1, log_level: error, health: {interval_s: 7}}")
    monkeypatch.setenv("KVROUTE_PORT", "2")
    monkeypatch.setenv("KVROUTE_LOG_LEVEL", "warning")
    monkeypatch.setenv("KVROUTE_HEALTH__TIMEOUT_S", "9")
    config = load(file, {"port": 3})
    assert (config.host, config.log_level, config.port) == ("0.0.0.0", "warning", 3)
    assert (config.health.interval_s, config.health.timeout_s) == (7, 9)


def test_a_flag_of_a_group_leaves_the_rest_of_the_group(tmp_path: Path) -> None:
    config = load(write(tmp_path, "admin: {token: s, host: 0.0.0.0}"), {"admin": {"port": 0}})
    assert config.admin.port == 0
    assert config.admin.host == "0.0.0.0"


def test_one_file_does_not_leak_into_the_next_configuration(tmp_path: Path) -> None:
    load(write(tmp_path, "port: 1"), {})
    assert load(None, {}).port == 8080


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("KVROUTE_POLICY", "round_robin", "policy", {"name": "round_robin", "options": {}}),
        ("KVROUTE_POLICY__NAME", "random", "policy", {"name": "random", "options": {}}),
        ("KVROUTE_POLICY", '{"name": "random", "options": {"seed": 1}}', "policy", None),
        ("KVROUTE_SHADOW_POLICY", "session", "shadow_policy", {"name": "session", "options": {}}),
        ("KVROUTE_RETRY__STATUSES", "[500]", "retry", None),
    ],
)
def test_a_bare_name_or_json_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, field: str, expected: Any
) -> None:
    monkeypatch.setenv(variable, value)
    found = load(None, {}).model_dump(mode="json")[field]
    if expected is not None:
        assert found == expected
    elif field == "policy":
        assert found["options"] == {"seed": 1}
    else:
        assert found["statuses"] == [500]


def test_workers_in_the_environment_are_a_json_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTE_WORKERS", '["http://a:1", {"url": "http://b:2", "api_key": "k"}]')
    assert [worker.url for worker in load(None, {}).workers] == ["http://a:1", "http://b:2"]
    monkeypatch.setenv("KVROUTE_WORKERS", "http://a:1")
    assert fault() == "workers: a list is expected (in the environment, as JSON)"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prot": 1}, r"^prot: unknown field; accepted: host, port, workers, .*shutdown$"),
        ({"health": {"every_s": 1}}, r"^health\.every_s: unknown field; accepted: interval_s, timeout_s, "),
        (
            {"workers": [{"url": "http://a:1", "keys": 1}]},
            r"^workers\.0\.keys: unknown field; accepted: url, engine, role, place",
        ),
        (
            {"shadow_policy": {"name": "x", "seed": 1}},
            r"^shadow_policy\.seed: unknown field; accepted: name, options$",
        ),
        ({"port": "x"}, r"^port: Input should be a valid integer"),
        ({"port": 70000}, r"^port: Input should be less than or equal to 65535"),
        ({"workers": "http://a"}, r"^workers: a list is expected"),
        ({"workers": [{}]}, r"^workers\.0\.url: Field required"),
        (
            {"workers": ["ftp://a"]},
            r"^workers\.0\.url: worker url 'ftp://a' has scheme 'ftp'; accepted: h",
        ),
        ({"workers": ["http://a:1", "http://A:1/"]}, r"^workers: listed more than once: http://a:1$"),
        ({"log_level": "loud"}, r"^log_level: Input should be 'debug', 'info', 'warning' or 'error'"),
        ({"timeouts": {"idle_s": 0}}, r"^timeouts\.idle_s: Input should be greater than 0"),
        (
            {"prefix_index": {"chunk_bytes": 0}},
            r"^prefix_index\.chunk_bytes: Input should be greater than or equal to 64",
        ),
        ({"admin": {"host": "0.0.0.0"}}, r"^admin: admin\.token is required when admin\.host is not 127"),
        ({"port": -1, "host": 1}, r"^host: .*; port: "),
    ],
)
def test_an_error_names_the_field_the_fault_and_what_is_accepted(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: [", "not valid YAML"),
        ("- port", "a mapping of field names is expected at the top"),
        ("1: 2", "a mapping of field names is expected at the top"),
        ("!!python/object/apply:os.getcwd []", "not valid YAML"),
        ("just words", "a mapping of field names is expected at the top"),
    ],
)
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    assert fault(file).startswith(f"{file}: {message}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert fault(tmp_path / "none.yaml") == f"{tmp_path}/none.yaml: No such file or directory"
    assert fault(tmp_path) == f"{tmp_path}: Is a directory"
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    assert "not valid YAML" in fault(tmp_path / "binary.yaml")


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, "# nothing\n"), {}) == Config()


def test_nothing_can_be_changed_afterwards() -> None:
    config = load(None, {"workers": ["http://a:1"]})
    with pytest.raises(ValidationError, match="frozen"):
        config.port = 1
    with pytest.raises(ValidationError, match="frozen"):
        config.health.interval_s = 1
    with pytest.raises(ValidationError, match="frozen"):
        config.workers[0].url = "http://b:1"


def test_shown_resolved_with_secrets_masked_and_readable_again(tmp_path: Path) -> None:
    config = load(
        None,
        {
            "api_key": "hush",
            "admin": {"token": "hush"},
            "workers": [{"url": "http://a:1", "api_key": "hush", "engine": "vllm"}],
        },
    )
    text = show(config)
    assert "hush" not in text
    assert "hush" not in repr(config)
    values = yaml.safe_load(text)
    assert values["api_key"] == values["admin"]["token"] == values["workers"][0]["api_key"] == "**********"
    assert load(write(tmp_path, text), {}).workers[0].engine == "vllm"


def test_an_error_does_not_repeat_a_secret() -> None:
    message = fault(api_key=["hush"], admin={"token": {"hush": 1}}, port="hush")
    assert "port" in message
    assert "hush" not in message


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"models": {"a/b.c": {"tokeniser": "/x"}}},
            "models.a/b.c.tokeniser: unknown field; accepted: tokeni",
        ),
        ({"models": {"m": {}}}, "models.m: give `tokenizer`, or another `source` than local: engine, bytes"),
        ({"models": {"m": {"tokenizer": "/x", "source": "engine"}}}, "`tokenizer` goes with source local"),
        ({"conductor": {"connect": "tcp://127.0.0.1:99999"}}, "conductor.connect: 'tcp://127.0.0.1:99999'"),
        ({"conductor": {"lookup": "http://a"}}, "accepted: unix:///path, tcp://host:port"),
        (
            {"workers": [{"url": "http://a:1", "kv_events": {"endpoint": "tcp://127.0.0.1:notaport"}}]},
            "workers.0.kv_events.endpoint: 'tcp://127.0.0.1:notaport' is no ZMQ endpoint; accepted: tcp://host:port",
        ),
        (
            {"workers": [{"url": "http://a:1", "kv_events": {"endpoint": "tcp://*:1", "tpoic": ""}}]},
            "workers.0.kv_events.tpoic: unknown field; accepted: endpoint, replay_endpoint, topic",
        ),
        (
            {
                "conductor": {
                    "services": [
                        {"endpoint": end, "instance_id": "i", "modelname": "m", "block_size": 16}
                        for end in ("tcp://a:1", "tcp://a:2")
                    ]
                }
            },
            "conductor.services: instance, tenant and rank listed more than once: i|default|0",
        ),
        ({"redis": {"prefix": ""}}, "redis.prefix"),
        ({"prefix_index": {"max_bytes": 1000}}, "prefix_index.max_bytes: Input should be greater than"),
    ],
)
def test_what_is_wrong_with_knowledge_of_caches_is_named(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(path, {})
