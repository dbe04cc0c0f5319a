"""The settings of token capture: what is accepted, and what each error names."""

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from evsys_jax.capture.config import (
    TokenIdCaptureConfig,
    mask_incomplete_when_attributed_from_config,
    rollout_id_of,
    token_id_capture_dirs_from_config,
)
from evsys_jax.capture.store import make_token_store


class OmegaLike:
    """A container that is no Mapping, as OmegaConf's."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def keys(self) -> Iterator[str]:
        return iter(self.values)

    def __getitem__(self, key: str) -> Any:
        value = self.values[key]
        return OmegaLike(value) if isinstance(value, dict) else value


@pytest.mark.parametrize("wrap", [dict, MappingProxyType, OmegaLike])
def test_mappings(wrap: Any) -> None:
    config = wrap({"token_id_capture": {"enabled": True, "dir": "/x"}, "other": {"deep": [1]}})
    settings = TokenIdCaptureConfig.model_validate(config)
    assert settings.enabled
    assert settings.resolved_dir() == Path("/x")
    assert settings.token_id_capture.mask_fraction_min_samples == 50
    assert settings.token_id_capture.rebuild_response is True
    assert token_id_capture_dirs_from_config(config) == [Path("/x")]
    assert mask_incomplete_when_attributed_from_config(config) is True


def test_a_path_object_and_the_fallback() -> None:
    settings = TokenIdCaptureConfig.model_validate(
        {"token_id_capture": {"enabled": True, "dir": None}, "model_call_capture_dir": Path("/y")}
    )
    assert settings.resolved_dir() == Path("/y")


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"dirr": "/x"}, "dirr"),
        ({"enabled": 1}, "token_id_capture.enabled"),
        ({"dir": 5}, "token_id_capture.dir"),
        ({"dir": b"/x"}, "token_id_capture.dir"),
        ({"dir": ""}, "token_id_capture.dir"),
        ({"enabled": True, "dir": "x"}, "token_id_capture.dir"),
        ({"enabled": True}, "token_id_capture.dir"),
        ({"sink": 5}, "sink"),
        ({"sink_kwargs": []}, "sink_kwargs"),
        ({"sink_kwargs": None}, "sink_kwargs"),
        ({"lineage_store_kwargs": "x"}, "lineage_store_kwargs"),
        ({"max_mask_fraction": "0.5"}, "max_mask_fraction"),
        ({"max_mask_fraction": True}, "max_mask_fraction"),
        ({"mask_fraction_min_samples": 2.0}, "mask_fraction_min_samples"),
        ({"mask_fraction_min_samples": None}, "mask_fraction_min_samples"),
        ({"external_staging": True}, "external_staging"),
        ({"mask_incomplete_when_attributed": None}, "mask_incomplete_when_attributed"),
    ],
)
def test_errors_name_the_key(block: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        TokenIdCaptureConfig.model_validate({"token_id_capture": block})


@pytest.mark.parametrize("config", [None, 5, "token_id_capture", ["token_id_capture"]])
def test_no_mapping(config: Any) -> None:
    with pytest.raises(ValueError, match="configuration"):
        TokenIdCaptureConfig.model_validate(config)


def test_make_token_store(tmp_path: Path) -> None:
    on = {"token_id_capture": {"enabled": True, "dir": str(tmp_path / "new")}}
    store = make_token_store(on)
    assert store is not None
    assert store.root == tmp_path / "new"
    assert store.root.is_dir()
    assert make_token_store({}) is None
    on["token_id_capture"]["sink"] = "m:C"
    assert make_token_store(on) is None


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"_ng_rollout_id": "a.b-1", "_ng_task_index": 1, "_ng_rollout_index": 2}, "a.b-1"),
        ({"_ng_task_index": 1, "_ng_rollout_index": 2}, "1-2"),
        ({"_ng_task_index": 1}, None),
        ({}, None),
        ({"_ng_task_index": 1, "_ng_rollout_index": 2, "_ng_attempt_index": 0}, "1-2"),
        ({"_ng_task_index": 1, "_ng_rollout_index": 2, "_ng_attempt_index": 3}, "1-2-a3"),
        ({"_ng_rollout_id": "x", "_ng_attempt_index": 1}, "x-a1"),
    ],
)
def test_rollout_ids(record: dict[str, Any], expected: str | None) -> None:
    assert rollout_id_of(record) == expected


@pytest.mark.parametrize(
    "record",
    [
        {"_ng_rollout_id": None},
        {"_ng_rollout_id": ".x"},
        {"_ng_rollout_id": "x\n"},
        {"_ng_rollout_id": 5},
        {"_ng_task_index": True, "_ng_rollout_index": 2},
        {"_ng_task_index": 1, "_ng_rollout_index": "2"},
        {"_ng_rollout_id": "x", "_ng_attempt_index": -1},
        {"_ng_rollout_id": "x", "_ng_attempt_index": 1.0},
    ],
)
def test_malformed_rollout_ids(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="_ng_"):
        rollout_id_of(record)
