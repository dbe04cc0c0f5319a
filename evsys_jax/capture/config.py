"""The settings of token capture: one strict block of a larger configuration."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK = "token_id_capture"
_FALLBACK = "model_call_capture_dir"
_ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class TokenIdCapture:
    """The `token_id_capture` block.

    Args:
      enabled: calls are captured.
      dir: absolute path of the capture directory; None for `model_call_capture_dir`.
      rebuild_response: responses are rebuilt from captures, so there must be a directory.
      mask_incomplete_when_attributed: an incomplete rollout is masked even if the chain of its
        terminal call is whole. Not known to NeMo Gym.
      sink: where a recording server sends calls instead of the directory.

    The other keys concern a recording server; they are checked, kept and not acted on.
    """

    enabled: bool = False
    all_agents: bool = False
    dir: str | None = None
    sink: str | None = None
    sink_kwargs: Mapping[str, Any] = field(default_factory=dict)
    lineage_store: str | None = None
    lineage_store_kwargs: Mapping[str, Any] = field(default_factory=dict)
    rebuild_response: bool = True
    allow_unresolved_continuations: bool = False
    delta_records: bool = False
    max_mask_fraction: float | None = None
    mask_fraction_min_samples: int = 50
    external_staging: bool = False
    external_staging_backend: str | None = None
    control_auth_token_env: str | None = None
    mask_incomplete_when_attributed: bool = True


@dataclass(frozen=True)
class TokenIdCaptureConfig:
    """The settings of token capture, checked.

    Args:
      token_id_capture: the block.
      model_call_capture_dir: the directory where the block has none.
    """

    token_id_capture: TokenIdCapture = field(default_factory=TokenIdCapture)
    model_call_capture_dir: str | None = None

    @classmethod
    def model_validate(cls, config: Any) -> TokenIdCaptureConfig:
        """Read the settings from a larger configuration, and ignore the rest of it.

        Args:
          config: a mapping, or anything with `keys()` and `[]`.

        Raises:
          ValueError: an unknown key of the block or a wrong type, also where capture is off; a
            block that is no mapping; external staging; a capture directory that is relative
            or missing. The text names the key.
        """
        values = _as_dict(config, "the configuration")
        block = _as_dict(values[_BLOCK], _BLOCK) if _BLOCK in values else {}
        unknown = [key for key in block if key not in _CHECKS]
        if unknown:
            raise ValueError(f"{_BLOCK} has the unknown key {unknown[0]!r}")
        checked = {key: _CHECKS[key](value, f"{_BLOCK}.{key}") for key, value in block.items()}
        fallback = _check_path(values.get(_FALLBACK), _FALLBACK)
        settings = cls(TokenIdCapture(**checked), fallback)
        settings._check_destination()
        return settings

    def _check_destination(self) -> None:
        block = self.token_id_capture
        if block.external_staging:
            raise ValueError(f"{_BLOCK}.external_staging is not supported")
        if not self.captures_to_directory:
            return
        directory = self.resolved_dir()
        if directory is None:
            if block.rebuild_response:
                raise ValueError(f"{_BLOCK}.dir is missing, and so is {_FALLBACK}")
        elif not directory.is_absolute():
            key = f"{_BLOCK}.dir" if block.dir is not None else _FALLBACK
            raise ValueError(f"{key} is not an absolute path: {str(directory)!r}")

    @property
    def enabled(self) -> bool:
        """Whether calls are captured."""
        return self.token_id_capture.enabled

    @property
    def captures_to_directory(self) -> bool:
        """Whether calls are captured, and into a directory rather than a sink."""
        return self.enabled and self.token_id_capture.sink is None

    def resolved_dir(self) -> Path | None:
        """Give the capture directory: the block's, else the fallback, else None."""
        directory = self.token_id_capture.dir
        directory = self.model_call_capture_dir if directory is None else directory
        return None if directory is None else Path(directory)


def token_id_capture_dirs_from_config(config: Any) -> list[Path]:
    """Give the directories in which a configuration's captures lie: one or none.

    Raises:
      ValueError: the configuration is wrong; names the key.
    """
    settings = TokenIdCaptureConfig.model_validate(config)
    directory = settings.resolved_dir() if settings.captures_to_directory else None
    return [] if directory is None else [directory]


def mask_incomplete_when_attributed_from_config(config: Any) -> bool:
    """Tell whether incomplete rollouts are masked even if their terminal's chain is whole.

    Raises:
      ValueError: the configuration is wrong; names the key.
    """
    settings = TokenIdCaptureConfig.model_validate(config)
    return settings.token_id_capture.mask_incomplete_when_attributed


def rollout_id_of(record: Mapping[str, Any]) -> str | None:
    """Give the id under which a rollout record's calls were captured.

    Args:
      record: `_ng_rollout_id`, else `_ng_task_index` and `_ng_rollout_index`; and
        `_ng_attempt_index`, where a later attempt was recorded apart.

    Returns:
      The id, None if the record has none.

    Raises:
      ValueError: one of these values is malformed; names the key.
    """
    if "_ng_rollout_id" in record:
        rollout_id = record["_ng_rollout_id"]
        if not isinstance(rollout_id, str) or not _ROLLOUT_ID.fullmatch(rollout_id):
            raise ValueError(f"_ng_rollout_id is no rollout id: {rollout_id!r}")
    else:
        indices = [record.get(key) for key in ("_ng_task_index", "_ng_rollout_index")]
        if None in indices:
            return None
        for key, index in zip(("_ng_task_index", "_ng_rollout_index"), indices, strict=True):
            _check_index(index, key)
        rollout_id = f"{indices[0]}-{indices[1]}"
    attempt = record.get("_ng_attempt_index")
    if attempt is None:
        return rollout_id
    return f"{rollout_id}-a{attempt}" if _check_index(attempt, "_ng_attempt_index") else rollout_id


def _check_index(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"{key} is no index: {value!r}")
    return int(value)


def _as_dict(value: Any, key: str) -> dict[Any, Any]:
    if isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__")):
        return {name: value[name] for name in value.keys()}
    raise ValueError(f"{key} is no mapping but {type(value).__name__}")


def _check_bool(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key} is no bool: {value!r}")
    return value


def _check_text(value: Any, key: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key} is no text: {value!r}")
    return value


def _check_path(value: Any, key: str) -> str | None:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise ValueError(f"{key} is no path: {value!r}")
    return path


def _check_number(value: Any, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} is no finite number: {value!r}")
    return value


def _check_count(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} is no integer: {value!r}")
    return value


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "enabled": _check_bool,
    "all_agents": _check_bool,
    "dir": _check_path,
    "sink": _check_text,
    "sink_kwargs": _as_dict,
    "lineage_store": _check_text,
    "lineage_store_kwargs": _as_dict,
    "rebuild_response": _check_bool,
    "allow_unresolved_continuations": _check_bool,
    "delta_records": _check_bool,
    "max_mask_fraction": _check_number,
    "mask_fraction_min_samples": _check_count,
    "external_staging": _check_bool,
    "external_staging_backend": _check_text,
    "control_auth_token_env": _check_text,
    "mask_incomplete_when_attributed": _check_bool,
}
