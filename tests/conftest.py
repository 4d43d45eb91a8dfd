"""What every test file has in common."""

from __future__ import annotations

import gc

import pytest
import structlog
from hypothesis import HealthCheck, settings

# How fast the machine is makes no example wrong.
settings.register_profile(
    "kvroute", deadline=None, max_examples=50, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvroute")
# The usual traceback, with every local variable, takes half a second.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper("%H:%M:%S"),
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


@pytest.fixture(scope="module", autouse=True)
def what_earlier_files_left_is_not_collected_again() -> None:
    """As the gateway does at its start: else a full collection, in the middle of a test that bounds a wait,
    looks for a quarter of a second at what some hundred files have imported and made.
    """
    gc.collect()
    gc.freeze()
