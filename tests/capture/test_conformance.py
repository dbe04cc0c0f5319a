"""The store passes the contract checks, and each check finds the transport that breaks it."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from evsys_jax.capture.conformance import ConformanceError, run_conformance
from evsys_jax.capture.protocols import TokenCaptureSnapshot, TokenSink, TokenSource
from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.store import TokenCaptureStore

NAMES = [
    "put_then_freeze_visibility",
    "idempotent_reput",
    "conflicting_reput",
    "mark_incomplete_durability",
    "freeze_idempotency",
    "post_freeze_write_safety",
    "conditional_retirement",
    "begin_call_custody",
]


class Memory:
    """A backend in memory, with one fault by name; "" has none."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.entries: dict[str, list[TokenEntry]] = {}
        self.lost: set[str] = set()
        self.intents: dict[str, set[str]] = {}
        self.frozen: set[str] = set()
        self.versions: dict[str, int] = {}
        self.freezes = 0

    async def close(self) -> None:
        pass

    async def put(self, entry: TokenEntry) -> None:
        entries = self.entries.setdefault(entry.rollout_id, [])
        if entry.rollout_id in self.frozen:
            if self.fault == "takes late records silently":
                return
            raise RuntimeError("frozen")
        if self.fault == "loses a field":
            entry = dataclasses.replace(entry, response_id=None)
        if self.fault == "rounds log-probs":
            entry = dataclasses.replace(entry, generation_log_probs=[-0.5, -0.0999999])
        for known in entries:
            if known.model_call_id == entry.model_call_id and self.fault != "keeps repeats":
                if known != entry and self.fault != "keeps the first silently":
                    raise ValueError("conflict")
                return
        if self.fault == "raises":
            raise OSError("no backend")
        entries.append(entry)
        self.move(entry.rollout_id)

    def move(self, rollout_id: str) -> None:
        self.versions[rollout_id] = self.versions.get(rollout_id, 0) + 1

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        self.intents.setdefault(rollout_id, set()).add(model_call_id)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        if self.fault != "forgets marks":
            self.lost.add(rollout_id)
        if self.fault != "mark moves nothing":
            self.move(rollout_id)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        self.freezes += 1
        if rollout_id not in self.frozen:
            self.frozen.add(rollout_id)
            self.move(rollout_id)
        entries = self.entries.get(rollout_id, [])
        calls = {entry.model_call_id for entry in entries}
        open_calls = self.intents.get(rollout_id, set()) - calls
        return TokenCaptureSnapshot(
            rollout_id=rollout_id,
            entries=tuple(entries),
            incomplete=rollout_id in self.lost
            or (bool(open_calls) and self.fault != "ignores intents"),
            snapshot_id=str(self.freezes) if self.fault == "fresh id" else f"id-{rollout_id}",
            version=self.versions[rollout_id],
        )

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        if self.fault == "never drops":
            return False
        if self.fault == "drops any version":
            return True
        return version == self.versions[rollout_id]


def test_the_store_passes(tmp_path: Path) -> None:
    def factory() -> TokenCaptureStore:
        return TokenCaptureStore(tmp_path)

    assert isinstance(factory(), TokenSink)
    assert isinstance(factory(), TokenSource)
    assert asyncio.run(run_conformance(factory, factory)) == NAMES


def test_async_factories_and_a_prefix(tmp_path: Path) -> None:
    async def factory() -> TokenCaptureStore:
        return TokenCaptureStore(tmp_path)

    assert asyncio.run(run_conformance(factory, factory, rollout_id="x")) == NAMES
    assert (tmp_path / "x-freeze-idempotency.tokens.jsonl").exists()


def test_a_sink_without_begin_call(tmp_path: Path) -> None:
    class Plain:
        def __init__(self) -> None:
            store = TokenCaptureStore(tmp_path)
            self.put, self.mark_incomplete = store.put, store.mark_incomplete
            self.close = store.close

    def factory() -> Any:
        return Plain()

    passed = asyncio.run(run_conformance(factory, lambda: TokenCaptureStore(tmp_path)))
    assert passed == NAMES[:-1]


def test_a_good_backend_in_memory() -> None:
    backend = Memory()
    assert asyncio.run(run_conformance(lambda: backend, lambda: backend)) == NAMES


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("raises", "put_then_freeze_visibility"),
        ("loses a field", "put_then_freeze_visibility"),
        ("rounds log-probs", "put_then_freeze_visibility"),
        ("keeps repeats", "idempotent_reput"),
        ("keeps the first silently", "conflicting_reput"),
        ("forgets marks", "mark_incomplete_durability"),
        ("mark moves nothing", "mark_incomplete_durability"),
        ("fresh id", "freeze_idempotency"),
        ("takes late records silently", "post_freeze_write_safety"),
        ("never drops", "conditional_retirement"),
        ("drops any version", "mark_incomplete_durability"),
        ("ignores intents", "begin_call_custody"),
    ],
)
def test_each_fault_is_found(fault: str, check: str) -> None:
    backend = Memory(fault)
    with pytest.raises(ConformanceError) as caught:
        asyncio.run(run_conformance(lambda: backend, lambda: backend))
    assert isinstance(caught.value, AssertionError)
    assert caught.value.check_name == check
    assert caught.value.detail and caught.value.detail in str(caught.value)
