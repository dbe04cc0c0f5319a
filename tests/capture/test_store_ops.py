"""Recorded scripts of store operations, with the value and the files after every step."""

import asyncio
import base64
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.store import TokenCaptureStore

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "store_ops.json").read_text("utf-8"))
ROLLOUT = GOLDEN["rollout_id"]
ERRORS: dict[str, type[BaseException]] = {
    "any": Exception,
    "KeyError": KeyError,
    "RuntimeError": RuntimeError,
    "ValueError": ValueError,
}


class Script:
    """Runs the steps of one script and remembers the snapshots."""

    def __init__(self, root: Path) -> None:
        self.store = TokenCaptureStore(root)
        self.snapshots: list[Any] = []
        self.ids: list[str] = []

    def run(self, name: str, *args: Any) -> Any:
        return getattr(self, name)(*args)

    def begin(self, call_id: str) -> None:
        asyncio.run(self.store.begin_call(ROLLOUT, call_id))

    def append(self, record: dict[str, Any]) -> None:
        asyncio.run(self.store.put(TokenEntry.from_dict(revive(record))))

    def append_changed(self, record: dict[str, Any], field: str, index: int, value: Any) -> None:
        entry = TokenEntry.from_dict(record)
        getattr(entry, field)[index] = revive(value)
        self.store.append(entry)

    def mark(self, call_id: str) -> None:
        asyncio.run(self.store.mark_incomplete(ROLLOUT, call_id))

    def is_incomplete(self) -> bool:
        return self.store.is_incomplete(ROLLOUT)

    def read(self) -> list[str]:
        return [entry.model_call_id for entry in self.store.read_entries(ROLLOUT)]

    def freeze(self) -> dict[str, Any]:
        snapshot = asyncio.run(self.store.freeze(ROLLOUT))
        self.snapshots.append(snapshot)
        if snapshot.snapshot_id not in self.ids:
            assert len(snapshot.snapshot_id) == 32
            self.ids.append(snapshot.snapshot_id)
        return {
            "calls": [entry.model_call_id for entry in snapshot.entries],
            "incomplete": snapshot.incomplete,
            "version": snapshot.version,
            "snapshot": self.ids.index(snapshot.snapshot_id),
        }

    def drop(self, which: str) -> bool:
        snapshot_id, version = "0" * 32, 1
        if which != "none":
            snapshot_id, version = self.snapshots[-1].snapshot_id, self.snapshots[-1].version
        if which == "wrong_id":
            snapshot_id = "0" * 32
        version += which == "wrong_version"
        return asyncio.run(self.store.drop(ROLLOUT, snapshot_id=snapshot_id, version=version))

    def delete(self) -> None:
        self.store.delete(ROLLOUT)

    def sweep(self, limit: float, age: float) -> int:
        path = self.store.state_path_for(ROLLOUT)
        if path.exists():
            os.utime(path, (time.time() - age,) * 2)
        return self.store.sweep_retired(limit)

    def raw(self, record: dict[str, Any]) -> None:
        self.raw_text(json.dumps(record) + "\n")

    def raw_text(self, text: str) -> None:
        with self.store.path_for(ROLLOUT).open("ab") as file:
            file.write(text.encode("utf-8"))

    def raw_bytes(self, text: str) -> None:
        with self.store.path_for(ROLLOUT).open("ab") as file:
            file.write(base64.b64decode(text))

    def marker(self, text: str) -> None:
        self.store.incomplete_path_for(ROLLOUT).write_text(text, "utf-8")

    def state(self, value: Any) -> None:
        self.store.state_path_for(ROLLOUT).write_text(json.dumps(value), "utf-8")

    def unlink_state(self) -> None:
        self.store.state_path_for(ROLLOUT).unlink()


def revive(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$float"}:
            return float(value["$float"])
        return {key: revive(item) for key, item in value.items()}
    return [revive(item) for item in value] if isinstance(value, list) else value


def files_in(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(root.iterdir()):
        data = path.read_bytes()
        if path.name.endswith(".lock"):
            assert data == b""
        elif path.name.endswith(".state.json"):
            state = json.loads(data)
            if isinstance(state, dict) and state.get("snapshot_id"):
                state["snapshot_id"] = "<id>"
            found[path.name] = {"state": state}
        else:
            digest = hashlib.sha256(data).hexdigest()
            found[path.name] = {"size": len(data), "sha256": digest}
    return found


@pytest.mark.parametrize(
    "script", [pytest.param(s, id=name) for name, s in GOLDEN["scripts"].items()]
)
def test_script(script: dict[str, Any], tmp_path: Path) -> None:
    runner = Script(tmp_path)
    for number, step in enumerate(script["steps"]):
        where = f"step {number}: {step['step']}"
        if "error" in step:
            with pytest.raises(ERRORS[step["error"]]) as caught:
                runner.run(*step["step"])
            for name in step.get("names", []):
                assert name in str(caught.value), where
        else:
            assert runner.run(*step["step"]) == step["value"], where
        assert files_in(tmp_path) == step["files"], where
