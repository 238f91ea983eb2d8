"""Real servers, and peers that are not what they should be: garbage on every socket, a tier in the middle that lies.

Whoever is lied to is told what was wrong with it; everybody else is answered as ever, and nothing is left over.
"""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
import pytest
from chaos_rig import OUTPUT, Blow, answered, at_rest, ended, flush, inventory, pair, running, sets, totals, unseen
from foreign_rig import Foreign, peer_row
from garbage_rig import (
    dealer,
    listening,
    sound_requests,
    takes_messages,
    talk_to_its_socket,
    talk_to_the_bootstrap_server,
    talk_to_the_data_plane,
    talk_to_the_tier,
    throw_at,
    welcome_of,
)

from oasis_sglang.soak import baseline
from oasis_sglang.soak.asking import REFUSED
from transport import messages as m
from transport.errors import LayoutMismatch
from transport.worker_client import WorkerClient

replace = msgspec.structs.replace
ALONG = 250
"""Tokens of an answer that is being given while all of it happens."""


def as_ever(stack, before: dict, prompts, expected) -> None:
    """No server has made a mistake of its own, and none was replaced."""
    answered(pair(stack, prompts.fits, 16)[1], expected["fits"])
    answered(pair(stack, prompts.selects, 4)[1])
    at_rest(stack)
    assert baseline.faults_of_ours(stack) == before["faults"] and sets(stack)["leaks"] == 0
    assert {name: server.pid for name, server in stack.servers.items()} == before["pids"]
    assert not (more := baseline.grown(before["uses"], baseline.uses(stack))), more


def now(stack) -> dict:
    return {"faults": baseline.faults_of_ours(stack), "pids": {name: server.pid for name, server in stack.servers.items()}, "uses": baseline.uses(stack)}


# -- hostile bytes ------------------------------------------------------------------------------------------------


def test_garbage_on_every_socket(stack, prompts, expected):
    before, refused = now(stack), totals(stack, "tier").get("refused", 0)
    restarts = {name: totals(stack, "tier").get(name, 0) for name in ("data_plane_restarts", "mover_restarts")}
    row, path = peer_row(stack), baseline.worker(stack, "prefill")["tier"]
    needs, fits = pair(stack, prompts.selects, ALONG)[1], pair(stack, prompts.fits, OUTPUT)[1]
    running(stack)
    blow = Blow("hostile bytes", "some 2,000 damaged messages and half-open connections, to every socket of tier, prefill and decode")
    tiers, others = listening(stack, "tier"), listening(stack, "prefill") | listening(stack, "decode")
    known = {int(port) for port in [stack.bootstrap_port, *(stack.urls[name].rpartition(":")[2] for name in ("tier", "prefill", "decode"))]}
    assert known <= {port for _, port in tiers | others} and len(tiers) >= 4 and len(others) > 4
    with ExitStack() as undo:
        for address in tiers | others:
            throw_at(address, undo, all_of_it=address in tiers or address[1] in known)
        replies = talk_to_the_tier(undo, row)
        assert totals(stack, "tier")["refused"] - refused >= replies["none"] > 100
        blow.noticed()
        assert {"ProtocolError", "StaleEpoch", "LayoutMismatch"} <= set(replies), replies
        welcome = welcome_of(dealer(undo, row.control), row)
        refused = totals(stack, "tier")["refused"]
        ended_by_it = talk_to_its_socket(undo, path, sound_requests(row, welcome))
        assert totals(stack, "tier")["refused"] - refused >= ended_by_it > 10
        talk_to_the_data_plane(undo, next(e for e in welcome.endpoints if e.kind == "zmq"))
        assert takes_messages(undo, others) == [], "of SGLang's own back ends"
        talk_to_the_bootstrap_server(f"http://127.0.0.1:{stack.bootstrap_port}", row)
        assert peer_row(stack) == row, "decode nodes are sent where they were"
        along = [pair(stack, prompts.fits, 16)[1] for _ in range(3)]
        for asking in along:
            answered(asking, expected["fits"])
        answered(fits, expected["fits"])
        answered(needs)
    at_rest(stack)
    blow.restored(needs, fits, *along)
    assert restarts == {name: totals(stack, "tier").get(name, 0) for name in restarts}
    as_ever(stack, before, prompts, expected)


# -- a tier that lies ---------------------------------------------------------------------------------------------


def packed(raw: bytes, dtype: str, at: int, value: int) -> bytes:
    """An array of a message with another value at one place."""
    values = m.unpack(raw, dtype).copy()
    values[at] = value
    return m.pack(values, dtype)


def page_less(sent: m.Manifest) -> m.Manifest:
    """A sound manifest of a prompt that is a page shorter."""
    pages = sent.prompt_tokens // sent.layout.block_tokens - 1
    return replace(sent, prompt_tokens=pages * sent.layout.block_tokens, records=sent.records[: 4 * pages], generations=sent.generations[: 8 * pages],
                   roots=sent.roots[: 8 * pages], hashes=sent.hashes[: 32 * pages], ranking=b"")


def other_bytes(sent: m.Manifest) -> m.Manifest:
    """Roots that do not match what the data plane delivers."""
    return replace(sent, roots=packed(sent.roots, "u8", 2, 1))


