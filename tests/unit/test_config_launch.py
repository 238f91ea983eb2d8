"""Options: where they come from, which wins, and that a wrong one is refused by its name."""

from __future__ import annotations

import json

import pytest

from oasis_sglang import config, launch
from oasis_sglang.config import ENV, OasisConfig
from oasis_sglang.fingerprint import SAMPLE, model_fingerprint
from oasis_sglang.seams import SURFACE, Seam, drift, unhooked
from transport.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv(ENV, raising=False)
    monkeypatch.delenv(config.ACTIVE_ENV, raising=False)


# -- loading ------------------------------------------------------------------------------------------------------


def test_nothing_given_is_the_defaults():
    assert config.load() == config.load("") == config.load("{}") == OasisConfig() and not config.active()


def test_the_environment_wins_over_the_flag_and_a_file_is_read(monkeypatch, tmp_path):
    flag = json.dumps({"host_ratio": 2, "oasis": {"tier": "/flag", "read_seconds": 5}})
    assert (config.load(flag).tier, config.load(flag).read_seconds) == ("/flag", 5)
    monkeypatch.setenv(ENV, '{"tier": "/env"}')
    assert (config.load(flag).tier, config.load(flag).read_seconds) == ("/env", 5)
    (tmp_path / "options.json").write_text('{"tier": "/file"}')
    monkeypatch.setenv(ENV, f"@{tmp_path}/options.json")
    assert config.load().tier == "/file"
    assert config.load(f"@{tmp_path}/options.json").tier == "/file", "the flag's file has no oasis part, the environment's has"


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "1", "null", "@/nowhere", "@"])
def test_what_is_no_json_object_is_refused_by_its_source(monkeypatch, text):
    with pytest.raises(ConfigError, match="--hisparse-config"):
        config.load(text)
    monkeypatch.setenv(ENV, text)
    for refuse in (config.load, lambda: launch.worker_argv("decode", [])):
        with pytest.raises(ConfigError, match=ENV):
            refuse()


def test_an_oasis_part_that_is_no_object():
    with pytest.raises(ConfigError, match="oasis"):
        config.load('{"oasis": [1]}')


def test_unknown_options_and_wrong_types_are_named():
    with pytest.raises(ConfigError, match="read_second, teir; known: tier"):
        config.parse({"teir": "x", "read_second": 3})
    for option, value in (("read_seconds", "5"), ("staging_windows", 1.5), ("tier", 5), ("staging_bytes", None)):
        with pytest.raises(ConfigError, match=option):
            config.parse({option: value})


@pytest.mark.parametrize("option, value", [
    ("data_plane", "rdma"), ("data_plane", ""), ("data_plane", "loopback"), ("admission", "some"), ("mode", "dense"), ("on_miss", "never"), ("budget_tokens", 0), ("sink_tokens", -16), ("recent_tokens", 0),
    ("tail_tokens", 0), ("fetch_blocks_per_step", -1), ("wait_seconds", 0.0), ("host_cache_bytes", 0), ("summary", "mean"), ("staging_bytes", 0),
    ("staging_windows", -1), ("reserve_seconds", 0.0), ("await_seconds", -0.1), ("read_seconds", float("nan")), ("silence_seconds", float("inf")),
    ("tier_start_seconds", 0), ("restore_min_tokens", -1)])
def test_values_out_of_bounds_are_named(option, value):
    with pytest.raises(ConfigError, match=option):
        OasisConfig(**{option: value}).validate("decode")


def test_prefill_needs_a_tier_and_decode_does_not():
    with pytest.raises(ConfigError, match="tier"):
        OasisConfig().validate("prefill")
    OasisConfig().validate("decode")
    OasisConfig(tier="/x", summary="none", data_plane="zmq").validate("prefill")


# -- command lines ------------------------------------------------------------------------------------------------


def test_our_flags_are_taken_out_and_the_rest_is_untouched():
    ours, rest = launch.split_flags(["--model-path", "m", "--oasis-tier", "/t", "--oasis-read-seconds=2.5", "-tp", "2", "--oasis-staging-windows", "8", "--x=--oasis-y"])
    assert ours == {"tier": "/t", "read_seconds": 2.5, "staging_windows": 8} and rest == ["--model-path", "m", "-tp", "2", "--x=--oasis-y"]


@pytest.mark.parametrize("flags, named", [
    (["--oasis-teir", "x"], "--oasis-teir"), (["--oasis-tier"], "--oasis-tier needs a value"), (["--oasis-read-seconds", "soon"], "read_seconds"),
    (["--oasis-staging-windows=1.5"], "staging_windows"), (["--oasis-", "x"], "unknown option")])
