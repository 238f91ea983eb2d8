"""Two looks at a decode node, and what ``oasis top`` makes of them."""

from __future__ import annotations

import http.server
import io
import json
import re
import threading

import pytest
from rich.console import Console
from typer.testing import CliRunner

from oasis_sglang import top
from oasis_sglang.cli import app
from oasis_sglang.top import Look, figures, growth, quantile, shares
from oasis_sglang.top_view import clock, frame, number, size

LAYERS, HEADS = 2, 3
BOUNDS = [1, 10, 100]


def info(steps: dict, *, totals: dict | None = None, stalls=None, heads=None, **sets) -> dict:
    """A decode worker's ``/server_info`` as far as it is read."""
    working = {"held": {"pages": 3, "sets": 2, "waiting": 1}, "live": 2, "physical_tokens": 12_000, "physical_tokens_peak": 1_600, "sets": 20, "leaks": 0,
               "steps": steps, "host_cache": {"capacity_bytes": 1 << 30, "used_bytes": 3 << 20, "peak_bytes": 5 << 20, "average_bytes": 1 << 20,
                                              "pinned_bytes": 1 << 20, "reserved_bytes": 0, "evicted": 7, "uncached": 0},
               "reuse": {"prompt_tokens": 8000, "hit_tokens": 6000, "bytes_saved": 7 << 20, "blocks_cached": 90}, **sets}
    if stalls:
        working["stalls"] = stalls
    if heads:
        working["heads"] = heads
    oasis = {"role": "decode", "totals": totals or {}, "pulls": 2, "flights": 1, "tiers": {"127.0.0.1:9000": "abcdef0123", "127.0.0.1:9001": ""},
             "kv_pool_tokens": 1_500, "kv_pool_tokens_peak": 1_580, "staging": {"free": 8, "leased": 0, "quarantined": 0},
             "layout": {"num_layers": LAYERS, "kv_heads": HEADS}, "working_sets": working,
             "config": {"mode": "sparse", "budget_tokens": 512, "tail_tokens": 256, "summary": "mean_var_int8", "on_miss": "wait", "admission": "selected",
                        "fetch_blocks_per_step": 2}}
    return {"served_model_name": "/models/tiny", "max_total_num_tokens": 99, "speculative_algorithm": None, "internal_states": [{"oasis": oasis}]}


BEFORE = info({"steps": 10, "wanted": 1000, "misses": 100, "missed_mass_ppm": 400_000, "fetched": 50, "fetched_used": 20, "swaps_committed": 40,
               "request_steps": 20, "verify_steps": 10, "tokens_accepted": 15, "drafts_proposed": 30, "drafts_accepted": 5, "plan_microseconds": 5_000},
              totals={"bytes_on_demand": 1 << 20, "bytes_manifest": 100},
              stalls={"bounds_ms": BOUNDS, "counts": [1, 1, 0, 0], "sum_ms": 6.0, "count": 2},
              heads={"misses": [1, 2, 3, 0, 0, 0], "wanted": [10] * 6, "missed_mass": [1.0, 0, 0, 0, 0, 0]})
AFTER = info({"steps": 30, "wanted": 3000, "misses": 150, "missed_mass_ppm": 1_600_000, "fetched": 90, "fetched_used": 50, "fetched_wasted": 4,
              "swaps_committed": 76, "swaps_late": 4, "request_steps": 60, "verify_steps": 30, "tokens_accepted": 65, "drafts_proposed": 90, "drafts_accepted": 35,
              "plan_microseconds": 25_000},
             totals={"bytes_on_demand": 5 << 20, "bytes_manifest": 100},
             stalls={"bounds_ms": BOUNDS, "counts": [1, 5, 4, 2], "sum_ms": 506.0, "count": 12},
             heads={"misses": [1, 2, 3, 4, 5, 9], "wanted": [20] * 6, "missed_mass": [1.0, 2, 0, 0, 0, 8]},
             lane={"heads": 2, "tokens": 640, "capacity_tokens": 4_096, "peak_tokens": 700, "bytes": 1 << 20},
             live_requests=[{"rid": "r1", "room": 5, "prompt": 6000, "blocks": 376, "working": 32, "tail": 2, "selecting": True, "steps": 12,
                             "pulled_bytes": 3 << 20, "state": "serving"},
                            {"rid": "room-1099511627776-17", "room": 6, "prompt": 131_072, "blocks": 8_200, "working": 1_024, "tail": 16, "selecting": False,
                             "steps": 12_345, "pulled_bytes": 3 << 30, "state": "pulling"}])