def lies(records: int, layout) -> dict:
    """By name: how the manifest of 400 tokens is false, and what its reader is told: the error's type, the field or the limit."""
    return {
        "another model": (lambda x: replace(x, fingerprint="0" * 64), "LayoutMismatch", "fingerprint"),
        "another layout": (lambda x: replace(x, layout=replace(x.layout, kv_heads=layout.kv_heads + 1)), "LayoutMismatch", "kv_heads"),
        "a record that there is not": (lambda x: replace(x, records=packed(x.records, "u4", 3, records)), "BoundsError", f"{records} records"),
        "a record far away": (lambda x: replace(x, records=packed(x.records, "u4", 0, 2**32 - 1)), "BoundsError", f"{records} records"),
        "a record too few": (lambda x: replace(x, records=x.records[:-4]), "ProtocolError", "where 25 u4 were due"),
        "a page less": (page_less, "RoomFailed", "400 tokens here, 384 committed"),
        "a short hand-over row": (lambda x: replace(x, metadata=(x.metadata[0][:-8], *x.metadata[1:])), "LayoutMismatch", "hand-over row"),
        "a hand-over row less": (lambda x: replace(x, metadata=x.metadata[:-1]), "LayoutMismatch", "hand-over row"),
        "another request's hand-over row": (lambda x: replace(x, metadata=(*x.metadata[:-1], bytes([1, *bytes(len(x.metadata[-1]) - 1)]))), "ProtocolError", "another room"),
        "a hand-over row of no room": (lambda x: replace(x, metadata=(*x.metadata[:-1], bytes(len(x.metadata[-1])))), "ProtocolError", "another room"),
        "another room": (lambda x: replace(x, room=x.room + 1), "ProtocolError", "another room"),
        "another epoch": (lambda x: replace(x, epoch="0" * 32), "ProtocolError", "another room"),
        "a ranking of nothing": (lambda x: replace(x, ranking=m.pack([[25]] * layout.pieces, "u4")), "ProtocolError", "25 whole blocks"),
        "a page twice": (lambda x: replace(x, hashes=x.hashes[:32] * 25), "ProtocolError", "twice"),
        "no manifest": (lambda x: m.Ok(seq=x.seq), "ProtocolError", "something else than a manifest"),
        "a lease below zero": (lambda x: replace(x, lease=-1), "ProtocolError", "$.lease"),
        "no message": (lambda x: b"\xc1" * 40, "ProtocolError", "undecodable"),
    }


def test_a_tier_in_the_middle_that_lies(stack, prompts, expected):
    """Everything that it does not change is the real tier's: told as it was, it is believed."""
    flush(stack)
    before, had = now(stack), totals(stack, "decode")
    needs = pair(stack, prompts.selects, 2 * ALONG)[1]
    running(stack)
    blow, told, others = Blow("foreign manifest", "manifests of another model, layout, room, size, with other roots and records, by a tier in the middle"), [], []
    with Foreign(stack) as foreign:
        for lie, field in ((dict(layout=replace(foreign.row.layout, kv_heads=7)), "kv_heads"), (dict(fingerprint="0" * 64), "model differs")):
            foreign.lies = lie
            told.append(asking := foreign.ask(prompts.fits, 4))
            outcome = ended(asking)
            assert (outcome.status, outcome.error) == (REFUSED, "LayoutMismatch") and field in outcome.told, outcome
        blow.noticed()
        foreign.lies = {}
        for prompt in (prompts.fits, unseen(prompts.selects)):  # decode has nothing of either
            told.append(asking := foreign.ask(prompt, 16, other_bytes, on_failure="fail"))
            outcome = ended(asking)
            assert (outcome.status, outcome.error, outcome.code) == (REFUSED, "IntegrityError", 503) and "differ from what was published" in outcome.told, outcome
        others.append(foreign.ask(prompts.fits, 16, other_bytes))
        answered(others[-1], expected["fits"])  # computed again, in a room of which it is told the truth
        assert totals(stack, "decode").get("recomputed", 0) == had.get("recomputed", 0) + 1
        for name, (change, error, words) in lies(inventory(stack)["records"], foreign.row.layout).items():
            told.append(asking := foreign.ask(prompts.fits, 16, change, on_failure="fail"))
            others.append(pair(stack, prompts.fits, 16)[1])
            outcome = ended(asking)
            assert (outcome.status, outcome.error, outcome.code) == (REFUSED, error, 500) and words in outcome.told, (name, outcome)
            answered(others[-1], expected["fits"])
        assert len(foreign.changed) == len(told) - 1, "each lie was told"
        others.append(foreign.ask(prompts.selects, 4))
        answered(others[-1])
    answered(needs)
    at_rest(stack)
    blow.restored(needs, *told, *others)
    as_ever(stack, before, prompts, expected)


@pytest.mark.parametrize("field, value", [("kv_heads", 4), ("dtype", "bfloat16"), ("block_tokens", 32), ("tp_size", 2), ("summary", "none")])
def test_a_worker_of_another_layout_is_told_the_field(stack, prompts, expected, field, value):
    row, path = peer_row(stack), baseline.worker(stack, "prefill")["tier"]
    workers = inventory(stack)["workers"]
    other = replace(row.layout, **{field: value})
    worker = WorkerClient(path)
    with pytest.raises(LayoutMismatch, match=field):
        worker.attach(node="foreign", rank=0, layout=other, fingerprint=row.fingerprint)
    assert not worker.alive()
    with ExitStack() as undo, pytest.raises(LayoutMismatch, match=field):
        welcome_of(dealer(undo, row.control), replace(row, layout=other))
    assert inventory(stack)["workers"] == workers
    answered(pair(stack, prompts.fits, 4)[1], expected["fits"])
