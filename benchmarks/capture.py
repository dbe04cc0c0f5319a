"""How long does it take to read and verify captured rollouts, next to parsing their JSON alone?

For 8 and 40 turns per rollout, whole prompts and deltas, on the same files in the same run:

    orjson.loads               every line, nothing else
    trajectories_for_rollout   freeze, verify, one dictionary of lists per rollout
    build_rollout              freeze, verify, arrays (by `build_from_directories`)

    python benchmarks/capture.py [--repeats 9] [--stages]

The captures are frozen before the clock starts, so the directory is only read. Repeats are
interleaved; medians and minima are printed, and the ratio of each to `orjson.loads`. With
`--stages` further rows say where the time of `build_rollout` goes, each timed by itself:

    first freeze               freeze a rollout that is not frozen yet: the state is written
    freeze                     freeze it again: locate, lock, state, and the records
    records of the bytes       only what turns the bytes of the file into records
    build of the records       attribute, link, check, project, with all digests
    digests                    only SHA-256 of every stamped sequence that is checked, one thread
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from harness import arguments, conclude, describe
from numpy.typing import NDArray
from recorded import Shape, captured_entries

from evsys_jax.capture import (
    TokenCaptureSnapshot,
    TokenCaptureStore,
    TokenEntry,
    build_rollout,
    encode_token_ids,
    trajectories_for_rollout,
)
from evsys_jax.capture.lines import read_records
from evsys_jax.capture.sources import build_from_directories

SIZES = {8: 32, 40: 8}  # turns per rollout: rollouts


def main() -> None:
    """Measure the four kinds of capture and print one table each."""
    options = arguments(__doc__, repeats=9, stages="where the time goes")
    repeats = options.repeats
    print(describe("numpy", "orjson"))
    print(f"{repeats} interleaved repeats, seed 0")
    for turns, rollouts in ({3: 1} if options.quick else SIZES).items():
        for delta in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                measure(Path(directory), turns, rollouts, delta, repeats, options.stages)


def measure(
    directory: Path, turns: int, rollouts: int, delta: bool, repeats: int, stages: bool
) -> None:
    """Write one kind of capture, time the readers on it, and print their table."""
    random = np.random.default_rng(0)
    store = TokenCaptureStore(directory)
    names = [f"0-{number}" for number in range(rollouts)]
    tokens = 0
    for name in names:
        # A long first prompt, then tool output between the generations.
        shape = Shape(turns, first=1_500, between=150, generated=350)
        for entry in captured_entries(random, name, shape, delta=delta):
            tokens += len(entry.prompt_token_ids) + len(entry.generation_token_ids)
            store.append(entry)
    fresh = {name: store.state_path_for(name).read_bytes() for name in names}
    snapshots = [store.freeze_now(name) for name in names]
    lines = [line for name in names for line in store.path_for(name).read_bytes().splitlines()]
    size = sum(map(len, lines))

    def parse_only() -> None:
        for line in lines:
            orjson.loads(line)

    def make_dictionaries() -> None:
        for name in names:
            result = trajectories_for_rollout(name, [directory])
            assert result is not None and not result["mask_sample"], result

    def make_arrays() -> None:
        for name in names:
            build = build_from_directories(name, [directory])
            assert build.trains and len(build.spans) == turns, build.error

    readers = {
        "orjson.loads": parse_only,
        "trajectories_for_rollout": make_dictionaries,
        "build_rollout": make_arrays,
    }
    if stages:
        readers |= make_stages(store, snapshots)

    def thaw(name: str) -> None:
        if name == "first freeze":
            for rollout_id, state in fresh.items():
                store.state_path_for(rollout_id).write_bytes(state)

    times = time_interleaved(readers, repeats, thaw)
    kind = "deltas" if delta else "whole prompts"
    print(
        f"\n{turns} turns, {kind}: {rollouts} rollouts, {size / 1e6:.2f} MB, "
        f"{tokens:,} stored tokens"
    )
    print(f"{'':26}{'median ms':>10}{'min ms':>9}{'MB/s':>8}{'Mtok/s':>8}{'ratio':>7}{'of min':>8}")
    base = times["orjson.loads"]
    for name, each in times.items():
        median, least = statistics.median(each), min(each)
        print(
            f"{name:26}{1e3 * median:10.2f}{1e3 * least:9.2f}{size / median / 1e6:8.1f}"
            f"{tokens / median / 1e6:8.2f}{median / statistics.median(base):7.2f}"
            f"{least / min(base):8.2f}"
        )
    for name in list(readers)[1:]:
        figure = f"{statistics.median(times[name]) / statistics.median(base):.2f}x"
        conclude(f"`{name}`, {turns} turns, {kind}", figure, "time over `orjson.loads` alone")


def make_stages(
    store: TokenCaptureStore, snapshots: list[TokenCaptureSnapshot]
) -> dict[str, Callable[[], Any]]:
    """The parts of a build, to be timed each by itself."""
    names = [snapshot.rollout_id for snapshot in snapshots]
    files = [(store.path_for(name).read_bytes(), name) for name in names]
    encoded = [
        b"nemo-gym-tokens" + encode_token_ids(sequence)
        for snapshot in snapshots
        for sequence in checked_sequences(snapshot.entries)
    ]

    def freeze() -> None:
        for name in names:
            store.freeze_now(name)

    def read() -> None:
        for data, name in files:
            read_records(data, name, name)

    def build() -> None:
        for snapshot in snapshots:
            build_rollout(snapshot.rollout_id, snapshot)

    def digest() -> None:
        for data in encoded:
            hashlib.sha256(data).hexdigest()

    return {
        "first freeze": freeze,
        "freeze": freeze,
        "records of the bytes": read,
        "build of the records": build,
        "digests": digest,
    }


def checked_sequences(entries: Sequence[TokenEntry]) -> list[NDArray[np.int32]]:
    """The sequences of one chain whose stamped digests a build checks."""
    sequences: list[NDArray[np.int32]] = []
    for entry in entries:
        before = sequences[-1:] if entry.prompt_is_delta else []
        parts = [*before, entry.prompt_token_ids, entry.generation_token_ids]
        sequences.append(np.concatenate(parts).astype(np.int32))
    # The last call is nobody's parent; a delta has its own digest checked.
    return sequences if entries[-1].prompt_is_delta else sequences[:-1]


def time_interleaved(
    readers: dict[str, Callable[[], Any]], repeats: int, prepare: Callable[[str], None]
) -> dict[str, list[float]]:
    """Time each reader once per round, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(repeats + 1):
        for name, reader in readers.items():
            prepare(name)
            gc.collect()
            start = time.perf_counter()
            reader()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
