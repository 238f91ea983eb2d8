"""Keys between nodes: real ZeroMQ sockets, real tiers. Whoever is not on the list is told nothing and says so within a bound."""

from __future__ import annotations

import json
import logging
import os
import stat
import time
import urllib.request

import msgspec
import numpy as np
import pytest
import zmq
from node_rig import FINGERPRINT, SOURCE, Decode, LocalTier, Prefill, small_layout, until

from decode_node.tier_link import TierLink
from oasis_sglang import keyring
from prefill_node.publisher import COMMITTED
from transport import messages as m
from transport.dataplane import Endpoint, ReadBatch
from transport.errors import AccessDenied, ConfigError, IntegrityError, ProtocolError
from transport.layout import ArenaGeometry
from transport.planes import incarnation, make_plane, make_server
from transport.security import AllowList, Security, is_loopback, show, split_key
from transport.server import TierOptions, TierServer
from transport.worker_client import WorkerClient

LAYOUT = small_layout()
BOUND = 10.0
"""Seconds within which a refusal must have been told; waits of ours for what must not come are a second."""


class Nodes:
    """Nodes with keys and lists of their own. ``security("a", "b", "c")``: of node a, which trusts b and c."""

    def __init__(self, folder):
        self.folder = folder

    def public(self, name):
        path = self.folder / name / f"{name}.key"
        if not path.exists():
            keyring.create(self.folder / name, name)
        return path

    def files(self, name, *trusts) -> dict[str, str]:
        self.public(name)
        keyring.allow(self.folder / name, map(self.public, trusts))
        return dict(keys=str(self.folder / name / f"{name}.key_secret"), allowed=str(self.folder / name / "allowed"))

    def security(self, name, *trusts) -> Security:
        return Security.load(**self.files(name, *trusts), allow_plaintext=False)

    def forget(self, name, other) -> None:
        (self.folder / name / "allowed" / f"{other}.key").unlink()

    def key(self, name) -> str:
        return keyring.public_key(self.public(name))

    def secrets(self) -> list[bytes]:
        return [line.split(b'"')[1] for path in self.folder.rglob("*.key_secret") if path.is_file() for line in path.read_bytes().splitlines() if b"secret-key" in line]


@pytest.fixture
def nodes(tmp_path):
    return Nodes(tmp_path / "nodes")


@pytest.fixture
def undo():
    made = []
    yield lambda thing, close="close": made.append(getattr(thing, close)) or thing
    for close in reversed(made):
        close()


@pytest.fixture
def keyed(nodes, undo, tmp_path):
    """``keyed("tier", "decode")`` is a tier that trusts decode, with a worker attached; its address carries its key."""

    def make(name, *trusts, planes=("zmq",), **options):
        tier = undo(LocalTier(str(tmp_path / f"{name}.sock"), planes=planes, **nodes.files(name, *trusts), **options), "stop")
        client = undo(WorkerClient(tier.path, timeout=10))
        client.attach(node="worker", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT)
        return tier

    return make


def link_to(undo, control, security, silence=BOUND):
    """A decode rank's link, run until it is welcomed or ends."""
    context = undo(zmq.Context(), "destroy")
    link = TierLink(context, control, node="decode", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT, silence=silence, now=time.monotonic(),
                    on_ready=lambda link: None, security=security)
    undo(type("Ended", (), {"close": lambda self: link.fail(ConfigError("over"))})())
    until(lambda: link.process(time.monotonic()) or link.welcome or link.error, "the tier has answered", BOUND)
    return link


def mute(undo, address, keys=None, server=None):
    """A socket that has said something to ``address`` and was told nothing for a second."""
    context = undo(zmq.Context(), "destroy")
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys.public, keys.secret, server
    socket.connect(split_key(address)[0])
    socket.send(m.encode(m.Hello(seq=1, protocol=m.PROTOCOL, role="reader", node="x", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT)))
    assert not socket.poll(1000), socket.recv()
    socket.close()


# -- key files and lists ----------------------------------------------------------------------------------------


def test_a_sound_pair_is_loaded_and_keeps_its_secret(nodes):
    security = nodes.security("a", "b")
    assert show(security.keys.public) == nodes.key("a") and len(security.keys.secret) == 40
    [secret, _] = sorted(nodes.secrets(), key=lambda one: one != security.keys.secret)
    assert secret == security.keys.secret
    for text in (repr(security.keys), repr(security), repr(vars(security)), str(security.allowed)):
        assert secret.decode() not in text
    assert security.told("tcp://h:1") == f"tcp://h:1#{nodes.key('a')}" and split_key(security.told("tcp://h:1")) == ("tcp://h:1", nodes.key("a"))


