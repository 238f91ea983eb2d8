"""Rates and lists as they are typed."""

from __future__ import annotations

import re

from oasis_sglang.config import parse_size
from transport.errors import ConfigError

_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}


def parse_rate(text: str) -> float:
    """Bytes per second of "100gbit" (as ``tc`` has it, decimal), "3.35TB/s" or "400 GiB/s". Raises ``ConfigError``."""
    plain = text.strip().removesuffix("/s")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)", plain, re.ASCII)
    if match and match[2].lower() in _BITS:
        rate = float(match[1]) * _BITS[match[2].lower()] / 8
    elif match and text.strip().endswith("/s"):
        rate = float(parse_size(plain))
    else:
        raise ConfigError(f"{text!r} is not a rate such as 100gbit or 3.35TB/s")
    if rate <= 0:
        raise ConfigError(f"a rate of {text} moves nothing")
    return rate


def parse_tokens(text: str) -> list[int]:
    """Positive whole numbers, comma separated, each at most 2**24. Raises ``ConfigError``."""
    parts = text.replace(" ", "").split(",")
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) <= 1 << 24 for part in parts):
        raise ConfigError(f"{text!r} is not a list of token counts such as 16384,32768", limit=f"1..{1 << 24}")
    return list(map(int, parts))
