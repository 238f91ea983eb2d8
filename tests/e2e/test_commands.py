"""The documented commands, each a process of its own: ``oasis tier``, plain ``sglang serve`` as prefill, ``oasis decode``."""

import json
import sys
from pathlib import Path

import matrix
from pd import Post, next_room, wait_for

from oasis_sglang.stack import free_port, get_json, probe


def test_plain_sglang_serve_and_oasis_decode(processes, models, goldens, prompt_maker, text, tmp_path):
    prompts = matrix.prompts(prompt_maker, text)
    expected = goldens.get(models.s4, prompts, matrix.OUTPUT_TOKENS)
    sock = str(Path(processes.scratch) / "commands.sock")
    http, bootstrap, ports = free_port(), free_port(), {"prefill": free_port(), "decode": free_port()}
    common = ["--model-path", str(models.s4), "--host", "127.0.0.1", "--skip-server-warmup", "--max-total-tokens", "20000"]
    serve = [str(Path(sys.executable).with_name("sglang")), "serve", *common, "--port", str(ports["prefill"]), "--disaggregation-mode", "prefill",
             "--disaggregation-transfer-backend", "oasis", "--disaggregation-bootstrap-port", str(bootstrap), "--page-size", "16",
             # What `oasis prefill` adds on a machine without a GPU.
             "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--disable-overlap-schedule", "--sleep-on-idle"]
    decode = ["-m", "oasis_sglang.cli", "decode", *common, "--port", str(ports["decode"])]
    tier = ["-m", "oasis_sglang.cli", "tier", "--local", sock, "--http", f"127.0.0.1:{http}", "--arena-bytes", "128MiB"]
    servers = []

    def run(name, words, env=None):
        scratch = tmp_path / name
        (scratch / "metrics").mkdir(parents=True)
        own = {"TMPDIR": str(scratch), "PROMETHEUS_MULTIPROC_DIR": str(scratch / "metrics"), **(env or {})}
        servers.append(processes.run([sys.executable, "-P", *words], log=tmp_path / f"{name}.log", env=own, name=name))

    try:
        run("tier", tier)
        run("prefill", serve, {"SGLANG_OASIS_CONFIG": json.dumps({"tier": sock})})  # waits for the tier
        run("decode", decode)
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        for server in servers[1:]:
            wait_for(lambda s=server: s.poll() is not None or probe(urls[s.name] + "/health"), f"{server.name} serves", 240)
            assert server.poll() is None, server.tail()
        request = {"input_ids": prompts[3], "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
                   "bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap, "bootstrap_room": next_room(), "rid": "by-command"}
        Post(urls["prefill"], request)
        assert Post(urls["decode"], request).result().output_ids == expected[3][:16]
        report = get_json(urls["decode"] + "/server_info")["internal_states"][0]["oasis"]
        assert report["requests"]["by-command"]["prompt_tokens"] == len(prompts[3]) and report["plane"]["landed_bytes"] > 0
    finally:
        for server in reversed(servers):
            server.stop()
