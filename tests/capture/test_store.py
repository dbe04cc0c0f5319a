"""TokenCaptureStore beyond the recorded scripts: ids, order on the disk, errors, locks."""

import asyncio
import errno
import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evsys_jax.capture import files
from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.store import TokenCaptureStore, validate_rollout_id

DEFAULT_STATE = {
    "entry_digests": {},
    "frozen": False,
    "incomplete": False,
    "indexed_size": 0,
    "retired": False,
    "snapshot_id": "",
    "version": 0,
}


@pytest.fixture
def store(tmp_path: Path) -> TokenCaptureStore:
    return TokenCaptureStore(tmp_path / "deep" / "captures")


def make(call_id: str = "a", **fields: Any) -> TokenEntry:
    values: dict[str, Any] = {
        "rollout_id": "r",
        "model_call_id": call_id,
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3],
        "generation_log_probs": [-0.5],
    }
    return TokenEntry(**(values | fields))


def state_of(store: TokenCaptureStore) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(store.state_path_for("r").read_bytes())
    return value


def write_state(store: TokenCaptureStore, **values: Any) -> None:
    store.state_path_for("r").write_text(json.dumps(values))


def ids(entries: Any) -> list[str]:
    return [entry.model_call_id for entry in entries]


BAD_IDS = ["", "../x", "a/b", "a\0", "a\n", "x" * 238, "x" * 300, "\u00e9", "a b", None, 5, b"a"]


@pytest.mark.parametrize("bad", BAD_IDS)
def test_bad_rollout_ids_touch_no_file(bad: Any, store: TokenCaptureStore) -> None:
    with pytest.raises(ValueError, match="rollout id"):
        validate_rollout_id(bad)
    before = list(store.root.parent.rglob("*"))
    operations: list[Callable[[], Any]] = [
        lambda: store.freeze_now(bad),
        lambda: store.read_entries(bad),
        lambda: store.is_incomplete(bad),
        lambda: store.delete(bad),
        lambda: asyncio.run(store.begin_call(bad, "a")),
        lambda: asyncio.run(store.mark_incomplete(bad)),
        lambda: asyncio.run(store.drop(bad, snapshot_id="", version=1)),
    ]
    if isinstance(bad, str):
        operations.append(lambda: store.append(make(rollout_id=bad)))
    for operation in operations:
        with pytest.raises(ValueError, match="rollout id"):
            operation()
    assert list(store.root.parent.rglob("*")) == before


def test_the_longest_rollout_id_works(store: TokenCaptureStore) -> None:
    rollout_id = "x" * 237
    store.append(make(rollout_id=rollout_id))
    asyncio.run(store.mark_incomplete(rollout_id))
    assert store.freeze_now(rollout_id).incomplete


def test_the_files_byte_for_byte(store: TokenCaptureStore) -> None:
    entry = make()
    asyncio.run(store.begin_call("r", "a"))
    assert not store.state_path_for("r").exists()
    asyncio.run(store.put(entry))
    asyncio.run(store.mark_incomplete("r", "b"))
    asyncio.run(store.mark_incomplete("r"))
    line = entry.to_json()
    digest = hashlib.sha256(line).hexdigest()
    size = len(line) + 1
    state = (
        f'{{"entry_digests":{{"a":"{digest}"}},"frozen":false,"incomplete":true,'
        f'"indexed_size":{size},"retired":false,"snapshot_id":"","version":3}}\n'
    )
    assert {path.name: path.read_bytes() for path in store.root.iterdir()} == {
        "r.tokens.jsonl": line + b"\n",
        "r.tokens.state.json": state.encode(),
        "r.tokens.intents": b"a\n",
        "r.tokens.incomplete": b"b\n\n",
        "r.tokens.lock": b"",
    }


