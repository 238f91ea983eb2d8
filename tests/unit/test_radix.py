"""The radix cache named oasis: which tree a server gets, what it asks the tier for, and which options go with it."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from node_rig import until
from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from oasis_sglang import config, hooks, plugin, radix
from oasis_sglang.config import OasisConfig
from transport.errors import ConfigError
from transport.hashing import page_hashes
from transport.records import HASH_BYTES

PAGE = 4
SEED = b"s" * 32


class Request:
    def __init__(self, rid="r", seed=SEED):
        self.rid, self.seed = rid, seed


class Restorer:
    """Finds ``pages`` of whatever it is asked for, and says yes to it."""

    def __init__(self, pages=0, *, fine=True):
        self.pages, self.fine, self.asked, self.filled, self.batches, self.tokens = pages, fine, [], [], 0, []

    def find(self, hashes):
        self.asked.append(hashes)
        return min(self.pages, len(hashes) // HASH_BYTES)

    def restore(self, hashes, pages):
        self.filled.append((hashes, pages.tolist()))
        return self.fine

    def built(self):
        self.batches += 1

    def computed(self, tokens):
        self.tokens.append(tokens)


class Component:
    def build_external_linker_transfer(self, phase, node, keys):
        return PoolTransfer(name=PoolName.KV, keys=list(keys))


class Tree:
    """What SGLang's use of a linker needs of a tree. ``reduced``: what this rank brought to each agreement."""

    page_size = PAGE

    def __init__(self, restorer, *, others=1):
        full = Component()
        self.tree_components, self.components, self._components_tuple = (ComponentType.FULL,), {ComponentType.FULL: full}, (full,)
        self.tree_core = SimpleNamespace(is_eagle=False, enable_external_cache_linker=None)
        self.reduced, self.others = [], others
        allocator = SimpleNamespace(get_kvcache=lambda: "pool")
        linker = radix.TierLinker(None, SimpleNamespace(page_size=PAGE, token_to_kv_pool_allocator=allocator), components=set(), extra_config={})
        radix.RestoringTree.init_cache_linker(self, linker)
        self.linker.identify, self.linker.cache_linker.restorer = (lambda req: req.seed), restorer

    def _all_reduce_attn_groups(self, tensor, op):
        self.reduced.append(tensor.tolist())
        tensor *= self.others

    def _agree(self, restored):
        return radix.RestoringTree._agree(self, restored)

    def match(self, tokens, *, req, held=0, limit=None):
        result = MatchResult(device_prefix_len=held, last_device_node=0, last_host_node=0, best_match_node=0)
        return self.linker.match(RadixKey(tokens, limit=limit), req, result)


TOKENS = list(range(100, 131))


def chain(tokens=TOKENS, seed=SEED) -> bytes:
    return page_hashes(seed, np.array(tokens, np.int64), PAGE)


def test_the_tier_is_asked_for_what_the_tree_does_not_hold_by_the_publishers_hashes():
    restorer = Restorer(pages=2)
    tree, req = Tree(restorer), Request()
    result = tree.match(TOKENS, req=req, held=8, limit=21)
    assert restorer.asked == [chain()[2 * HASH_BYTES : 5 * HASH_BYTES]], "whole pages below the limit"
    assert (result.device_prefix_len, result.host_hit_length) == (8, 8) and tree.linker.has_hit("r")
    assert tree.reduced == [[0, 1, 1, 0]], "each beginning of it can be restored, whichever the ranks have in common"
    assert tree.match(TOKENS, req=req, held=20, limit=21).host_hit_length == 0 and not tree.linker.has_hit("r"), "an earlier round's hit is void"
    assert len(restorer.asked) == 1


def test_prompts_without_an_identity_are_not_asked_for_and_tenants_have_their_own_names():
    restorer = Restorer(pages=9)
    tree = Tree(restorer)
    assert tree.match(TOKENS, req=Request(seed=None)).host_hit_length == 0 and restorer.asked == [] and tree.reduced == []
    tree.match(TOKENS, req=Request("a"))
    tree.match(TOKENS, req=Request("b", seed=b"o" * 32))
    assert restorer.asked == [chain(), chain(seed=b"o" * 32)]
    tree.linker.identify = None
    assert tree.match(TOKENS, req=Request("c")).host_hit_length == 0 and len(restorer.asked) == 2, "nothing is bound yet"


