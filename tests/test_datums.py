"""The Datum boundary: out and back exactly, and the same bytes on tinker's wire."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import tinker
from generators import random_groups
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest

from evsys_jax import reference
from evsys_jax.batch import pack
from evsys_jax.data_processing import _turn_to_datum, assemble_training_data
from evsys_jax.datums import DatumMetadata, from_datums, unpack
from evsys_jax.rollouts import Trajectory, TrajectoryGroup, Turn


def plain_datum(row: reference.Row, **more) -> tinker.Datum:
    """Make a Datum as tinker's own documentation does: every field as a list."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(row.input_tokens),
        loss_fn_inputs={
            "target_tokens": row.target_tokens,
            "logprobs": row.logprobs,
            "advantages": row.advantages,
            **more,
        },
    )


def wire(datums):
    """Encode Datums as tinker sends them, decode the bytes, and list what the server reads."""
    request = ForwardBackwardRequest(
        forward_backward_input=ForwardBackwardInput(data=datums, loss_fn="importance_sampling"),
        model_id="model",
        seq_id=1,
    )
    message = forward_backward_request_to_proto(request)
    decoded = type(message).FromString(message.SerializeToString())
    return [
        (
            [chunk.encoded_text.tokens for chunk in datum.model_input],
            {
                key: (tensor.dtype, list(tensor.shape), tensor.dense)
                for key, tensor in datum.loss_fn_inputs.items()
            },
        )
        for datum in decoded.data
    ]


@pytest.mark.parametrize("arrays", [False, True, None])
@pytest.mark.parametrize("seed", range(8))
def test_the_wire_bytes_are_the_references(seed, arrays):
    groups = random_groups(seed, arrays=arrays)
    advantages = reference.compute_advantages(groups)
    datums, _ = assemble_training_data(groups, advantages)
    rows = reference.training_rows(groups, advantages)
    assert wire(datums) == wire([plain_datum(row) for row in rows])


@pytest.mark.parametrize("arrays", [False, True])
def test_lists_come_out_as_lists_and_arrays_as_memory(arrays):
    turn = Turn([1, 2], [3, 4], [-1.0, -2.0])
    if arrays:
        turn = Turn(np.array([1, 2]), np.array([3, 4]), np.array([-1.0, -2.0]))
    datum = _turn_to_datum(turn, advantage=0.5)
    (chunk,) = datum.model_input.chunks
    assert isinstance(chunk.tokens, list) is not arrays
    assert memoryview(chunk.tokens).itemsize == 4 if arrays else chunk.tokens == [1, 2, 3]
    assert datum.model_input.to_ints() == [1, 2, 3]
    assert all(type(token) is int for token in chunk.tokens)
    assert datum.model_input.length == 3
    again = pickle.loads(pickle.dumps(datum))
    assert again.model_input.to_ints() == [1, 2, 3]
    assert again.loss_fn_inputs["logprobs"].tolist() == [0, -1, -2]


def test_a_turn_without_completion_is_no_datum():
    assert _turn_to_datum(Turn([1, 2], [], []), advantage=1.0) is None
    with pytest.raises(ValueError, match="2 completion_tokens but 1 logprobs"):
        _turn_to_datum(Turn([1], [2, 3], [-1.0]), advantage=1.0)


def test_groups_and_advantages_must_match():
    groups = [TrajectoryGroup([Trajectory([Turn([1], [2], [-1.0])])])]
    for wrong in ([], [[1.0], [1.0]], [[1.0, 2.0]]):
        with pytest.raises(ValueError, match="advantages"):
            assemble_training_data(groups, wrong)
    with pytest.raises(ValueError, match="1 groups but 0 lists"):
        assemble_training_data([TrajectoryGroup([])], [])


def test_padding_of_logprobs_on_request():
    groups = [TrajectoryGroup([Trajectory([Turn([1], [2, 3], [-1.0])])])]
    (datum,), _ = assemble_training_data(groups, [[1.0]], on_logprob_mismatch="pad")
    assert datum.loss_fn_inputs["logprobs"].tolist() == [-1.0, 0.0]


def test_one_long_row_is_batched_apart():
    short = [Trajectory([Turn([1], [2], [-1.0])], float(n)) for n in range(20)]
    long = Trajectory([Turn([1], np.full(300_000, 3), np.full(300_000, -1.0))], 1.0)
    groups = [TrajectoryGroup([*short[:7], long, *short[7:]])]
    datums, metadata = assemble_training_data(groups, [[0.5] * 21])
    assert [place.traj_idx for place in metadata] == list(range(21))
    assert [datum.model_input.length for datum in datums] == [1] * 7 + [300_000] + [1] * 13


def equal(one: tinker.Datum, other: tinker.Datum) -> bool:
    return wire([one]) == wire([other]) and list(one.loss_fn_inputs) == list(other.loss_fn_inputs)