def rewritten(change):
    def damage(secret, folder):
        secret.write_bytes(change(secret.read_bytes()))

    return damage


def others_key(secret, folder):
    public, other = keyring.create(folder / "other", "other")
    theirs = next(line for line in other.read_text().splitlines() if "secret-key" in line)
    secret.write_text("\n".join(theirs if "secret-key" in line else line for line in secret.read_text().splitlines()))


DAMAGE = {
    "missing": (lambda secret, folder: secret.unlink(), "No such file"),
    "a folder": (lambda secret, folder: (secret.unlink(), secret.mkdir()), "no key file"),
    "a pipe": (lambda secret, folder: (secret.unlink(), os.mkfifo(secret, 0o600)), "no key file"),
    "empty": (rewritten(lambda raw: b""), "No public key"),
    "no secret": (rewritten(lambda raw: b"\n".join(line for line in raw.splitlines() if b"secret-key" not in line)), "holds no secret key"),
    "cut": (rewritten(lambda raw: raw.replace(b'secret-key = "', b'secret-key = "#')[:-3]), "malformed"),
    "not Z85": (rewritten(lambda raw: raw.replace(b'public-key = "', b'public-key = "\xff\xff\xff\xff\xff')), "malformed"),
    "huge": (rewritten(lambda raw: raw + b"#" * (1 << 17)), "no key file"),
    "two pairs": (others_key, "do not belong together"),
    "group may read": (lambda secret, folder: secret.chmod(0o640), "open to others"),
    "world may read": (lambda secret, folder: secret.chmod(0o604), "open to others"),
    "group may write": (lambda secret, folder: secret.chmod(0o620), "open to others"),
    "list is missing": (lambda secret, folder: [path.unlink() for path in (folder / "a/allowed").iterdir()] and (folder / "a/allowed").rmdir(), "No such file"),
    "list is empty": (lambda secret, folder: (folder / "a/allowed/b.key").rename(folder / "b.txt"), "holds no public key"),
    "list is damaged": (lambda secret, folder: (folder / "a/allowed/c.key").write_text("curve\n    public-key = nothing\n"), "malformed"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_cannot_be_used_is_refused_at_start_in_one_line(nodes, case):
    files = nodes.files("a", "b")
    damage, said = DAMAGE[case]
    damage(nodes.folder / "a" / "a.key_secret", nodes.folder)
    with pytest.raises(ConfigError, match=said) as refused:
        TierServer(TierOptions(local="unused", **files))
    assert str(refused.value).startswith(("--keys ", "--allowed ")) and "\n" not in str(refused.value)
    assert not any(secret.decode() in str(refused.value) for secret in nodes.secrets() if len(secret) == 40)


@pytest.mark.parametrize("options, named", [
    (dict(keys="x"), "go together"), (dict(allowed="x"), "go together"), (dict(keys="x", allowed="y", allow_plaintext=True), "contradicts")])
def test_options_that_do_not_fit_together(options, named):
    with pytest.raises(ConfigError, match=named):
        Security.load(**{"keys": "", "allowed": "", "allow_plaintext": False, **options})


def test_a_list_follows_its_folder_and_never_fails_open(nodes, caplog):
    allowed = AllowList(nodes.files("a", "b")["allowed"])
    b, c = (keyring.read_keys(nodes.public(name))[0] for name in "bc")
    assert (b in allowed, c in allowed) == (True, False)
    keyring.allow(nodes.folder / "a", [nodes.public("c")])
    assert (b in allowed, c in allowed) == (True, True)
    nodes.forget("a", "b")
    assert (b in allowed, c in allowed) == (False, True)
    (allowed.folder / "d.key").write_text("nonsense")
    (allowed.folder / "e.key").symlink_to("nowhere")
    (allowed.folder / "f.txt").write_bytes(nodes.public("b").read_bytes())
    assert (b in allowed, c in allowed) == (False, True) and "counts for nobody" in caplog.text
    (allowed.folder / "c.key").write_bytes(nodes.public("b").read_bytes())  # in place
    assert (b in allowed, c in allowed) == (True, False)
    allowed.folder.rename(nodes.folder / "away")
    assert (b in allowed, c in allowed) == (False, False) and "nobody is allowed any more" in caplog.text
    (nodes.folder / "away").rename(allowed.folder)
    assert (b in allowed, c in allowed) == (True, False)


def test_how_often_refusals_are_logged_is_not_up_to_who_is_refused(nodes, caplog):
    allowed = nodes.security("a", "b").allowed
    assert [allowed.callback("oasis", keyring.read_keys(nodes.public(name))[0]) for name in ("c", "d", "e", "b")] == [False, False, False, True]
    told = [record.message for record in caplog.records if "refused" in record.message]
    assert len(told) == 1 and nodes.key("c") in told[0]


# -- addresses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host, near", [("localhost", True), ("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("127.evil.example", False),
                                        ("0.0.0.0", False), ("10.0.0.1", False), ("localhost.example", False), ("", False), ("::", False)])