def test_hashes_are_kept_with_the_request_and_follow_its_tokens(monkeypatch):
    made = []
    monkeypatch.setattr(radix, "page_hashes", lambda seed, tokens, page: made.append(len(tokens)) or page_hashes(seed, tokens, page))
    restorer = Restorer()
    tree, req = Tree(restorer), Request()
    tree.match(TOKENS, req=req, limit=20)
    tree.match(TOKENS, req=req, limit=12)
    tree.match(TOKENS, req=req, held=4)
    tree.match(TOKENS, req=req, held=4)
    assert made == [20, 28] and restorer.asked[1:] == [chain()[: 3 * HASH_BYTES], *[chain()[HASH_BYTES:]] * 2]
    req.seed = b"n" * 32
    tree.match(TOKENS, req=req)
    assert restorer.asked[-1] == chain(seed=req.seed), "new weights name pages anew"
    tree.match(list(range(200, 231)), req=Request())
    assert restorer.asked[-1] == chain(range(200, 231)), "the same rid, another request"
    tree.linker._req = req = None
    gc.collect()
    assert len(tree.linker._hashes) == 0


def test_a_load_names_pool_pages_and_counts_only_when_every_rank_has_it():
    for fine, others, expected in ((True, 1, True), (True, 0, False), (False, 1, False)):
        restorer = Restorer(fine=fine)
        tree = Tree(restorer, others=others)
        keys = [chain()[at : at + HASH_BYTES] for at in (0, HASH_BYTES)]
        slots = torch.tensor([28, 29, 30, 31, 12, 13, 14, 15])
        assert tree.linker.cache_linker.load("r", [PoolTransfer(name=PoolName.KV, keys=keys, device_indices=slots)]) is expected
        assert restorer.filled == [(b"".join(keys), [7, 3])] and tree.reduced == [[int(fine)]]


def test_what_the_tree_lacks_is_found_without_asking_the_tier():
    asked = []
    req = SimpleNamespace(origin_input_ids=TOKENS, extra_key="x", cache_salt="y", _compute_max_prefix_len=lambda tokens: tokens - 9)
    tree = SimpleNamespace(page_size=PAGE, match_prefix=lambda params: asked.append(params) or SimpleNamespace(device_prefix_len=13))
    assert radix.RestoringTree.missing(tree, req) == (3, 5), "of 31 tokens 22 may come from elsewhere"
    [params] = asked
    assert params.req is None and (params.key.extra_key, params.key.cache_salt, len(params.key)) == ("x", "y", 22)


def test_nothing_goes_to_the_tier_through_the_tree_and_no_forward_waits():
    restorer = Restorer()
    linker = Tree(restorer).linker
    assert linker.cache.tree_core.enable_external_cache_linker is False
    assert linker.cache_linker.offload([]) is False and linker.num_completed_offloads() == 0
    assert linker.start_layer_wise_loading() == -1 and restorer.batches == 1
    linker.layer_done_counter.set_consumer(3)
    assert linker.layer_done_counter.wait_until(0) is None and linker.cache_linker.finish_layer_wise_loading(-1)


@pytest.mark.parametrize("hisparse, linker, expected", [(True, False, radix.EmptyTree), (False, True, radix.RestoringTree), (False, False, None)])
def test_which_tree_a_server_gets(monkeypatch, hisparse, linker, expected):
    monkeypatch.setattr(radix, "get_memory", lambda: SimpleNamespace(enable_hisparse=hisparse, enable_unified_cache_external_linker=linker))
    monkeypatch.setattr(radix, "create_unified_radix_cache", lambda context, cache_class: SimpleNamespace(made=(context, cache_class)))
    context = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(hisparse_coordinator="coordinator")))
    built = radix.build(context)
    assert built.made == (context, expected) and getattr(built, "coordinator", None) == ("coordinator" if hisparse else None)