@pytest.mark.parametrize("rows", ["turns", "merged"])
@pytest.mark.parametrize("seed", range(8))
def test_unpack_undoes_from_datums(seed, rows):
    datums, metadata = unpack(pack(random_groups(seed), rows=rows))
    again, places = unpack(from_datums(datums, metadata=metadata))
    assert places == metadata
    assert len(again) == len(datums)
    for one, other in zip(datums, again, strict=True):
        assert equal(one, other)
        assert one.model_input == other.model_input


@pytest.mark.parametrize("key", ["mask", "weights"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_a_datums_own_mask_goes_in_and_comes_out(key, dtype):
    row = reference.Row([1, 2], [2, 3], [-1.0, 0.0], [0.0, 0.5], [], 0, 0, 0)
    datum = plain_datum(row, **{key: np.array([0, 1], dtype)})
    batch = from_datums([datum])
    assert np.asarray(batch.mask)[0, :2].tolist() == [False, True]
    (again,), _ = unpack(batch)
    assert equal(datum, again)


def test_where_the_mask_comes_from():
    row = reference.Row([1, 2, 3], [2, 3, 4], [0.0, -2.0, -1.0], [0.0, 0.0, 0.5], [], 0, 0, 0)
    datum = plain_datum(row)
    assert np.asarray(from_datums([datum]).mask)[0, :3].tolist() == [False, True, True]
    batch = from_datums([datum], prompt_lengths=np.array([3]))
    assert np.asarray(batch.mask)[0, :3].tolist() == [False, False, True]
    assert equal(unpack(batch)[0][0], datum)
    assert unpack(batch)[1] == [DatumMetadata(0)]


def test_tokens_as_buffers():
    datums, _ = unpack(pack(random_groups(5)), tokens="buffer")
    again, _ = unpack(from_datums(datums), tokens="buffer")
    assert all(not isinstance(datum.model_input.chunks[0].tokens, list) for datum in again)
    assert [d.model_input.chunks[0].tokens for d in again] == [
        d.model_input.chunks[0].tokens for d in datums
    ]


good = reference.Row([1, 2], [2, 3], [0.0, -1.0], [0.0, 0.5], [], 0, 0, 0)


def spoiled(**changes):
    datum = plain_datum(good)
    inputs = {**datum.loss_fn_inputs, **changes}
    inputs = {key: value for key, value in inputs.items() if value is not None}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


@pytest.mark.parametrize(
    ("datum", "message"),
    [
        (spoiled(logprobs=None), "Datum 1: loss_fn_inputs lacks 'logprobs'"),
        (spoiled(clip_low_threshold=[0.1, 0.1]), "Datum 1: .*'clip_low_threshold'"),
        (spoiled(advantages=[0.5]), r"Datum 1: advantages has shape \(1,\)"),
        (spoiled(target_tokens=np.array([1, 2**31])), "Datum 1: target_tokens"),
        (spoiled(mask=np.array([0, 1])), "Datum 1: .*in all Datums"),
        (tinker.Datum(model_input=tinker.ModelInput.empty(), loss_fn_inputs={}), "Datum 1: "),
    ],
)
def test_datums_that_do_not_fit_are_named(datum, message):
    with pytest.raises(ValueError, match=message):
        from_datums([plain_datum(good), datum])


def test_other_refusals():
    half = spoiled(weights=np.array([0.5, 1.0], np.float32))
    with pytest.raises(ValueError, match="Datum 0: weights holds other values"):
        from_datums([half])
    with pytest.raises(ValueError, match="Datum 0 is too long: 2 positions > width 1"):
        from_datums([plain_datum(good)], width=1)
    with pytest.raises(ValueError, match="1 Datums but 2 prompt_lengths"):
        from_datums([plain_datum(good)], prompt_lengths=[1, 1])
    with pytest.raises(ValueError, match="1 Datums but 0 metadata"):
        from_datums([plain_datum(good)], metadata=[])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_narrowed_mask_takes_its_advantages_with_it(layout):
    groups = [TrajectoryGroup([Trajectory([Turn([1], [2, 3, 4], [-1.0] * 3)])])]
    batch = pack(groups, advantages=[[0.5]], layout=layout)
    narrow = replace(batch, mask=batch.mask & (batch.positions != 1))
    (datum,), _ = unpack(narrow)
    assert datum.loss_fn_inputs["advantages"].tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_tokens": np.array([-2, 3])}, "target_tokens holds what is no integer"),
        ({"target_tokens": np.array([2.0, 3.0], np.float32)}, "target_tokens holds what is no"),
        ({"logprobs": np.array([np.nan, 0], np.float32)}, "logprobs holds what is no finite"),
        ({"advantages": np.array([0, 1])}, "advantages holds what is no finite float32"),
        (
            {"mask": np.array([1, 0]), "advantages": np.array([0.5, 0.5], np.float32)},
            r"advantages\[1\] is not zero where the mask is off",
        ),
    ],
)
def test_values_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=f"Datum 0: {message}"):
        from_datums([spoiled(**changes)])


def test_the_kind_of_tokens_is_checked():
    with pytest.raises(ValueError, match="tokens='foo'"):
        unpack(pack([]), tokens="foo")


def test_no_datums():
    assert unpack(from_datums([])) == ([], [])
