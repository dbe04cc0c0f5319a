"""The training example runs from the command line."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_three_steps_run(tmp_path):
    curve = tmp_path / "reward.png"
    done = subprocess.run(
        [sys.executable, "examples/train_grpo.py", "--steps", "3", "--out", str(curve)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    start, end = re.search(r"mean reward (\S+) -> (\S+) in 3 steps", done.stdout).groups()
    assert 0.0 <= float(start) == float(end) < 0.3
    assert curve.read_bytes().startswith(b"\x89PNG")
