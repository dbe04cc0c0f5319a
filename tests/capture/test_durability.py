"""What the store promises is kept across kills, tears, full disks and crowds of writers.

An acknowledged record is never lost, a torn one never trusted, reading changes nothing, and the
verdict is never better than the evidence.
"""

import asyncio
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evsys_jax.capture.protocols import TokenCaptureSnapshot
from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.store import TokenCaptureStore

sys.path.insert(0, str(Path(__file__).parent))
from writers import FROZEN, entry_for

KILLED = -9
Pool = Callable[..., list[int]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Run writer processes, and give their exit statuses."""
    script = Path(__file__).parent / "writers.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin and process.stdout

    def run(writers: list[dict[str, Any]], kill_after: float | None = None) -> list[int]:
        assert process.stdin and process.stdout
        request = {"writers": writers, "kill_after": kill_after}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        statuses: list[int] = json.loads(process.stdout.readline())
        return statuses

    yield run
    process.stdin.close()
    process.stdout.close()
    assert process.wait(30) == 0


def writer(root: Path, rollout: str, ids: list[str], **more: Any) -> dict[str, Any]:
    acks = root.parent / f"{root.name}.acks"
    return {"root": str(root), "rollout": rollout, "ids": ids, "acks": str(acks), **more}


def acknowledged(root: Path, what: str) -> set[str]:
    path = root.parent / f"{root.name}.acks"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line.removeprefix(f"{what} ") for line in lines if line.startswith(f"{what} ")}


def contents(root: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(root.iterdir()) if p.suffix != ".lock"}


def read_without_change(store: TokenCaptureStore, rollout: str) -> list[TokenEntry] | None:
    """The records, or None where a torn end is an error; either way no file changes."""
    before = contents(store.root)
    try:
        entries = store.read_entries(rollout)
    except ValueError as error:
        assert f"{rollout}.tokens.jsonl:" in str(error)
        entries = None
    store.is_incomplete(rollout)
    assert contents(store.root) == before
    return entries


def check(root: Path, rollout: str) -> TokenCaptureSnapshot:
    """Freeze, and hold what came out against what was acknowledged."""
    store = TokenCaptureStore(root)
    entries = read_without_change(store, rollout)
    snapshot = store.freeze_now(rollout)
    ids = [entry.model_call_id for entry in snapshot.entries]
    assert len(ids) == len(set(ids))
    assert acknowledged(root, "put") <= set(ids), "an acknowledged record is lost"
    for entry in snapshot.entries:
        assert entry == entry_for(rollout, entry.model_call_id), "a record changed"
    if entries is not None:
        assert [entry.model_call_id for entry in entries] == ids
    if acknowledged(root, "begin") - set(ids):
        assert snapshot.incomplete, "a call is announced and lost, and the verdict is good"
    assert store.freeze_now(rollout) == snapshot
    assert store.read_entries(rollout) == list(snapshot.entries)
    return snapshot


def test_killed_at_every_step(pool: Pool, tmp_path: Path) -> None:
    """The writer dies in the middle of its 1st, 2nd, 3rd … change of a file."""
    steps = 0
    for step in range(1, 200):
        root = tmp_path / f"s{step}"
        job = writer(root, "r", ["a", "b"], announce=True, die_at=step)
        status = pool([job])
        if status == [KILLED]:
            steps += 1
            if step % 2:
                # Every other time a second writer goes on before the freeze.
                assert pool([job | {"die_at": None, "announce": False}]) == [0]
                assert len(check(root, "r").entries) == 2
            else:
                check(root, "r")
            leftovers = [p for p in root.iterdir() if p.name.startswith(".tokens-state-")]
            assert len(leftovers) <= 1
            shutil.rmtree(root)
        else:
            assert status == [0]
            assert not check(root, "r").incomplete
            break
    assert steps > 20, "the writer hardly did anything"


def test_killed_while_cutting_a_torn_end(pool: Pool, tmp_path: Path) -> None:
    for step in range(1, 60):
        root = tmp_path / f"s{step}"
        store = TokenCaptureStore(root)
        store.append(entry_for("r", "a"))
        with store.path_for("r").open("ab") as file:
            file.write(entry_for("r", "torn").to_json()[:-20])
        (tmp_path / f"s{step}.acks").write_text("put a\n")
        status = pool([writer(root, "r", ["b"], die_at=step)])
        check(root, "r")
        if status == [0]:
            return
        assert status == [KILLED]
    raise AssertionError("the writer never came through")


def test_killed_at_random_moments(pool: Pool, tmp_path: Path) -> None:
    """Many rounds on one rollout; each next writer finds what the last one left."""
    rng = random.Random(time.time_ns())
    root = tmp_path / "random"
    kills = 0
    for round_number in range(60):
        ids = [f"{round_number}-{i}" for i in range(2000)]
        # The first calls again, as a client retries what it has no answer for.
        ids = [f"{round_number - 1}-{i}" for i in range(3) if round_number] + ids
        statuses = pool([writer(root, "r", ids)], rng.uniform(0.0, 0.06))
        kills += statuses == [KILLED]
        if rng.random() < 0.3:
            read_without_change(TokenCaptureStore(root), "r")
    assert kills > 30
    assert len(acknowledged(root, "put")) > 5, "nothing was written before the kills"
    check(root, "r")


def test_many_writers_on_one_rollout(pool: Pool, tmp_path: Path) -> None:
    root = tmp_path / "one"
    shared = [f"shared-{i}" for i in range(5)]
    jobs = [
        writer(root, "r", random.Random(n).sample(shared, 5) + [f"{n}-{i}" for i in range(12)])
        for n in range(6)
    ]
    assert pool(jobs) == [0] * 6
    snapshot = check(root, "r")
    assert len(snapshot.entries) == 5 + 6 * 12
    assert snapshot.version == 5 + 6 * 12 + 1
    assert not snapshot.incomplete


def test_many_writers_killed_together(pool: Pool, tmp_path: Path) -> None:
    rng = random.Random(time.time_ns())
    for round_number in range(8):
        root = tmp_path / f"k{round_number}"
        jobs = [writer(root, "r", [f"{n}-{i}" for i in range(200)]) for n in range(4)]
        statuses = pool(jobs, rng.uniform(0.01, 0.08))
        assert set(statuses) <= {KILLED, 0}
        check(root, "r")


def test_many_writers_on_many_rollouts(pool: Pool, tmp_path: Path) -> None:
    root = tmp_path / "many"
    rollouts = [f"r{n}" for n in range(5)]
    ids = [f"c{i}" for i in range(8)]
    # Two writers per rollout store the same calls.
    jobs = [writer(root, rollout, ids, announce=True) for rollout in rollouts * 2]
    assert pool(jobs) == [0] * 10
    for rollout in rollouts:
        snapshot = check(root, rollout)
        assert sorted(entry.model_call_id for entry in snapshot.entries) == ids
        assert not snapshot.incomplete
    assert TokenCaptureStore(root).sweep_retired(0) == 0


def test_freeze_while_writers_write(pool: Pool, tmp_path: Path) -> None:
    rng = random.Random(time.time_ns())
    for round_number in range(6):
        root = tmp_path / f"f{round_number}"
        store = TokenCaptureStore(root)
        snapshots: list[TokenCaptureSnapshot] = []

        def freeze(store: TokenCaptureStore = store, found: list[Any] = snapshots) -> None:
            time.sleep(rng.uniform(0.01, 0.08))
            found.append(store.freeze_now("r"))

        freezer = threading.Thread(target=freeze)
        freezer.start()
        statuses = pool([writer(root, "r", [f"{n}-{i}" for i in range(3000)]) for n in range(3)])
        freezer.join()
        assert statuses == [FROZEN] * 3
        snapshot = check(root, "r")
        assert snapshot == snapshots[0], "a record came in after the freeze"
        assert asyncio.run(
            store.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        )


@pytest.mark.parametrize("indexed", [0, 1])
@pytest.mark.parametrize("filler", [b"", b"\n", b"\0\0\0", b"\r\n \n"])
def test_torn_at_every_byte(
    indexed: int, filler: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tears are made by hand, so the disk need not be waited for.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    entries = [short_entry(call_id) for call_id in ("a", "b", "c")]
    lines = [entry.to_json() + b"\n" for entry in entries]
    whole = b"".join(lines)
    start = len(lines[0]) if indexed else 0
    rng = random.Random(start)
    for cut in range(start, len(whole) + 1):
        if filler and rng.random() < 0.7:
            continue
        store = TokenCaptureStore(tmp_path / f"{cut}")
        if indexed:
            store.append(entries[0])
        data = whole[:cut] + filler
        store.path_for("r").write_bytes(data)
        kept = [n for n in range(3) if cut >= len(b"".join(lines[: n + 1])) - 1]
        bare = cut in {len(b"".join(lines[: n + 1])) - 1 for n in range(3)}
        expected = [entries[n] for n in kept]
        if bare and b"\0" in filler:
            # A finished record with zeros behind it is damage: nothing is cut.
            with pytest.raises(ValueError, match=rf"r\.tokens\.jsonl:{len(kept)}: "):
                store.freeze_now("r")
            assert store.path_for("r").read_bytes() == data
            continue
        torn = not bare and data[len(b"".join(lines[: len(kept)])) :].strip() != b""
        found = read_without_change(store, "r")
        assert found == (None if torn else expected)
        if cut % 2:
            store.append(entries[2])
            expected += [] if 2 in kept else [entries[2]]
        snapshot = store.freeze_now("r")
        assert list(snapshot.entries) == expected
        assert store.read_entries("r") == expected


def short_entry(call_id: str) -> TokenEntry:
    return TokenEntry(
        rollout_id="r",
        model_call_id=call_id,
        prompt_token_ids=[1, 20],
        generation_token_ids=[3],
        generation_log_probs=[-1.5],
        output_items=[{"t": "\u00e9\u2028\\"}],
    )


def test_a_file_shorter_than_its_index_is_an_error(tmp_path: Path) -> None:
    """What the index knows was acknowledged: its loss must not look like a torn end."""
    store = TokenCaptureStore(tmp_path)
    for call_id in ("a", "b"):
        store.append(short_entry(call_id))
    whole = store.path_for("r").read_bytes()
    state = store.state_path_for("r").read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        store.path_for("r").write_bytes(whole[:cut])
        for attempt in (store.freeze_now, lambda _: store.append(short_entry("c"))):
            with pytest.raises(ValueError, match=r"'r'.*index"):
                attempt("r")
        assert store.path_for("r").read_bytes() == whole[:cut]
        assert store.state_path_for("r").read_bytes() == state


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB, where this machine lets one be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    # No other way to a full disk is as real: a limit on file sizes raises another error, elsewhere.
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command")  # as on systems other than Linux: no disk of a given size
    if done.returncode:
        # Mounting takes rights that not every machine gives to its tests.
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("padding", [0, 700, 1900, 3100])
def test_a_full_disk(small_disk: Path, padding: int) -> None:
    store = TokenCaptureStore(small_disk / "captures")
    (small_disk / "padding").write_bytes(b"x" * padding)
    stored: list[str] = []
    announced: list[str] = []
    refusals = 0
    for number in range(400):
        call_id = f"c{number}"
        try:
            asyncio.run(store.begin_call("r", call_id))
            announced.append(call_id)
            store.append(entry_for("r", call_id))
            stored.append(call_id)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            refusals += 1
            if refusals > 5:
                break
    assert refusals > 5 and len(stored) > 20
    # Everything that was acknowledged is there, and every other call is known to be lost.
    assert set(stored) <= {entry.model_call_id for entry in store.read_entries("r")}
    marked = False
    try:
        asyncio.run(store.mark_incomplete("r", "lost"))
        marked = True
    except OSError as error:
        assert error.errno == errno.ENOSPC
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    assert not list(store.root.glob(".tokens-state-*"))
    store.append(entry_for("r", "later"))
    snapshot = store.freeze_now("r")
    ids = [entry.model_call_id for entry in snapshot.entries]
    assert {*stored, "later"} <= set(ids)
    assert all(entry == entry_for("r", entry.model_call_id) for entry in snapshot.entries)
    if marked or set(announced) - set(ids):
        assert snapshot.incomplete
