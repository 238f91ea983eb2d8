"""A stack whose nodes have keys: the same answers over encrypted sockets, and nothing for a decode worker that is not on the list."""

from __future__ import annotations

from pathlib import Path

import pytest
from pd import Post, assert_baseline, body, next_room, pair, tier, worker
from test_refusals import second_decode

from oasis_sglang import keyring

TOKENS = 16
SHORT, LONG = 1, 6
"""Prompts of the matrix that are asked."""


@pytest.fixture(scope="module")
def stack(oasis_stack):
    return oasis_stack(keyed=True, memory_nodes=1, data_plane="zmq", config={"data_plane": "zmq"}, tier_flags=("--room-seconds", "5"))


def test_answers_over_zeromq_with_keys_are_those_of_one_server(stack, prompts, expected):
    before = worker(stack, "decode")["plane"]["landed_bytes"]
    for index in (SHORT, LONG):
        for oasis in ({"mode": "exact"}, {}):
            prefill, decode = pair(stack, prompts[index], max_new_tokens=TOKENS, oasis=oasis)
            assert decode.result().output_ids == expected[index][:TOKENS], (index, oasis)
            assert prefill.result().status == 200
    state, report = tier(stack), worker(stack, "decode")
    assert state["control"].partition("#")[2] == keyring.public_key(Path(report["config"]["allowed"]) / "tier.key")
    assert state["totals"]["rooms_moved"] > 0, "over the process that moves records too"
    assert report["plane"]["kind"] == "zmq" and report["plane"]["landed_bytes"] > before
    assert_baseline(stack)


def test_a_decode_worker_without_keys_or_with_others_is_refused_by_name_and_the_stack_goes_on(stack, processes, models, tmp_path, prompts, expected):
    listed = Path(worker(stack, "decode")["config"]["allowed"])
    _, secret = keyring.create(tmp_path, "stranger")
    keyring.allow(tmp_path, [listed / "tier.key", listed / "memory0.key"])
    stranger = ("--oasis-keys", str(secret), "--oasis-allowed", str(tmp_path / "allowed"))
    for flags, said in (((), "this node has none"), (("--oasis-allow-plaintext", "true"), "this node has none"), (stranger, "refused our key")):
        with second_decode(processes, tmp_path, models.s4, "--oasis-data-plane", "zmq", *flags) as url:
            request = body(stack, prompts[SHORT], room=next_room(), max_new_tokens=8)
            Post(stack.urls["prefill"], request)
            answer = Post(url, request).result(60)
            assert answer.status >= 500 and said in answer.text, answer.text
    secrets = [path.read_text().split('secret-key = "')[1].split('"')[0] for path in (*listed.parent.glob("*.key_secret"), secret)]
    logs = "".join(server.log.read_text(errors="replace") for server in stack.servers.values())
    assert len(secrets) == 4 and not any(one in logs for one in secrets)
    assert pair(stack, prompts[SHORT], max_new_tokens=TOKENS)[1].result().output_ids == expected[SHORT][:TOKENS]
    assert_baseline(stack)
