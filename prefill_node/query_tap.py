"""Keeps the queries of the last tokens of each running prompt; they rank the prompt's blocks when it is published.

A query exists during one layer of one forward, so it is copied where SGLang hands it to its attention backend: after RoPE,
one gather per layer for all requests of the batch. SGLang calls the backend with one batch at a time, but starts the next
forward before it looks at the result of this one; hence each forward has memory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

WINDOW = 64
"""Last tokens of a prompt whose queries are kept."""


@dataclass(eq=False)
class Forward:
    """What one forward keeps. ``rows``: the kept rows of its q. ``queries`` [layers, rows, query heads, head_dim] and
    ``index`` int64 [rows] on the device, from the first layer on.

    ``lengths`` is the batch's own list of new tokens per request: attention calls that belong to this forward are
    recognised by it, because a prefill graph makes them with another batch object, which shares the list.
    """

    lengths: list[int]
    rows: list[int] = field(default_factory=list)
    index: torch.Tensor | None = None
    queries: torch.Tensor | None = None


@dataclass(eq=False)
class Span:
    """``rid``'s rows ``start``..``stop`` of ``forward``: its last tokens, of ``tokens`` computed so far. The first
    ``carried`` rows are older than this forward and are the last ones of ``earlier``."""

    rid: str
    forward: Forward
    start: int
    stop: int
    tokens: int
    carried: int = 0
    earlier: Span | None = None


class QueryTap:
    """Queries of the last ``window`` tokens of at most ``limit`` prompts; the oldest is forgotten for a new one.

    Used by one thread, SGLang's scheduler. On a GPU all copies are work on the forward's stream and ``take`` adds none: what
    it returns is complete once the forward is known to be, as it is when SGLang sends a prompt's last chunk. A forward that
    replays one graph for the whole prefill (not SGLang's default) calls no backend and leaves nothing to take.
    ``scale``: of the softmax, known from the first forward on.
    """

    def __init__(self, window: int = WINDOW, limit: int = 256):
        self.window, self.limit = window, limit
        self.scale = 1.0
        self._layers = 0
        self._forward: Forward | None = None
        self._spans: list[Span] = []
        """Those of ``_forward``."""
        self._held: dict[str, Span] = {}

    def install(self, backend) -> None:
        """Taps this instance of an SGLang attention backend; its arguments and results stay as they are."""
        init_forward_metadata, forward_extend = backend.init_forward_metadata, backend.forward_extend

        def init(forward_batch):
            self._begin(forward_batch)
            return init_forward_metadata(forward_batch)

        def extend(q, k, v, layer, forward_batch, *args, **kwargs):
            self._keep(q, layer, forward_batch)
            return forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)

        backend.init_forward_metadata, backend.forward_extend = init, extend

    def take(self, rid: str, tokens: int | None = None) -> torch.Tensor | None:
        """Removes and returns ``rid``'s queries [n, layers, query heads, head_dim]: of its last n computed tokens.

        n is below ``window`` where fewer were computed in a row (short prompt, radix hit). None if there are none, or if
        they do not end at ``tokens``, the prompt's length. It is a view that keeps the rows of its whole batch alive.
        """
        span = self._held.pop(rid, None)
        if span is None or tokens not in (None, span.tokens):
            return None
        return span.forward.queries[:, span.start : span.stop].transpose(0, 1)

    def drop(self, rid: str) -> None:
        """Forgets ``rid``, if it is known."""
        self._held.pop(rid, None)

    # -- in the forward -----------------------------------------------------------------------------------------

    def _begin(self, batch) -> None:
        """Plans what to keep of this batch. Nothing is held before its first layer runs."""
        for span in self._spans:
            span.earlier = None  # copied by now; else each chunk would keep all before it alive
        self._forward, self._spans = None, []
        # Warm-up batches belong to no request, and a prefill node computes prompts in this mode only.
        if batch.forward_mode.name != "EXTEND" or not batch.rids or batch.extend_seq_lens_cpu is None:
            return
        forward = self._forward = Forward(batch.extend_seq_lens_cpu)
        end = 0
        for rid, prefix, new in zip(batch.rids, batch.extend_prefix_lens_cpu, forward.lengths):
            end += new
            fresh = min(self.window, new)
            if not fresh:
                continue
            earlier, carried = self._held.get(rid), 0
            if earlier is not None and earlier.tokens == prefix:
                carried = min(self.window - fresh, earlier.stop - earlier.start)
            start = len(forward.rows)
            forward.rows += [end - 1] * carried  # stand-ins: one gather fills all rows, then these are overwritten
            forward.rows += range(end - fresh, end)
            self._spans.append(Span(rid, forward, start, len(forward.rows), prefix + new, carried, earlier if carried else None))

    def _keep(self, q: torch.Tensor, layer, batch) -> None:
        at = layer.layer_id
        self._layers = max(self._layers, at + 1)
        forward = self._forward
        if forward is None or batch.extend_seq_lens_cpu is not forward.lengths:
            return
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if forward.queries is None:
            self.scale = layer.scaling
            self._start(forward, q)
        elif at >= len(forward.queries):  # only in the very first forward: it shows how many layers there are
            more = q.new_empty((self._layers, *forward.queries.shape[1:]))
            more[: len(forward.queries)] = forward.queries
            forward.queries = more
        kept = forward.queries[at]
        torch.index_select(q, 0, forward.index, out=kept)
        for span in self._spans:
            if span.earlier is not None:
                stop = span.earlier.stop
                kept[span.start : span.start + span.carried] = span.earlier.forward.queries[at, stop - span.carried : stop]

    def _start(self, forward: Forward, q: torch.Tensor) -> None:
        # From pinned memory the copy waits for nothing; a wait would undo SGLang's overlap.
        forward.index = torch.tensor(forward.rows, dtype=torch.int64, pin_memory=q.is_cuda).to(q.device, non_blocking=True)
        forward.queries = q.new_empty((self._layers, len(forward.rows), *q.shape[1:]))
        for span in self._spans:
            self._held.pop(span.rid, None)
            self._held[span.rid] = span
        while len(self._held) > self.limit:
            del self._held[next(iter(self._held))]
