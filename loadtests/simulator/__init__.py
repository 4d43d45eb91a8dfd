"""Policies compared in virtual time: the product's own routing over simulated engines."""
