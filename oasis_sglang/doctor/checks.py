"""What is wrong, from what was found. Looks at nothing itself."""

from __future__ import annotations

from oasis_sglang.doctor import host_checks, network_checks, software_checks
from oasis_sglang.doctor.asked import Asked
from oasis_sglang.doctor.check import Check
from oasis_sglang.doctor.facts import Facts

CHECKS = (
    software_checks.python, software_checks.packages, software_checks.sglang, software_checks.cuda, software_checks.gpu, software_checks.nixl,
    network_checks.network, network_checks.rdma, host_checks.memlock, host_checks.shm, host_checks.hugepages, host_checks.memory,
    host_checks.cgroup, host_checks.files, host_checks.clock, host_checks.tier_socket, software_checks.keys, software_checks.model,
)
SEVERAL = (host_checks.ports, software_checks.transfers)
"""Those that make a check of each of several things."""


def check_all(facts: Facts, asked: Asked) -> list[Check]:
    """In the order of the table: what a process needs first comes first."""
    return [*(check(facts, asked) for check in CHECKS), *(check for several in SEVERAL for check in several(facts, asked))]