def test_flushing_reaches_the_coordinator_once_it_is_complete(monkeypatch):
    monkeypatch.setattr(radix.UnifiedRadixCache, "reset", lambda self: None)
    calls = []
    tree = radix.EmptyTree.__new__(radix.EmptyTree)
    tree.reset()
    tree.coordinator = SimpleNamespace(stepper=None, forget=lambda: calls.append(1))
    tree.reset()
    assert not calls
    tree.coordinator.stepper = object()
    tree.reset()
    assert calls == [1]


@pytest.mark.parametrize("active, extend, expected", [("1", True, [7]), ("1", False, []), ("0", True, [])])
def test_batches_are_counted_where_prompts_are_computed(monkeypatch, active, extend, expected):
    monkeypatch.setenv(config.ACTIVE_ENV, active)
    restorer = Restorer()
    batch = SimpleNamespace(extend_lens=[3, 4], forward_mode=SimpleNamespace(is_extend=lambda: extend))
    assert hooks.batch_computed("result", SimpleNamespace(tree_cache=SimpleNamespace(restorer=restorer)), batch, None) == "result"
    assert restorer.tokens == expected
    hooks.batch_computed("result", SimpleNamespace(tree_cache=SimpleNamespace()), batch, None)


# -- decode pulls what its tree does not hold ---------------------------------------------------------------------


@pytest.mark.parametrize("tokens, here", [(40, 4), (43, 10), (43, 0), (40, 10)])
def test_pages_that_are_here_are_not_pulled(worlds, tokens, here):
    world = worlds()
    ids, source = world.prompt(tokens)
    world.prefill.publish(1, ids, source, seed=SEED)
    target = np.arange(20, 20 + len(source))
    pull = world.decode.pull(1)
    until(lambda: pull.state == "ready")
    world.decode.fetch(pull, np.where(np.arange(len(source)) < here, -1, target))
    until(lambda: pull.state == "done")
    lay = world.decode.layout
    assert world.decode.untouched(target[:here]) and world.decode.untouched(np.arange(20))
    rest = tokens - here * lay.block_tokens
    assert np.array_equal(world.decode.pool.tokens(target[here:], rest), world.prefill.pool.tokens(source[here:], rest))
    assert sum(world.decode.plane.landed.values()) == (len(source) - here) * lay.payload_bytes
    assert world.decode.rows[1], "the hand-over row comes in any case"


@pytest.mark.parametrize("prefix, pages, expected", [(0, [5, 9], [5, 9]), (48, [7], [-1, -1, -1, 7]), (32, [], [-1, -1]), (None, [3], [3]), (40, [3], None)])
def test_a_receiver_names_the_pages_that_are_here(prefix, pages, expected):
    from decode_node.receiver import OasisReceiver

    receiver, asked = OasisReceiver.__new__(OasisReceiver), []
    receiver.kv_mgr = SimpleNamespace(kv_args=SimpleNamespace(page_size=16), row_writer=lambda *of: of, fetch=lambda *args: asked.append(args))
    receiver.req, receiver.error, receiver.bootstrap_room, receiver.conclude_state = "req", None, 1, None
    receiver.pull = None if expected is None else SimpleNamespace(room=1)
    receiver.send_metadata(np.array(pages, np.int32), 4, decode_prefix_len=prefix)
    if expected is None:
        assert not asked and "whole pages" in str(receiver.error)
    else:
        [(req, pull, got, row)] = asked
        assert (req, row, got.tolist(), got.dtype) == ("req", (4, 1), expected, np.int64)


# -- options ------------------------------------------------------------------------------------------------------


class Arguments(SimpleNamespace):
    """Server arguments as given; ``declared`` collects what is resolved."""

    def __init__(self, **given):
        fields = dict(
            radix_cache_backend="oasis", disable_radix_cache=False, disaggregation_mode="prefill", disaggregation_transfer_backend="oasis",
            disaggregation_decode_enable_radix_cache=False, disaggregation_decode_retraction_backup="cpu_tensor", speculative_algorithm=None, hisparse_config=None, model_path="m",
            enable_hierarchical_cache=False, enable_lmcache=False, enable_flexkv=False, enable_unified_cache_external_linker=False,
            pp_size=1, dcp_size=1, attn_cp_size=1, enable_hisparse=False, disaggregation_enable_kv_checksum=False, enable_pd_role_switch=False,
            disaggregation_decode_host_receive_threshold=1, disaggregation_decode_allocation_policy="x", page_size=16, enable_mixed_chunk=False,
            enable_pdmux=False, enable_two_batch_overlap=False, disable_overlap_schedule=False, speculative_num_draft_tokens=None)
        super().__init__(**(fields | given), declared={})