def test_what_is_loopback(host, near):
    assert is_loopback(host) is near


@pytest.mark.parametrize("address", ["tcp://h:1#", "tcp://h:1#12", "tcp://h:1#" + "g" * 64, "tcp://h:1#" + "a" * 66, "tcp://h:1#" + "é" * 64])
def test_malformed_keys_in_addresses(address):
    with pytest.raises(ProtocolError, match="malformed key"):
        split_key(address)


FAR = ["tcp://10.0.0.1:5", "tcp://tier.example:5", "tcp://127.0.0.1:0;10.0.0.1:5", "tcp://0.0.0.0:5", "tipc://{5,5}"]


@pytest.mark.parametrize("address", FAR)
def test_plaintext_stays_on_loopback_unless_it_is_allowed_elsewhere(address):
    with pytest.raises(AccessDenied, match="plaintext") as refused:
        Security().require(address, "tier X")
    assert refused.value.peer == "tier X"
    Security(allow_plaintext=True).require(address, "tier X")
    for near in ("tcp://127.0.0.1:5", "tcp://localhost:5", "tcp://[::1]:5", "inproc://here"):
        Security().require(near, "tier X")


def test_an_address_is_worth_nothing_unless_its_key_is_on_the_list(nodes):
    mine = nodes.security("a", "b")
    mine.require(f"tcp://10.0.0.1:5#{nodes.key('b')}", "tier X")
    with pytest.raises(AccessDenied, match="not on this node's allow list") as refused:
        mine.require(f"tcp://127.0.0.1:5#{nodes.key('c')}", "tier X")
    assert refused.value.peer == "tier X" and refused.value.limit == f"key {nodes.key('c')}"
    with pytest.raises(AccessDenied, match="carries no key"):
        mine.require("tcp://127.0.0.1:5", "tier X")
    with pytest.raises(AccessDenied, match="this node has none"):
        Security(allow_plaintext=True).require(f"tcp://127.0.0.1:5#{nodes.key('b')}", "tier X")


# -- control plane ----------------------------------------------------------------------------------------------


def test_an_allowed_reader_is_welcomed_and_learns_addresses_with_keys(nodes, keyed, undo):
    tier = keyed("tier", "decode")
    link = link_to(undo, tier.control, nodes.security("decode", "tier"))
    assert link.error is None and link.epoch == tier.server.epoch
    assert {split_key(address)[1] for address in (tier.control, link.welcome.control, link.welcome.endpoints[0].address)} == {nodes.key("tier")}


def test_an_unlisted_key_is_refused_by_name(nodes, keyed, undo):
    tier = keyed("tier", "decode")
    link = link_to(undo, tier.control, nodes.security("stranger", "tier"))
    assert isinstance(link.error, AccessDenied) and "refused our key" in link.error.message
    assert link.error.peer == f"tier {split_key(tier.control)[0]}"
    mute(undo, tier.control, nodes.security("stranger", "tier").keys, nodes.security("tier", "decode").keys.public)
    assert tier.call(lambda: len(tier.tier.sessions)) == 1, "the worker"


def test_without_a_key_nobody_is_heard(nodes, keyed, undo):
    tier = keyed("tier", "decode")
    with pytest.raises(AccessDenied, match="this node has none"):
        link_to(undo, tier.control, Security(allow_plaintext=True))
    mute(undo, tier.control)
    link = link_to(undo, split_key(tier.control)[0], Security())  # as an address that was told before the tier had keys
    assert isinstance(link.error, AccessDenied) and "one side has keys" in link.error.message


