"""The requests of a trace, sent live and measured from outside."""
