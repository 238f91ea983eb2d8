"""Prompts of a chosen length from text that is at hand: this repository, or the standard library's sources."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_QUESTION = "Summarize the text above in a few sentences."
_SHORT = (
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain to a child why the sky is blue and sunsets are red.",
    "List the first ten prime numbers and say what a prime number is.",
    "Give three reasons to visit the mountains in autumn, with a sentence for each.",
)


def repository_text() -> str:
    """Documentation, then code. An installed package without its repository has the code only."""
    package = Path(__file__).resolve().parent
    in_checkout = (ROOT / "pyproject.toml").exists()
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if in_checkout else []
    return _read([*documents, *sorted(package.rglob("*.py"))])


def library_text() -> str:
    """Sources of Python modules with much prose in them: the same text wherever this Python is installed."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "decimal", "difflib", "doctest", "optparse", "statistics", "textwrap", "threading")
    return _read(library / f"{name}.py" for name in names)


class PromptMaker:
    """Cuts texts to token counts with the tokenizer of a prepared model and wraps them as a chat (ChatML)."""

    def __init__(self, model: Path):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids))

    def chat(self, text: str) -> list[int]:
        return self.wrapped(self.encode(text))

    def cut(self, text: str, tokens: int, *, skip: int = 0, question: str = _QUESTION) -> list[int]:
        """A chat of exactly ``tokens`` tokens: ``text`` from its token ``skip`` on, then the question."""
        question_ids = self.encode("\n\n" + question)
        room = tokens - len(self.wrapped(question_ids))
        # Characters enough for the tokens wanted; encoding all of a long text takes seconds.
        ids = self.encode(text[: (skip + tokens) * 12])[skip : skip + room]
        if room <= 0 or len(ids) < room:
            raise ValueError(f"cannot cut {tokens} tokens from {len(ids)} available after {skip}")
        return self.wrapped(ids + question_ids)

    def short(self) -> list[list[int]]:
        """Four questions without a text."""
        return [self.chat(question) for question in _SHORT]

    def wrapped(self, ids: list[int], begun: str = "") -> list[int]:
        """What a user says, then the place of the answer, which begins with ``begun``."""
        head = self.encode("<|im_start|>user\n")
        return [*head, *ids, *self.encode("<|im_end|>\n<|im_start|>assistant\n" + begun)]


def _read(paths: Iterable[Path]) -> str:
    return "\n\n".join(path.read_text(errors="replace") for path in paths if path.exists())
