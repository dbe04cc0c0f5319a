"""Importing is cheap: what is heavy loads when it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import evsys_jax

HEAVY = ("jax", "tinker", "pyarrow", "rich")


def loaded_after(statement: str) -> set[str]:
    """Return which heavy packages a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import evsys_jax",
        "from evsys_jax import Turn, Trajectory, TrajectoryGroup, collect, ragged_rows",
        "import evsys_jax.cli",
        "import evsys_jax.reference, evsys_jax.datums, evsys_jax.data_processing",
        "import evsys_jax.inspection, evsys_jax.inspection_view",
    ],
)
def test_these_load_nothing_heavy(statement):
    assert not loaded_after(statement)


def test_help_loads_nothing_heavy():
    code = (
        "from evsys_jax.cli import app\n"
        "from contextlib import redirect_stdout\nimport io\nout = io.StringIO()\n"
        "with redirect_stdout(out):\n    app(['build', '--help'], standalone_mode=False)\n"
        "assert 'Directory of captured calls' in out.getvalue(), out.getvalue()"
    )
    assert not loaded_after(code)


def test_packing_loads_jax_but_not_tinker():
    assert loaded_after("from evsys_jax import pack\npack([])") == {"jax"}


def test_the_check_can_fail():
    assert "tinker" in loaded_after("from evsys_jax import from_datums\nimport tinker")


def test_the_face_hands_out_all_its_names():
    for name in evsys_jax.__all__:
        assert getattr(evsys_jax, name) is not None
    assert set(evsys_jax.__all__) <= set(dir(evsys_jax))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = evsys_jax.nothing


def test_collect_stays_the_function():
    code = "import evsys_jax.collect\nfrom evsys_jax import collect\nassert callable(collect)"
    assert not loaded_after(code)


def test_without_the_extra_the_command_says_what_to_install():
    code = (
        "import sys\nsys.modules['typer'] = None\nfrom evsys_jax import *\n"
        "from evsys_jax.__main__ import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "needs typer: pip install 'evsys_jax[cli]'" in done.stderr


def test_the_overview_is_there_without_the_extra():
    code = "import sys\nsys.modules['typer'] = None\nfrom evsys_jax.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "inspect  List what became of every rollout" in done.stdout