def test_who_answers_under_an_allowed_address_must_hold_its_key(nodes, keyed, undo):
    impostor = keyed("impostor", "decode")
    claimed = f"{split_key(impostor.control)[0]}#{nodes.key('tier')}"
    link = link_to(undo, claimed, nodes.security("decode", "tier"))
    assert isinstance(link.error, AccessDenied) and "another key than its address says" in link.error.message and link.welcome is None


def test_a_redirected_registration_leads_to_no_other_tier(nodes, keyed, undo):
    """Whatever the bootstrap server says, and once it says something else that is taken."""
    foreign, own = keyed("foreign", "decode"), keyed("tier", "decode")
    controls = {SOURCE: foreign.control}
    decode = undo(Decode(controls, layout=LAYOUT, kind="zmq", security=nodes.security("decode", "tier")))
    pull = decode.pull(1)
    until(lambda: pull.state == "failed", "refused", BOUND)
    assert isinstance(pull.error, AccessDenied) and pull.error.limit == f"key {nodes.key('foreign')}"
    assert decode.forgotten == [foreign.control] and foreign.call(lambda: len(foreign.tier.sessions)) == 1
    controls[SOURCE] = own.control
    other = decode.pull(2)
    until(lambda: other.state == "awaiting" and other.asked and not next(iter(other.asked)).error and next(iter(other.asked)).welcome, "welcomed", BOUND)


def test_a_commit_is_pulled_over_sockets_with_keys(nodes, keyed, undo):
    tier = keyed("tier", "decode")
    prefill = undo(Prefill(tier.path, layout=LAYOUT))
    decode = undo(Decode({SOURCE: tier.control}, layout=LAYOUT, kind="zmq", security=nodes.security("decode", "tier")))
    pages = np.arange(5)
    assert prefill.publish(7, np.arange(18, dtype=np.int64), pages).state == COMMITTED
    pull = decode.pull(7)
    until(lambda: pull.state in ("ready", "failed"), "manifest")
    decode.fetch(pull, pages)
    until(lambda: pull.state in ("done", "failed"), "pulled")
    assert pull.state == "done", pull.error
    assert np.array_equal(prefill.pool.tokens(pages, 18), decode.pool.tokens(pages, 18))


def test_rotation_needs_no_restart_and_who_is_taken_off_is_not_heard_any_more(nodes, keyed, undo):
    tier = keyed("tier", "decode")
    trusted = nodes.security("decode", "tier")
    old = link_to(undo, tier.control, trusted)
    assert isinstance(link_to(undo, tier.control, nodes.security("decode-2", "tier")).error, AccessDenied)
    keyring.allow(nodes.folder / "tier", [nodes.public("decode-2")])
    assert link_to(undo, tier.control, nodes.security("decode-2", "tier")).error is None
    nodes.forget("tier", "decode")
    answers = []

    def refused():
        asked = len(answers)
        old.request(m.Lookup, dict(hashes=b"", hold=False), answers.append, deadline=time.monotonic() + BOUND)
        until(lambda: old.process(time.monotonic()) or len(answers) > asked, "answered", BOUND)
        return isinstance(answers[-1], AccessDenied)

    until(refused, "the connection that stands is refused too", BOUND)
    assert "not on the allow list any more" in answers[-1].message


def test_a_tier_that_is_taken_off_the_readers_list_is_left(nodes, keyed, undo):
    tier = keyed("tier", "decode")
    link = link_to(undo, tier.control, nodes.security("decode", "tier", "decode"))
    nodes.forget("decode", "tier")
    until(lambda: link.process(time.monotonic()) or link.error, "the link ends", BOUND)
    assert isinstance(link.error, AccessDenied) and "any more" in link.error.message


