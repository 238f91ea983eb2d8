"""Options of an Oasis worker.

They come from ``--hisparse-config '{"oasis": {...}}'`` (SGLang passes unknown keys through to every process) and from
``SGLANG_OASIS_CONFIG`` (JSON, or ``@file``), which wins. ``oasis prefill`` and ``oasis decode`` set the latter.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from transport.errors import ConfigError

if TYPE_CHECKING:
    from transport.security import Security

ENV = "SGLANG_OASIS_CONFIG"
ACTIVE_ENV = "SGLANG_OASIS_ACTIVE"


class OasisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker's options; every field is an option of the same name.

    Both: drain_seconds: after a SIGTERM, how long requests may take to end. node: its name (default: the host's).
    summary: kind built at publication and used for scoring, "none" for none;
    the control_ kinds are for measuring. trace_dir: tests only, taps write what they see there.

    Prefill: tier: unix socket of the node's tier. reserve_seconds: how long a prompt may wait for room in the arena.
    tier_start_seconds: how long to wait for the tier at start. restore_min_tokens: with --radix-cache-backend oasis, how long a
    beginning of a prompt must be to be copied back from the tier, when the KV pool no longer has it, instead of being computed.

    Decode, the working set:
    mode: sparse = attend over a working set of blocks, exact = over all of them, as SGLang does.
    budget_tokens: tokens of prompt and folded blocks that a request keeps in the KV pool, for each layer and KV head; the
    first sink_tokens and the last recent_tokens of them always are. tail_tokens: what it keeps beside them, the partial
    page of the prompt and the newest generated tokens. admission: selected = pull only the working set before decoding,
    full = pull every block into the host cache first. on_miss: what happens when a step needs blocks that are not on this
    node: defer = go on without them and have them for a later step, wait = the request (no other) waits for them at the
    step boundary, at most wait_seconds. fetch_blocks_per_step: new blocks pulled per step, on average over layers and KV
    heads, 0 = no limit; in a request's first warmup_steps more, decaying. hysteresis: by how much more expected attention
    than a resident block another one takes its place. lookahead_rows: with speculative decoding, drafted
    rows that choose blocks beside the newest real one; draft_trust: how much more of its attention than the newest real row a
    drafted row may miss and still be accepted (1 = accept all that are right, 0 = none: drafts only choose blocks).
    profile: file of `oasis calibrate`, its critical heads are served from all blocks, out of a lane of lane_tokens (0: four
    times the KV pool's) beside the KV pool. host_cache_bytes: host memory for pieces pulled and for sealed generated blocks.
    publish_generated: give the tier the whole blocks of each answer (it must accept them), for prefill and other decode nodes.
    inner_backend: SGLang's attention backend inside ours ("": the one that SGLang would choose).

    Decode, the transfer: keys, allowed: this node's secret key file, and the folder of the public keys of the tiers that it may
    connect to (see `oasis keys`); without them allow_plaintext must be set for tiers on other hosts. data_plane: nixl | zmq (the tier
    must serve it). staging_bytes, staging_windows: host memory that
    reads land in. await_seconds: how long to wait for prefill's commit; begin_seconds: of that, until the prompt has reached a prefill
    worker. read_seconds: one window's deadline.
    silence_seconds: a tier that answers nothing for so long is dead. on_failure: recompute | fail, what becomes of a request that loses its
    tier or gets damaged KV twice: a prefill worker computes it again, at most recompute_attempts times and within recompute_seconds of the
    failure, or it ends. prefill_addresses: bootstrap addresses (host:port, with commas) of prefill workers to ask beside the one that
    the request came with. hold_reads_file: fault tests only, no read starts
    while this file exists.
    """

    tier: str = ""
    node: str = ""
    keys: str = ""
    allowed: str = ""
    allow_plaintext: bool = False
    data_plane: str = "nixl"
    mode: str = "sparse"
    admission: str = "selected"
    on_miss: str = "defer"
    budget_tokens: int = 1024
    sink_tokens: int = 16
    recent_tokens: int = 64
    tail_tokens: int = 256
    fetch_blocks_per_step: int = 2
    warmup_steps: int = 0
    hysteresis: float = 3.0
    lookahead_rows: int = 1
    draft_trust: float = 0.25
    profile: str = ""
    lane_tokens: int = 0
    wait_seconds: float = 2.0
    host_cache_bytes: int = 2 << 30
    publish_generated: bool = False
    inner_backend: str = ""
    summary: str = "mean_var_int8"
    staging_bytes: int = 64 << 20
    staging_windows: int = 8
    reserve_seconds: float = 30.0
    await_seconds: float = 300.0
    begin_seconds: float = 60.0
    read_seconds: float = 30.0
    silence_seconds: float = 10.0
    tier_start_seconds: float = 60.0
    on_failure: str = "recompute"
    recompute_attempts: int = 2
    recompute_seconds: float = 60.0
    prefill_addresses: str = ""
    restore_min_tokens: int = 64
    drain_seconds: float = 30.0
    hold_reads_file: str = ""
    trace_dir: str = ""

    def validate(self, role: str) -> OasisConfig:
        """Raises ``ConfigError`` naming the option."""
        from oasis_sglang.selection import CONTROL_NAMES, SUMMARY_NAMES

        choices = {"data_plane": ("nixl", "zmq"), "mode": ("sparse", "exact"), "admission": ("selected", "full"),
                   "on_miss": ("defer", "wait"), "on_failure": ("recompute", "fail"), "summary": (*SUMMARY_NAMES, *CONTROL_NAMES, "none")}
        for option, allowed in choices.items():
            if getattr(self, option) not in allowed:
                raise ConfigError(f"Oasis option {option}={getattr(self, option)!r} is not one of {', '.join(allowed)}")
        for option in ("staging_bytes", "staging_windows", "reserve_seconds", "await_seconds", "begin_seconds", "read_seconds", "silence_seconds",
                       "tier_start_seconds", "budget_tokens", "sink_tokens", "recent_tokens", "tail_tokens", "wait_seconds", "host_cache_bytes",
                       "recompute_attempts", "recompute_seconds"):
            if not 0 < getattr(self, option) < float("inf"):
                raise ConfigError(f"Oasis option {option} must be positive")
        for option in ("restore_min_tokens", "drain_seconds", "fetch_blocks_per_step", "warmup_steps", "hysteresis", "lookahead_rows", "lane_tokens"):
            if not 0 <= getattr(self, option) < float("inf"):
                raise ConfigError(f"Oasis option {option} must not be negative")
        for address in self.other_prefills():
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise ConfigError(f"Oasis option prefill_addresses: {address!r} is not host:port")
        if not 0 <= self.draft_trust <= 1:
            raise ConfigError("Oasis option draft_trust is a share, 0 to 1")
        if role == "prefill" and not self.tier:
            raise ConfigError("Oasis option tier is missing: the unix socket of this node's `oasis tier`")
        if role == "decode" and self.mode == "exact" and self.profile:
            raise ConfigError("Oasis option profile needs mode=sparse: with mode=exact every head attends to all blocks")
        if role == "decode" and self.mode == "sparse" and self.summary == "none":
            raise ConfigError("Oasis option mode=sparse needs block summaries: set summary on both workers, or mode=exact")
        if role == "decode":
            self.security()
        return self

    def other_prefills(self) -> list[str]:
        return [address.strip() for address in self.prefill_addresses.split(",") if address.strip()]

    def security(self) -> Security:
        """What a decode node's sockets are held to. Reads the key files; raises ``ConfigError`` naming the option."""
        from transport.security import Security

        return Security.load(self.keys, self.allowed, self.allow_plaintext, prefix="--oasis-")


