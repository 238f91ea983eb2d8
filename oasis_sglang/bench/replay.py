"""Replays a trace of arrivals in Mooncake's layout: one JSON object per line with ``timestamp`` (milliseconds), ``input_length``,
``output_length`` and ``hash_ids``, each standing for a block of the prompt. Equal ids are equal tokens, so that prefixes are shared as
they were; what the tokens are is up to us."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

from oasis_sglang.bench.jobs import Job, Work
from oasis_sglang.bench.ruler import ADJECTIVES, NOUNS, PEOPLE
from oasis_sglang.prompts import PromptMaker
from transport.errors import ConfigError

BLOCK = 512
"""Tokens of a block in the published traces."""
_FIELDS = {"timestamp": (int, float), "input_length": int, "output_length": int, "hash_ids": list}


def load(path: Path, maker: PromptMaker, *, block: int = BLOCK, scale: float = 1.0, speed: float = 1.0, limit: int | None = None, context: int = 8192,
         seed: int = 0) -> Work:
    """At most ``limit`` requests, the first of the file that fit. ``scale`` multiplies lengths, ``speed`` divides times. The earliest request
    arrives at 0. Those longer than ``context`` are left out and counted in the notes, and so is what ``limit`` cuts off. Raises ``ConfigError``
    naming the file or the line."""
    if not (0 < scale < math.inf and 0 < speed < math.inf):
        raise ConfigError(f"a trace cannot be scaled by {scale} or played {speed} times as fast")
    if block < 1 or (limit is not None and limit < 1):
        raise ConfigError(f"a trace needs blocks of 1 token and 1 request at least, not {block} and {limit}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error}") from error
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from error
    size = max(1, round(block * scale))
    words = maker.encode(" ".join((*ADJECTIVES, *NOUNS, *PEOPLE)))
    blocks: dict[int, list[int]] = {}
    jobs: list[Job] = []
    too_long = 0
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    looked_at = 0
    for number, line in filled:
        if limit is not None and len(jobs) >= limit:
            break
        looked_at += 1
        entry = _entry(path, number, line)
        tokens, output = max(1, round(entry["input_length"] * scale)), max(1, round(entry["output_length"] * scale))
        if tokens > len(entry["hash_ids"]) * size:
            # Rounding may leave a token over; a trace whose ids do not cover its prompt is another matter.
            if entry["input_length"] > len(entry["hash_ids"]) * block:
                ids = len(entry["hash_ids"])
                raise ConfigError(f"{path}, line {number}: {ids} hash_ids of {block} tokens do not cover input_length {entry['input_length']}")
            tokens = len(entry["hash_ids"]) * size
        if tokens + output > context:
            too_long += 1
            continue
        for one in entry["hash_ids"]:
            if one not in blocks:
                blocks[one] = random.Random(f"{seed} {one}").choices(words, k=size)
        prompt = [token for one in entry["hash_ids"] for token in blocks[one]][:tokens]
        jobs.append(Job(f"trace-{number}", prompt, output, arrival=entry["timestamp"] / 1000 / speed))
    if not jobs:
        raise ConfigError(f"{path} has no request of at most {context} tokens ({too_long} are longer); shrink it with a scale below {scale:g}"
                          if too_long else f"{path} has no request")
    start = min(job.arrival for job in jobs)
    jobs = sorted((replace(job, arrival=job.arrival - start) for job in jobs), key=lambda job: job.arrival)
    notes = (*([f"the first {looked_at} of {len(filled)} requests of the file"] if looked_at < len(filled) else []),
             f"lengths times {scale:g}, {speed:g} times as fast",
             *([f"{too_long} requests longer than the model's context of {context} tokens are left out"] if too_long else []))
    return Work("trace", f"arrivals and shared prefixes of {path.name}", jobs, notes=notes)


def _entry(path: Path, number: int, line: str) -> dict:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: no JSON: {error}") from error
    for name, kinds in _FIELDS.items():
        value = entry.get(name) if isinstance(entry, dict) else None
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ConfigError(f"{path}, line {number}: {name} is {value!r}")
    if not abs(entry["timestamp"]) < math.inf:
        raise ConfigError(f"{path}, line {number}: timestamp is {entry['timestamp']}, no time")
    if entry["input_length"] < 1 or entry["output_length"] < 0 or not all(type(one) is int for one in entry["hash_ids"]):
        raise ConfigError(f"{path}, line {number}: lengths are counts, hash_ids whole numbers")
    return entry