def test_one_tier_cannot_take_the_place_of_another(nodes, keyed, undo):
    """``control`` of a tier's Hello ends its earlier connection: only the holder of that address' key may name it."""
    memory = keyed("memory", "tier", "rogue")
    context = undo(zmq.Context(), "destroy")

    def say(name, control):
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(nodes.security(name, "memory").dial(socket, memory.control, "memory node"))
        hello = m.Hello(seq=5, protocol=m.PROTOCOL, role="tier", node=name, rank=0, layout=LAYOUT, fingerprint=FINGERPRINT, control=control)
        socket.send(m.encode(hello))
        assert socket.poll(BOUND * 1000)
        return m.decode_reply(socket.recv())

    control = f"tcp://127.0.0.1:1#{nodes.key('tier')}"
    assert isinstance(say("tier", control), m.Welcome)
    refused = say("rogue", control)
    assert isinstance(refused, m.Failure) and refused.code == "AccessDenied"
    assert memory.inventory()["tiers"] == 1


@pytest.mark.parametrize("planes", [("zmq",)])
def test_a_commit_is_moved_to_a_memory_node_and_pulled_from_there(nodes, keyed, undo, planes):
    """The process that moves records has the keys too, on a tier that serves no NIXL."""
    memory = keyed("memory", "tier", "decode", planes=planes)
    tier = keyed("tier", "memory", "decode", planes=planes, memory_nodes=f"{split_key(memory.control)[0]}#{nodes.key('memory')}")
    prefill = undo(Prefill(tier.path, layout=LAYOUT))
    pages = np.arange(4)
    pub = prefill.publish(9, np.arange(16, dtype=np.int64), pages)
    assert pub.state == COMMITTED, pub.error
    assert memory.call(lambda: memory.tier.totals["rooms_filled"]) == 1
    decode = undo(Decode({SOURCE: tier.control}, layout=LAYOUT, kind="zmq", security=nodes.security("decode", "tier", "memory")))
    pull = decode.pull(9)
    until(lambda: pull.state in ("ready", "failed"), "manifest")
    assert pull.state == "ready", pull.error
    decode.fetch(pull, pages)
    until(lambda: pull.state in ("done", "failed"), "pulled")
    assert pull.state == "done" and np.array_equal(prefill.pool.tokens(pages, 16), decode.pool.tokens(pages, 16))


@pytest.mark.parametrize("key_of, said", [("stranger", "not on this node's allow list"), (None, "carries no key")])
def test_memory_nodes_must_be_named_with_keys_on_the_list(nodes, key_of, said):
    mark = f"#{nodes.key(key_of)}" if key_of else ""
    for spec in (f"tcp://10.0.0.9:7400{mark}", f"dns://memory:7400{mark}"):
        with pytest.raises(ConfigError, match=said):
            TierServer(TierOptions(local="unused", memory_nodes=spec, **nodes.files("tier", "memory")))
        assert TierServer(TierOptions(local="unused", memory_nodes=f"{spec.partition('#')[0]}#{nodes.key('memory')}", **nodes.files("tier")))


def test_a_memory_node_that_refuses_our_key_is_named(nodes, keyed, undo):
    memory = keyed("memory", "decode")
    tier = keyed("tier", "memory", memory_nodes=memory.control)
    prefill = undo(Prefill(tier.path, layout=LAYOUT, reserve_seconds=2.0))
    pub = prefill.open(3, np.arange(8, dtype=np.int64))
    until(lambda: pub.state == "failed", "refused", BOUND)
    assert "refused our key" in str(pub.error) or split_key(memory.control)[0] in str(pub.error), pub.error
    assert memory.call(lambda: memory.inventory is not None) and memory.call(lambda: memory.tier.inventory()["tiers"]) == 0


def test_other_hosts_are_served_with_keys(nodes):
    assert TierServer(TierOptions(local="unused", listen="10.0.0.1:0", **nodes.files("tier", "decode"))).security.keys is not None


# -- data plane -------------------------------------------------------------------------------------------------


@pytest.fixture
def served(nodes, undo):
    arena = np.frombuffer(np.random.default_rng(3).bytes(1 << 16), dtype=np.uint8)
    server = undo(make_server("zmq", incarnation("tier"), arena, security=nodes.security("tier", "decode")))
    server.arena = arena
    return server


def read(undo, endpoint, security):
    """Bytes 100 to 300 of the arena, as a reader with ``security`` gets them."""
    region = np.zeros(1 << 10, dtype=np.uint8)
    plane = undo(make_plane("zmq", incarnation("decode"), region, security=security))
    plane.connect(endpoint)
    at = ReadBatch(*(np.array([value], dtype=np.uint64) for value in (100, 0, 200)))
    transfer = plane.read(endpoint.name, at)
    until(transfer.poll, "landed or refused", BOUND)
    return plane, at, region[:200].copy()


