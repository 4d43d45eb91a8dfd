"""Cache-aware request router for fleets of LLM engines."""

from importlib.metadata import version

__version__ = version("kvroute")
