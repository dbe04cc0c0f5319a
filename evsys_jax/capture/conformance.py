"""Contract checks that anyone can run against their own capture transport."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from evsys_jax.capture.protocols import TokenCaptureSnapshot, TokenSink, TokenSource
from evsys_jax.capture.records import TokenEntry

SinkFactory: TypeAlias = Callable[[], TokenSink | Awaitable[TokenSink]]
SourceFactory: TypeAlias = Callable[[], TokenSource | Awaitable[TokenSource]]


class ConformanceError(AssertionError):
    """A transport breaks the contract.

    Args:
      check_name: the check that failed.
      detail: what was expected, and what came.
    """

    def __init__(self, check_name: str, detail: str) -> None:
        super().__init__(f"{check_name}: {detail}")
        self.check_name = check_name
        self.detail = detail


async def run_conformance(
    sink_factory: SinkFactory,
    source_factory: SourceFactory,
    *,
    rollout_id: str = "conformance-rollout",
) -> list[str]:
    """Check that a transport keeps the contract of `TokenSink` and `TokenSource`.

    Args:
      sink_factory: makes a fresh client of the backend; may be async.
      source_factory: makes a fresh client of the same backend; may be async.
      rollout_id: each check works on an id of its own that begins with this; all of them must
        be new to the backend.

    Returns:
      The names of the checks that passed, in order. `begin_call_custody` is missing where the
      sink has no `begin_call`.

    Raises:
      ConformanceError: the first check that failed, or met an unforeseen exception.
    """
    passed: list[str] = []
    for name, check in _CHECKS.items():
        backend = _Backend(sink_factory, source_factory, f"{rollout_id}-{name.replace('_', '-')}")
        try:
            done = await check(backend)
        except _Broken as broken:
            raise ConformanceError(name, str(broken)) from broken.__cause__
        except Exception as error:
            detail = f"unforeseen {type(error).__name__}: {error}"
            raise ConformanceError(name, detail) from error
        if done:
            passed.append(name)
    return passed


class _Broken(Exception):
    """The contract is broken."""


@dataclasses.dataclass
class _Backend:
    """Fresh clients for every step, so that nothing passes through a client's memory."""

    sink_factory: SinkFactory
    source_factory: SourceFactory
    rollout_id: str

    @asynccontextmanager
    async def sink(self) -> AsyncIterator[TokenSink]:
        made = self.sink_factory()
        sink = await made if inspect.isawaitable(made) else made
        try:
            yield sink
        finally:
            await sink.close()

    @asynccontextmanager
    async def source(self) -> AsyncIterator[TokenSource]:
        made = self.source_factory()
        source = await made if inspect.isawaitable(made) else made
        try:
            yield source
        finally:
            await source.close()

    def entry(self, call_id: str, last_token: int = 5) -> TokenEntry:
        return TokenEntry(
            rollout_id=self.rollout_id,
            model_call_id=call_id,
            model="policy",
            prompt_token_ids=[1, 2, 3],
            generation_token_ids=[4, last_token],
            generation_log_probs=[-0.5, -0.1],
            output_items=[{"type": "message", "role": "assistant", "content": "h\u00e9"}],
            token_item_index=0,
            response_id=f"resp-{call_id}",
            created_at=12.25,
            parent_resolution="root",
            extra={"requested_model": "policy"},
        )

    async def put(self, entry: TokenEntry) -> None:
        async with self.sink() as sink:
            await sink.put(entry)

    async def refuses(self, entry: TokenEntry) -> bool:
        try:
            await self.put(entry)
        except Exception:
            return True
        return False

    async def mark(self, call_id: str) -> None:
        async with self.sink() as sink:
            await sink.mark_incomplete(self.rollout_id, call_id)

    async def freeze(self) -> TokenCaptureSnapshot:
        async with self.source() as source:
            return await source.freeze(self.rollout_id)

    async def drop(self, snapshot: TokenCaptureSnapshot, version: int | None = None) -> bool:
        async with self.source() as source:
            return await source.drop(
                self.rollout_id,
                snapshot_id=snapshot.snapshot_id,
                version=snapshot.version if version is None else version,
            )


def _require(holds: bool, detail: str) -> None:
    if not holds:
        raise _Broken(detail)


