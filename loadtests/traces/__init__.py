"""Requests to simulate or to send: read from traces, or generated."""
