"""Tests on hosts of their own (``oasis_sglang.hosts``). Without root and iproute2 they are skipped, loudly."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from oasis_sglang import hosts, launch
from oasis_sglang.hosts import Cable, HostsError
from oasis_sglang.processes import Processes, Server


def _missing(*programs: str) -> str:
    try:
        hosts.require(*programs)
    except HostsError as error:
        return str(error)
    return ""


marks = [pytest.mark.netns, pytest.mark.skipif(bool(_missing()), reason=f"NOT RUN: {_missing()}")]
needs_tc = pytest.mark.skipif(bool(_missing("tc")), reason=f"NOT RUN: {_missing('tc')}")


def enter(undo: ExitStack, made: AbstractContextManager):
    """``undo.enter_context(made)``; skips the test where this machine refuses."""
    try:
        return undo.enter_context(made)
    except HostsError as error:
        pytest.skip(f"NOT RUN: {error}")


def serve_worker(processes: Processes, role: str, model: Path, there: Cable, port: int, bootstrap: int, scratch: Path, *flags: str) -> Server:
    """An Oasis worker that other hosts reach at ``there``; its log is ``scratch``/log. A decode worker keeps nothing from one
    request to the next, so that bytes can be counted again for the same prompt."""
    (scratch / "metrics").mkdir(parents=True)
    keeping = ["--radix-cache-backend", ""] if role == "decode" else []
    argv, ours = launch.worker_argv(role, [
        "--model-path", str(model), "--host", there.address, "--port", str(port), "--skip-server-warmup", "--max-running-requests", "4",
        "--max-total-tokens", "20000", "--disaggregation-bootstrap-port", str(bootstrap), *keeping, *flags])
    own = {"TMPDIR": str(scratch), "PROMETHEUS_MULTIPROC_DIR": str(scratch / "metrics")}
    return processes.serve(argv, log=scratch / "log", env={**own, **ours, **there.env}, name=role)
