"""Versions, the accelerator, keys, the model, and the self-test."""

from __future__ import annotations

import re

from oasis_sglang import SGLANG_VERSION
from oasis_sglang.doctor.asked import Asked
from oasis_sglang.doctor.check import Check, fail, ok, skip, warn
from oasis_sglang.doctor.facts import OURS, Facts, Requirement
from oasis_sglang.models_supported import MODELS
from oasis_sglang.plan.show import size

PYTHON = (3, 11)
NOT_OF_A_TIER = ("sglang", "sglang-router", "nixl-cu12", "matplotlib", "jinja2", "requests")
"""Packages that an image for tiers alone may leave out."""
SHOWN = 3


def python(facts: Facts, asked: Asked) -> Check:
    wanted = f"{PYTHON[0]}.{PYTHON[1]} or newer"
    if _numbers(facts.python)[:2] < PYTHON:
        return fail("python", facts.python, wanted, f"Make the environment with Python {wanted}.")
    return ok("python", facts.python, wanted)


def packages(facts: Facts, asked: Asked) -> Check:
    if facts.ours is None:
        return fail("packages", f"{OURS} is not installed", OURS, f"Install {OURS} with pip: SGLang finds plugins by what is installed, not by paths.")
    own, others = [], []
    for row in facts.requirements:
        if not row.fits and _needed(row, asked):
            (others if row.by == "sglang" else own).append(row)
    if not facts.requirements:
        return warn("packages", f"{OURS} {facts.ours}, its requirements cannot be read", "the package named packaging", "Install packaging with pip.")
    if not own and not others:
        return ok("packages", f"{OURS} {facts.ours}, {len(facts.requirements)} requirements are met")
    rows = own or others
    back = " ".join(f"'{row.name}{row.wanted}'" for row in rows)
    return (fail if own else warn)(
        "packages", _some([f"{row.name} {row.installed or 'is missing'}" for row in rows]), _some([f"{row.name}{row.wanted} ({row.by})" for row in rows]),
        f"Put back what was installed together (pip install {back}), or make a fresh environment.")


def _needed(row: Requirement, asked: Asked) -> bool:
    if row.by == "nixl" and row.installed is None:  # it wants a build for every CUDA and loads one
        return False
    if asked.workers:
        return True
    absent = row.installed is None and (row.name in NOT_OF_A_TIER or (row.name.startswith("nixl") and "nixl" not in asked.planes))
    return row.by != "sglang" and not absent


def sglang(facts: Facts, asked: Asked) -> Check:
    found, wanted = facts.sglang, f"{SGLANG_VERSION}, with our plugin and every seam as it was"
    if found is None:
        return skip("sglang", "a tier runs no SGLang")
    if found.error:
        return fail("sglang", found.error, wanted, f"Install sglang=={SGLANG_VERSION} with all it depends on into a fresh environment.")
    only = facts.variables.get("SGLANG_PLUGINS", "")
    if not found.loaded and only:
        return fail("sglang", f"SGLANG_PLUGINS={only} leaves our plugin out", wanted, "Add oasis to SGLANG_PLUGINS, or unset it.")
    if found.problems:
        return fail("sglang", f"{found.version}: {_some(found.problems)}", wanted,
                    f"Install sglang=={SGLANG_VERSION} unchanged: servers refuse to start with this one.")
    if not found.loaded:
        return fail("sglang", f"{found.version} does not load our plugin", wanted, f"Install {OURS} into the environment of SGLang.")
    return ok("sglang", f"{found.version}, no seam has drifted", wanted)


def cuda(facts: Facts, asked: Asked) -> Check:
    """The torch build against the driver: a driver runs what was built for its CUDA or an older one, and within a major version for newer ones."""
    found, card = facts.sglang, facts.accelerator
    if found is None or not found.torch:
        return skip("cuda", "a tier runs no torch" if found is None else "torch cannot be loaded")
    build = f"torch {found.torch}"
    if not found.cuda:
        if card.nodes and not facts.cpu:
            return fail("cuda", f"{build} is built without CUDA, driver {card.driver or 'unknown'}", "a CUDA build",
                        f"Install the torch that sglang {SGLANG_VERSION} pins from the CUDA wheels.")
        return ok("cuda", f"{build}, without CUDA")
    if card.cuda == (0, 0):
        return skip("cuda", f"{build} for CUDA {found.cuda}; no driver here")
    driver, wanted = f"driver {card.driver} for CUDA {card.cuda[0]}.{card.cuda[1]}", f"a driver for CUDA {found.cuda}"
    needed = _numbers(found.cuda)
    if card.cuda[0] < needed[0]:
        return fail("cuda", f"{build}, {driver}", wanted,
                    f"Upgrade the NVIDIA driver of the host to one for CUDA {found.cuda}, or install a torch for CUDA {card.cuda[0]}.")
    if card.cuda < needed[:2]:
        return warn("cuda", f"{build}, {driver}", wanted,
                    f"Upgrade the NVIDIA driver of the host to one for CUDA {found.cuda}, which kernels compiled on first use need.")
    return ok("cuda", f"{build}, {driver}", wanted)


