"""The demo's report and the client it measures with, without any SGLang server."""

import http.server
import io
import json
import threading
from contextlib import redirect_stdout

import pytest

from oasis_sglang import demo
from oasis_sglang.client import GenerateError, Generation, generate, generate_concurrently

ISSUE_FIELDS = {
    "prompt_tokens", "output_tokens", "full_transfer_bytes", "admitted_bytes", "admitted_bytes_by_phase",
    "lifetime_bytes", "ttft_seconds", "itl_seconds_mean", "stock_ttft_seconds", "stock_itl_seconds_mean",
    "agreement_tokens",
}  # fmt: skip


def generation(rid, ids, times=(0.5, 0.7, 0.9)):
    return Generation(rid, 10, list(ids), list(times), {"type": "length"})


def account(total):
    return {
        "full_transfer_bytes": 100,
        "admitted_bytes": total,
        "admitted_bytes_by_phase": {"records": total},
        "lifetime_bytes": total,
        "state": "done",
    }


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 9, 3], [1, 2, 3], 1), ([], [1], 0), ([1], [], 0)],
)
def test_agreement_counts_leading_equal_tokens(ours, theirs, expected):
    assert demo.agreement(ours, theirs) == expected


def test_compare_joins_answers_and_counts_by_request_id():
    stock = {"long": generation("s", [1, 2, 3], (1.0, 1.5, 2.0))}
    oasis = {"long": generation("o", [1, 2, 4])}
    (entry,) = demo.compare(stock, oasis, {"o": account(120)})
    assert set(entry) == ISSUE_FIELDS | {"name"}
    assert (entry["agreement_tokens"], entry["admitted_bytes"]) == (2, 120)
    assert (entry["ttft_seconds"], entry["stock_ttft_seconds"]) == (0.5, 1.0)
    assert entry["stock_itl_seconds_mean"] == pytest.approx(0.5)


def test_a_request_without_counts_is_an_error():
    answers = {"long": generation("o", [1])}
    with pytest.raises(demo.StackError, match="no byte counts for request o"):
        demo.compare(answers, answers, {})


def test_the_table_states_machine_model_and_n():
    stock = {"long": generation("s", [1, 2, 3])}
    report = {
        "requests": demo.compare(stock, {"long": generation("o", [1, 2, 3])}, {"o": account(120)}),
        "decode_host_bytes_peak": 1,
        "kv_pool_tokens_peak": 2,
        "config": {"model": "M", "machine": demo.describe_machine(), "output_tokens": 3,
                   "oasis": {"budget_tokens": 1024, "tail_tokens": 256}},
    }
    with redirect_stdout(io.StringIO()) as output:
        demo.show(report)
    shown = " ".join(output.getvalue().split())
    assert "Model M" in shown and "n = 1" in shown and "cores" in shown and "1 of the 1 answers over all blocks" in shown


class Maker:
    """Tokens are characters."""

    def encode(self, text):
        return list(map(ord, text))

    def chat(self, text):
        return self.encode(f"<{text}>")


def test_a_second_turn_begins_with_the_first_and_its_answer():
    first = demo.Prompt("long", [1, 2])
    second = demo.second_turn(Maker(), first, generation("o", [7, 8]))
    assert second.name == "long, turn 2" and second.input_ids[:4] == [1, 2, 7, 8] and not second.fresh
    assert "".join(map(chr, second.input_ids[4:])).startswith("<|im_end|>\n<Which of")


@pytest.mark.parametrize(("kind", "before"), [("oasis", ["/flush_cache"]), ("stock", [])])
def test_oasis_forgets_before_each_prompt_but_a_next_turn(server, posted, kind, before):
    stack = demo.Stack(demo.StackSpec(kind, "m"), None, run_dir=None)
    stack.urls = {"router": server, "decode": server}
    prompts = [demo.Prompt("long", [5]), demo.Prompt("long, turn 2", [5, 6], fresh=False), demo.Prompt("medium", [9])]
    answers = demo.ask(stack, prompts, 2, lambda line: None)
    assert list(answers) == ["long", "long, turn 2", "medium"] and answers["medium"].output_ids == [7, 9]
    assert posted == [*before, "/generate", "/generate", *before, "/generate"]


@pytest.fixture
def posted():
    """Paths that ``server`` was asked for, in their order."""
    return []


@pytest.fixture
def server(posted):
    """``/generate`` that streams two cumulative chunks; prompt [0] is refused, [1] aborted, [2] fails in the stream,
    [3] is cut off."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(self.path.partition("?")[0])
            if posted[-1] == "/flush_cache":
                self.send_response(200)
                self.end_headers()
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            first = body["input_ids"][0]
            if first == 0:
                self.send_error(400, "too long")
                return
            meta = {
                "id": body.get("rid", "made-up"),
                "prompt_tokens": len(body["input_ids"]),
                "finish_reason": None,
            }
            end = {"type": "abort", "message": "gone"} if first == 1 else {"type": "length"}
            chunks = [
                {"output_ids": [7], "meta_info": meta},
                {"error": {"message": "boom"}}
                if first == 2
                else {"output_ids": [7, first], "meta_info": meta | {"finish_reason": end}},
            ]
            self.send_response(200)
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if first != 3:
                self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_generate_reads_the_stream(server):
    answer = generate(server, [5, 6], max_new_tokens=2, rid="mine")
    assert (answer.rid, answer.prompt_tokens, answer.output_ids) == ("mine", 2, [7, 5])
    assert len(answer.chunk_times) == 2 and answer.itl_seconds_mean >= 0


def test_concurrent_answers_keep_their_order(server):
    answers = generate_concurrently(server, [[8], [9]], max_new_tokens=2, rid="r")
    assert [(answer.rid, answer.output_ids) for answer in answers] == [("r-0", [7, 8]), ("r-1", [7, 9])]


@pytest.mark.parametrize(("first", "message"), [(0, "HTTP 400"), (1, "gone"), (2, "boom"), (3, "before its end")])
def test_errors_are_raised_wherever_they_arrive(server, first, message):
    with pytest.raises(GenerateError, match=message):
        generate(server, [first], max_new_tokens=2)
