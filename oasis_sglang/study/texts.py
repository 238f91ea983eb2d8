"""What models are calibrated and studied on: prompts cut from texts, each with answers whose tokens are given."""

from __future__ import annotations

import hashlib
import json
import pydoc_data.topics
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import AutoTokenizer

LEAD = 16
"""Tokens of a passage that are given before it has to be found again: until then nothing says which passage it is."""


class Case(NamedTuple):
    """Token ids. ``counted``: the answer's tokens from this one on count."""

    name: str
    prompt: list[int]
    answer: list[int]
    counted: int = 0


def standard_texts() -> dict[str, str]:
    """Code and prose that every Python carries, by name."""
    library, topics = Path(sysconfig.get_paths()["stdlib"]), pydoc_data.topics.topics
    return {
        "code": (library / "ipaddress.py").read_text(),
        "manual": "\n\n".join(topics[name] for name in ("formatstrings", "debugger", "typesmapping", "typesseq")),
        "dialogue": "\n\n".join((library / f"{name}.py").read_text() for name in ("cmd", "getopt", "calendar")),
        "held out": (library / "smtplib.py").read_text() + "\n\n" + topics["string-methods"],
    }


class Cutter:
    """Cuts texts to tokens of a model."""

    def __init__(self, model: Path | str):
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def cases(self, name: str, text: str, tokens: int, steps: int) -> list[Case]:
        """One prompt of at most ``tokens`` tokens of ``text`` with two answers of ``steps`` tokens: the text goes on, and a passage
        from its middle is said again, which only heads that look far back can do. Raises ``ValueError`` when it is too short."""
        ids = self.encode(text)[: tokens + steps]
        if len(ids) < 4 * (steps + LEAD):
            raise ValueError(f"the text {name} has {len(ids)} tokens, {4 * (steps + LEAD)} are needed for answers of {steps}")
        prompt, rest = ids[:-steps], ids[-steps:]
        middle = len(prompt) // 2
        return [Case(f"{name}, continued", prompt, rest), Case(f"{name}, recalled", prompt, prompt[middle - LEAD : middle + steps], LEAD)]


def digest(cases: Sequence[Case]) -> str:
    return hashlib.sha256(json.dumps(cases).encode()).hexdigest()[:16]


def read_texts(files: Sequence[Path]) -> dict[str, str]:
    """Texts by file name, or the standard ones. Raises ``OSError``, and ``ValueError`` for two files of one name."""
    if not files:
        return standard_texts()
    texts = {file.name: file.read_text() for file in files}
    if len(texts) < len(files):
        raise ValueError("two texts have the same file name")
    return texts