_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_size(text: object) -> int:
    """Bytes of "1GiB", "512 MiB", "1.5GB" or a plain number. Raises ``ConfigError``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text), re.ASCII)
    if not match or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size such as 1GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def plain(options: dict) -> dict:
    """The options as fields: hyphens in names become underscores, sizes with a unit become bytes. Raises ``ConfigError``."""
    fields = {name.replace("-", "_"): value for name, value in options.items()}
    for name in ("staging_bytes", "host_cache_bytes"):
        if isinstance(fields.get(name), str):
            fields[name] = parse_size(fields[name])
    return fields


def parse(options: dict) -> OasisConfig:
    """Raises ``ConfigError`` naming an unknown option or a wrong type."""
    options = plain(options)
    unknown = sorted(set(options) - set(OasisConfig.__struct_fields__))
    if unknown:
        raise ConfigError(f"unknown Oasis option {', '.join(unknown)}; known: {', '.join(OasisConfig.__struct_fields__)}")
    try:
        return msgspec.convert(options, OasisConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"Oasis options: {error}") from error


def load(hisparse_config: str | None = None) -> OasisConfig:
    """This process' options. ``hisparse_config``: the flag's JSON text, if it was given."""
    options = _object("--hisparse-config", hisparse_config).get("oasis", {})
    if not isinstance(options, dict):
        raise ConfigError("--hisparse-config: oasis is not a JSON object")
    return parse({**options, **inherited()})


def inherited() -> dict:
    """The options in the environment. Raises ``ConfigError``."""
    return _object(ENV, os.environ.get(ENV))


def _object(name: str, text: str | None) -> dict:
    """``text``: JSON or ``@file``; nothing is an empty object."""
    if not text:
        return {}
    try:
        parsed = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} is not readable JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name} is not a JSON object: {text}")
    return parsed


def active() -> bool:
    """Whether this server chose ``--disaggregation-transfer-backend oasis`` (set while its arguments were resolved)."""
    return os.environ.get(ACTIVE_ENV) == "1"
