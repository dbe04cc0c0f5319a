"""The same numbers on any number of devices, and on two processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_cases import drawn_rows, packed_batch
from jax.sharding import Mesh, PartitionSpec
from sharded_step import step
from two_process_worker import halves

from evsys_jax.batch import pack
from evsys_jax.losses import importance_sampling
from evsys_jax.reductions import reduce_by
from evsys_jax.sharding import from_process_local, shard, unshard

HERE = Path(__file__).parent


def mesh_of(devices):
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


def rows_of(batch, count):
    return jax.tree.map(lambda array: np.asarray(array)[:count], batch)


def assert_same_step(got, want):
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["gradient"], want["gradient"], rtol=1e-4, atol=1e-6)
    assert got["metrics"].keys() == want["metrics"].keys()
    for name, value in want["metrics"].items():
        np.testing.assert_allclose(got["metrics"][name], value, rtol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def single():
    rows = drawn_rows(12, groups=5)
    return rows, step(pack(rows, width=32))


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_same_step_on_any_number_of_devices(devices, single):
    rows, want = single
    batch = shard(rows_of(pack(rows, width=32), len(rows)), mesh_of(devices))
    assert len(batch.mask.sharding.device_set) == devices
    assert batch.mask.sharding.spec == PartitionSpec("data")
    assert_same_step(step(batch), want)


@pytest.mark.parametrize(
    ("rows", "devices", "filler"), [(4, 4, 0), (5, 4, 3), (3, 8, 5), (0, 8, 0), (3, 1, 0)]
)
def test_rows_are_laid_out_in_order(rows, devices, filler):
    batch = rows_of(packed_batch(rows=8), rows)
    laid = shard(batch, mesh_of(devices))
    assert laid.shape[0] == rows + filler
    back = unshard(laid)
    jax.tree.map(np.testing.assert_array_equal, back, batch)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), back, batch)
    tail = jax.tree.map(lambda array: np.asarray(array)[rows:], laid)
    assert not tail.mask.any() and not tail.segment_ids.any() and not tail.segment_lengths.any()
    for name in ("group", "trajectory", "turn", "row"):
        assert np.all(getattr(tail, f"segment_{name}") == -1)
    total, slope = jax.value_and_grad(importance_sampling, has_aux=True)(
        jnp.zeros(laid.shape, jnp.float32), laid
    )
    assert np.isfinite(total[0]) and np.isfinite(slope).all()


def test_unshard_takes_the_filler_of_pack_away_too():
    rows = drawn_rows(1).take([0, 1, 2])
    laid = shard(pack(rows), mesh_of(3))
    assert laid.shape[0] == 9 and unshard(laid).shape[0] == 3
    again = unshard(unshard(laid))
    jax.tree.map(np.testing.assert_array_equal, again, unshard(laid))


def test_second_mesh_axis_replicates():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    batch = packed_batch()
    laid = shard(batch, mesh)
    assert laid.shape[0] == 8
    jax.tree.map(np.testing.assert_array_equal, unshard(laid), rows_of(batch, 4))


def test_reduced_batch_is_sharded_with_its_weights():
    batch = reduce_by(packed_batch(), "sequence")
    laid = shard(batch, mesh_of(4))
    assert laid.weights.shape == laid.shape
    jax.tree.map(np.testing.assert_array_equal, unshard(laid), rows_of(batch, 4))


def test_token_mean_weighs_tokens_not_devices():
    # One device has one token of loss 4, the other three of loss 0.
    batch = packed_batch(rows=3, width=16, segments=1)
    mask = np.zeros(batch.shape, bool)
    mask[0, :1] = mask[1, :3] = True
    ids = np.zeros(batch.shape, np.int32)
    ids[:2, :4] = 1
    advantages = np.zeros(batch.shape, np.float32)
    advantages[0, 0] = -4.0
    fields = {"mask": mask, "segment_ids": ids, "advantages": advantages}
    batch = rows_of(type(batch)(**{**vars(batch), **fields}), 2)
    laid = shard(batch, mesh_of(2))
    learner = jnp.where(laid.mask, laid.logprobs, 0.0)
    assert importance_sampling(learner, reduce_by(laid, "token"))[0] == 1.0


def test_unknown_axis_is_named():
    with pytest.raises(ValueError, match="'model'"):
        shard(packed_batch(), mesh_of(2), axis="model")
    with pytest.raises(ValueError, match="'model'"):
        from_process_local(packed_batch(), mesh_of(2), axis="model")


def test_one_process_alone():
    batch = packed_batch()
    laid = from_process_local(batch, mesh_of(4))
    assert laid.shape[0] == 8
    jax.tree.map(np.testing.assert_array_equal, unshard(laid), rows_of(batch, 4))


def test_two_processes_take_the_same_step(single, tmp_path):
    rows, want = single
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
    }
    outs = [tmp_path / f"{rank}.json" for rank in range(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / "two_process_worker.py"), str(rank), port, str(out)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        logs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(logs)
    results = [json.loads(out.read_text()) for out in outs]
    parts = halves(rows)
    for result, part in zip(results, parts, strict=True):
        assert_same_step(result, want)
        assert result["rows"] == 2 * max(8, *(1 << (len(p) - 1).bit_length() for p in parts))
        assert len(result["tokens"]) == len(part)  # unshard brought down its own rows only
        own = pack(rows.take(part), width=32).target_tokens[: len(part)]
        np.testing.assert_array_equal(result["tokens"], own)
        assert "0: T=32, 1: T=33" in result["error"]
        assert result["laid_segments"] == max(r["segments"] for r in results)
    assert [result["groups"] for result in results] == [[0, 1], [2, 3, 4]]
    assert results[0]["segments"] < results[1]["segments"]
    assert [result["packed_tokens"] for result in results] == [1, 20]
