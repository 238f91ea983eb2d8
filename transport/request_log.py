"""One line for each request at its end, as JSON, on both nodes: the bootstrap room is what they have in common.

Ids, sizes, times and names of errors. No text, no token of a prompt or an answer, no key.
"""

from __future__ import annotations

import json
import logging

log = logging.getLogger("oasis.requests")


def end(role: str, **fields) -> None:
    """Seconds (float) are written in milliseconds, under their name with ``_ms``; empty fields are left out."""
    shown = {f"{name}_ms" if isinstance(value, float) else name: round(value * 1e3, 1) if isinstance(value, float) else value
             for name, value in fields.items() if value not in ("", None)}
    log.info("request %s", json.dumps({"role": role, **shown}))
