"""The generation APIs, by path."""

from kvroute.loadtests.mock_engine.dialects import (
    chat,
    completions,
    embeddings,
    generate,
    messages,
    responses,
)
from kvroute.loadtests.mock_engine.dialects.base import Dialect

DIALECTS: dict[str, Dialect] = {
    module.DIALECT.path: module.DIALECT
    for module in (chat, completions, responses, messages, generate, embeddings)
}

__all__ = ["DIALECTS", "Dialect"]
