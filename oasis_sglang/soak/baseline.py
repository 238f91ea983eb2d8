"""What servers hold now. At rest all of ``held`` is 0; ``Uses`` may differ from before by what ``grown`` allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
import psutil

from oasis_sglang.bench.meters import in_memory, tree
from oasis_sglang.probes import get_json
from oasis_sglang.stack import Stack

READING_S = 20.0
"""For one server to say what it holds: a scheduler answers between two batches."""
MORE_THREADS, MORE_FILES, MORE_MEMORY, MORE_MEMORY_SHARE = 24, 64, 256 << 20, 0.25
"""What a server may use beside what it used before: pools of connections and allocators keep some of what a rush made them take."""


class Uses(msgspec.Struct, frozen=True):
    """Of a server and all it started: threads, open descriptors, bytes in memory (as ``in_memory`` counts them)."""

    threads: int
    files: int
    memory: int


def worker(stack: Stack, name: str) -> dict:
    """The ``oasis`` part of a worker's ``/server_info``. Raises OSError."""
    return get_json(stack.urls[name] + "/server_info", READING_S)["internal_states"][0]["oasis"]


def tier(stack: Stack) -> dict:
    """Raises OSError."""
    return get_json(stack.urls["tier"] + "/state", READING_S)


def held(stack: Stack) -> dict[str, int]:
    """Everything that a request must have given back at its end, read by scanning tables. Raises OSError when a server does not answer."""
    return summed(tier(stack)["inventory"], worker(stack, "prefill"), worker(stack, "decode"))


def summed(inventory: Mapping, prefill: Mapping, decode: Mapping) -> dict[str, int]:
    """``held`` of what the three servers say."""
    i, sets = inventory, decode.get("working_sets") or {}
    cache = sets.get("host_cache", {})
    return {
        **{f"tier {name}": i[name] for name in ("writing", "leased", "holders", "held", "rooms", "leases", "waiters")},
        "tier records missing": i["records"] - i["free"] - i["cached"] - i["writing"] - i["leased"],
        "prefill publications": prefill["publications"],
        "decode pulls": decode["pulls"], "decode leases": decode["leases"], "decode reads": decode["flights"], "decode KV tokens": decode["kv_pool_tokens"],
        "decode windows": decode["staging"]["leased"] + decode["staging"]["quarantined"],
        **{f"decode {name}": value for name, value in sets.get("held", {}).items()},
        "decode logical tokens": sets.get("logical_tokens", 0), "decode leaks": sets.get("leaks", 0),
        "decode cache bytes": cache.get("pinned_bytes", 0) + cache.get("reserved_bytes", 0)}


def faults_of_ours(stack: Stack) -> dict[str, int]:
    """Internal errors by server, since each was started: 0 unless we made a mistake. Raises OSError."""
    totals = {"tier": tier(stack)["totals"], **{name: worker(stack, name)["totals"] for name in ("prefill", "decode")}}
    return {name: of.get("internal_errors", 0) for name, of in totals.items()}


def uses(stack: Stack) -> dict[str, Uses]:
    """By server. A process that ends meanwhile counts as nothing."""
    found = {}
    for name, server in stack.servers.items():
        threads = files = 0
        processes = tree([server.pid])
        for pid in processes:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                threads, files = threads + process.num_threads(), files + process.num_fds()
        if not processes:
            continue
        found[name] = Uses(threads, files, in_memory(processes))
    return found


def grown(before: Mapping[str, Uses], after: Mapping[str, Uses]) -> list[str]:
    """What is used beyond the allowance, one line each; a server that is gone is one too."""
    lines = [f"{name} is gone" for name in before if name not in after]
    for name, now in after.items():
        if (then := before.get(name)) is None:
            continue
        if now.threads > then.threads + MORE_THREADS:
            lines.append(f"{name}: {then.threads} threads before, {now.threads} after")
        if now.files > then.files + MORE_FILES:
            lines.append(f"{name}: {then.files} open files before, {now.files} after")
        if now.memory > then.memory * (1 + MORE_MEMORY_SHARE) + MORE_MEMORY:
            lines.append(f"{name}: {then.memory >> 20} MiB before, {now.memory >> 20} MiB after")
    return lines


def settle(read: Callable[[], Mapping[str, int]], seconds: float, *, clock=time.monotonic, pause: float = 0.25) -> dict[str, int]:
    """Waits until nothing of ``read()`` is held, ``seconds`` at most. What still is, by name; a server that does not answer is ``silent``."""
    end = clock() + seconds
    while True:
        try:
            left = {name: value for name, value in read().items() if value}
        except (OSError, ValueError, KeyError) as error:
            left = {f"silent ({error})": 1}
        if not left or clock() >= end:
            return left
        time.sleep(pause)
