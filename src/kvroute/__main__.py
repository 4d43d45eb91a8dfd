"""`python -m kvroute` is the `kvroute` command."""

from kvroute.cli import app

app()
