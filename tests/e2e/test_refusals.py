"""Bad input gets a clear error that names the field, and what was there before goes on working."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager

import matrix
import pytest
from pd import Post, assert_baseline, body, next_room, pair, wait_for

from oasis_sglang import launch
from oasis_sglang.stack import free_port, probe


@pytest.fixture(scope="module")
def stack(oasis_stack):
    """3,000 tokens of arena: 192 records and a little."""
    return oasis_stack(arena_bytes=20 << 20)


def serve(processes, tmp_path, role, *flags, env=None):
    """An Oasis worker of its own, started like ``oasis prefill`` or ``oasis decode`` would."""
    processes.preload()
    argv, ours = launch.worker_argv(role, [*flags, "--skip-server-warmup", "--max-running-requests", "4", "--max-total-tokens", "20000"])
    scratch = tmp_path / f"{role}-{time.monotonic_ns()}"
    (scratch / "metrics").mkdir(parents=True)
    own = {"TMPDIR": str(scratch), "PROMETHEUS_MULTIPROC_DIR": str(scratch / "metrics")}
    return processes.serve(argv, log=scratch / "log", env={**own, **ours, **(env or {})}, name=role)


@contextmanager
def second_decode(processes, tmp_path, model, *flags):
    """One more decode worker; yields its URL."""
    port = free_port()
    server = serve(processes, tmp_path, "decode", "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), *flags)
    try:
        wait_for(lambda: server.poll() is not None or probe(f"http://127.0.0.1:{port}/health"), "the second decode worker serves", 120)
        assert server.poll() is None, server.tail()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


def ends_with(server, pattern, timeout=90.0):
    """The server exits on its own and its log says why."""
    try:
        server.wait(timeout)
    finally:
        server.stop()
    text = server.log.read_text(errors="replace")
    assert re.search(pattern, text), text[-3000:]


def other_model(models, tmp_path):
    """The same shapes, one changed weight file."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "other"
    shutil.copytree(models.s4, folder)
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + torch.ones_like(tensors[name]) * 0.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("differs, named", [("page_size", "age"), ("dtype", "dtype"), ("model", "odel differs")])
def test_a_decode_node_that_differs(stack, processes, models, tmp_path, prompts, goldens, differs, named):
    flags = {"page_size": ("--page-size", "32"), "dtype": ("--dtype", "bfloat16"), "model": ()}[differs]
    model = other_model(models, tmp_path) if differs == "model" else models.s4
    expected = goldens.get(models.s4, prompts, matrix.OUTPUT_TOKENS)[1][:8]
    with second_decode(processes, tmp_path, model, *flags) as url:
        for _ in range(2):  # the second time from the cached verdict
            request = body(stack, prompts[1], room=next_room(), max_new_tokens=8)
            Post(stack.urls["prefill"], request)
            answer = Post(url, request).result(60)
            assert answer.status == 500 and named in answer.text and "LayoutMismatch" in answer.text, answer.text
        assert probe(url + "/health"), "the decode worker that was refused still serves"
    assert pair(stack, prompts[1], max_new_tokens=8)[1].result().output_ids == expected
    wait_for(lambda: probe(stack.urls["decode"] + "/health"), "decode serves")


def test_a_prompt_larger_than_the_arena(stack, prompts, goldens, models):
    expected = goldens.get(models.s4, prompts, matrix.OUTPUT_TOKENS)[3][:8]
    prefill, decode = pair(stack, prompts[7], max_new_tokens=4)  # 5,000 tokens
    for post in (prefill, decode):
        answer = post.result(60)
        assert answer.status == 500 and "more pages than the arena has records" in answer.text, answer.text
    assert pair(stack, prompts[3], max_new_tokens=8)[1].result().output_ids == expected
    assert_baseline(stack, 130)


