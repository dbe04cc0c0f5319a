"""Exact, JAX-vectorized training rows from the recorded rollouts of language model agents."""

__version__ = "0.1.0"
