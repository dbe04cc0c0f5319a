"""The tinker example runs, and what it prints adds up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_position_arrives():
    environment = {key: value for key, value in os.environ.items() if key != "TINKER_API_KEY"}
    done = subprocess.run(
        [sys.executable, "examples/tinker_step.py"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    numbers = [int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", done.stdout)]
    datums, positions, requests, in_all, largest, arrived = numbers
    assert (datums, requests) == (200, 4)
    assert arrived == positions
    assert largest <= in_all
    assert in_all > 20 * positions  # int32 input, int64 target, two float32 a position
