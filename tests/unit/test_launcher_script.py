"""``./oasis`` with a stand-in for Python and pip: what it installs, when, and what it leaves on stdout."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from oasis_sglang import models

ROOT = Path(__file__).resolve().parents[2]

# Answers the version and venv questions, makes an "environment" that holds itself as bin/python, and writes down
# each pip call. The environment's oasis command prints its arguments and what it sees of the environment.
FAKE_PYTHON = """#!/bin/bash
case "$1 $2" in
"-c import sys"*) exit ${FAKE_TOO_OLD:-0} ;;
"-c import ensurepip"*) exit ${FAKE_NO_VENV:-0} ;;
"-m venv")
    dir="${@: -1}"; mkdir -p "$dir/bin"; cp "$0" "$dir/bin/python"
    printf '#!/bin/bash\\necho "ran $* path=${PYTHONPATH-none}"\\n' >"$dir/bin/oasis"; chmod +x "$dir/bin/oasis"
    echo venv >>"$CALLS" ;;
"-m pip")
    [ "$3" = --version ] && exit 0
    echo "pip ${*:3}" >>"$CALLS"; echo "pip's own output"; sleep ${FAKE_PIP_SLEEP:-0}; exit ${FAKE_PIP_FAILS:-0} ;;
esac
"""


@pytest.fixture
def call(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    shutil.copy(ROOT / "oasis", checkout)
    (checkout / "pyproject.toml").write_text("[project]\n")
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def start(*args, **env):
        settings = {
            "OASIS_PYTHON": str(python),
            "CALLS": str(tmp_path / "calls"),
            "PYTHONPATH": "/leak",
            **env,
        }
        return subprocess.Popen(
            [checkout / "oasis", *args],
            env={"PATH": os.environ["PATH"], **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(*args, **env):
        process = start(*args, **env)
        output, errors = process.communicate(timeout=30)
        return process.returncode, output, errors

    run.start = start
    run.checkout = checkout
    run.calls = lambda: (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    return run


def test_first_call_installs_and_only_the_command_writes_to_stdout(call):
    code, output, errors = call("demo", "--json")
    assert (code, output) == (0, "ran demo --json path=none\n")
    assert call.calls()[0] == "venv"
    assert f"--editable {call.checkout}[dev]" in call.calls()[1]
    assert f"--no-deps {models.REQUIREMENT}" in call.calls()[2]
    assert "pip's own output" in errors and "set-up is complete" in errors


def test_second_call_goes_straight_to_the_command(call):
    call()
    before = call.calls()
    code, output, errors = call("x")
    assert (code, output, errors, call.calls()) == (0, "ran x path=none\n", "", before)


def test_a_changed_pyproject_installs_again_into_the_same_environment(call):
    call()
    (call.checkout / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    assert call()[0] == 0
    assert [line.split()[0] for line in call.calls()] == ["venv", "pip", "pip", "pip", "pip"]


def test_a_failed_install_is_an_error_and_is_taken_up_again(call):
    code, output, errors = call(FAKE_PIP_FAILS="1")
    assert code == 1 and output == "" and "package index" in errors
    code, output, _ = call("x")
    assert (code, output) == (0, "ran x path=none\n")


def test_two_calls_at_once_install_once(call):
    first = call.start("a", FAKE_PIP_SLEEP="1")
    time.sleep(0.5)
    second = call.start("b", FAKE_PIP_SLEEP="1")
    outputs = [process.communicate(timeout=30) for process in (first, second)]
    assert [output for output, _ in outputs] == ["ran a path=none\n", "ran b path=none\n"]
    assert "waiting for it" in outputs[1][1]
    assert [line.split()[0] for line in call.calls()] == ["venv", "pip", "pip"]


@pytest.mark.parametrize(
    ("setting", "message"), [("FAKE_TOO_OLD", "3.11 or newer"), ("FAKE_NO_VENV", "python3-venv")]
)
def test_missing_prerequisites_are_named(call, setting, message):
    code, output, errors = call(**{setting: "1"})
    assert code == 1 and output == "" and message in errors
    assert call.calls() == []
