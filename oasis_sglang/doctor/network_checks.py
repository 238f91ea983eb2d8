"""Which network devices KV would go over."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from oasis_sglang.doctor.asked import Asked
from oasis_sglang.doctor.check import Check, fail, ok, skip, warn
from oasis_sglang.doctor.facts import Facts
from oasis_sglang.doctor.probe import Device

LOOPBACK = "lo"
INSIDE = re.compile(r"(docker|br-|cni|virbr|veth|cali|flannel|kube-|tunl|podman|lxc)")
"""How interfaces are called that join containers of one host, and lead no further by themselves."""


def network(facts: Facts, asked: Asked) -> Check:
    if not asked.planes:
        return skip("network", "a prefill worker opens no data plane")
    if facts.nixl is None:
        return _plain(facts)
    if facts.nixl.error or facts.nixl.ucx_error:
        if facts.nixl.error:
            return skip("network", "NIXL cannot be asked")
        tls = facts.variables.get("UCX_TLS", "")
        return fail("network", f"{facts.nixl.ucx_error} (UCX_TLS={tls or 'unset'})", "a device that UCX can use",
                    "Set UCX_TLS to transports that there are (tcp is always one), or unset it.")
    return _of_ucx(facts)


def _plain(facts: Facts) -> Check:
    """For ZeroMQ alone, which listens where the tier is told to."""
    outside = [one.name for one in facts.interfaces if not one.loopback and not one.bridge]
    if outside:
        return ok("network", f"{', '.join(outside)}; ZeroMQ goes by --listen and --advertise")
    return warn("network", "loopback only", "an interface", "Give this host or pod a network, unless all nodes run on it.")


def _of_ucx(facts: Facts) -> Check:
    chosen = [device for device in facts.nixl.chosen if device.name != LOOPBACK]
    listed = facts.variables.get("UCX_NET_DEVICES", "")
    there = ", ".join(device.name for device in facts.nixl.devices) or "none"
    missing = unknown(listed, [device.name for device in facts.nixl.devices])
    wanted = "a device that other hosts reach"
    if not facts.nixl.chosen or (missing and not chosen):
        return fail("network", f"UCX_NET_DEVICES={listed or 'unset'} leaves none of: {there}", wanted,
                    "Set UCX_NET_DEVICES to devices from that list, or unset it: UCX goes on without a network when it finds none.")
    if not chosen:
        return warn("network", f"{LOOPBACK} only", wanted,
                    "Give this host or pod a network, or name its interface in UCX_NET_DEVICES, unless all nodes run on it.")
    if missing:
        return warn("network", f"no {', '.join(missing)}, but {_told(chosen)}", wanted,
                    f"Leave {', '.join(missing)} out of UCX_NET_DEVICES: there are {there}.")
    bridges = {one.name for one in facts.interfaces if one.bridge}
    if inside := [device.name for device in chosen if device.name in bridges or INSIDE.match(device.name)]:
        return warn("network", f"{_told(chosen)}: {', '.join(inside)} joins containers of this host", wanted,
                    "Set UCX_NET_DEVICES to the interface that leads to the other hosts.")
    if not listed and len(chosen) > 1 and not any(device.rdma for device in chosen):
        route = f", the default route is over {facts.route}" if facts.route else ""
        return warn("network", f"{_told(chosen)}: UCX may take any{route}", wanted, "Set UCX_NET_DEVICES to the interface that KV is to go over.")
    return ok("network", _told(chosen), wanted)


def unknown(listed: str, there: list[str]) -> list[str]:
    """Entries of ``listed`` (as UCX_NET_DEVICES has them, with ranges such as ``mlx5_[0-3]:1``) that name none of the devices ``there``."""
    if listed in ("", "all") or listed.startswith("^"):
        return []
    entries = [entry.strip() for entry in listed.split(",") if entry.strip()]
    return [entry for entry in entries if not any(fnmatchcase(name, entry) for name in there)]


def _told(devices: list[Device]) -> str:
    return ", ".join(f"{device.name} ({', '.join(device.transports)})" for device in devices)


def rdma(facts: Facts, asked: Asked) -> Check:
    if facts.nixl is None:
        return skip("rdma", "no data plane here uses it")
    if not facts.rdma:
        return skip("rdma", "no device: NIXL goes over TCP")
    names = ", ".join(device.name for device in facts.rdma)
    if used := [device.name for device in facts.nixl.chosen if device.rdma]:
        return ok("rdma", f"{', '.join(used)} of {names}")
    if shut := [device.name for device in facts.rdma if not device.usable]:
        return warn("rdma", f"{', '.join(shut)} cannot be opened here: NIXL goes over TCP", "its file in /dev/infiniband",
                    "Give the container the cluster's RDMA resource (such as rdma/ib: 1), or set UCX_TLS=tcp if TCP is meant.")
    if not any(device.active for device in facts.rdma):
        return warn("rdma", f"no port of {names} is active: NIXL goes over TCP", "an active port",
                    "Bring the link up (ibstat shows its state; InfiniBand needs a subnet manager).")
    if facts.variables.get("UCX_TLS") or facts.variables.get("UCX_NET_DEVICES"):
        return ok("rdma", f"{names} left out by UCX_TLS or UCX_NET_DEVICES: NIXL goes over TCP")
    return warn("rdma", f"UCX takes none of {names}: NIXL goes over TCP", "a device that UCX uses", "Look at what UCX says with UCX_LOG_LEVEL=info.")
