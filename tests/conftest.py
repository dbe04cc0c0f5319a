"""Strict JAX for every test: no silent broadcast, no silent promotion, several CPU devices."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
settings.register_profile("suite", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("suite")


@pytest.fixture(params=["eager", "jit"])
def run(request):
    """Return a function that hands a kernel back as it is, or jitted."""
    return jax.jit if request.param == "jit" else lambda kernel: kernel
