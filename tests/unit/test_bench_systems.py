"""Systems by name, points of sweeps, and what is read from the servers."""

import http.server
import json
import threading
from pathlib import Path

import pytest

from oasis_sglang.bench import counters, settings, systems
from oasis_sglang.bench.records import Node, Request
from oasis_sglang.selection.profile import Profile
from oasis_sglang.stack import worker_argv
from transport.errors import ConfigError

SERVING = systems.Serving(Path("/m"), pool=1600, prefill_pool=8000, context=8192, max_running=4, budget=1024)


def test_stock_is_sglangs_own_with_the_same_pools():
    one = systems.named("stock", SERVING)
    assert (one.spec.kind, one.spec.max_total_tokens, one.system.dense) == ("stock", 1600, True)
    argv, _ = worker_argv("prefill", one.spec, "", [])
    assert argv[-2:] == ["--max-total-tokens", "8000"], "the last of a repeated flag counts"
    assert argv[argv.index("--disaggregation-transfer-backend") + 1] == "nixl"


@pytest.mark.parametrize("name, options, dense, reuse", [
    ("oasis", {"budget_tokens": 1024}, False, "oasis"),
    ("oasis:512", {"budget_tokens": 512}, False, "oasis"),
    ("oasis:512-reuse", {"budget_tokens": 512}, False, ""),
    ("full:256+on_miss=wait", {"budget_tokens": 256, "on_miss": "wait", "admission": "full"}, False, "oasis"),
    ("oasis:8192", {"budget_tokens": 8192}, True, "oasis"),
    ("exact", {"budget_tokens": 1024, "mode": "exact"}, True, "oasis"),
    ("oasis:512+reuse+wait_seconds=3+on_miss=wait", {"budget_tokens": 512, "wait_seconds": 3.0, "on_miss": "wait"}, False, "oasis"),
])
def test_oasis_by_name(name, options, dense, reuse):
    one = systems.named(name, SERVING)
    assert one.system.options == options == dict(one.spec.config)
    assert one.system.dense is dense
    flags = one.spec.flags
    assert flags[flags.index("--radix-cache-backend") + 1] == reuse


@pytest.mark.parametrize("name", ["", "stok", "oasis:", "oasis:x", "stock:512", "monolith+reuse", "oasis+", "oasis+budget"])
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError):
        systems.named(name, SERVING)


def test_an_option_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ConfigError, match="nonsense"):
        systems.named("oasis+nonsense=1", SERVING)


def test_endpoints():
    one = systems.endpoint("mine=http://a:1/,decode=http://b:2,tier=http://c:3")
    assert one.endpoint == ("http://a:1", "", "http://b:2", "http://c:3")
    assert (one.system.name, one.system.kind, one.spec) == ("mine", "endpoint", None)
    for wrong in ("mine", "=http://a", "mine=a:1", "mine=http://a,other=http://b"):
        with pytest.raises(ConfigError):
            systems.endpoint(wrong)


def test_a_point_changes_what_it_names():
    made = settings.Settings(Path("/m"), sweeps=settings.merged(["concurrency=1,8", "context=1000,2000", "budget=256"]), concurrency=4, tokens=6000)
    points = made.points()
    assert points == [{"concurrency": 1}, {"concurrency": 8}, {"context": 1000}, {"context": 2000}, {"budget": 256}]
    assert (made.at(points[1]).concurrency, made.at(points[1]).requests) == (8, 8)
    assert (made.at(points[2]).tokens, made.at(points[2]).concurrency) == (1000, 4)
    assert (made.most_at_once, made.longest) == (8, 6000)
    assert made.server_key(points[0]) == made.server_key(points[1]) != made.server_key(points[4])


def test_without_a_sweep_there_is_one_point():
    assert settings.Settings(Path("/m")).points() == [{}]


@pytest.mark.parametrize("text", ["", "speed=1", "budget", "budget=", "budget=x"])
def test_wrong_sweeps(text):
    with pytest.raises(ValueError):
        settings.sweep(text)


def test_a_link_rate_needs_hosts():
    with pytest.raises(ConfigError, match="--hosts"):
        settings.Settings(Path("/m"), sweeps={"link": ("200mbit",)}).points()


def test_the_pool_holds_two_requests_as_stock_counts_them():
    assert settings.Settings(Path("/m"), tokens=6000, output=64).pool_tokens() == 2 * (6000 + 64 + 512) // 16 * 16
    assert settings.Settings(Path("/m"), pool=1000).pool_tokens() == 992


