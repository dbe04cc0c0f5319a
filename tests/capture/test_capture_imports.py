"""Importing the capture package stays cheap: no jax, no tinker."""

import subprocess
import sys

import evsys_jax.capture

LIST_HEAVY = "import sys; print(sorted({'jax', 'jaxlib', 'tinker', 'chex'} & set(sys.modules)))"


def loaded_after(statement: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; {LIST_HEAVY}"],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def test_all_names_load_neither_jax_nor_tinker() -> None:
    assert loaded_after("from evsys_jax.capture import *") == "[]"


def test_the_check_above_can_fail() -> None:
    assert "jax" in loaded_after("import jax")


def test_every_name_is_there() -> None:
    for name in evsys_jax.capture.__all__:
        assert getattr(evsys_jax.capture, name) is not None, name
