"""Heptad: one job file, seven ways to cut a training step, and a proof for each number."""

__version__ = "0.1.0"
