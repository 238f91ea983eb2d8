"""Joins SGLang's queues to our nodes: layout and model checks, tier attachment, threads.

Runs in the scheduler process while it starts; whatever it raises ends the server with that message.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter

import msgspec

from oasis_sglang import config
from oasis_sglang.fingerprint import model_fingerprint
from oasis_sglang.metrics import Exporter
from oasis_sglang.models_supported import check_model
from transport.errors import ConfigError, OasisError, PeerLost
from transport.layout import KVLayout

log = logging.getLogger("oasis")

LANE_SHARE = 4
"""Tokens of the dense lane per token of the KV pool, by default: with a twentieth of the heads in it, a fifth of the pool's bytes."""


def check_pool(pool, summary) -> None:
    """Raises ``ConfigError`` naming the field for a KV pool that records cannot describe."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from decode_node.pool import CompactPool

    if type(pool) not in (MHATokenToKVPool, CompactPool):
        raise ConfigError(f"Oasis needs SGLang's plain MHA KV pool, this model uses {type(pool).__name__} (MLA, SWA and mamba models are refused)")
    if pool.head_dim != pool.v_head_dim:
        raise ConfigError(f"Oasis needs equal head dimensions of K and V (head_dim {pool.head_dim}, v_head_dim {pool.v_head_dim})")
    if pool.k_buffer[0].ndim != 3:
        raise ConfigError(f"Oasis needs the NHD KV layout, not {getattr(pool, 'kv_cache_layout', 'this one')} (field kv_cache_layout)")
    if summary is not None and pool.k_buffer[0].dtype != pool.dtype:
        raise ConfigError(f"Oasis cannot summarise a KV cache stored as codes (field kv_cache_dtype = {pool.dtype}); set its option summary to none")


def check_queue(queue) -> None:
    """Raises ``ConfigError`` naming the field for state beside the pool that is not handed over."""
    if queue.draft_token_to_kv_pool is not None:
        raise ConfigError("Oasis does not hand over the KV of a draft model (field speculative_algorithm)")
    if queue.metadata_buffers.output_ids.device.type != "cpu":
        raise ConfigError("Oasis needs hand-over rows in host memory (SGLANG_MOONCAKE_CUSTOM_MEM_POOL)")


def layout_of(manager, pool, summary) -> KVLayout:
    first = pool.k_buffer[0]
    return KVLayout(
        num_layers=pool.layer_num, kv_heads=pool.head_num, head_dim=pool.head_dim, block_tokens=pool.page_size,
        dtype=str(pool.dtype).removeprefix("torch."), itemsize=first.element_size(), tp_size=manager.attn_tp_size,
        summary=summary.name if summary else "none", summary_bytes=summary.bytes(pool.head_dim) if summary else 0,
        metadata_lens=tuple(manager.kv_args.aux_item_lens))


def _common(manager, queue, role: str):
    from sglang.srt.runtime_context import get_memory

    from oasis_sglang.selection.controls import CONTROLS
    from oasis_sglang.selection.summaries import SUMMARIES

    scheduler, pool = queue.scheduler, queue.token_to_kv_pool
    options = config.load(get_memory().hisparse_config).validate(role)
    check_model(scheduler.model_config.hf_config.to_dict())
    check_queue(queue)
    summary = (SUMMARIES | CONTROLS).get(options.summary)
    check_pool(pool, summary)
    layout = layout_of(manager, pool, summary)
    model = scheduler.model_config
    fingerprint = model_fingerprint(model.model_path, model.hf_config.to_dict(), str(model.dtype), str(model.quantization))
    node = options.node or socket.gethostname()
    export = Exporter(role, manager.attn_tp_rank) if scheduler.metrics_reporter.enable_metrics else (lambda *figures: None)
    return scheduler, pool, options, summary, layout, fingerprint, node, export


def bind_prefill(manager, queue) -> None:
    """Attaches this prefill rank to its tier and starts the publisher; with ``--radix-cache-backend oasis`` binds the radix tree to it."""
    from sglang.srt.runtime_context import get_memory

    from prefill_node.pages import PageSource
    from prefill_node.publisher import Publisher
    from prefill_node.restore import ANSWER_SECONDS, Restorer
    from transport import messages as m
    from transport.hashing import chain_seed
    from transport.worker_client import WorkerClient

    scheduler, pool, options, summary, layout, fingerprint, node, export = _common(manager, queue, "prefill")
    hello = dict(node=f"{node}:{os.getpid()}", rank=manager.attn_tp_rank, layout=layout, fingerprint=fingerprint)
    source = PageSource(pool.k_buffer, pool.v_buffer, layout)

    restorer = None
    if get_memory().radix_cache_backend == "oasis" and get_memory().enable_unified_cache_external_linker:
        restorer = Restorer(WorkerClient(options.tier, timeout=ANSWER_SECONDS), hello, source, min_tokens=options.restore_min_tokens,
                            stream=scheduler.forward_stream if pool.k_buffer[0].is_cuda and scheduler.enable_overlap else None)

    def attach() -> Publisher:
        return Publisher(WorkerClient(options.tier), hello, source, summary, reserve_seconds=options.reserve_seconds,
                         export=lambda totals, gauges: export({**totals, **(restorer.totals if restorer else {})}, gauges))

    publisher = _patiently(attach, options.tier_start_seconds)

    def identify(req) -> bytes | None:
        """Start of the prompt's hash chain, or None for a prompt that its token ids do not determine."""
        if req.multimodal_inputs is not None or req.input_embeds is not None:
            return None
        return chain_seed(layout, fingerprint, manager.attn_tp_rank, manager.cache_epoch, req.extra_key or "", req.cache_salt or "", req.lora_id or "")

    def wish(req) -> m.Wish | None:
        return None if restorer is None else restorer.wish(*scheduler.tree_cache.missing(req))

    # Keys stored as codes cannot be attended to.
    tap = getattr(scheduler.tp_worker.model_runner, "oasis_tap", None) if pool.k_buffer[0].is_floating_point() else None
    manager.bind(publisher, {"layout": msgspec.to_builtins(layout), "fingerprint": fingerprint}, identify, tap, restorer, wish)
    if restorer is not None:
        scheduler.tree_cache.bind(restorer, identify)
    geometry = publisher.client.welcome.geometry
    log.info("prefill rank %d publishes to %s: %d records of %d bytes", manager.attn_tp_rank, options.tier, geometry.num_records, layout.payload_bytes)


