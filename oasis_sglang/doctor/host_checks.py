"""Limits and memory of the host and of the container."""

from __future__ import annotations

import resource

from oasis_sglang.doctor.asked import Asked
from oasis_sglang.doctor.check import Check, fail, ok, skip, warn
from oasis_sglang.doctor.facts import Facts
from oasis_sglang.plan.show import size

LARGE_SHARE = 0.8
"""Of the memory that there is: what is asked for beyond it leaves little for the processes themselves."""
SHM_LEAST, SHM_WANTED = 32 << 20, 1 << 30
"""SGLang's processes share memory there, and NCCL between GPUs does; container engines give 64 MiB unless told otherwise."""
HUGE_SHARE = 0.05
"""Of all memory: reserved pages below that are not worth a word."""
FILES_LEAST, FILES_WANTED = 1024, 4096
"""Each reader of a tier takes a few."""
YEARS = (2025, 2100)
DRIFT_SECONDS = 1.0


def memlock(facts: Facts, asked: Asked) -> Check:
    """RDMA pins what it registers. What a GPU's driver pins is not counted."""
    limit = "no limit" if facts.memlock is None else size(facts.memlock)
    found = f"{limit}, and CAP_IPC_LOCK" if facts.may_lock else limit
    if facts.nixl is None or not any(device.rdma for device in facts.nixl.chosen):
        return ok("memlock", f"{found}; nothing is locked without RDMA")
    wanted = size(asked.registered)
    if facts.memlock is None or facts.may_lock or facts.memlock >= asked.registered:
        return ok("memlock", found, wanted)
    return fail("memlock", found, wanted, "Raise it with LimitMEMLOCK=infinity in the container runtime's systemd unit or ulimit -l unlimited (IPC_LOCK in a "
                "securityContext helps root alone), or set UCX_TLS=tcp.")


def shm(facts: Facts, asked: Asked) -> Check:
    if not asked.workers:
        return skip("shm", "a tier uses memory without a name")
    remedy = "Mount memory there (emptyDir with medium: Memory and sizeLimit: 8Gi at /dev/shm, or docker run --shm-size 8g)."
    found = facts.shm.error or f"{size(facts.shm.free)} free of {size(facts.shm.size)}"
    if facts.shm.error or facts.shm.free < SHM_LEAST:
        return fail("shm", found, size(SHM_WANTED), remedy)
    if facts.shm.free < SHM_WANTED:
        return warn("shm", found, size(SHM_WANTED), remedy)
    return ok("shm", found, size(SHM_WANTED))


def hugepages(facts: Facts, asked: Asked) -> Check:
    found = f"{size(facts.huge.reserved)} reserved and unused; shared memory: {facts.huge.shmem}"
    if facts.huge.reserved > HUGE_SHARE * facts.total and asked.need:
        return warn("hugepages", found, "none", "Lower vm.nr_hugepages, unless others here use them: arena and host cache are made of ordinary pages and "
                    "cannot have that memory.")
    return ok("hugepages", found)


def memory(facts: Facts, asked: Asked) -> Check:
    return _fits("memory", facts.available, f"{size(facts.available)} available of {size(facts.total)}", asked,
                 f"Free memory on this host, take one with more, or {_lower(asked)}.")


def cgroup(facts: Facts, asked: Asked) -> Check:
    if not facts.groups:
        return ok("cgroup", "no limit", _wanted(asked))
    tightest = min(facts.groups, key=lambda group: group.free)
    found = f"{size(tightest.free)} left of the limit of {size(tightest.limit)} in {tightest.path}"
    return _fits("cgroup", tightest.free, found, asked, "Raise the container's memory request and limit, which have to hold arena, host cache and staging "
                 f"beside the processes themselves, or {_lower(asked)}.")


def _fits(name: str, there: int, found: str, asked: Asked, remedy: str) -> Check:
    wanted = _wanted(asked)
    if asked.need > there:
        return fail(name, found, wanted, remedy)
    if asked.need > LARGE_SHARE * there:
        return warn(name, found, f"{wanted}, and room for the processes", remedy)
    return ok(name, found, wanted)


def _wanted(asked: Asked) -> str:
    parts = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in asked.parts.items())
    return f"{size(asked.need)}: {parts}" if parts else ""


def _lower(asked: Asked) -> str:
    options = {"arena": "--arena-bytes", "host cache": "--oasis-host-cache-bytes"}
    return f"lower {' and '.join(options[part] for part in asked.parts if part in options) or 'what else runs here'}"


def files(facts: Facts, asked: Asked) -> Check:
    """SGLang raises its own limit as far as it may; a tier keeps what it gets."""
    soft, hard = facts.files
    limit = soft if "tier" in asked.roles else hard
    if limit == resource.RLIM_INFINITY or limit >= FILES_WANTED:
        return ok("files", "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,} open files", f"{FILES_WANTED:,}")
    told = fail if limit < FILES_LEAST else warn
    return told("files", f"{limit:,} open files", f"{FILES_WANTED:,}",
                f"Raise the limit with ulimit -n {FILES_WANTED << 4}, or in the container runtime (LimitNOFILE).")


def clock(facts: Facts, asked: Asked) -> Check:
    if not YEARS[0] <= facts.year < YEARS[1]:
        return fail("clock", f"the year is {facts.year}", "the right time", "Set the clock of the host and keep it with NTP.")
    if abs(facts.drift) > DRIFT_SECONDS:
        return warn("clock", f"set by {facts.drift:+.1f} s while this ran", "a clock that runs evenly",
                    "Let NTP slew the clock instead of setting it: no deadline of ours depends on it, but logs cannot be compared across a jump.")
    return ok("clock", f"{facts.year}, runs evenly")


def tier_socket(facts: Facts, asked: Asked) -> Check:
    """Where a prefill worker and its tier meet."""
    wanted = "a folder for the socket" if "tier" in asked.roles else "a socket that may be connected to"
    if asked.role == "decode":
        return skip("tier socket", "a decode worker uses none")
    if facts.tier_there not in ("", "yes"):
        return fail("tier socket", f"{asked.local}: {facts.tier_there}", wanted,
                    "Run the tier and its prefill worker as the same user, with a short path on a volume that both mount.")
    if "tier" not in asked.roles:
        return ok("tier socket", f"{asked.local}: {'a tier serves there' if facts.tier_there else 'no tier yet, the worker will wait for it'}", wanted)
    if facts.tier_there:
        return fail("tier socket", f"{asked.local}: another tier serves there", wanted, "Stop that tier, or give this one another path with --local.")
    if facts.tier_cannot:
        return fail("tier socket", facts.tier_cannot, wanted, "Give --local a short path in a folder that this user can write, such as an emptyDir.")
    return ok("tier socket", asked.local, wanted)


def ports(facts: Facts, asked: Asked) -> list[Check]:
    return [_port(facts, port) for port in asked.ports]


def _port(facts: Facts, port: int) -> Check:
    if port in facts.busy:
        return fail(f"port {port}", facts.busy[port], "free",
                    "End what listens there (ss -ltnp shows it), or choose another port, above 1023 if this user is not root.")
    return ok(f"port {port}", "free", "free")
