"""The clock is injected, so that virtual time can drive the same code as wall time."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds on a monotonic axis with an arbitrary origin."""

monotonic: Clock = time.monotonic