def test_our_flags_are_refused_by_name(flags, named):
    with pytest.raises(ConfigError, match=named):
        launch.split_flags(flags)


def test_a_workers_command_line(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    argv, extra = launch.worker_argv("prefill", ["--model-path", "m", "--page-size", "32", "--oasis-silence-seconds", "3"])
    assert argv[:6] == ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "oasis", "--radix-cache-backend", "oasis"]
    assert argv[-4:] == ["--model-path", "m", "--page-size", "32"], "the user's come last and so win"
    assert json.loads(extra[ENV]) == {"tier": f"{tmp_path}/oasis/tier.sock", "silence_seconds": 3.0}
    argv, extra = launch.worker_argv("decode", [])
    assert argv[1] == "decode" and json.loads(extra[ENV]) == {}


def test_a_flag_wins_over_the_environment_and_the_rest_of_it_is_kept(monkeypatch, tmp_path):
    (tmp_path / "o.json").write_text('{"tier": "/file", "read_seconds": 7}')
    for text in ('{"tier": "/file", "read_seconds": 7}', f"@{tmp_path}/o.json"):
        monkeypatch.setenv(ENV, text)
        _, extra = launch.worker_argv("prefill", ["--oasis-read-seconds", "9"])
        assert json.loads(extra[ENV]) == {"tier": "/file", "read_seconds": 9.0}


def test_a_bad_option_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="data_plane"):
        launch.worker_argv("decode", ["--oasis-data-plane", "pigeon"])


# -- which weights ------------------------------------------------------------------------------------------------


def test_a_fingerprint_follows_weights_configuration_and_extras(tmp_path):
    weights = tmp_path / "model.safetensors"
    data = bytearray(4 * SAMPLE)
    weights.write_bytes(data)
    hf = {"hidden_size": 4, "architectures": ["A"]}
    base = model_fingerprint(str(tmp_path), hf, "fp32")
    assert base == model_fingerprint(str(tmp_path), {**hf, "_name_or_path": "elsewhere", "transformers_version": "9"}, "fp32")
    seen = {base, model_fingerprint(str(tmp_path), {**hf, "hidden_size": 5}, "fp32"), model_fingerprint(str(tmp_path), hf, "bf16"), model_fingerprint(str(tmp_path), hf)}
    for at in (0, 2 * SAMPLE + 5, 4 * SAMPLE - 1):
        data[at] = 1
        weights.write_bytes(data)
        seen.add(model_fingerprint(str(tmp_path), hf, "fp32"))
        data[at] = 0
    weights.write_bytes(data + b"\0")
    seen.add(model_fingerprint(str(tmp_path), hf, "fp32"))
    assert len(seen) == 8
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes(data)
    assert model_fingerprint(str(copy), hf, "fp32") == base, "where the files lie does not matter"
    assert model_fingerprint("org/one", hf) != model_fingerprint("org/two", hf)


# -- seams --------------------------------------------------------------------------------------------------------


def test_drift_is_found_and_named():
    assert drift([Seam("json.dumps", ("obj", "skipkeys"))]) == [
        "json.dumps takes ('obj', 'skipkeys', 'ensure_ascii', 'check_circular', 'allow_nan', 'cls', 'indent', 'separators', 'default', 'sort_keys', 'kw'), "
        "Oasis knows ('obj', 'skipkeys')"]
    [gone] = drift([Seam("json.no_such", ())])
    assert gone.startswith("json.no_such is gone")
    [gone] = drift([Seam("no_such_module.f", ())])
    assert gone.startswith("no_such_module.f is gone")
    assert unhooked(["json.dumps"]) == ["json.dumps is not hooked"]


def test_another_sglang_is_named(monkeypatch):
    import sglang

    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    assert drift([]) == ["SGLang is 0.5.24, Oasis needs 0.5.23"]


def test_every_seam_is_listed_once():
    assert len({s.target for s in SURFACE}) == len(SURFACE)


def test_options_take_hyphens_and_sizes_in_json_and_on_the_command_line():
    assert config.parse({"data-plane": "zmq", "staging-bytes": "32MiB"}) == config.parse({"data_plane": "zmq", "staging_bytes": 32 << 20})
    ours, rest = launch.split_flags(["--oasis-staging-bytes", "32MiB", "--oasis-staging-windows=2", "--port", "1"])
    assert ours == {"staging_bytes": 32 << 20, "staging_windows": 2} and rest == ["--port", "1"]
    with pytest.raises(ConfigError, match="not a size"):
        config.parse({"staging_bytes": "banana"})