def test_figures_of_what_grew_and_of_everything():
    found = figures(Look(100.0, BEFORE), Look(104.0, AFTER))
    now, total = found["now"], found["total"]
    assert now["seconds"] == 4.0
    assert now["per_second"] | {"steps": 5.0, "tokens_accepted": 12.5, "fetched": 10.0, "swaps_committed": 9.0, "swaps_late": 1.0,
                                "bytes_on_demand": float(1 << 20), "bytes_manifest": 0.0} == now["per_second"]
    assert now["per_second"]["bytes_records"] is None, "nothing ever moved it"
    assert now["misses_share"] == 50 / 2000 and total["misses_share"] == 150 / 3000
    assert now["missed_mass"] == pytest.approx(1.2 / 40), "per step of a request, of which two ran in a step"
    assert (now["tokens_per_verify"], now["drafts_accepted_share"]) == (2.5, 0.5)
    assert (now["used_share"], now["wasted_share"], now["late_share"]) == (30 / 40, 4 / 40, 4 / 40)
    assert (now["plan_us_per_step"], now["score_us_per_step"], now["fallback_share"]) == (1000, None, None)
    assert total["count"]["fetched"] == 90 and total["count"]["bytes_on_demand"] == 5 << 20
    # Of the ten new waits four are between 1 and 10 ms, four up to 100, two above that.
    assert now["stalls"] == 10 and now["stall_mean_ms"] == 50.0
    assert now["stall_p50_ms"] == pytest.approx(10 + 90 / 4) and now["stall_p95_ms"] == now["stall_p99_ms"] == 100.0
    assert found["kv_pool"] == {"tokens": 1500, "peak_tokens": 1600, "size_tokens": 12000}
    assert found["working_sets"] == {"used": 2, "size": 20} and (found["running"], found["waiting"]) == (2, 1)
    json.dumps(found)


def test_layers_of_the_last_look_with_the_worst_head_marked():
    first, second = figures(Look(0.0, BEFORE), Look(1.0, AFTER))["layers"]["now"]
    assert first == {"layer": 0, "misses_share": 0.0, "missed_mass": pytest.approx(2 / 40 / 3), "worst_head": 1, "worst_missed_mass": 2 / 40, "worst": False}
    assert second == {"layer": 1, "misses_share": 18 / 30, "missed_mass": pytest.approx(8 / 40 / 3), "worst_head": 2, "worst_missed_mass": 8 / 40, "worst": True}
    idle = figures(Look(0.0, AFTER), Look(1.0, AFTER))["layers"]
    assert idle["now"] == [] and idle["total"][0]["worst_missed_mass"] == pytest.approx(2 / 60)


def test_a_node_that_was_restarted_has_grown_from_nought():
    assert growth({"steps": 30, "fetched": 5}, {"steps": 4, "fetched": 9}) == {"steps": 4, "fetched": 9}
    assert growth({"steps": 30}, {"steps": 34, "fetched": 9}) == {"steps": 4, "fetched": 9}


def test_nothing_is_divided_by_nothing():
    found = shares({"misses": 0, "wanted": 0, "tokens_accepted": 0, "verify_steps": 0})
    assert set(found.values()) == {None}
    assert shares({"misses": 0, "wanted": 5})["misses_share"] == 0.0


@pytest.mark.parametrize(("counts", "total", "q", "expected"), [
    ([4, 0, 0, 0], 4, 0.5, 0.5), ([0, 10, 0, 0], 10, 0.95, 1 + 9 * 0.95), ([1, 1, 2, 0], 4, 0.5, 10.0), ([1, 0, 0], 9, 0.5, 100.0), ([0, 0, 0, 0], 0, 0.5, None),
    ([0, 0, 0, 3], 3, 0.5, 100.0)])
def test_quantiles_of_a_histogram(counts, total, q, expected):
    assert quantile(BOUNDS, counts, total, q) == (None if expected is None else pytest.approx(expected))


def drawn(found: dict, **options) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(frame("http://d:1", found, **options))
    return console.file.getvalue()


def row(text: str, label: str) -> list[str]:
    """Cells of the left table's row."""
    line = next(line for line in text.splitlines() if line.strip().startswith(label))
    return line.strip()[len(label):].split()