def _patiently(attach, seconds: float):
    """Workers and tiers start in any order: an absent tier is waited for, a tier that says no is not."""
    deadline = time.monotonic() + seconds
    told = False
    while True:
        try:
            return attach()
        except PeerLost as error:
            if time.monotonic() >= deadline:
                raise ConfigError(f"no tier within {seconds:g} s: {error}") from error
            if not told:
                told = True
                log.warning("waiting for the tier: %s", error)
            time.sleep(0.2)


def make_coordinator(runner):
    """The coordinator of a decode server with working sets, before its attention back end is built. Raises ``ConfigError``."""
    from sglang.srt.runtime_context import get_memory, get_spec

    from decode_node.budget import make_budget
    from decode_node.coordinator import Coordinator
    from decode_node.pool import CompactAllocator, CompactPool

    options = config.load(get_memory().hisparse_config)
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    if type(pool) is not CompactPool or type(allocator) is not CompactAllocator:
        raise ConfigError(f"Oasis option mode=sparse got {type(pool).__name__} and {type(allocator).__name__}, not its own KV pool and allocator")
    draft = (get_spec().speculative_num_draft_tokens or 0) if runner.spec_algorithm.is_some() else 0
    budget = make_budget(pool.page_size, options.budget_tokens, options.sink_tokens, options.recent_tokens, options.tail_tokens,
                         options.on_miss == "wait", draft)
    return Coordinator(runner, budget, _make_lane(runner, pool, budget, options) if options.profile else None)


