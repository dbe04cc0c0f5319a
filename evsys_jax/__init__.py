"""Exact, JAX-vectorized training rows from the recorded rollouts of language model agents.

Dimension letters, here and in every docstring: G groups, N trajectories (one per rollout),
R rows (one trainable sequence each), L tokens of all rows end to end, B batch rows, T padded
positions, S segments in a batch row.

A position is target-aligned: position i of a row holds input token i and everything about target
token i + 1. `mask` is True where the target was sampled by the policy and trains. `logprobs`
without an adjective are the sampler's.

Names load on first use: importing the package loads neither jax nor tinker.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Turn": "rollouts",
    "Trajectory": "rollouts",
    "TrajectoryGroup": "rollouts",
    "collect": "collect",
    "ragged_rows": "ragged",
    "pack": "batch",
    "microbatches": "batch",
    "attention_mask": "batch",
    "TokenBatch": "batch",
    "unpack": "datums",
    "from_datums": "datums",
    "DatumMetadata": "datums",
    "reduce_by": "reductions",
    "count_live": "reductions",
    "diagnose": "diagnostics",
    "shard": "sharding",
    "unshard": "sharding",
    "from_process_local": "sharding",
    "compute_advantages": "data_processing",
    "assemble_training_data": "data_processing",
    "compute_trajectory_metrics": "data_processing",
}
_ROOMS = (
    "account",
    "advantage_inputs",
    "advantages",
    "batch",
    "calltree",
    "capture",
    "capture_jobs",
    "checks",
    "data_processing",
    "datums",
    "diagnostics",
    "flat",
    "inline",
    "inspection",
    "inspection_view",
    "losses",
    "plans",
    "ragged",
    "reductions",
    "reference",
    "rollouts",
    "segments",
    "sharding",
    "targets",
    "trajectories",
    "verdicts",
    "verify",
)
_ROOMS_WITH_EXTRAS = ("cli", "dataset")  # of what the `cli` extra brings

__all__ = [*_HOME, *_ROOMS]


def __getattr__(name: str) -> Any:
    """Import a public name or a submodule on first use."""
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in _ROOMS or name in _ROOMS_WITH_EXTRAS:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})


class _Face(ModuleType):
    """Keeps `collect` the function: importing a submodule binds its name in the package."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
