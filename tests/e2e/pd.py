"""Talking to prefill and decode workers without the router, and reading what they hold."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from oasis_sglang.stack import Stack, get_json

_rooms = itertools.count(1 << 40)
_rids = itertools.count()


def next_room() -> int:
    """A bootstrap room that no test used before."""
    return next(_rooms)


@dataclass
class Answer:
    """``body``: parsed JSON whatever the status; ``text``: as it came."""

    status: int
    text: str

    @property
    def output_ids(self) -> list[int]:
        return json.loads(self.text)["output_ids"]


class Post:
    """One request to one worker on its own connection, so that it can be dropped like a client that left."""

    def __init__(self, url: str, body: dict, *, timeout: float = 300.0):
        self._url, self.rid = url, body["rid"]
        address = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout)
        self._connection.connect()
        self._connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        self._pool = ThreadPoolExecutor(1)
        self.answer: Future[Answer] = self._pool.submit(self._read)
        self._pool.shutdown(wait=False)

    def _read(self) -> Answer:
        reply = self._connection.getresponse()
        return Answer(reply.status, reply.read().decode())

    def result(self, timeout: float = 300.0) -> Answer:
        return self.answer.result(timeout)

    def drop(self) -> None:
        """The client goes away in the middle."""
        sock = self._connection.sock
        if sock is not None:
            try:
                sock.shutdown(2)
            except OSError:
                pass
        self._connection.close()

    def abort(self) -> None:
        """Asks for the abort. A client that just leaves is noticed by SGLang within four seconds only."""
        request = urllib.request.Request(self._url + "/abort_request", json.dumps({"rid": self.rid}).encode(), {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=60).read()


def body(stack: Stack, prompt: list[int], *, room: int, max_new_tokens: int, **extra) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "bootstrap_host": "127.0.0.1",
            "bootstrap_port": stack.bootstrap_port, "bootstrap_room": room, "rid": f"room-{room}-{next(_rids)}", **extra}


def pair(stack: Stack, prompt: list[int], *, room: int | None = None, max_new_tokens: int = 8, oasis: dict | None = None) -> tuple[Post, Post]:
    """The same request at both workers, as the router sends it: (prefill's, decode's). ``oasis``: its own Oasis options."""
    request = body(stack, prompt, room=next_room() if room is None else room, max_new_tokens=max_new_tokens)
    if oasis is not None:
        request["sampling_params"]["custom_params"] = {"oasis": oasis}
    return Post(stack.urls["prefill"], request), Post(stack.urls["decode"], request)


def flush(stack: Stack, name: str = "decode") -> None:
    """What the worker keeps of earlier requests is gone."""
    urllib.request.urlopen(urllib.request.Request(f"{stack.urls[name]}/flush_cache?timeout=30", method="POST"), timeout=60).read()


def worker(stack: Stack, name: str) -> dict:
    """The ``oasis`` part of a worker's ``/server_info``."""
    return stack.server_info(name)["internal_states"][0]["oasis"]


def tier(stack: Stack) -> dict:
    return get_json(stack.urls["tier"] + "/state")


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout:g} s: {what}")
        time.sleep(0.1)


def held(stack: Stack) -> dict:
    """Everything that a finished request must have given back, by scanning; all zero at the baseline."""
    t, d, p = tier(stack)["inventory"], worker(stack, "decode"), worker(stack, "prefill")
    return {
        "tier_writing": t["writing"], "tier_leased": t["leased"], "tier_holders": t["holders"], "tier_rooms": t["rooms"],
        "tier_leases": t["leases"], "tier_waiters": t["waiters"], "tier_missing": t["records"] - t["free"] - t["cached"] - t["writing"] - t["leased"],
        "decode_pulls": d["pulls"], "decode_flights": d["flights"], "decode_kv_tokens": d["kv_pool_tokens"],
        "decode_windows": d["staging"]["leased"] + d["staging"]["quarantined"], "prefill_publications": p["publications"],
        **{f"sets_{name}": value for name, value in d.get("working_sets", {"held": {}})["held"].items()},
        "logical_tokens": d.get("working_sets", {}).get("logical_tokens", 0), "leaks": d.get("working_sets", {}).get("leaks", 0)}


def at_baseline(stack: Stack) -> bool:
    return not any(held(stack).values())


def assert_baseline(stack: Stack, timeout: float = 60.0) -> None:
    try:
        wait_for(lambda: at_baseline(stack), "baseline", timeout)
    except AssertionError:
        raise AssertionError(f"not back at the baseline: {held(stack)}") from None


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