def test_the_largest_batch_is_read_from_what_the_log_says_afterwards(tmp_path):
    log = tmp_path / "decode.log"
    line = "[2026] Decode batch, #running-req: {}, #gpu token: 768, gpu token usage: 0.04, more\n"
    log.write_text(line.format(9))
    skip = log.stat().st_size
    with log.open("a") as file:
        file.write(line.format(2) + "noise\n" + line.format(5) + "Decode batch, #running-req: 3, #token: 5, token usage: 0.1\n")
    assert counters.batch_at_most(log, skip) == 5
    assert counters.batch_at_most(log, log.stat().st_size) is None
    assert counters.batch_at_most(None, 0) is None


def look(oasis=None, **more):
    return counters.Look(oasis or {}, more.pop("info", {}), more.pop("computed", None), more.pop("transferred", None), 0)


def test_bytes_on_the_wire_of_either_kind():
    assert counters.wire_bytes(look(transferred=10.0), look(transferred=25.0)) == 15
    assert counters.wire_bytes(look(), look()) is None
    reports = [{"plane": {"landed_bytes": landed}, "totals": {"bytes_manifest": manifest}} for landed, manifest in ((5, 1), (105, 3))]
    assert counters.wire_bytes(*map(look, reports)) == 102


def test_host_bytes_in_use_are_cache_and_leased_windows():
    oasis = {"host_bytes_reserved": 800, "staging": {"free": 6, "leased": 1, "quarantined": 1}, "working_sets": {"host_cache": {"used_bytes": 50}}}
    assert counters.host_used(oasis) == 50 + 200


def test_tier_bytes_in_use_are_records_that_are_not_free():
    assert counters.tier_used({"record_bytes": 10, "inventory": {"records": 8, "free": 5}}) == 30


def test_accounts_go_to_their_requests():
    requests = [Request("a", 100, 0, 0, [1.0], [1]), Request("b", 200, 0, 0, [1.0], [1]), Request("c", 200, 0, 0, [], [], error="x")]
    report = {"admitted_bytes_by_phase": {"pieces": 1}, "lifetime_bytes_by_phase": {"pieces": 2}}
    counters.account(requests, ["p-a", "p-b", "p-c"], look({"requests": {"p-a": report}}), 10)
    assert [r.full_transfer_bytes for r in requests] == [1000, 2000, None]
    assert requests[0].lifetime_bytes_by_phase == {"pieces": 2} and requests[1].lifetime_bytes_by_phase is None


def test_growth_of_steps_makes_the_selection_figures():
    def oasis(n):
        return {"totals": {"bytes_manifest": n}, "plane": {"landed_bytes": 10 * n}, "host_bytes_reserved": 64, "staging": {"free": 1},
                "layout": {"block_tokens": 16},
                "working_sets": {"physical_tokens": 1600, "sets_bytes": 5, "lane": {"bytes": 6}, "held": {"pages": 2}, "host_cache": {"used_bytes": 7,
                                                                                                                                      "capacity_bytes": 100},
                                 "steps": {"steps": 2 * n, "request_steps": 4 * n, "wanted": 100 * n, "misses": 25 * n, "missed_mass_ppm": 400_000 * n,
                                           "score_microseconds": 3000 * n,
                                           "plan_microseconds": 1000 * n, "plan_wait_microseconds": 5000 * n, "trust_wait_microseconds": 1000 * n},
                                 "stalls": {"counts": [0], "sum_ms": 500.0 * n, "count": n, "bounds_ms": [1]}}}
    sampler = counters.Sampler(counters.Places())
    sampler.host, sampler.pool, sampler.tiers = [10, 30, 20], [0, 32, 16], [5, 9]
    found = counters.node(look(oasis(1)), look(oasis(3)), sampler, counters.Places(), arena_bytes=1000)
    assert found == Node(wire_bytes=22, device_extra_bytes=11, kv_pool_tokens=1600, kv_pool_tokens_peak=32, host_reserved_bytes=164,
                         host_used_bytes_mean=25.0, host_used_bytes_peak=30,
                         tier_reserved_bytes=1000, tier_used_bytes_peak=9, wanted=200, misses=50, missed_mass=0.1, request_steps=8, swapped_pieces=0,
                         stalls=2, stall_seconds=1.0)
    parts = {"scores, beside it": 1.5, "plan, beside it": 0.5, "wait for the plan": 2.5, "wait for trust": 0.5, "wait for blocks": 125.0}
    assert counters.stages(look(oasis(1)), look(oasis(3)), None) == parts
    assert counters.stages(look(oasis(1)), look(oasis(3)), 200.0) == {"whole step": 200.0, counters.REST: 72.0, **parts}
    assert counters.stages(look(oasis(1)), look(oasis(3)), 100.0)[counters.REST] == 0.0
    assert counters.stages(look(), look(), 200.0) == {}