def _require_same(got: TokenEntry, put: TokenEntry) -> None:
    for name, value in put.to_dict().items():
        found = got.to_dict().get(name)
        _require(found == value, f"field {name} was put as {value!r} and came back as {found!r}")
    _require(got == put, "the record came back with other contents")


async def _put_then_freeze_visibility(backend: _Backend) -> bool:
    entry = backend.entry("a")
    await backend.put(entry)
    snapshot = await backend.freeze()
    _require(
        snapshot.rollout_id == backend.rollout_id,
        f"the snapshot of {backend.rollout_id} says {snapshot.rollout_id}",
    )
    _require(len(snapshot.entries) == 1, f"1 record was put, {len(snapshot.entries)} came back")
    _require_same(snapshot.entries[0], entry)
    _require(not snapshot.incomplete, "nothing was lost, and the snapshot is incomplete")
    return True


async def _idempotent_reput(backend: _Backend) -> bool:
    await backend.put(backend.entry("a"))
    await backend.put(backend.entry("a"))
    snapshot = await backend.freeze()
    _require(
        len(snapshot.entries) == 1,
        f"the same record was put twice, and {len(snapshot.entries)} came back",
    )
    _require(not snapshot.incomplete, "the same record again made the snapshot incomplete")
    return True


async def _conflicting_reput(backend: _Backend) -> bool:
    await backend.put(backend.entry("a", 5))
    if not await backend.refuses(backend.entry("a", 6)):
        snapshot = await backend.freeze()
        _require(
            snapshot.incomplete,
            "another content under the same id was taken, and the snapshot is complete",
        )
    return True


async def _mark_incomplete_durability(backend: _Backend) -> bool:
    await backend.put(backend.entry("a"))
    before = await backend.freeze()
    _require(not before.incomplete, "nothing was lost, and the snapshot is incomplete")
    await backend.mark("lost")
    after = await backend.freeze()
    _require(after.incomplete, "a call was marked as lost, and a new client sees no mark")
    _require(after.version != before.version, "the mark did not move the version")
    _require(not await backend.drop(before), "the snapshot from before the mark was dropped")
    return True


async def _freeze_idempotency(backend: _Backend) -> bool:
    await backend.put(backend.entry("a"))
    await backend.put(backend.entry("b"))
    first, second = await backend.freeze(), await backend.freeze()
    for field in dataclasses.fields(TokenCaptureSnapshot):
        one, two = getattr(first, field.name), getattr(second, field.name)
        _require(one == two, f"{field.name} differs between two freezes")
    return True


async def _post_freeze_write_safety(backend: _Backend) -> bool:
    await backend.put(backend.entry("a"))
    snapshot = await backend.freeze()
    if not await backend.refuses(backend.entry("late")):
        _require(
            not await backend.drop(snapshot),
            "a record was taken after the freeze, and the snapshot without it was dropped",
        )
    return True


async def _conditional_retirement(backend: _Backend) -> bool:
    await backend.put(backend.entry("a"))
    snapshot = await backend.freeze()
    dropped = await backend.drop(snapshot, snapshot.version + 1)
    _require(not dropped, "a drop with a wrong version says that it dropped")
    again = await backend.freeze()
    _require(again == snapshot, "a drop with a wrong version changed the rollout")
    _require(await backend.drop(snapshot), "a drop with the exact snapshot dropped nothing")
    return True


async def _begin_call_custody(backend: _Backend) -> bool:
    async with backend.sink() as sink:
        begin: Any = getattr(sink, "begin_call", None)
        if begin is None:
            return False
        await begin(backend.rollout_id, "a")
        await begin(backend.rollout_id, "lost")
    await backend.put(backend.entry("a"))
    snapshot = await backend.freeze()
    _require(
        snapshot.incomplete, "a call was announced and never stored, and the snapshot is complete"
    )
    return True


_CHECKS: dict[str, Callable[[_Backend], Awaitable[bool]]] = {
    "put_then_freeze_visibility": _put_then_freeze_visibility,
    "idempotent_reput": _idempotent_reput,
    "conflicting_reput": _conflicting_reput,
    "mark_incomplete_durability": _mark_incomplete_durability,
    "freeze_idempotency": _freeze_idempotency,
    "post_freeze_write_safety": _post_freeze_write_safety,
    "conditional_retirement": _conditional_retirement,
    "begin_call_custody": _begin_call_custody,
}
