"""Prefill on one worker, decode on another: who speaks to whom, in which order, and who cleans up."""