def gpu(facts: Facts, asked: Asked) -> Check:
    found, card = facts.sglang, facts.accelerator
    if found is None:
        return skip("gpu", "a tier uses none")
    explicit, hidden = facts.variables.get("SGLANG_USE_CPU_ENGINE"), facts.variables.get("CUDA_VISIBLE_DEVICES")
    if facts.cpu and explicit == "1":
        return ok("gpu", "CPU mode, as SGLANG_USE_CPU_ENGINE says")
    if facts.cpu and card.nodes and not card.library:
        return fail("gpu", "NVIDIA devices, but no libcuda.so.1: workers would run on the CPU", "the driver's libraries",
                    "Start the container with the NVIDIA runtime (runtimeClassName: nvidia), which mounts them.")
    if facts.cpu and card.nodes:
        return warn("gpu", f"CUDA_VISIBLE_DEVICES={hidden!r} hides all: workers would run on the CPU", "a visible GPU",
                    "Unset CUDA_VISIBLE_DEVICES, or set SGLANG_USE_CPU_ENGINE=1 if the CPU is meant.")
    if facts.cpu:
        return warn("gpu", "none: workers would run on the CPU", "a GPU, or CPU mode by name",
                    "Give the container GPUs (nvidia.com/gpu), or set SGLANG_USE_CPU_ENGINE=1 if the CPU is meant.")
    if found.gpus:
        names = ", ".join(f"{one.name}, {size(one.memory)}" for one in found.gpus)
        return ok("gpu", f"{len(found.gpus)}: {names}")
    if card.others:
        return skip("gpu", "an accelerator that is not NVIDIA's: SGLang decides")
    return fail("gpu", f"torch sees none: {found.gpu_error or found.error or 'it found no device'}", "a GPU that torch can use",
                "Check with nvidia-smi in this container that the GPU is healthy and that driver and torch fit (see cuda).")


def nixl(facts: Facts, asked: Asked) -> Check:
    found = facts.nixl
    if found is None:
        return skip("nixl", "no data plane here uses it")
    if found.error:
        return fail("nixl", found.error, "nixl with its UCX",
                    "Install nixl and nixl-cuXX of one version afresh, or serve and read with --data-plane zmq.")
    return ok("nixl", f"{found.version} ({found.package}), UCX {found.ucx or 'unknown'}")


def keys(facts: Facts, asked: Asked) -> Check:
    if not asked.keys and not asked.allowed:
        return skip("keys", "none given: plaintext, and loopback only unless told otherwise")
    if facts.keys:
        return fail("keys", facts.keys, "a secret key and a list of peers", "Make the pair with `oasis keys create`, keep NAME.key_secret to its owner (mode "
                    "0600, a mounted Secret defaultMode 0400), and list peers with `oasis keys allow`.")
    return ok("keys", f"{asked.keys}; {facts.allowed} nodes are allowed")


def model(facts: Facts, asked: Asked) -> Check:
    if not asked.model:
        return skip("model", "none given")
    if facts.model:
        return fail("model", facts.model, ", ".join(MODELS), "Serve a model of one of these classes, and give --model the folder that has its config.json.")
    return ok("model", asked.model, ", ".join(MODELS))


_TRANSFER_REMEDIES = {
    "nixl": "See nixl, network and memlock above, try UCX_TLS=tcp, or serve and read with --data-plane zmq.",
    "zmq": "Let processes of this host connect to each other over TCP on 127.0.0.1: nothing of the network is in between.",
}


def transfers(facts: Facts, asked: Asked) -> list[Check]:
    if not asked.planes or not asked.transfer:
        return [skip("transfer", "--no-transfer" if asked.planes else "a prefill worker opens no data plane: it writes shared memory")]
    return [_transfer(facts, plane) for plane in asked.planes]


def _transfer(facts: Facts, plane: str) -> Check:
    name, wanted, done = f"transfer {plane}", "records read on this host, checksums equal", facts.transfers[plane]
    if done.error:
        return fail(name, done.error, wanted, _TRANSFER_REMEDIES[plane])
    return ok(name, f"{done.records} records, {done.nbytes:,} bytes in {done.seconds * 1e3:.0f} ms, checksums are equal", wanted)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _some(lines) -> str:
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more