@pytest.fixture
def resolve(monkeypatch):
    """``resolve(step, options, **arguments)`` -> what was declared, and what SGLang's own step saw."""
    from sglang.srt.arg_groups import overrides

    monkeypatch.setattr(overrides, "resolving_view", lambda given: SimpleNamespace(**{**vars(given), **given.declared}))
    monkeypatch.setattr(overrides, "declare_resolution", lambda given, source, **fields: given.declared.update(fields))
    monkeypatch.setattr(plugin, "check_model_path", lambda path: None)
    monkeypatch.setattr(plugin, "_problems", [])
    monkeypatch.setenv(config.ACTIVE_ENV, "1")

    def run(step, options=None, *, active="1", **given):
        monkeypatch.setenv(config.ACTIVE_ENV, active)
        monkeypatch.setattr(config, "load", lambda text: OasisConfig(**{"tier": "/t", **(options or {})}))
        arguments, seen = Arguments(**given), []
        for _ in "ab":  # resolution can run again
            step(arguments, lambda given: seen.append(dict(given.declared)))
        return arguments.declared, seen[-1]

    return run


def test_a_prefill_server_has_the_tier_behind_its_tree(resolve):
    declared, seen = resolve(plugin.resolve_linker)
    assert declared == {"enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic",
                        "unified_cache_external_linker_config": {"linker": "TierLinker", "linker_module_path": "oasis_sglang.radix"}}
    assert seen["enable_unified_cache_external_linker"] is False, "SGLang's check knows no linker behind a named tree"


@pytest.mark.parametrize("given", [
    {"active": "0"}, {"disaggregation_mode": "decode"}, {"radix_cache_backend": None}, {"disable_radix_cache": True},
    {"enable_hierarchical_cache": True}, {"enable_lmcache": True}, {"enable_flexkv": True}, {"enable_unified_cache_external_linker": True}])
def test_other_servers_are_left_to_sglang(resolve, given):
    declared, _ = resolve(plugin.resolve_linker, **given)
    assert declared == {}


@pytest.mark.parametrize("given, expected", [
    ({}, True), ({"radix_cache_backend": None}, None), ({"disable_radix_cache": True}, None), ({"speculative_algorithm": "OASIS_NGRAM"}, None),
    ({"radix_cache_backend": None, "disaggregation_decode_enable_radix_cache": True}, None)])
def test_a_decode_server_without_working_sets_gets_sglangs_tree(resolve, given, expected):
    declared, _ = resolve(plugin.resolve_arguments, {"mode": "exact"}, disaggregation_mode="decode", **given)
    assert declared.get("disaggregation_decode_enable_radix_cache") is expected and declared["disaggregation_transfer_backend"] == "nixl"


def test_working_sets_and_a_tree_of_whole_pages_do_not_go_together(resolve):
    declared, _ = resolve(plugin.resolve_arguments, disaggregation_mode="decode")
    assert "disaggregation_decode_enable_radix_cache" not in declared and declared["enable_hisparse"] is True
    with pytest.raises(ConfigError, match="--radix-cache-backend oasis"):
        resolve(plugin.resolve_arguments, disaggregation_mode="decode", disaggregation_decode_enable_radix_cache=True)


def test_the_name_needs_the_back_end_and_an_empty_one_is_none(resolve):
    with pytest.raises(ConfigError, match="--disaggregation-transfer-backend oasis"):
        resolve(plugin.resolve_arguments, disaggregation_transfer_backend="nixl")
    declared, _ = resolve(plugin.resolve_arguments, radix_cache_backend="")
    assert declared["radix_cache_backend"] is None
