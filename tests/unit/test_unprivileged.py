"""A tier needs no privileges: without any capability, and with no way to gain one, it serves with all its data planes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from node_rig import until

from oasis_sglang.probes import free_port

TIER = """
import sys
from transport.server import TierOptions, serve
serve(TierOptions(local=sys.argv[1], http=sys.argv[2], arena_bytes=1 << 20, planes=("nixl", "zmq"), drain_seconds=0))
"""


def status(pid: int) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="as root it takes setpriv to be without privileges")
def test_a_tier_serves_without_any_capability(tmp_path):
    http = f"127.0.0.1:{free_port()}"
    stripped = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"] if os.geteuid() == 0 else []
    tier = subprocess.Popen([*stripped, sys.executable, "-c", TIER, str(tmp_path / "tier.sock"), http])
    try:
        def ready() -> bool:
            assert tier.poll() is None, "it ended"
            try:
                with urllib.request.urlopen(f"http://{http}/readyz", timeout=2) as reply:
                    return reply.status == 200
            except OSError:  # not yet, or 503
                return False

        until(ready, "it serves", seconds=60)
        pids = [tier.pid, *(child.pid for child in psutil.Process(tier.pid).children(recursive=True))]
        assert len(pids) >= 2, "the data plane is a process of its own"
        for pid in pids:
            about = status(pid)
            assert int(about["CapEff"], 16) == 0 and int(about["CapPrm"], 16) == 0, (pid, about["CapEff"])
    finally:
        tier.send_signal(signal.SIGTERM)
        assert tier.wait(30) == 0
