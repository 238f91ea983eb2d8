"""The driver of SGLang's load generator: its command line, what counts as answered, and real runs of it against a small server."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from oasis_sglang.bench import serving
from oasis_sglang.bench.serving import ServingError, check, command, figures, run

WORDS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The folder of a tokenizer of ``WORDS`` words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}))
    return folder


@contextmanager
def endpoint(refused: int | None = None):
    """A server that streams ``/generate``, a chunk per token, but for request number ``refused``, which gets an error inside the stream.
    Without ``/server_info``, as a router. Yields its address and the bodies it got."""
    bodies: list[dict] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            known = self.path == "/v1/models"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "tiny"}]}' if known else b"")

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            self.send_response(200)
            self.end_headers()
            if len(bodies) - 1 == refused:
                self._say({"error": {"message": "too long", "code": 400}})
            else:
                for n in range(1, body["sampling_params"]["max_new_tokens"] + 1):
                    self._say({"text": " ".join(["w1"] * n), "meta_info": {"completion_tokens": n, "prompt_tokens": len(body["input_ids"])}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _say(self, chunk: dict) -> None:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_it_runs_offline_and_its_figures_come_back(model, tmp_path):
    lines: list[str] = []
    with endpoint() as (url, bodies):
        (row,) = run(url, model=str(model), arguments=["--num-prompts", "3", "--random-input-len", "20", "--random-output-len", "5"], folder=tmp_path / "runs",
                     progress=lines.append)
    assert (row["completed"], row["total_input_tokens"], row["total_output_tokens"], row["dataset_name"]) == (3, 60, 15, "random-ids")
    assert [len(body["input_ids"]) for body in bodies] == [20] * 4  # one to warm up
    assert 0 < row["mean_ttft_ms"] < row["mean_e2e_latency_ms"] and row["request_rate"] == "inf"
    (whole,) = map(json.loads, (tmp_path / "runs" / "bench_serving.jsonl").read_text().splitlines())
    assert whole["output_lens"] == [5, 5, 5] and "output_lens" not in row
    assert "--random-input-len 20" in lines[0] and lines[-1].startswith("bench_serving: 3 requests")
    json.dumps(row, allow_nan=False)


def test_requests_refused_inside_the_stream_are_an_error(model, tmp_path):
    with endpoint(refused=2) as (url, _), pytest.raises(ServingError, match="of 3 requests of bench_serving 1 have no text"):
        run(url, model=str(model), arguments=["--num-prompts=3", "--random-input-len=8", "--random-output-len=4", "--max-concurrency=1"], folder=tmp_path)
    (row,) = map(json.loads, (tmp_path / "bench_serving.jsonl").read_text().splitlines())
    assert row["completed"] == 3  # as it says itself


def instead(monkeypatch, script: str) -> None:
    monkeypatch.setattr(serving, "command", lambda *_: [sys.executable, "-c", script])


def test_the_end_of_its_output_is_in_the_error_and_no_old_result_is_taken(tmp_path, monkeypatch):
    (tmp_path / "bench_serving.jsonl").write_text('{"completed": 9}')
    instead(monkeypatch, "import sys; print('x' * 9000); print('no such dataset', file=sys.stderr); sys.exit(2)")
    with pytest.raises(ServingError, match=r"(?s)^bench_serving ended with exit code 2\n.{0,3000}no such dataset\n$"):
        run("http://e", model="/m", arguments=[], folder=tmp_path)
    instead(monkeypatch, "print('nothing to do')")
    with pytest.raises(ServingError, match="wrote no result\nnothing to do"):
        run("http://e", model="/m", arguments=[], folder=tmp_path)


def test_it_is_ended_at_the_limit(tmp_path, monkeypatch):
    instead(monkeypatch, "import os, time; print(os.getpid()); time.sleep(60)")
    with pytest.raises(ServingError, match=r"(?s)did not end within 2 s\n\d+") as raised:
        run("http://e", model="/m", arguments=[], folder=tmp_path, timeout=2)
    assert not Path(f"/proc/{int(str(raised.value).split()[-1])}").exists()


def last(argv: list[str], flag: str) -> str:
    return argv[len(argv) - argv[::-1].index(flag)]


def test_the_users_arguments_win_over_ours_but_not_over_where_it_goes():
    argv = command("http://e", "/m", ["--num-prompts", "5", "--base-url", "http://other", "--seed", "7"], Path("/o.jsonl"))
    assert (last(argv, "--num-prompts"), last(argv, "--seed"), last(argv, "--model")) == ("5", "7", "/m")
    assert (last(argv, "--base-url"), last(argv, "--output-file")) == ("http://e", "/o.jsonl")


@pytest.mark.parametrize(("arguments", "ids"), [
    ([], True),
    (["--dataset-name", "random-ids"], True),
    (["--backend=sglang-oai"], False),
    (["--dataset-name=custom", "--dataset-path", "x"], False),
])
def test_ids_are_sent_as_ids_where_they_can_be(arguments, ids):
    assert ("--tokenize-prompt" in command("http://e", "/m", arguments, Path("/o"))) == ids


def details(errors: list[str], lens: list[int], ttfts: list[float]) -> dict:
    return {"errors": errors, "output_lens": lens, "ttfts": ttfts}


@pytest.mark.parametrize(("row", "said"), [
    (details(["", "Bad Gateway: no", ""], [4, 0, 4], [0.1, 0.0, 0.1]), r"of 3 requests of bench_serving 1 failed\nBad Gateway: no$"),
    (details(["", "x"], [4, 0], [0.0, 0.0]), "1 failed and 1 have no text"),
])
def test_unanswered_requests_are_counted_and_the_first_error_shown(row, said):
    with pytest.raises(ServingError, match=said):
        check(row)


def test_answered_requests_pass_and_so_do_embeddings_without_tokens():
    check(details(["", ""], [4, 1], [0.1, 0.2]))
    check(details([""], [0], [0.0]))


def test_figures_leave_out_what_each_request_has():
    row = {"completed": 2, "request_rate": float("inf"), "std_ttft_ms": 0.5, "server_info": {"a": 1}, "ttfts": [1, 2], "tag": None}
    assert figures(row) == {"completed": 2, "request_rate": "inf", "std_ttft_ms": 0.5, "tag": None}