def test_a_context_too_long(stack, prompts, goldens, models):
    expected = goldens.get(models.s4, prompts, matrix.OUTPUT_TOKENS)[1][:8]
    prefill, decode = pair(stack, [5] * 9000, max_new_tokens=4)
    for post in (prefill, decode):
        answer = post.result(60)
        assert answer.status == 400 and "8192" in answer.text, answer.text
    assert pair(stack, prompts[1], max_new_tokens=8)[1].result().output_ids == expected
    assert_baseline(stack)


def test_an_unreachable_tier(processes, models, tmp_path):
    server = serve(processes, tmp_path, "prefill", "--model-path", str(models.s4), "--port", str(free_port()),
                   "--disaggregation-bootstrap-port", str(free_port()), "--oasis-tier", str(tmp_path / "nobody.sock"),
                   "--oasis-tier-start-seconds", "2")
    ends_with(server, r"no tier within 2 s.*nobody\.sock")


def test_an_unknown_option_in_the_environment(processes, models, tmp_path):
    server = serve(processes, tmp_path, "decode", "--model-path", str(models.s4), "--port", str(free_port()),
                   env={"SGLANG_OASIS_CONFIG": json.dumps({"budget": 3})})
    ends_with(server, r"unknown Oasis option budget; known: .*data_plane")


def test_an_unknown_option_on_the_command_line():
    command = [sys.executable, "-P", "-m", "oasis_sglang.cli", "decode", "--model-path", "x", "--oasis-budget", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.returncode == 2 and "unknown option --oasis-budget" in done.stderr and "--oasis-data-plane" in done.stderr


@pytest.mark.parametrize("config, field", [
    ({"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}, "DeepseekV2ForCausalLM"),
    ({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 4096}, "Gemma2ForCausalLM"),
    ({"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}, "FalconMambaForCausalLM"),
    ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "sliding_window = 64"),
], ids=["mla", "swa", "mamba", "qwen2-swa"])
def test_models_that_records_cannot_describe(processes, models, tmp_path, config, field):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(models.s4, folder)
    ours = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**ours, **config}))
    server = serve(processes, tmp_path, "decode", "--model-path", str(folder), "--port", str(free_port()))
    ends_with(server, rf"Oasis does not serve .*{re.escape(field)}")


def test_another_version_of_sglang(models):
    """A server process that believes in another version refuses to serve."""
    code = ("import sglang; sglang.__version__ = '0.5.24'\n"
            "from sglang.srt.plugins import load_plugins\nload_plugins()\n"
            "from sglang.launch_server import run_server\nfrom sglang.srt.server_args import prepare_server_args\n"
            f"run_server(prepare_server_args(['--model-path', {str(models.s4)!r}, '--disaggregation-mode', 'decode', '--disaggregation-transfer-backend', 'oasis']))\n")
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=180, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode != 0 and "SGLang is 0.5.24, Oasis needs 0.5.23" in done.stderr, done.stderr[-2000:]


def test_a_prefill_node_with_another_tp_size(stack, prompts, goldens, models):
    """A stand-in for its bootstrap server that says tp_size 2 of the real one."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    from oasis_sglang.stack import get_json

    class Twice(BaseHTTPRequestHandler):
        def do_GET(self):
            row = {} if self.path == "/health" else get_json(f"http://127.0.0.1:{stack.bootstrap_port}{self.path}")
            if "attn_tp_size" in row:
                row["attn_tp_size"] = 2
            if "layout" in row:
                row["layout"]["tp_size"] = 2
            raw = json.dumps(row).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_):
            pass

    expected = goldens.get(models.s4, prompts, matrix.OUTPUT_TOKENS)[1][:8]
    with ThreadingHTTPServer(("127.0.0.1", 0), Twice) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        request = body(stack, prompts[1], room=next_room(), max_new_tokens=8, bootstrap_port=server.server_port)
        answer = Post(stack.urls["decode"], request).result(60)
        server.shutdown()
    assert answer.status == 500 and "LayoutMismatch" in answer.text and "tp_size: 1 here, 2 at the peer" in answer.text, answer.text
    assert pair(stack, prompts[1], max_new_tokens=8)[1].result().output_ids == expected
