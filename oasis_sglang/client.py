"""A small client of SGLang's ``/generate``: token ids in, token ids and times out, streaming.

Standard library only, so that importing it costs nothing and measures nothing but the server.
"""

from __future__ import annotations

import json
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

DEFAULT_TIMEOUT_S = 600.0
_END_BYTES = 4096
"""Of a chunk, enough for all that is behind the token ids."""
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_GOES_ON = re.compile(rb'"finish_reason":\s*null')


class GenerateError(Exception):
    """The server answered with an error, in the HTTP status or inside the stream."""


@dataclass(frozen=True)
class Generation:
    """One answer. Times are seconds since the request was sent, one entry per chunk of the stream."""

    rid: str
    prompt_tokens: int
    output_ids: list[int]
    chunk_times: list[float]
    finish_reason: dict
    chunk_tokens: list[int] = field(default_factory=list)
    """Output tokens that each chunk brought."""

    @property
    def ttft_seconds(self) -> float:
        return self.chunk_times[0]

    @property
    def itl_seconds_mean(self) -> float:
        """Mean time between tokens after the first; 0 for a single token."""
        gaps = len(self.output_ids) - 1
        return (self.chunk_times[-1] - self.chunk_times[0]) / gaps if gaps > 0 else 0.0


def generate(
    url: str,
    input_ids: Sequence[int],
    *,
    max_new_tokens: int,
    rid: str | None = None,
    sampling: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Generation:
    """Greedy and to full length unless ``sampling`` says otherwise; ``extra``: other fields of the request. Raises
    GenerateError, or OSError."""
    greedy = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = {"input_ids": list(input_ids), "sampling_params": {**greedy, **(sampling or {})}, "stream": True, **(extra or {})}
    if rid is not None:
        body["rid"] = rid
    start = time.perf_counter()
    times, counts, answer = [], [0], _Answer(url)
    for chunk in _stream(url + "/generate", body, timeout):
        times.append(time.perf_counter() - start)
        counts.append(answer.add(chunk))
    meta = answer.end()
    return Generation(meta["id"], meta["prompt_tokens"], answer.ids, times, meta["finish_reason"], [b - a for a, b in pairwise(counts)])


def generate_on_pair(
    prefill: str, decode: str, bootstrap_port: int, input_ids: Sequence[int], *, bootstrap_host: str = "127.0.0.1", **options
) -> Generation:
    """Does the router's part: one request to both workers of a pair, the answer is decode's. For fields of a request that
    the router does not pass on, such as ``custom_params``. Options as for ``generate``."""
    room = random.getrandbits(62)
    pair = {"bootstrap_host": bootstrap_host, "bootstrap_port": bootstrap_port, "bootstrap_room": room, **(options.pop("extra", None) or {})}
    options.setdefault("rid", f"pair-{room}")
    with ThreadPoolExecutor(1) as pool:
        # What decode says counts: a prompt that prefill cannot serve ends there too.
        first = pool.submit(generate, prefill, input_ids, extra=pair, **options)
        answer = generate(decode, input_ids, extra=pair, **options)
        first.result()
    return answer


def generate_concurrently(url: str, prompts: Sequence[Sequence[int]], **options) -> list[Generation]:
    """All prompts at once, answers in their order. ``rid`` in ``options`` becomes ``rid-0``, ``rid-1``, ..."""
    rid = options.pop("rid", None)

    def one(index: int) -> Generation:
        own = None if rid is None else f"{rid}-{index}"
        return generate(url, prompts[index], rid=own, **options)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, range(len(prompts))))


def forget(url: str, seconds: int = 60) -> None:
    """Has the server at ``url`` drop what it keeps of earlier requests; ``seconds``: for those that still run to end. Raises OSError."""
    flush = urllib.request.Request(f"{url}/flush_cache?timeout={seconds}", method="POST")
    urllib.request.urlopen(flush, timeout=2 * seconds).read()


class _Answer:
    """What the chunks of a stream say together. SGLang sends all token ids so far with each of them, or only the new ones if its server was
    started with ``--incremental-streaming-output``; ``completion_tokens`` tells which. Of the first kind only the end of a long chunk is looked
    at while the answer goes on: all of them together grow with the square of the answer, and the clock runs in this process."""

    def __init__(self, url: str):
        self.url = url
        self.ids: list[int] = []
        self._meta: dict | None = None
        self._repeats = False
        self._unread = b""

    def add(self, chunk: bytes) -> int:
        """Tokens so far. Raises GenerateError for an error of the server, and for what is no answer."""
        end = chunk[-_END_BYTES:]
        if self._repeats and len(chunk) > _END_BYTES and _GOES_ON.search(end) and (tokens := _TOKENS.search(end)):
            self._unread = chunk
            return int(tokens[1])
        return self._read(chunk)

    def end(self) -> dict:
        """The last chunk's ``meta_info``; from now on ``ids`` is complete. Raises GenerateError without a chunk."""
        if self._unread:
            self._read(self._unread)
        if self._meta is None:
            raise GenerateError(f"{self.url} closed the stream without an answer")
        return self._meta

    def _read(self, chunk: bytes) -> int:
        self._unread = b""
        try:
            read = json.loads(chunk)
            if "error" in read:
                raise GenerateError(f"{self.url}: {read['error']}")
            self._meta = read["meta_info"]
            reason = self._meta.get("finish_reason") or {}
            if reason.get("type") == "abort":
                raise GenerateError(f"{self.url}: {reason.get('message', 'aborted')}")
            ids = read["output_ids"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GenerateError(f"{self.url} sent what is no chunk of an answer: {chunk[:200].decode(errors='replace')}") from error
        if self.ids and len(self.ids) + len(ids) == self._meta.get("completion_tokens"):
            self.ids += ids
        else:
            self._repeats = bool(self.ids) and len(ids) == self._meta.get("completion_tokens")
            self.ids = ids
        return len(self.ids)


def _stream(url: str, body: dict, timeout: float) -> Iterator[bytes]:
    """The chunks as they come, unread."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        reply = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        raise GenerateError(
            f"HTTP {error.code} from {url}: {error.read(2000).decode(errors='replace')}"
        ) from error
    with reply:
        for line in reply:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield line[len(b"data: ") :]
    raise GenerateError(f"{url} closed the stream before its end")
