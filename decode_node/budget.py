"""What a request may keep in the KV pool, in pages. Pure arithmetic over options and lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from transport.errors import CapacityError, ConfigError

PAGE_SIZES = (16, 32, 64)
REQUEST_OPTIONS = ("mode", "budget_tokens", "on_miss", "on_failure")
"""Of ``custom_params.oasis``. The last is read by ``policy.py``."""


def _pages(tokens: int, page: int) -> int:
    return -(-tokens // page)


class Budget(NamedTuple):
    """A working set's size. ``working``: blocks per (layer, KV head), of which the first ``sink`` and the last ``recent``
    are pinned; ``tail``: pages beside them; ``wait``: whether misses are waited for; ``draft``: tokens that a step of
    speculative decoding verifies, 0 without."""

    page: int
    working: int
    sink: int
    recent: int
    tail: int
    wait: bool
    exact: bool = False
    draft: int = 0

    def for_request(self, params: object) -> Budget:
        """With the request's own ``custom_params["oasis"]`` ({} or None: none). Raises ``ConfigError`` naming the option."""
        own = params.get("oasis") if isinstance(params, Mapping) else None
        own = {} if own is None else own
        if not isinstance(own, Mapping) or not set(own) <= set(REQUEST_OPTIONS):
            raise ConfigError(f"custom_params.oasis takes {', '.join(REQUEST_OPTIONS)}, not {own!r}")
        mode, tokens, on_miss = own.get("mode", "sparse"), own.get("budget_tokens"), own.get("on_miss")
        if mode not in ("sparse", "exact"):
            raise ConfigError(f"custom_params.oasis.mode={mode!r} is not one of sparse, exact")
        if on_miss not in (None, "defer", "wait"):
            raise ConfigError(f"custom_params.oasis.on_miss={on_miss!r} is not one of defer, wait")
        working = self.working
        if tokens is not None:
            if type(tokens) is not int or not (self.sink + self.recent + 1) * self.page <= tokens <= self.working * self.page:
                raise ConfigError(f"custom_params.oasis.budget_tokens={tokens!r} is not a smaller budget than the server's",
                                  limit=f"{(self.sink + self.recent + 1) * self.page} to {self.working * self.page} tokens")
            working = tokens // self.page
        return self._replace(working=working, exact=mode == "exact", wait=self.wait if on_miss is None else on_miss == "wait")

    def need(self, prompt: int, new: int) -> Need:
        """What a request of ``prompt`` tokens and at most ``new`` generated ones holds from admission to its end. Drafts are
        written past the last token: those of the step that ends the request, and with overlap of one step more."""
        total = _pages(prompt + new + 2 * self.draft, self.page)
        most = self.working + self.tail
        if self.exact or total <= most:
            return Need(total, total, total, False, 0)
        return Need(most, self.working, self.tail, True, total - prompt // self.page)


class Need(NamedTuple):
    """``pages`` of the KV pool; ``working``: the most blocks in the working set; ``tail``: the most pages in the tail;
    ``selecting``: whether it may hold fewer blocks than the request has; ``generated``: blocks that may have to go to the
    host cache."""

    pages: int
    working: int
    tail: int
    selecting: bool
    generated: int


def make_budget(page: int, budget_tokens: int, sink_tokens: int, recent_tokens: int, tail_tokens: int, wait: bool, draft: int = 0) -> Budget:
    """Raises ``ConfigError`` naming the option that makes no working set."""
    if page not in PAGE_SIZES:
        raise ConfigError(f"Oasis option mode=sparse needs --page-size {', '.join(map(str, PAGE_SIZES))}, not {page}; other sizes need mode=exact")
    sink, recent = _pages(sink_tokens, page), _pages(recent_tokens, page)
    working, tail = budget_tokens // page, tail_tokens // page
    if working < sink + recent + 1:
        raise ConfigError(f"Oasis option budget_tokens={budget_tokens} leaves nothing to select beside sink_tokens and recent_tokens",
                          limit=f"at least {(sink + recent + 1) * page}")
    if working >= 1 << 15:
        raise ConfigError(f"Oasis option budget_tokens={budget_tokens} is larger than a working set can be", limit=f"{((1 << 15) - 1) * page}")
    if tail < 2:
        raise ConfigError(f"Oasis option tail_tokens={tail_tokens} is too small: one page is being written, one is complete", limit=f"at least {2 * page}")
    if draft > page:
        raise ConfigError(f"speculative_num_draft_tokens={draft} is more than a page: a page may only leave the tail once it is committed", limit=f"{page}")
    return Budget(page, working, sink, recent, tail, wait, draft=draft)


def most_sets(budget: Budget, rows: int, pool_pages: int) -> int:
    """Requests of at most ``rows`` that may select at once. One holds all pages of working set and tail; twice as many sets as
    fit leave room for requests with smaller budgets of their own."""
    return max(1, min(rows, 2 * pool_pages // (budget.working + budget.tail)))


def require_possible(need: Need, pool_pages: int, *, page: int, room: int | None) -> None:
    """Raises ``CapacityError`` for a request that not even an empty pool can hold."""
    if need.pages > pool_pages:
        raise CapacityError("the request needs more KV pool than there is", room=room, limit=f"{pool_pages * page} tokens, it needs {need.pages * page}")
