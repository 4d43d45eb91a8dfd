"""Engines to test against: vLLM's API over a simulated scheduler and cache, and faults on demand."""

from kvroute.loadtests.mock_engine.engine import MockEngine
from kvroute.loadtests.mock_engine.faults import Faults
from kvroute.loadtests.mock_engine.fleet import MockFleet, run, serve
from kvroute.loadtests.mock_engine.options import MockOptions
from kvroute.policies.costs.speeds import PRESETS, Speed

__all__ = ["PRESETS", "Faults", "MockEngine", "MockFleet", "MockOptions", "Speed", "run", "serve"]
