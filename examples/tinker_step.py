"""Hand a batch of rollouts to tinker: Datums, encoded as its forward_backward requests.

The batch goes through the packed layout and comes back as Datums in its own order. Without a key
nothing is sent: the script shows the bytes that would go out. With TINKER_API_KEY set it takes
one importance_sampling step on BASE_MODEL.

    python examples/tinker_step.py [ROLLOUTS.jsonl]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import tinker
from tinker.proto import tinker_public_pb2 as public_pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest

from evsys_jax import collect, pack, unpack

EXAMPLE = Path(__file__).parent / "rollouts" / "rollouts.jsonl"
BASE_MODEL = "Qwen/Qwen3-8B"
DATUMS_PER_REQUEST = 64


def encode(datums: list[tinker.Datum], seq_id: int) -> bytes:
    """Encode one request as tinker's client does."""
    request = ForwardBackwardRequest(
        forward_backward_input=ForwardBackwardInput(data=datums, loss_fn="importance_sampling"),
        model_id="not-sent",
        seq_id=seq_id,
    )
    return forward_backward_request_to_proto(request).SerializeToString()


def decode(request: bytes) -> list[public_pb.Datum]:
    """Read a request as tinker's server does."""
    return list(public_pb.ForwardBackwardRequest.FromString(request).data)


def send(datums: list[tinker.Datum]) -> None:
    """Take one step on tinker's side."""
    client = tinker.ServiceClient().create_lora_training_client(base_model=BASE_MODEL).result()
    gradient = client.forward_backward(datums, loss_fn="importance_sampling")
    step = client.optim_step(tinker.AdamParams(learning_rate=1e-5))
    print("sent:", gradient.result().metrics, step.result())


def main() -> None:
    """Print what a step weighs on the wire, and check that all of it got there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rollouts", nargs="?", default=EXAMPLE)
    groups, _ = collect(parser.parse_args().rollouts)
    batch = pack(groups, layout="packed")
    datums, _ = unpack(batch, tokens="buffer")
    starts = range(0, len(datums), DATUMS_PER_REQUEST)
    requests = [encode(datums[i : i + DATUMS_PER_REQUEST], n) for n, i in enumerate(starts, 1)]
    sizes = [len(request) for request in requests]
    positions = sum(datum.model_input.length for datum in datums)
    print(f"{len(datums)} Datums, {positions:,} positions, {len(requests)} requests")
    print(f"{sum(sizes):,} bytes in all, {max(sizes):,} in the largest request")
    # Read back what the server would: eight bytes a target token.
    decoded = [datum for request in requests for datum in decode(request)]
    arrived = sum(len(datum.loss_fn_inputs["target_tokens"].dense) // 8 for datum in decoded)
    if arrived != positions or positions != int(np.asarray(batch.segment_lengths).sum()):
        raise SystemExit(f"{positions} positions went out and {arrived} arrived")
    print(f"{arrived:,} target tokens arrive")
    if os.environ.get("TINKER_API_KEY"):
        send(datums)


if __name__ == "__main__":
    main()
