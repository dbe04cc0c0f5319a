"""One of two processes: `python two_process_worker.py RANK PORT OUT`, devices from XLA_FLAGS."""

import json
import sys

import jax
import numpy as np
from device_cases import drawn_rows
from jax.sharding import Mesh
from sharded_step import step

from evsys_jax.batch import pack
from evsys_jax.rollouts import Trajectory, TrajectoryGroup, Turn
from evsys_jax.sharding import from_process_local, unshard


def halves(rows):
    """Cut the rows where a group begins; the two parts differ in size."""
    return [np.flatnonzero(rows.group < 2), np.flatnonzero(rows.group >= 2)]


def small_groups(count):
    """Make one group of rollouts with one position each."""
    return [TrajectoryGroup([Trajectory([Turn([1], [2], [-1.0])]) for _ in range(count)])]


def main(rank: int, port: str, out: str) -> None:
    """Run the step on this half of the rows and write down what came out."""
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    assert jax.device_count() == 4 and len(jax.local_devices()) == 2
    rows = drawn_rows(12, groups=5)
    local = pack(rows.take(halves(rows)[rank]), width=32)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    # The rows keep the numbers of all groups together, as `take` leaves the table whole.
    batch = from_process_local(local, mesh, renumber_groups=False)
    result = step(batch)
    mine = unshard(batch)
    # Packed, the two processes need different numbers of segments.
    packed = pack(small_groups(1 + 19 * rank), width=64, layout="packed")
    result["segments"] = packed.segment_lengths.shape[1]
    laid = from_process_local(packed, mesh)
    result["laid_segments"] = laid.segment_lengths.shape[1]
    result["packed_tokens"] = int(unshard(laid).mask.sum())
    result["tokens"] = np.asarray(mine.target_tokens).tolist()
    result["rows"] = batch.shape[0]
    other = from_process_local(pack(drawn_rows(rank, groups=2 + rank), width=32), mesh)
    result["groups"] = sorted(set(unshard(other).segment_group.ravel().tolist()))
    try:
        from_process_local(pack(drawn_rows(rank), width=32 + rank), mesh)
    except ValueError as error:
        result["error"] = str(error)
    with open(out, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
