"""``oasis keys``: what it writes, for whom, and what it will not do."""

from __future__ import annotations

import os
import re
import stat

import pytest
import zmq
from typer.testing import CliRunner
from zmq.auth import load_certificate
from zmq.utils import z85

from oasis_sglang import keyring
from oasis_sglang.cli import app
from transport.errors import ConfigError
from transport.security import Security


def oasis(*words) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["keys", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def mode(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def lax():
    """A umask under which everything would be open to everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_pair_is_made_and_its_secret_is_nobody_elses(tmp_path, lax):
    folder = tmp_path / "keys"
    code, said = oasis("create", "prefill-0", "--out", folder)
    assert code == 0 and sorted(path.name for path in folder.iterdir()) == ["prefill-0.key", "prefill-0.key_secret"]
    assert (mode(folder), mode(folder / "prefill-0.key_secret"), mode(folder / "prefill-0.key")) == (0o700, 0o600, 0o644)
    public, secret = load_certificate(folder / "prefill-0.key_secret")
    assert zmq.curve_public(secret) == public == load_certificate(folder / "prefill-0.key")[0]
    assert secret not in (folder / "prefill-0.key").read_bytes() and secret.decode() not in said
    assert oasis("show", folder / "prefill-0.key") == oasis("show", folder / "prefill-0.key_secret") == (0, z85.decode(public).hex() + "\n")


def test_nothing_is_written_over(tmp_path):
    folder = tmp_path / "keys"
    oasis("create", "a", "--out", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, said = oasis("create", "a", "--out", folder)
    assert code == 2 and "exists" in said
    (folder / "a.key_secret").unlink()
    assert oasis("create", "a", "--out", folder)[0] == 2, "half a pair is still somebody's"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a.key": before["a.key"]}


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "a b", "ä"])
def test_what_is_no_name(tmp_path, name):
    code, said = oasis("create", name, "--out", tmp_path / "keys")
    assert code == 2 and "is not a name" in said and not (tmp_path / "keys").exists()


def test_who_is_allowed(tmp_path):
    for name in ("tier", "decode"):
        oasis("create", name, "--out", tmp_path / name)
    public = tmp_path / "decode" / "decode.key"
    assert oasis("allow", tmp_path / "tier", public) == (0, f"{tmp_path}/tier/allowed/decode.key\n")
    assert oasis("allow", tmp_path / "tier", public)[0] == 0, "again is no fault"
    assert [path.name for path in (tmp_path / "tier/allowed").iterdir()] == ["decode.key"]
    security = Security.load(str(tmp_path / "tier/tier.key_secret"), str(tmp_path / "tier/allowed"), False)
    assert load_certificate(public)[0] in security.allowed and security.keys.public not in security.allowed


def test_a_secret_is_never_passed_on(tmp_path):
    for name in ("tier", "decode"):
        oasis("create", name, "--out", tmp_path / name)
    secret = tmp_path / "decode" / "decode.key_secret"
    (tmp_path / "renamed.key").write_bytes(secret.read_bytes())
    for path in (secret, tmp_path / "renamed.key"):
        code, said = oasis("allow", tmp_path / "tier", path)
        assert code == 2 and "stays where it was made" in said
    assert not (tmp_path / "tier/allowed").exists()


def test_another_key_of_a_name_takes_nobodys_place(tmp_path):
    for folder in ("one", "two"):
        oasis("create", "decode", "--out", tmp_path / folder)
    oasis("allow", tmp_path / "tier", tmp_path / "one/decode.key")
    code, said = oasis("allow", tmp_path / "tier", tmp_path / "two/decode.key")
    assert code == 2 and "another key of that name" in said
    assert (tmp_path / "tier/allowed/decode.key").read_bytes() == (tmp_path / "one/decode.key").read_bytes()


@pytest.mark.parametrize("content", [None, "", "curve\n    public-key = \"short\"\n"])
def test_files_that_are_none(tmp_path, content):
    path = tmp_path / "x.key"
    if content is not None:
        path.write_text(content)
    for command in (["show", path], ["allow", tmp_path, path]):
        code, said = oasis(*command)
        assert code == 2 and said.startswith("oasis: ") and len(said.splitlines()) == 1 and "x.key" in said


def test_a_ring_gives_each_server_keys_of_its_own_that_the_others_allow(tmp_path):
    ring = keyring.Ring(tmp_path / "ring")
    flags = {name: ring.flags(name, "--oasis-" if name == "decode" else "--") for name in ("memory0", "tier", "decode")}
    assert flags["decode"][::2] == ["--oasis-keys", "--oasis-allowed"] and flags["tier"][::2] == ["--keys", "--allowed"]
    loaded = {name: Security.load(words[1], words[3], False) for name, words in flags.items()}
    assert len({one.keys.public for one in loaded.values()}) == 3
    assert all(other.keys.public in one.allowed for one in loaded.values() for other in loaded.values())
    assert re.fullmatch(r"#[0-9a-f]{64}", ring.mark("tier")) and ring.mark("tier") == ring.mark("tier") != ring.mark("memory0")
    loaded["tier"].require(f"tcp://127.0.0.1:1{ring.mark('memory0')}", "memory node")


def test_a_decode_worker_is_refused_by_its_option_before_it_starts(tmp_path):
    from oasis_sglang import launch

    public, secret = keyring.create(tmp_path, "decode")
    with pytest.raises(ConfigError, match="--oasis-keys and --oasis-allowed go together"):
        launch.worker_argv("decode", ["--oasis-keys", str(secret)])
    with pytest.raises(ConfigError, match="--oasis-allowed .*No such file"):
        launch.worker_argv("decode", ["--oasis-keys", str(secret), "--oasis-allowed", str(tmp_path / "none")])
    keyring.allow(tmp_path, [public])
    _, env = launch.worker_argv("decode", ["--oasis-keys", str(secret), "--oasis-allowed", str(tmp_path / "allowed")])
    assert load_certificate(secret)[1].decode() not in str(env)
    launch.worker_argv("prefill", ["--oasis-keys", str(secret)])  # it opens no port: what decode is told goes over the bootstrap server
