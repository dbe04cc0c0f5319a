"""The boundary to tinker: batches become Datums and Datums become batches.

The only module that imports tinker, and only inside the functions, since that takes seconds.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evsys_jax import checks
from evsys_jax.plans import MIN_ROWS, MIN_WIDTH, bucket

if TYPE_CHECKING:
    import tinker

    from evsys_jax.batch import TokenBatch
    from evsys_jax.ragged import RaggedRows
    from evsys_jax.unpadded import Run

TokenKind: TypeAlias = Literal["list", "buffer"]

_REQUIRED = ("target_tokens", "logprobs", "advantages")
_MASKS = ("mask", "weights")


@dataclass(frozen=True)
class DatumMetadata:
    """Where a Datum comes from.

    Args:
      group_idx: index of the group.
      traj_idx: index of the trajectory in its group.
      turn_idx: index of the turn in its trajectory (of merged turns the first).
    """

    group_idx: int
    traj_idx: int = 0
    turn_idx: int = 0


def unpack(
    batch: TokenBatch, *, tokens: TokenKind = "list"
) -> tuple[list[tinker.Datum], list[DatumMetadata]]:
    """Bring a batch down and cut it into Datums, in the order of its rows before packing.

    Args:
      batch: any layout; filler yields nothing.
      tokens: the model input as a "list" of ints, or as an int32 "buffer" (`array.array`), which
        tinker's wire encoder takes without making Python ints.

    Returns:
      One Datum and one `DatumMetadata` per segment. `loss_fn_inputs` holds `target_tokens`
      int64, `logprobs` float32 and `advantages` float32, the keys of tinker's
      importance_sampling loss, and the mask where the batch was made from Datums that carry one.
    """
    checks.check_choice("tokens", tokens, ("list", "buffer"))
    lengths = np.asarray(batch.segment_lengths)
    starts = np.cumsum(lengths, axis=1) - lengths
    line, segment = np.nonzero(lengths)
    rows: NDArray[np.int32] = np.asarray(batch.segment_row)
    order = np.argsort(rows[line, segment], kind="stable")
    line, segment = line[order], segment[order]
    begin, length = starts[line, segment], lengths[line, segment]
    used = (slice(0, int(line.max(initial=-1)) + 1), slice(0, int((begin + length).max(initial=0))))
    input_tokens = np.ascontiguousarray(np.asarray(batch.input_tokens)[used])
    # One writable copy each: TensorData copies what is read-only or of another dtype.
    fields: dict[str, NDArray[Any]] = {
        "target_tokens": np.array(np.asarray(batch.target_tokens)[used], np.int64),
        "logprobs": np.array(np.asarray(batch.logprobs)[used], np.float32),
        # A mask that was narrowed on the way takes its advantages with it.
        "advantages": np.where(
            np.asarray(batch.mask)[used], np.asarray(batch.advantages)[used], np.float32(0.0)
        ),
    }
    if batch.wire_mask is not None:
        key, dtype = batch.wire_mask
        fields[key] = np.array(np.asarray(batch.mask)[used], dtype)
    make = _datum_maker({key: values.reshape(-1) for key, values in fields.items()})
    first = line * input_tokens.shape[1] + begin
    datums = []
    with collector_paused():
        for start, stop in zip(first.tolist(), (first + length).tolist(), strict=True):
            values = input_tokens.reshape(-1)[start:stop]
            as_list = tokens == "list"
            model_input = values.tolist() if as_list else _int32_buffer(values)
            datums.append(make(model_input, start, stop))
    places = (batch.segment_group, batch.segment_trajectory, batch.segment_turn)
    columns = np.stack([np.asarray(place) for place in places])[:, line, segment]
    return datums, [DatumMetadata(*place) for place in columns.T.tolist()]


def datums_of_runs(
    rows: RaggedRows, runs: Iterable[Run]
) -> tuple[list[tinker.Datum], list[DatumMetadata]]:
    """Cut runs of rows into Datums, one per row, in order.

    Args:
      rows: the rows; the model input is a row's own list where `rows.inputs` has one, else an
        int32 buffer.
      runs: what `iter_runs` makes of them. The Datums of a run share its arrays.

    Returns:
      One Datum and one `DatumMetadata` per row, as `unpack` does.
    """
    datums: list[tinker.Datum] = []
    starts, positions = rows.offsets.tolist(), (rows.lengths - 1).tolist()
    for run in runs:
        make = _datum_maker(
            {
                "target_tokens": run.target_tokens,
                "logprobs": run.logprobs,
                "advantages": run.advantages,
            }
        )
        for r, begin in zip(run.rows, run.begins, strict=True):
            tokens: Sequence[int] | None = rows.inputs[r] if rows.inputs is not None else None
            if tokens is None:
                tokens = _int32_buffer(rows.tokens[starts[r] : starts[r] + positions[r]])
            datums.append(make(tokens, begin, begin + positions[r]))
    places = (rows.group.tolist(), rows.trajectory.tolist(), rows.turn.tolist())
    return datums, [DatumMetadata(*place) for place in zip(*places, strict=True)]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from running meanwhile.

    Thousands of small objects would set it off again and again, to walk over every list of
    tokens there is and find nothing: Datums hold no cycles.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _int32_buffer(tokens: NDArray[np.int32]) -> Sequence[int]:
    """Copy an int32 array into an `array.array`: ints to a reader, memory to the wire encoder.

    Unlike an ndarray it compares and iterates as ints, and unlike a memoryview it pickles.
    """
    buffer = array("i")
    buffer.frombytes(np.ascontiguousarray(tokens).data.cast("B"))
    return buffer


def _datum_maker(
    fields: dict[str, NDArray[Any]],
) -> Callable[[Sequence[int], int, int], tinker.Datum]:
    """Return what makes one Datum of checked tokens, without validating every token once more.

    Args:
      fields: [P] arrays by key, int64 or float32 and writable, which the Datums share.
    """
    from tinker.types import Datum, EncodedTextChunk, ModelInput, TensorData

    columns: list[tuple[str, NDArray[Any], Literal["int64", "float32"]]] = [
        (key, values, "int64" if values.dtype == np.int64 else "float32")
        for key, values in fields.items()
    ]

    def make(tokens: Sequence[int], start: int, stop: int) -> tinker.Datum:
        chunk = EncodedTextChunk.model_construct(tokens=tokens)
        return Datum(
            model_input=ModelInput(chunks=[chunk]),
            loss_fn_inputs={
                key: TensorData(data=values[start:stop], dtype=dtype, shape=[stop - start])
                for key, values, dtype in columns
            },
        )

    return make


def from_datums(
    datums: Sequence[tinker.Datum],
    *,
    prompt_lengths: Sequence[int] | None = None,
    metadata: Sequence[DatumMetadata] | None = None,
    width: int | None = None,
    pad_token: int = 0,
) -> TokenBatch:
    """Pad Datums into a batch, so that `unpack` gives them again, exactly.

    Logprobs that a Datum carries where nothing was sampled stay where they are; no loss looks
    at them. Several chunks of text come back as one.

    The mask comes from a Datum's `mask` or `weights` where it carries one; else from
    `prompt_lengths`; else it is on where an advantage or a logprob is not zero, which misses a
    sampled token whose logprob and advantage are both 0.0.

    Args:
      datums: [R] Datums of text with `target_tokens`, `logprobs` and `advantages`, and `mask` or
        `weights` (zeros and ones) in all of them or in none.
      prompt_lengths: [R] prompt tokens of each, counted in the model input.
      metadata: [R] places; by default each Datum is a group of its own.
      width: T; None takes the longest Datum's length, rounded up.
      pad_token: fills padding.

    Returns:
      A `TokenBatch`, one row per Datum, in order.

    Raises:
      ValueError: names the Datum and the key: one that is missing, unknown or of another length,
        token ids outside [0, 2**31), numbers that are not finite, no token, a mask that is not
        zeros and ones, an advantage off the mask, or a Datum longer than `width`.
    """
    import jax.numpy as jnp

    from evsys_jax.batch import TokenBatch

    read = [_read_datum(i, datum) for i, datum in enumerate(datums)]
    for name, given in (("prompt_lengths", prompt_lengths), ("metadata", metadata)):
        if given is not None and len(given) != len(read):
            raise ValueError(f"{len(read)} Datums but {len(given)} {name}")
    wire_mask = _wire_mask(read)
    lengths = np.array([len(fields["input_tokens"]) for fields in read], np.int32)
    longest = int(lengths.max(initial=0))
    if width is not None and longest > width:
        i = int(lengths.argmax())
        raise ValueError(f"Datum {i} is too long: {longest} positions > width {width}")
    shape = (
        bucket(len(read), MIN_ROWS),
        bucket(longest, MIN_WIDTH) if width is None else width,
    )
    padded = {
        "input_tokens": np.full(shape, pad_token, np.int32),
        "target_tokens": np.full(shape, pad_token, np.int32),
        "logprobs": np.zeros(shape, np.float32),
        "advantages": np.zeros(shape, np.float32),
        "mask": np.zeros(shape, bool),
    }
    for i, fields in enumerate(read):
        if "mask" not in fields:
            prompt = None if prompt_lengths is None else prompt_lengths[i]
            if prompt is not None and not 0 <= prompt <= lengths[i] + 1:
                raise ValueError(f"Datum {i}: prompt length {prompt} of {lengths[i]} positions")
            fields["mask"] = _guess_mask(fields, prompt)
        if (fields["advantages"] != 0)[~fields["mask"]].any():
            at = int(np.flatnonzero((fields["advantages"] != 0) & ~fields["mask"])[0])
            raise ValueError(f"Datum {i}: advantages[{at}] is not zero where the mask is off")
        for key, array_ in padded.items():
            array_[i, : lengths[i]] = fields[key]
    places = [DatumMetadata(i) for i in range(len(read))] if metadata is None else metadata
    index = np.full((5, shape[0], 1), -1, np.int32)
    index[0] = 0
    index[0, : len(read), 0] = lengths
    for column, values in enumerate(
        (
            [place.group_idx for place in places],
            [place.traj_idx for place in places],
            [place.turn_idx for place in places],
            range(len(read)),
        ),
        start=1,
    ):
        index[column, : len(read), 0] = values
    real = np.arange(shape[1], dtype=np.int32) < index[0]
    return TokenBatch(
        **{key: jnp.asarray(value) for key, value in padded.items()},
        positions=jnp.asarray(np.where(real, np.arange(shape[1], dtype=np.int32), np.int32(0))),
        segment_ids=jnp.asarray(real.astype(np.int32)),
        segment_lengths=jnp.asarray(index[0]),
        segment_group=jnp.asarray(index[1]),
        segment_trajectory=jnp.asarray(index[2]),
        segment_turn=jnp.asarray(index[3]),
        segment_row=jnp.asarray(index[4]),
        wire_mask=wire_mask,
    )


def _read_datum(i: int, datum: tinker.Datum) -> dict[str, NDArray[Any]]:
    """Return the arrays of one Datum, checked; the mask under its own key."""
    tokens: list[NDArray[Any]] = []
    for chunk in datum.model_input.chunks:
        if not hasattr(chunk, "tokens"):
            raise ValueError(f"Datum {i}: model_input holds a {type(chunk).__name__}, not text")
        tokens.append(np.asarray(chunk.tokens, np.int64))
    fields = {"input_tokens": np.concatenate(tokens) if tokens else np.zeros(0, np.int64)}
    inputs = datum.loss_fn_inputs
    missing = [key for key in _REQUIRED if key not in inputs]
    unknown = [key for key in inputs if key not in (*_REQUIRED, *_MASKS)]
    if missing or unknown:
        named = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}, which has no place"
        raise ValueError(f"Datum {i}: loss_fn_inputs {named}")
    for key, tensor in inputs.items():
        if tensor.sparse_crow_indices is not None:
            raise ValueError(f"Datum {i}: {key} is sparse, and only whole 1-D arrays have a place")
        fields[key] = np.asarray(tensor.to_numpy())
        if fields[key].shape != fields["input_tokens"].shape:
            raise ValueError(
                f"Datum {i}: {key} has shape {fields[key].shape},"
                f" model_input {fields['input_tokens'].shape}"
            )
    if not fields["input_tokens"].size:
        raise ValueError(f"Datum {i}: model_input holds no token")
    for key in ("input_tokens", "target_tokens"):
        ids = fields[key]
        if ids.dtype.kind not in "iu" or not ((ids >= 0) & (ids < checks.TOKEN_LIMIT)).all():
            raise ValueError(f"Datum {i}: {key} holds what is no integer in [0, 2**31)")
    for key in ("logprobs", "advantages"):
        if fields[key].dtype != np.float32 or not np.isfinite(fields[key]).all():
            raise ValueError(f"Datum {i}: {key} holds what is no finite float32")
    return fields


def _wire_mask(read: list[dict[str, NDArray[Any]]]) -> tuple[str, str] | None:
    """Move each Datum's own mask to `mask`; return the key and dtype that all of them use."""
    found = None
    for i, fields in enumerate(read):
        keys = [key for key in _MASKS if key in fields]
        own = (keys[0], fields[keys[0]].dtype.name) if keys else None
        if len(keys) == 2 or (i and own != found):
            raise ValueError(
                f"Datum {i}: `mask` or `weights` must be in all Datums, alike, or none"
            )
        found = own
        if own:
            values = fields.pop(own[0])
            if not np.isin(values, (0, 1)).all():
                raise ValueError(f"Datum {i}: {own[0]} holds other values than 0 and 1")
            fields["mask"] = values.astype(bool)
    return found


def _guess_mask(fields: dict[str, NDArray[Any]], prompt_length: int | None) -> NDArray[np.bool_]:
    """Tell what was sampled: all targets behind the prompt, or else all with a sign of it."""
    if prompt_length is not None:
        return np.arange(len(fields["input_tokens"])) >= prompt_length - 1
    signs: NDArray[np.bool_] = (fields["advantages"] != 0) | (fields["logprobs"] != 0)
    return signs