class Disk:
    """Notes in which order files and directories are changed and brought to the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        for name in ("fsync", "write", "ftruncate"):
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))
        real_replace, real_unlink = os.replace, os.unlink

        def replace(source: Any, target: Any) -> None:
            real_replace(source, target)
            self.events.append(f"replace {Path(target).name}")

        def unlink(path: Any, **keywords: Any) -> None:
            real_unlink(path, **keywords)
            self.events.append(f"unlink {Path(path).name}")

        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(os, "unlink", unlink)

    def wrap(self, name: str, real: Any) -> Any:
        def call(descriptor: int, *args: Any) -> Any:
            done = real(descriptor, *args)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else path.name
            if not kind.endswith("]"):  # the event loop wakes itself through a socket
                self.events.append(f"{name} {'temporary' if kind.startswith('.') else kind}")
            return done

        return call

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events


def test_what_is_on_the_disk_and_when(
    store: TokenCaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    state = ["write temporary", "replace r.tokens.state.json"]
    durable = ["write temporary", "fsync temporary", state[1], "fsync directory"]
    line = ["write r.tokens.jsonl", "fsync r.tokens.jsonl"]

    store.append(make())
    assert disk.take() == [*line, "fsync directory", *state]
    store.append(make("b"))
    assert disk.take() == [*line, *state]
    store.append(make("b"))
    assert disk.take() == []
    store._begin_call("r", "c")
    assert disk.take() == ["write r.tokens.intents", "fsync r.tokens.intents", "fsync directory"]
    store._begin_call("r", "d")
    assert disk.take() == ["write r.tokens.intents", "fsync r.tokens.intents"]
    store._mark_incomplete("r", "c")
    marker = ["write r.tokens.incomplete", "fsync r.tokens.incomplete", "fsync directory"]
    assert disk.take() == durable + marker
    with store.path_for("r").open("ab") as file:
        file.write(b'{"torn')
    snapshot = store.freeze_now("r")
    assert disk.take() == ["ftruncate r.tokens.jsonl", "fsync r.tokens.jsonl", *durable]
    store.freeze_now("r")
    assert disk.take() == []
    assert store._drop("r", snapshot.snapshot_id, snapshot.version)
    removed = [f"unlink r.tokens.{name}" for name in ("jsonl", "intents", "incomplete")]
    assert disk.take() == removed + durable
    store.delete("r")
    assert disk.take() == ["unlink r.tokens.state.json", "fsync directory"]


def test_a_failed_write_leaves_the_file_as_it_was(
    store: TokenCaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append(make())
    before = store.path_for("r").read_bytes()
    state = store.state_path_for("r").read_bytes()
    real = os.write

    def half(descriptor: int, data: Any) -> int:
        if len(data) > 100:
            return real(descriptor, bytes(data)[:100])
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="full"):
            store.append(make("b"))
    assert store.path_for("r").read_bytes() == before
    assert store.state_path_for("r").read_bytes() == state
    with monkeypatch.context() as patch:

        def broken(descriptor: int) -> None:
            raise OSError(errno.EIO, "broken")

        patch.setattr(os, "fsync", broken)
        with pytest.raises(OSError, match="broken"):
            store.append(make("b"))
    assert store.path_for("r").read_bytes() == before
    store.append(make("b"))
    assert ids(store.freeze_now("r").entries) == ["a", "b"]


def test_a_mark_without_room_for_the_state_is_a_mark(
    store: TokenCaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **keywords: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr("evsys_jax.capture.state.replace_file", full)
        with pytest.raises(OSError, match="full"):
            asyncio.run(store.mark_incomplete("r", "x"))
    assert store.is_incomplete("r")


def test_a_failed_state_leaves_no_temporary_file(
    store: TokenCaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="full"):
            store.append(make())
    assert sorted(path.name for path in store.root.iterdir()) == [
        "r.tokens.jsonl",
        "r.tokens.lock",
    ]
    store.append(make())
    assert state_of(store)["version"] == 1


def test_append_checks_what_was_assigned_later(store: TokenCaptureStore) -> None:
    for field, value in (
        ("generation_log_probs", [-0.5, -0.5]),
        ("generation_token_ids", [2**31]),
        ("prompt_token_ids", "12"),
        ("cum_len", "3"),
        ("token_item_index", 0),
        ("extra", {"staging_key": "s"}),
    ):
        entry = make()
        setattr(entry, field, value)
        with pytest.raises(ValueError, match="call 'a'"):
            store.append(entry)
    with pytest.raises(ValueError, match="nesting"):
        deep: Any = []
        for _ in range(300):
            deep = [deep]
        store.append(make(extra={"deep": deep}))
    with pytest.raises(TypeError):
        store.append({"rollout_id": "r"})  # type: ignore[arg-type]
    assert list(store.root.iterdir()) == []


def test_append_does_not_read_indexed_records(store: TokenCaptureStore) -> None:
    store.append(make())
    path = store.path_for("r")
    path.write_bytes(b"x" * (path.stat().st_size - 1) + b"\n")
    store.append(make("b"))
    with pytest.raises(ValueError, match=r"r\.tokens\.jsonl:1: "):
        store.freeze_now("r")
    assert state_of(store)["frozen"]
    with pytest.raises(RuntimeError, match="'r' is frozen"):
        store.append(make("c"))


def test_line_numbers_count_from_the_begin_of_the_file(store: TokenCaptureStore) -> None:
    store.append(make())
    store.append(make("b"))
    with store.path_for("r").open("ab") as file:
        file.write(b"\n\noops\n")
    for operation in (store.freeze_now, store.read_entries, lambda _: store.append(make("c"))):
        with pytest.raises(ValueError, match=r"r\.tokens\.jsonl:5: "):
            operation("r")


def test_a_cut_is_logged(store: TokenCaptureStore, caplog: pytest.LogCaptureFixture) -> None:
    store.append(make())
    path = store.path_for("r")
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'\n {"model": "\xc3')
    with caplog.at_level(logging.WARNING):
        assert ids(store.freeze_now("r").entries) == ["a"]
    assert path.stat().st_size == size + 1
    assert str(path) in caplog.text and str(size + 1) in caplog.text
    assert state_of(store)["indexed_size"] == size + 1


@pytest.mark.parametrize("call_id", ["", " ", "a\nb", "a\r", " a", "a\t", "\n", None, 5, "\ud83d"])
def test_intents_that_would_not_come_back(call_id: Any, store: TokenCaptureStore) -> None:
    with pytest.raises(ValueError):
        asyncio.run(store.begin_call("r", call_id))
    assert list(store.root.iterdir()) == []


def test_a_torn_intent_is_not_glued_to_the_next(store: TokenCaptureStore) -> None:
    store.append(make("12"))
    store.intents_path_for("r").write_bytes(b"1")
    asyncio.run(store.begin_call("r", "2"))
    assert store.intents_path_for("r").read_bytes() == b"1\n2\n"
    assert store.freeze_now("r").incomplete


@pytest.mark.parametrize(
    ("intents", "incomplete"),
    [
        (b"a\n\xc3\xa9\n", False),
        (b"a\r\xc3\xa9\r\n\n a \t\n", False),
        (b"a", False),
        (b"", False),
        (b"A\n", True),
        (b"a\x0bb\n", True),
    ],
)
def test_how_intents_are_read(intents: bytes, incomplete: bool, store: TokenCaptureStore) -> None:
    store.append(make())
    store.append(make("\u00e9"))
    store.intents_path_for("r").write_bytes(intents)
    assert not store.is_incomplete("r")
    assert store.freeze_now("r").incomplete is incomplete


def test_intents_that_are_no_text(store: TokenCaptureStore) -> None:
    store.append(make())
    store.intents_path_for("r").write_bytes(b"a\n\xff\n")
    with pytest.raises(ValueError, match=r"r\.tokens\.intents"):
        store.freeze_now("r")
    assert state_of(store)["frozen"]
    store.incomplete_path_for("r").write_bytes(b"x")
    assert store.freeze_now("r").incomplete, "a mark settles it, the intents are not opened"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nul",
        "[]",
        "5",
        '"x"',
        "\ufeff{}",
        '{"frozen": 1}',
        '{"retired": null}',
        '{"incomplete": 0}',
        '{"snapshot_id": 5}',
        '{"version": "1"}',
        '{"version": 1.0}',
        '{"version": true}',
    ],
)
def test_bad_states(text: str, store: TokenCaptureStore) -> None:
    store.state_path_for("r").write_text(text)
    operations: list[Callable[[], Any]] = [
        lambda: store.append(make()),
        lambda: store.freeze_now("r"),
        lambda: store.is_incomplete("r"),
        lambda: asyncio.run(store.begin_call("r", "a")),
        lambda: asyncio.run(store.mark_incomplete("r", "a")),
        lambda: asyncio.run(store.drop("r", snapshot_id="", version=1)),
    ]
    for operation in operations:
        with pytest.raises(ValueError, match="'r'"):
            operation()
    assert store.state_path_for("r").read_text() == text
    assert store.sweep_retired(-10) == 0
    store.delete("r")
    store.append(make())


@pytest.mark.parametrize("offset", [-1, 10**6])
def test_a_bad_index(offset: int, store: TokenCaptureStore) -> None:
    store.append(make())
    write_state(store, **{**state_of(store), "indexed_size": offset})
    for operation in (store.freeze_now, lambda _: store.append(make("b"))):
        with pytest.raises(ValueError, match=r"'r'.*index"):
            operation("r")


def test_keys_stay_and_missing_keys_are_not_added(store: TokenCaptureStore) -> None:
    write_state(store, other={"b": 1, "a": [None]}, version=4)
    store.append(make())
    state = state_of(store)
    assert set(state) == {"other", "version", "entry_digests", "indexed_size"}
    assert (state["other"], state["version"]) == ({"a": [None], "b": 1}, 5)
    asyncio.run(store.mark_incomplete("r"))
    assert set(state_of(store)) - set(state) == {"incomplete"}
    store.freeze_now("r")
    assert set(state_of(store)) - set(state) == {"incomplete", "frozen", "snapshot_id"}


def test_an_old_state_is_indexed_without_a_new_version(store: TokenCaptureStore) -> None:
    store.path_for("r").write_bytes(make().to_json() + b"\n" + make("b").to_json() + b"\n")
    write_state(store, frozen=True, snapshot_id="s", version=7, entry_digests=[], indexed_size="x")
    snapshot = store.freeze_now("r")
    assert (snapshot.version, ids(snapshot.entries)) == (7, ["a", "b"])
    assert state_of(store)["indexed_size"] == store.path_for("r").stat().st_size
    assert set(state_of(store)["entry_digests"]) == {"a", "b"}


@pytest.mark.parametrize("key", ["snapshot_id", "version"])
def test_a_frozen_state_without(key: str, store: TokenCaptureStore) -> None:
    values = {**DEFAULT_STATE, "frozen": True, "snapshot_id": "s", "version": 3}
    del values[key]
    write_state(store, **values)
    with pytest.raises(KeyError, match=key):
        store.freeze_now("r")


def test_a_conflict_raises_each_time_and_keeps_the_index(store: TokenCaptureStore) -> None:
    store.append(make())
    index = state_of(store)["indexed_size"]
    with store.path_for("r").open("ab") as file:
        file.write(make(model="other").to_json() + b"\n")
    for version in (2, 3, 4):
        with pytest.raises(ValueError, match=r"'r'.*'a'"):
            store.freeze_now("r") if version % 2 else store.append(make("b"))
        state = state_of(store)
        assert (state["version"], state["incomplete"]) == (version, True)
        assert (state["indexed_size"], state["frozen"]) == (index, False)


def test_identical_repeats_are_read_and_counted(store: TokenCaptureStore) -> None:
    line = make().to_json() + b"\n"
    store.path_for("r").write_bytes(line + b" " + line + b"\r\n")
    snapshot = store.freeze_now("r")
    assert ids(snapshot.entries) == ["a", "a"]
    assert snapshot.version == 3


def test_glued_records_across_the_index_are_found(store: TokenCaptureStore) -> None:
    """The index ends behind a bare line; a writer that adds no line feed glues to it."""
    store.path_for("r").write_bytes(make().to_json())
    store.append(make())
    assert state_of(store)["indexed_size"] == store.path_for("r").stat().st_size
    with store.path_for("r").open("ab") as file:
        file.write(make("b").to_json() + b"\n")
    with pytest.raises(ValueError, match=r"r\.tokens\.jsonl:1: "):
        store.freeze_now("r")


def test_blocking_work_is_off_the_event_loop(store: TokenCaptureStore) -> None:
    async def race() -> list[str]:
        order: list[str] = []

        async def store_it() -> None:
            await store.put(make())
            order.append("put")

        held = threading.Event()
        release = threading.Event()

        def hold() -> None:
            with files.locked(store.lock_path_for("r")):
                held.set()
                release.wait(10)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(10)
        task = asyncio.create_task(store_it())
        await asyncio.sleep(0.05)
        order.append("loop ran")
        release.set()
        await task
        thread.join()
        return order

    assert asyncio.run(race()) == ["loop ran", "put"]


def test_readers_share_the_lock(store: TokenCaptureStore) -> None:
    store.append(make())
    with files.locked(store.lock_path_for("r"), shared=True):
        assert ids(store.read_entries("r")) == ["a"]
        assert not store.is_incomplete("r")


def test_a_swept_lock_is_not_held_twice(store: TokenCaptureStore) -> None:
    """Who waited for a lock file that is gone now must wait at the new one."""
    path = store.lock_path_for("r")
    order: list[str] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        with files.locked(path):
            order.append("waiter")

    waiter = threading.Thread(target=wait)
    with files.locked(path):
        waiter.start()
        waiting.wait(10)
        time.sleep(0.05)
        path.unlink()
        new = files.locked(path)
        new.__enter__()
    time.sleep(0.05)
    order.append("first")
    new.__exit__(None, None, None)
    waiter.join(10)
    assert order == ["first", "waiter"]


def test_sweep(store: TokenCaptureStore) -> None:
    for rollout_id in ("kept", "retired", "young"):
        store.append(make(rollout_id=rollout_id))
        if rollout_id != "kept":
            snapshot = store.freeze_now(rollout_id)
            assert asyncio.run(
                store.drop(rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
            )
    for rollout_id in ("kept", "retired"):
        os.utime(store.state_path_for(rollout_id), (1.0, 1.0))
    assert store.sweep_retired(3600) == 1
    assert sorted(path.name for path in store.root.iterdir()) == [
        "kept.tokens.jsonl",
        "kept.tokens.lock",
        "kept.tokens.state.json",
        "young.tokens.lock",
        "young.tokens.state.json",
    ]


def test_large_captures_are_equal_to_what_was_put(store: TokenCaptureStore) -> None:
    prompt: list[int] = list(range(500))
    entries = []
    for number in range(12):
        generation = [number * 7 + i for i in range(20)]
        entries.append(
            make(
                f"c{number}",
                prompt_token_ids=prompt,
                generation_token_ids=generation,
                generation_log_probs=[-(i + 0.1) / 3 for i in range(20)],
            )
        )
        store.append(entries[-1])
        prompt = prompt + generation + [5, 6]
    assert store.read_entries("r") == entries
    assert list(store.freeze_now("r").entries) == entries
