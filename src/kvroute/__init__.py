"""Cache-aware request router and prefill/decode scheduler for fleets of LLM engines."""

from importlib.metadata import version

__version__ = version("kvroute")
