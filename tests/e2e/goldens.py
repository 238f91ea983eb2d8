"""Greedy answers of one plain SGLang server, kept on disk.

A golden is found again by everything that decides its tokens: the model's content, the prompt, the number of
tokens, the versions of SGLang and torch, and our CPU runtime's sources (the monolith runs under them too).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path

from oasis_sglang import models
from oasis_sglang.client import generate
from oasis_sglang.cpu import platform
from oasis_sglang.stack import Stack


class Goldens:
    """``start_monolith(model)`` gives a context with a running monolith; called only when one is missing."""

    def __init__(self, start_monolith: Callable[[Path], AbstractContextManager[Stack]]):
        self._start_monolith = start_monolith
        self._directory = models.cache_dir() / "goldens"

    def get(self, model: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        files = [self._file(model, prompt, max_new_tokens) for prompt in prompts]
        missing = [index for index, file in enumerate(files) if not file.exists()]
        if missing:
            self._directory.mkdir(parents=True, exist_ok=True)
            with self._start_monolith(model) as monolith:
                for index in missing:
                    answer = generate(monolith.url, prompts[index], max_new_tokens=max_new_tokens)
                    partial = files[index].with_suffix(".partial")
                    partial.write_text(json.dumps(answer.output_ids))
                    partial.rename(files[index])
        return [json.loads(file.read_text()) for file in files]

    def _file(self, model: Path, prompt: Sequence[int], max_new_tokens: int) -> Path:
        key = [
            models.fingerprint(model),
            list(prompt),
            max_new_tokens,
            *map(version, ("sglang", "torch")),
            _runtime(),
        ]
        return self._directory / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"


def _runtime() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(platform.__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