def _make_lane(runner, pool, budget, options: config.OasisConfig):
    """The dense lane for the critical heads of the profile; None when this rank has none. Raises ``ConfigError``."""
    from sglang.srt.runtime_context import get_parallel

    from decode_node.budget import most_sets
    from decode_node.lane import DenseLane
    from oasis_sglang.fingerprint import profile_fingerprint
    from oasis_sglang.selection.profile import Profile

    model, page, parallel = runner.model_config, pool.page_size, get_parallel()
    heads = model.get_total_num_kv_heads()
    try:
        profile = Profile.load(options.profile)
        profile.require(profile_fingerprint(model.model_path), model.num_hidden_layers, heads)
        pieces = profile.pieces(parallel.attn_tp_rank * heads // parallel.attn_tp_size, pool.head_num)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Oasis option profile={options.profile!r}: {error}") from error
    if not len(pieces):
        return None
    least = (budget.working + budget.tail) * page
    if options.lane_tokens and options.lane_tokens < least:
        raise ConfigError(f"Oasis option lane_tokens={options.lane_tokens} holds no request that selects", limit=f"at least {least}")
    rows, context = runner.req_to_token_pool.req_to_token.shape
    shape = dict(head_dim=pool.head_dim, page=page, sets=most_sets(budget, rows, pool.size // page), context=context + 2 * budget.draft,
                 tokens=options.lane_tokens or LANE_SHARE * pool.size)
    _require_memory(DenseLane.bytes(len(pieces), itemsize=pool.store_dtype.itemsize, **shape), pool.device, "the dense lane needs", "lane_tokens")
    lane = DenseLane(pieces, layers=pool.layer_num, kv_heads=pool.head_num, dtype=pool.store_dtype, device=pool.device, **shape)
    log.info("%d of %d (layer, KV head)s are served from all blocks, out of a lane of %d tokens: %d bytes beside the KV pool", len(pieces),
             pool.layer_num * pool.head_num, lane.capacity, lane.kv.nbytes + lane.table.nbytes)
    return lane


def bind_decode(manager, queue) -> None:
    """Builds this decode rank's data plane and starts the puller."""
    import torch
    from sglang.srt.runtime_context import get_memory

    from decode_node.destination import WholePages
    from decode_node.pages import PageSink
    from decode_node.pull import PullLimits
    from decode_node.puller import Puller
    from transport.dataplane import MeteredPlane
    from transport.planes import incarnation, make_plane
    from transport.staging import Staging

    scheduler, pool, options, summary, layout, fingerprint, node, export = _common(manager, queue, "decode")
    allocator = queue.token_to_kv_pool_allocator
    coordinator = scheduler.hisparse_coordinator
    window = max(options.staging_bytes // options.staging_windows, layout.payload_bytes)
    staging = Staging(window, options.staging_windows)
    security = options.security()
    if security.allow_plaintext:
        log.warning("tiers on other hosts are talked to without encryption or authentication (allow_plaintext)")
    plane = MeteredPlane(make_plane(options.data_plane, incarnation(f"{node}:{manager.attn_tp_rank}"), staging.region, security=security))
    physical = allocator if coordinator is None else coordinator.physical
    peaks, started = {"kv_pool_tokens_peak": 0}, time.monotonic()

    def in_use() -> int:
        """Tokens of the KV pool that requests hold; what only the radix tree still has can be had at once."""
        return physical.size - physical.available_size() - (scheduler.tree_cache.evictable_size() if coordinator is None else 0)

    def sample() -> None:
        peaks["kv_pool_tokens_peak"] = max(peaks["kv_pool_tokens_peak"], in_use())

    def written() -> torch.cuda.Event | None:
        """An event after which pages that SGLang has freed are written no more: with overlap the forward of a request
        that has finished may still run."""
        if not (pool.k_buffer[0].is_cuda and scheduler.enable_overlap):
            return None
        event = torch.cuda.Event()
        event.record(scheduler.forward_stream)
        return event

    def exported(totals, gauges) -> None:
        sets, stalls = {}, None
        if coordinator is not None and coordinator.stepper is not None:
            stalls = coordinator.stepper.stalls.report()
            cache, store = coordinator.cache, coordinator.reuse.store
            totals = {**totals, **coordinator.stepper.totals, **{f"reuse_{name}": value for name, value in coordinator.reuse.totals.items()},
                      "cache_evicted": cache.evicted, "blocks_evicted": store.evicted}
            sets = {"host_cache_bytes": cache.used_bytes, "working_sets": coordinator.sets.size - coordinator.sets.free,
                    "blocks_held": store.held, "blocks_cached": store.cached}
        export({**totals, **recovery.totals}, {**gauges, **sets, "host_bytes": staging.region.nbytes, "kv_pool_tokens": in_use()}, stalls)

    sink = PageSink(pool.k_buffer, pool.v_buffer, layout)
    puller = Puller(
        node=f"{node}:{os.getpid()}", rank=manager.attn_tp_rank, layout=layout, fingerprint=fingerprint,
        plane=plane, staging=staging, resolve=manager.resolve, forget=manager.forget,
        limits=PullLimits(options.await_seconds, options.read_seconds, options.silence_seconds, options.begin_seconds, options.hold_reads_file),
        sample=sample, export=exported, security=security)

    recovery = _make_recovery(manager, puller, options)

    def report() -> dict:
        return {
            "config": msgspec.to_builtins(options), "layout": msgspec.to_builtins(layout), "fingerprint": fingerprint,
            "uptime_seconds": int(time.monotonic() - started), "host_bytes_reserved": staging.region.nbytes, "host_bytes_peak": puller.reader.staged_peak,
            "kv_pool_tokens": in_use(), **peaks,
            "staging": {"free": staging.free, "leased": staging.leased, "quarantined": staging.quarantined},
            "flights": len(puller.reader.flights),
            "plane": {"kind": plane.kind, "requested_bytes": sum(plane.requested.values()), "landed_bytes": sum(plane.landed.values()),
                      "reads": plane.reads, "descriptors": plane.descriptors},
            **({"radix": dict(radix)} if coordinator is None else {"working_sets": coordinator.report()})}

    if coordinator is None:
        radix = Counter(hit_tokens=0, hit_bytes=0)  # the scheduler's thread alone counts them

        def fetch(req, pull, pages, write_row) -> None:
            hit = int((pages < 0).sum()) * layout.block_tokens
            radix.update(hit_tokens=hit, hit_bytes=hit * layout.token_bytes)
            puller.fetch(pull, WholePages(sink, layout, pages), write_row, written())
    else:
        query_heads = scheduler.model_config.num_attention_heads // manager.attn_tp_size
        coordinator.overlap, coordinator.recovery = scheduler.enable_overlap, recovery
        keep = get_memory().radix_cache_backend == "oasis"
        fetch = _bind_working_sets(coordinator, query_heads, options, summary, layout, sink, puller, written, keep=keep)
    release = (lambda req: None) if coordinator is None else coordinator.request_finished
    manager.bind(puller, layout, fingerprint, report, fetch, release, recovery)
    log.info("decode rank %d pulls over %s into %d windows of %d bytes", manager.attn_tp_rank, plane.kind, options.staging_windows, window)


def _make_recovery(manager, puller, options: config.OasisConfig):
    """What is done about requests that lose their KV."""
    from sglang.srt.runtime_context import get_serving

    from decode_node.policy import RecoveryLimits
    from decode_node.recompute import Recomputer
    from decode_node.recovery import Recovery

    def start(order, source: str):
        return puller.pull(order.room, source, rid=order.rid, seconds=max(0.0, order.deadline - time.monotonic()))

    key = get_serving().api_key
    recomputer = Recomputer(addresses=options.other_prefills(), look=manager.look, start=start, cancel=puller.cancel,
                            headers={"Authorization": f"Bearer {key}"} if key else {})
    return Recovery(RecoveryLimits(options.on_failure, options.recompute_attempts, options.recompute_seconds), manager.attn_tp_size, recomputer)


def _bind_working_sets(coordinator, query_heads, options, summary, layout, sink, puller, written, *, keep: bool = False):
    """Completes the coordinator. ``keep``: blocks outlive their requests.

    Returns ``fetch(req, pull, pages, write_row)`` for receivers. Raises ``ConfigError``."""
    from decode_node.admission import AllBlocks, PieceReads, SelectedBlocks
    from decode_node.block_store import BlockStore
    from decode_node.budget import most_sets
    from decode_node.destination import WholePages
    from decode_node.host_cache import HostCache
    from decode_node.lookahead import Lookahead
    from decode_node.pieces import PoolPieces
    from decode_node.reuse import Reuse
    from decode_node.stepper import Stepper
    from decode_node.working_set import WorkingSets
    from oasis_sglang.trace import Trace

    budget, page = coordinator.budget, layout.block_tokens
    blocks = coordinator.max_blocks
    one = (blocks if options.admission == "full" else budget.working) * layout.payload_bytes
    if options.host_cache_bytes < one:
        raise ConfigError(f"Oasis option host_cache_bytes={options.host_cache_bytes} is smaller than one admission", limit=f"{one} bytes")
    count = most_sets(budget, coordinator.req_to_token.shape[0], coordinator.physical.size // page)
    # Enough for every set to be as long as it can, and for as many blocks as the pool can hold beside them.
    numbers = count * blocks + coordinator.physical.size // page
    device, lane = coordinator.pool.device, coordinator.lane
    scores = Lookahead.bytes(layout, count, budget.draft or 1, blocks)
    lower = "--max-running-requests, --context-length or --max-total-tokens, or raise budget_tokens"
    _require_memory(WorkingSets.bytes(layout, count, blocks, numbers, budget.working) + scores, device, "the working sets' tables need", lower)
    _require_memory(HostCache.table_bytes(layout.pieces, numbers) + BlockStore.bytes(layout.pieces, numbers), "cpu", "the tables of blocks need", lower)
    sets = WorkingSets(layout, summary, sets=count, blocks=blocks, numbers=numbers, working=budget.working, sink=budget.sink, recent=budget.recent,
                       device=device, dense=None if lane is None else lane.place >= 0, sticky=options.hysteresis)
    cache = HostCache(layout.pieces, numbers, layout.piece_bytes, options.host_cache_bytes, pin=coordinator.pool.kv.is_cuda)
    pieces = PoolPieces(coordinator.pool.kv, layout)
    reuse = Reuse(BlockStore(numbers, layout.pieces, cache), cache, sets, coordinator.table, pieces, enabled=keep,
                  donate=puller.donate if options.publish_generated else None)
    reads = PieceReads(layout, reuse.store, cache, sets, lane, reuse.totals, keep=keep)
    totals: Counter[str] = Counter()
    lookahead = Lookahead(
        sets=sets, cache=cache, group=query_heads // layout.kv_heads, scale=layout.head_dim**-0.5, cap=options.fetch_blocks_per_step,
        warmup=options.warmup_steps, ahead=options.lookahead_rows, trust=options.draft_trust, totals=totals,
        pull=lambda entry, which, of: puller.demand(entry.pull, reads.job(entry, "on_demand", which, of)))
    stepper = Stepper(table=coordinator.table, sets=sets, cache=cache, pool=pieces, lookahead=lookahead, reuse=reuse,
                      wait_seconds=options.wait_seconds, totals=totals)

    def admit(entry) -> None:
        if entry.set is None and entry.numbers is not None:
            destination = AllBlocks(entry, reads, sink)
        elif entry.set is None:
            destination = WholePages(sink, layout, entry.pages[: -(-entry.prompt // page)])
        else:
            destination = SelectedBlocks(entry, reads, pieces, sink, whole_cache=options.admission == "full")
        puller.fetch(entry.pull, destination, entry.write_row, written())

    def fetch(req, pull, pages, write_row) -> None:
        entry = coordinator.reserve(req, pull, write_row)
        if (life := getattr(req, "oasis", None)) is not None:
            life.entries.append(entry)

    trace = Trace(options.trace_dir) if options.trace_dir else None
    if trace is not None:
        puller.reader.landed = lambda phase, posted, now, size: trace.write("read", phase=phase, posted=posted, landed=now, bytes=size)
    coordinator.bind(pieces=pieces, sets=sets, cache=cache, stepper=stepper, reuse=reuse, puller=puller, admit=admit,
                     trace=trace)
    log.info("decode keeps %d blocks of %d tokens per layer and KV head, tails of %d pages, %d working sets, a host cache of %d pieces; "
             "%s", budget.working, page, budget.tail, count, cache.capacity,
             "what requests leave behind is kept for the next" if keep else "nothing is kept from one request to the next")
    return fetch


def _require_memory(needed: int, device: str, what: str, lower: str) -> None:
    """Raises ``ConfigError`` when ``what`` does not fit the device beside what is there, saying what to ``lower``."""
    import psutil
    import torch

    free = torch.cuda.mem_get_info(device)[0] if torch.device(device).type == "cuda" else psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(f"{what} {needed} bytes, {free} are free: lower {lower}")


def report(scheduler) -> dict:
    """What ``/server_info`` shows under ``oasis``."""
    for queue in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        if getattr(scheduler, queue, None) is not None:
            try:
                return getattr(scheduler, queue).kv_manager.report()
            except OasisError as error:
                return {"error": str(error)}
    return {}