def test_an_allowed_reader_reads_and_nobody_else(nodes, served, undo):
    _, _, landed = read(undo, served.endpoint, nodes.security("decode", "tier"))
    assert np.array_equal(landed, served.arena[100:300])
    with pytest.raises(AccessDenied, match="refused our key") as refused:
        read(undo, served.endpoint, nodes.security("stranger", "tier"))
    assert refused.value.peer == served.endpoint.name
    with pytest.raises(AccessDenied, match="not on this node's allow list"):
        read(undo, served.endpoint, nodes.security("decode-2", "decode"))
    with pytest.raises(AccessDenied, match="this node has none"):
        read(undo, served.endpoint, Security(allow_plaintext=True))
    bare = msgspec.structs.replace(served.endpoint, address=split_key(served.endpoint.address)[0])
    with pytest.raises(AccessDenied):
        read(undo, bare, Security())
    mute(undo, served.endpoint.address)
    wrong = msgspec.structs.replace(bare, address=f"{bare.address}#{nodes.key('decode')}")
    with pytest.raises(AccessDenied, match="another key than its address says"):
        read(undo, wrong, nodes.security("decode-3", "decode"))
    assert served.malformed == served.refused == 0, "nothing of this came so far as to be a request"


def test_a_reader_taken_off_the_list_is_refused_over_the_connection_that_stands(nodes, served, undo):
    keyring.allow(nodes.folder / "tier", [nodes.public("other")])
    plane, at, _ = read(undo, served.endpoint, nodes.security("decode", "tier"))
    nodes.forget("tier", "decode")

    def denied():
        transfer = plane.read(served.endpoint.name, at)
        try:
            until(transfer.poll, "landed or refused", BOUND)
        except AccessDenied as error:
            return "any more" in error.message
        return False

    until(denied, "refused", BOUND)


# -- what the control plane vouches for -------------------------------------------------------------------------


def test_a_data_planes_metadata_is_checked_before_any_plane_sees_it(undo):
    """NIXL takes whatever blob it is given, so a welcome with one that is not the one that was made ends the link."""
    context = undo(zmq.Context(), "destroy")
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    sound = Endpoint.make("nixl", incarnation("tier"), "", 1 << 20, metadata=b"agent" * 20)
    geometry = ArenaGeometry.fit(LAYOUT, 1 << 20)
    for endpoint, wanted in ((msgspec.structs.replace(sound, metadata=b"agenT" * 20), IntegrityError), (sound, None)):
        attached = []
        link = TierLink(context, f"tcp://127.0.0.1:{port}", node="decode", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT, silence=BOUND,
                        now=time.monotonic(), on_ready=attached.append)
        identity, raw = router.recv_multipart()
        welcome = m.Welcome(seq=m.decode_request(raw).seq, epoch="e", control="tcp://127.0.0.1:1", geometry=geometry, endpoints=(endpoint,),
                            planes=("nixl",), lease_seconds=1.0)
        router.send_multipart([identity, m.encode(welcome)])
        until(lambda: link.process(time.monotonic()) or link.error or link.welcome, "taken or refused", BOUND)
        assert (type(link.error) if link.error else None, bool(attached)) == (wanted, wanted is None)
        link.fail(ConfigError("over"))
    router.close()


# -- what is told -----------------------------------------------------------------------------------------------


def test_no_secret_is_told_to_anybody(nodes, keyed, undo, caplog):
    caplog.set_level(logging.DEBUG)
    tier = keyed("tier", "decode")
    link_to(undo, tier.control, nodes.security("decode", "tier"))
    link_to(undo, tier.control, nodes.security("stranger", "tier"))
    pages = [urllib.request.urlopen(f"http://127.0.0.1:{tier.server.http_port}{path}", timeout=10).read().decode() for path in ("/state", "/metrics", "/readyz")]
    assert json.loads(pages[0])["control"] == tier.control
    secrets = [secret.decode() for secret in nodes.secrets()]
    assert len(secrets) == 3 and "refused" in caplog.text
    assert not [secret for secret in secrets if any(secret in text for text in (caplog.text, *pages))]


def test_the_socket_of_the_workers_is_the_owners_alone(keyed):
    tier = keyed("tier", "decode")
    assert stat.S_IMODE(os.stat(tier.path).st_mode) == 0o600