def test_the_frame_fits_80_columns_and_says_what_was_counted():
    text = drawn(figures(Look(0.0, BEFORE), Look(4.0, AFTER)), by_layer=True)
    assert max(map(len, text.splitlines())) <= 80 and text.count("…") == 1, "only a long rid is cut"
    assert "\ntiny\n" in text and "budget 512 + 256 tokens" in text and "last 4.0 s" in text
    assert row(text, "steps")[:2] == ["5/s", "30"] and row(text, "misses of wanted")[:2] == ["2.5%", "5.0%"]
    assert row(text, "on demand")[:4] == ["1.0", "MiB/s", "5.0", "MiB"] and row(text, "records")[:2] == ["-", "-"]
    assert row(text, "r1") == ["serving", "6,000", "376", "32", "2", "yes", "12", "3.0", "MiB"]
    assert row(text, "* 1") == ["60.0%", "0.0667", "2", "0.2000"]
    assert re.search(r"prompt tokens known +75.0% *\n", text) and re.search(r"bytes saved +7.0 MiB *\n", text) and re.search(r"blocks cached +90 *\n", text)
    assert re.search(r"dense lane tokens +640 *\n", text) and re.search(r"host cache +3.0 MiB *\n", text)
    assert "tiers: 127.0.0.1:9000 abcdef01, 127.0.0.1:9001 lost" in text


@pytest.mark.parametrize("sparse", [True, False])
def test_a_node_that_reports_less_shows_dashes(sparse):
    older = info({"misses": 4, "wanted": 8, "steps": 2})
    if not sparse:
        older["internal_states"][0]["oasis"].pop("working_sets")
    found = figures(None, Look(0.0, older))
    text = drawn(found, by_layer=True)
    assert found["now"] is None and found["requests"] is None and found["lane"] is None and found["layers"] is None
    assert found["kv_pool"]["size_tokens"] == (12_000 if sparse else 99)
    assert row(text, "misses of wanted")[:2] == ["-", "50.0%" if sparse else "-"]
    assert row(text, "missed mass")[:2] == ["-", "-"] and row(text, "stalls")[:2] == ["-", "-"]
    assert "layers: not reported yet" in text


def test_units():
    assert [size(n) for n in (None, 0, 1023, 1536, 5 << 20, 3 << 40)] == ["-", "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3072.0 GiB"]
    assert [number(n) for n in (None, 0, 1234, 1234.5, 2.345, 0.01234)] == ["-", "0", "1,234", "1,234", "2.35", "0.0123"]
    assert (clock(None), clock(3725)) == ("-", "1:02:05")


@pytest.fixture
def serve():
    """Starts servers that answer ``/server_info`` with the given objects in turn, the last one for ever."""
    started = []

    def start(*answers) -> str:
        left = list(answers)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                answer = left.pop(0) if len(left) > 1 else left[0]
                if answer is None:
                    self.send_error(404)
                    return
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def test_one_json_object_and_one_frame(serve):
    answer = CliRunner().invoke(app, ["top", serve(BEFORE, AFTER).removeprefix("http://") + "/", "--json", "--interval", "0.1"])
    assert answer.exit_code == 0 and json.loads(answer.stdout)["now"]["misses_share"] == 50 / 2000
    answer = CliRunner().invoke(app, ["top", serve(BEFORE, AFTER), "--once", "--layers", "--interval", "0.1"])
    assert answer.exit_code == 0 and answer.stdout.count("oasis top") == 1 and "worst head" in answer.stdout


@pytest.mark.parametrize(("answer", "words"), [
    ({"internal_states": [{"oasis": {"role": "prefill"}}]}, "is a prefill worker"), ({"internal_states": [{"oasis": {"error": "not bound yet"}}]}, "not bound yet"),
    ({"internal_states": [{}]}, "not an Oasis worker"), ({"version": "1"}, "not an Oasis worker"), ([], "not an Oasis worker"), (None, "404")])
def test_other_servers_are_told_in_one_line(serve, answer, words):
    told = CliRunner().invoke(app, ["top", serve(answer), "--once", "--interval", "0.1"])
    assert told.exit_code == 1 and not told.stdout and words in told.stderr and told.stderr.count("\n") == 1


def test_a_server_that_is_gone_ends_the_live_view(serve):
    with pytest.raises(top.TopError, match="no server answers at http://127.0.0.1:1: "):
        top.look("http://127.0.0.1:1")
    told = CliRunner().invoke(app, ["top", serve(BEFORE, AFTER, AFTER, None), "--interval", "0.1"])
    assert told.exit_code == 1 and told.stderr.count("\n") == 1 and "404" in told.stderr
