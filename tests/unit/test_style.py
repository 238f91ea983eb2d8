"""The rules that a tool can check (``[tool.ruff]`` in pyproject.toml)."""

import subprocess
import sys
from pathlib import Path


def test_ruff_finds_nothing():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", str(root)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
