"""The README says what the code does: its example runs as printed, its lines are CI's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evsys_jax.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_and_prints_what_it_says(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    code = "".join(blocks)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    promised = re.findall(r"^print\(.*\)  # (.*?)(?::|$)", code, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == promised
    assert len(promised) == 4


@pytest.mark.parametrize(
    ("arguments", "shown"),
    re.findall(r"^\$ evsys-jax (inspect .*)\n((?:.*\n)*?)(?=\$ |```)", README, re.M),
)
def test_inspect_prints_what_it_says(arguments, shown, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, arguments.split())
    # Frozen is what a build leaves behind, and none need have run here.
    output = result.stdout.replace("open, calls may still come", "frozen")
    assert output.strip() == shown.strip()


def test_the_setup_lines():
    build, test = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert "evsys-jax build examples/rollouts/" in build
    assert test.endswith("pytest")


def test_the_tables_name_what_exists():
    for path in re.findall(r"`(evsys_jax/\w+\.py)`", README):
        assert (ROOT / path).exists(), path


def test_verify_says_what_the_readme_says():
    promised = re.search(r"`(\d+ rows, [\d,]+ positions: identical)`", README).group(1)
    arguments = ["verify", str(ROOT / "examples" / "rollouts" / "rollouts.jsonl")]
    assert CliRunner().invoke(app, arguments).stdout.strip() == promised
