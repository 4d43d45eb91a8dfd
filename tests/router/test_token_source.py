"""What a gateway tells of its tokenizers."""

from __future__ import annotations

from pathlib import Path

from tests.conductor.tokens.tiny import write
from tests.kit import CHAT, Engine, ask, gateway, until


async def test_templates_that_take_the_slower_engine_are_counted(tmp_path: Path) -> None:
    models = {"m": {"tokenizer": str(write(tmp_path))}}
    async with Engine() as engine, gateway(engine, policy="prefix_affinity", models=models) as server:
        render = server.metrics.render
        await until(lambda: b'kvroute_tokenizer_ready{model="m"} 1.0' in render(), within_s=30)
        fallbacks = b'kvroute_tokenizer_template_fallbacks_total{model="m"} '
        for content, count in (("hello", b"0.0"), ("\ufffd", b"1.0"), ("\ufffd", b"2.0")):
            body = {"model": "m", "messages": [{"role": "user", "content": content}]}
            assert (await ask(server.url, CHAT, body)).status == 200
            assert fallbacks + count in render()
        assert b'kvroute_prompts_total{mode="tokens"} 3.0' in render()
