"""The index equals the engines' caches, block for block: what it predicts is what they then report."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from .fleet import (
    CALL_LIMIT_S,
    MODEL,
    START_LIMIT_S,
    Server,
    engine_command,
    eventually,
    free_port,
    gateway_environment,
    serving,
    started,
    vllm_environment,
)

pytestmark = pytest.mark.engines

BLOCK = 32
CONTEXT_TOKENS = 1024
BLOCKS = 96
"""Of each engine: three long prompts, so that a run of many evicts all the time."""
PROBES = 200
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = "the quick brown fox jumps over a lazy dog and runs from seven small hungry wolves again".split()

Request = tuple[str, dict[str, Any]]


class Rig:
    """Two engines that hash differently and can be restarted, and a gateway that knows their tokenizer."""

    def __init__(self, python: Path, model: Path, run: Path, stack: ExitStack) -> None:
        self.http = stack.enter_context(httpx.Client(timeout=CALL_LIMIT_S))
        self._python, self._model, self._run, self._stack = python, model, run, stack
        self._lives: dict[str, ExitStack] = {}
        self.engines: dict[str, Server] = {}
        self.predicted: list[int] = []

    def start_engines(self) -> None:
        for name in ("index-a", "index-b"):
            self._launch(name, free_port())
        for engine in self.engines.values():
            engine.wait_for("/health", START_LIMIT_S)

    def restart(self, name: str) -> None:
        """End the process and start another at the same port."""
        self._lives[name].close()
        self._launch(name, self.engines[name].port)
        self.engines[name].wait_for("/health", START_LIMIT_S)

    def _launch(self, name: str, port: int) -> None:
        command = engine_command(self._python, self._model, port)
        for flag, value in (
            ("--max-model-len", CONTEXT_TOKENS),
            ("--num-gpu-blocks-override", BLOCKS),
            ("--max-lora-rank", 8),
            ("--lora-modules", f"ad1={self._model}/adapter"),
            ("--prefix-caching-hash-algo", "sha256" if name == "index-a" else "sha256_cbor"),
        ):
            command += [flag, str(value)]
        env = {**vllm_environment(), "VLLM_SERVER_DEV_MODE": "1"}
        if name == "index-b":
            env["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
        life = self._lives[name] = ExitStack()
        self._stack.callback(life.close)
        self.engines[name] = life.enter_context(
            started(name, port, [*command, "--enable-lora"], env, self._run)
        )

    def start_gateway(self) -> None:
        self.admin = f"http://127.0.0.1:{free_port()}"
        port = free_port()
        config = {
            "port": port,
            "policy": "prefix_affinity",
            "health": {"slow_start_s": 0},
            "models": {MODEL: {"tokenizer": str(self._model)}},
            "workers": [engine.url for engine in self.engines.values()],
        }
        path = self._run / "index-gateway.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "kvroute", "serve", "--config", str(path)]
        env = {**gateway_environment(), "KVROUTE_ADMIN__PORT": self.admin.rpartition(":")[2]}
        self.gateway = self._stack.enter_context(started("index-gateway", port, command, env, self._run))
        self.gateway.wait_for("/readyz", 60)
        self.wait_until_exact()

    def wait_until_exact(self) -> None:
        def exact() -> bool:
            text = self.http.get(f"{self.gateway.url}/metrics").text
            levels = re.findall(r'^kvroute_index_trust\{trust="exact",worker="[^"]+"\} (\S+)$', text, re.M)
            ready = re.search(r'^kvroute_tokenizer_ready\{model="tiny"\} 1\.0$', text, re.M)
            return ready is not None and levels == ["1.0"] * len(self.engines)

        waited = eventually(exact, 60)
        assert waited is not None, self.http.get(f"{self.gateway.url}/metrics").text + self.gateway.log_tail()

    def send(self, request: Request) -> httpx.Response:
        path, body = request
        answer = self.http.post(self.gateway.url + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer

    def known(self, request: Request) -> tuple[int, dict[str, int]]:
        """(Prompt tokens, confirmed tokens by engine) as the index has it now."""
        path, body = request
        answer = self.http.post(f"{self.admin}/v1/route/explain", params={"path": path}, json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["keys"] in ("tokens", None), found
        names = {engine.url: name for name, engine in self.engines.items()}
        held = {
            names[w["url"]]: w["match"]["confirmed_tokens"] for w in found["workers"] if w["url"] in names
        }
        return found["prompt_tokens"], held

    def probe(self, request: Request) -> list[str]:
        """Ask the index, then both engines; what differs."""
        path, body = request
        tokens, held = self.known(request)
        self.predicted += held.values()
        wrong = []
        for name, engine in self.engines.items():
            answer = self.http.post(engine.url + path, json={**body, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            usable = min(held[name], (tokens - 1) // BLOCK * BLOCK)
            if (usable, tokens) != (cached, usage["prompt_tokens"]):
                wrong.append(
                    f"{name}: index {usable} of {tokens}, engine {cached} of {usage['prompt_tokens']}"
                )
        whole = dict.fromkeys(self.engines, tokens // BLOCK * BLOCK)
        assert eventually(lambda: self.known(request)[1] == whole, 10) is not None, (
            self.known(request),
            whole,
        )
        return wrong


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


@dataclass
class Traffic:
    """Requests that fork from earlier ones: chats, text and id completions, salts, an adapter."""

    rng: random.Random
    seen: list[Request]

    def next(self) -> Request:
        rng = self.rng
        fork = bool(self.seen) and rng.random() < 0.55
        request = self._forked(*rng.choice(self.seen)) if fork else self._fresh()
        self.seen.append(request)
        return request

    def _fresh(self) -> Request:
        rng = self.rng
        body: dict[str, Any] = {"model": rng.choice([MODEL, MODEL, "ad1"]), "temperature": 0}
        if rng.random() < 0.2:
            body["cache_salt"] = rng.choice(["ad1", "s1", "s2"])
        kind = rng.randrange(3)
        if kind == 0:
            system = {"role": "system", "content": f"{rng.randrange(6)} {'Answer shortly. ' * 20}"}
            return CHAT, {**body, "messages": [system, {"role": "user", "content": sentence(rng, 30)}]}
        if kind == 1:
            return COMPLETIONS, {
                **body,
                "prompt": f"{rng.randrange(6)} {sentence(rng, rng.randrange(5, 200))}",
            }
        return COMPLETIONS, {**body, "prompt": [rng.randrange(3, 2000) for _ in range(rng.randrange(5, 400))]}

    def _forked(self, path: str, body: Mapping[str, Any]) -> Request:
        rng = self.rng
        if "messages" in body:
            messages = [*body["messages"], {"role": "assistant", "content": sentence(rng, 12)}]
            if len(messages) > 7:
                messages = messages[: rng.randrange(1, 4)]
            return path, {**body, "messages": [*messages, {"role": "user", "content": sentence(rng, 10)}]}
        prompt = body["prompt"]
        cut = rng.randrange(1, len(prompt) + 1)
        more = sentence(rng, 20) if isinstance(prompt, str) else [rng.randrange(3, 2000) for _ in range(50)]
        longest = 3000 if isinstance(prompt, str) else 800
        return path, {**body, "prompt": (prompt[:cut] + more)[:longest]}


@contextmanager
def rig(vllm_python: Path, run_directory: Path) -> Iterator[Rig]:
    model = run_directory / "index-model"
    script = Path(__file__).with_name("make_tiny_model.py")
    subprocess.run([vllm_python, script, model], env=vllm_environment(), check=True, timeout=START_LIMIT_S)
    with ExitStack() as stack:
        made = Rig(vllm_python, model, run_directory, stack)
        made.start_engines()
        made.start_gateway()
        yield made


def run(rig: Rig, traffic: Traffic, requests: int) -> set[str]:
    """Send so many through the gateway, some of them long enough to fill blocks while decoding."""
    by = set()
    for _ in range(requests):
        path, body = traffic.next()
        tokens = traffic.rng.choice([1, 1, 5, 80])
        answer = rig.send((path, {**body, "max_tokens": tokens}))
        by.add(serving(answer, list(rig.engines.values())).name)
    return by


def probe_all(rig: Rig, traffic: Traffic, probes: int) -> list[str]:
    wrong = []
    for number in range(probes):
        request = traffic.next() if number % 2 else traffic.rng.choice(traffic.seen)
        wrong += [f"{json.dumps(request)[:200]}: {fault}" for fault in rig.probe(request)]
    return wrong


def held_blocks(rig: Rig, name: str) -> Sequence[str]:
    text = rig.http.get(f"{rig.gateway.url}/metrics").text
    url = re.escape(rig.engines[name].url)
    return re.findall(rf'^kvroute_kv_events_held_blocks\{{dp_rank="0",worker="{url}"\}} (\S+)$', text, re.M)


def test_predicted_tokens_are_the_cached_tokens_that_engines_report(
    vllm_python: Path, run_directory: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    traffic = Traffic(random.Random(seed), [])
    with rig(vllm_python, run_directory) as made:
        assert run(made, traffic, 60) == set(made.engines)
        wrong = probe_all(made, traffic, PROBES // 4)

        assert made.http.post(f"{made.engines['index-a'].url}/reset_prefix_cache").status_code == 200
        run(made, traffic, 20)
        wrong += probe_all(made, traffic, PROBES // 4)

        made.restart("index-b")
        assert eventually(lambda: len(held_blocks(made, "index-b")) == 1, 60) is not None
        made.wait_until_exact()
        run(made, traffic, 20)
        wrong += probe_all(made, traffic, PROBES // 2)
        made.wait_until_exact()
        sent = sum(engine.metric("vllm:prompt_tokens_total") for engine in made.engines.values())
    assert wrong == []
    hits = sorted(filter(None, made.predicted))
    assert len(hits) > PROBES // 4, hits
    assert len(set(hits)) > 5, hits
    assert sent > 10 * BLOCKS * BLOCK  # far more than fits: both evicted all the time