def test_bytes_of_a_full_transfer_are_as_decode_reports_them():
    def full(token_bytes):
        requests = [Request("a", 100, 0, 0, [1.0], [1]), Request("b", 200, 0, 0, [1.0], [1])]
        report = {"full_transfer_bytes": 700, "admitted_bytes_by_phase": {"pieces": 1}, "lifetime_bytes_by_phase": {"pieces": 2}}
        counters.account(requests, ["a", "b"], look({"requests": {"a": report}}), token_bytes)
        return [request.full_transfer_bytes for request in requests]
    assert full(10) == [700, 2000]
    assert full(None) == [700, None], "the model that is served is not known"


PAGE = """# TYPE sglang:realtime_tokens counter
sglang:realtime_tokens_total{mode="prefill_compute"} 0.0
"""


@pytest.fixture
def servers():
    """Answers of small servers, by path; a path that is not there is 404."""
    answers, asked = {}, []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            body = answers.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", answers, asked
        running.shutdown()


def test_a_counter_that_is_not_there_is_none_and_one_at_0_is_0(servers):
    assert counters.sample_sum(PAGE, "sglang:realtime_tokens_total", mode="prefill_compute") == 0
    assert counters.sample_sum(PAGE, "sglang:realtime_tokens_total", mode="prefill_cache") is None
    url, answers, _ = servers
    answers["/metrics"] = PAGE
    before = counters.look(counters.Places(prefill=url))
    answers["/metrics"] = PAGE.replace(" 0.0", " 70.0")
    after = counters.look(counters.Places(prefill=url))
    found = counters.node(before, after, counters.Sampler(counters.Places()), counters.Places(), arena_bytes=None)
    assert (found.computed_tokens, found.wire_bytes) == (70, None)
    assert counters.wire_bytes(look(), look(transferred=30.0)) == 30, "a counter appears with its first count"


def test_stock_is_looked_at_as_oasis_is_and_says_what_its_pool_holds(servers):
    url, answers, asked = servers
    answers |= {"/server_info": {"internal_states": [{}], "max_total_num_tokens": 900}, "/state": {"record_bytes": 10, "inventory": {"records": 8, "free": 5}},
                "/v1/loads?include=core": {"loads": [{"num_used_tokens": 300}, {"num_used_tokens": 20}]}}
    places = counters.Places(decode=url, tiers=(url, url))
    with counters.Sampler(places) as sampler:
        pass
    assert (sampler.pool, sampler.host, sampler.tiers) == ([320], [], [60])
    assert "/server_info" in asked
    before = counters.look(places)
    found = counters.node(before, before, sampler, places, arena_bytes=None)
    assert (found.kv_pool_tokens, found.kv_pool_tokens_peak, found.host_used_bytes_peak) == (900, 320, None)
    assert (found.tier_used_bytes_peak, found.tier_kept_bytes) == (60, 60)
    del answers["/v1/loads?include=core"]
    with counters.Sampler(places) as sampler:
        pass
    assert (sampler.pool, sampler.tiers) == ([], [60]), "what cannot be read is left out, nothing else"


def test_decode_with_several_schedulers_is_known_as_such():
    assert counters.several(look(info={"internal_states": [{}, {}]}))
    assert not counters.several(look(info={"internal_states": [{}]})) and not counters.several(look())


def test_each_system_has_the_critical_heads_of_its_own_profile(tmp_path):
    Profile(1, "f", 2, 2, ((0, 1), (1, 0), (1, 1)), ((0.0, 0.1), (0.2, 0.3)), {}).save(tmp_path / "p.json")
    assert systems.named(f"oasis:512+profile={tmp_path}/p.json", SERVING).system.critical_heads == 3
    assert systems.named("oasis:512", SERVING).system.critical_heads is None
    with pytest.raises(ConfigError, match="none.json"):
        systems.named(f"oasis+profile={tmp_path}/none.json", SERVING)
