"""What a traced pair computed, put together by true position, and the same attention again in numpy.

K and V of a prompt come from the prefill node, those of generated tokens from the decode step that made them. From the
decode node's tables comes only which blocks it says it attends to.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pd
import torch

from oasis_sglang.selection.scorer import block_mass
from oasis_sglang.selection.summaries import SUMMARIES
from oasis_sglang.stack import Stack

PAGE = 16
TOLERANCE = 1e-5
"""Of max(1, value). The server computes in float32 and is within 3e-6 of numpy in float64."""


class Shape(NamedTuple):
    """Of a model's attention. S = layers * kv_heads pieces; ``group`` query heads share a KV head."""

    layers: int
    kv_heads: int
    group: int
    head_dim: int

    @classmethod
    def of(cls, model: Path):
        config = json.loads((model / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(config["num_hidden_layers"], config["num_key_value_heads"], heads // config["num_key_value_heads"],
                   config.get("head_dim") or config["hidden_size"] // heads)

    @property
    def pieces(self) -> int:
        return self.layers * self.kv_heads


class Step(NamedTuple):
    """One request in one decode forward. ``length`` counts the token that the forward computes; ``blocks`` int [S, working];
    ``q``, ``out`` float [S, group, head_dim]; ``rooms``: the whole batch."""

    rooms: tuple[int, ...]
    length: int
    compact: int
    folded: int
    working: int
    blocks: np.ndarray
    unused: np.ndarray
    q: np.ndarray
    out: np.ndarray

    @property
    def tail(self) -> np.ndarray:
        """True positions that are attended to beside the blocks."""
        return np.arange(self.folded * PAGE, self.length)


@dataclass
class Request:
    """``keys``, ``values`` float [S, tokens, head_dim] by true position."""

    prompt: int
    keys: np.ndarray
    values: np.ndarray
    steps: list[Step]


def ask(stack: Stack, prompts: list[list[int]], *, max_new_tokens: int, hold: Path, options: list[dict] | None = None) -> tuple[list[int], list[list[int]]]:
    """Rooms and answers of ``prompts``, which decode together. ``hold``: the stack's ``hold_reads_file``; decode reads nothing
    until all are committed. ``options``: each request's own Oasis options."""
    rooms = [pd.next_room() for _ in prompts]
    bodies = [pd.body(stack, prompt, room=room, max_new_tokens=max_new_tokens) for prompt, room in zip(prompts, rooms)]
    for body, own in zip(bodies, options or []):
        body["sampling_params"]["custom_params"] = {"oasis": own}
    hold.touch()
    try:
        posts = [pd.Post(stack.urls[name], body) for body in bodies for name in ("prefill", "decode")]
        pd.wait_for(lambda: pd.tier(stack)["inventory"]["leases"] == len(prompts), "all prompts are committed and claimed", 120)
    finally:
        hold.unlink()
    answers = [post.result() for post in posts]
    assert all(answer.status == 200 for answer in answers), [answer.text for answer in answers if answer.status != 200]
    return rooms, [answer.output_ids for answer in answers[1::2]]


def load(folder: Path, model: Path, rooms: list[int], tokens: list[int], steps: int, *, turns: bool = False) -> list[Request]:
    """The requests in ``rooms``, with prompts of ``tokens`` tokens and ``steps`` decode steps each. Fails unless K and V of every
    position were computed exactly once, which a prefix hit on prefill would not do. ``turns``: each begins with all that the one
    before it had, and where prefill did not compute a position for it, its K and V are those of the turn before."""
    shape = Shape.of(model)
    requests = []
    for n in tokens:
        empty = np.full((2, shape.pieces, n + steps, shape.head_dim), np.nan)
        requests.append(Request(n, *empty, []))
    known = dict(zip(rooms, requests))
    _add_prompts(folder, shape, known)
    _add_steps(folder, shape, known)
    for before, request in zip(requests, requests[1:]) if turns else ():
        for whole, had in ((request.keys, before.keys), (request.values, before.values)):
            part = whole[:, : had.shape[1]]
            part[:] = np.where(np.isnan(part), had, part)
    for request in requests:
        assert [step.length for step in request.steps] == list(range(request.prompt + 1, request.prompt + steps + 1))
        assert not np.isnan(request.keys).any() and not np.isnan(request.values).any()
    return requests


def attention(request: Request, step: Step, *, without: int = -1) -> np.ndarray:
    """Softmax attention over exactly ``step.blocks`` and the tail, float64 [S, group, head_dim]. ``without``: a position left out."""
    inside = (step.blocks[:, :, None] * PAGE + np.arange(PAGE)).reshape(len(step.blocks), -1)
    positions = np.concatenate([inside, np.tile(step.tail, (len(inside), 1))], 1)
    piece = np.arange(len(inside))[:, None]
    keys, values = request.keys[piece, positions], request.values[piece, positions]
    scores = np.einsum("sgd,snd->sgn", step.q.astype(np.float64), keys) * keys.shape[-1] ** -0.5
    scores[np.broadcast_to((positions == without)[:, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("sgn,snd->sgd", weights / weights.sum(-1, keepdims=True), values)


def errors(request: Request, step: Step, *, without: int = -1) -> np.ndarray:
    """Of each (layer, KV head): how far the served output is from the reference, float [S]."""
    expected = attention(request, step, without=without)
    return (np.abs(step.out - expected) / np.maximum(1, np.abs(expected))).max((1, 2))


def assert_exact(request: Request, steps: list[Step] | None = None, *, without: int = -1) -> float:
    """The checker: what was served in ``steps`` (all of them) is attention over what they name. Returns the largest error."""
    worst = float(np.max([errors(request, step, without=without) for step in (request.steps if steps is None else steps)]))
    assert worst < TOLERANCE, f"served attention is {worst:.2g} from the reference"
    return worst


def assert_well_formed(request: Request, *, most: int, sink: int, recent: int) -> None:
    """Each (layer, KV head) holds as many distinct sealed blocks as there are, at most ``most``; the first ``sink`` and the last
    ``recent`` are among them; everything newer is in the tail."""
    for step in request.steps:
        assert step.working == min(most, step.folded) and (step.unused == -1).all()
        held = np.sort(step.blocks, 1)
        assert held.shape[1] == step.working and (np.diff(held, axis=1) > 0).all()
        assert 0 <= held.min() and held.max() < step.folded
        pinned = [*range(sink), *range(step.folded - recent, step.folded)]
        assert all(np.isin(pinned, row).all() for row in held)
        assert len(step.tail) > 0 and step.compact == step.working * PAGE + step.length - step.folded * PAGE


def heads_differ(request: Request) -> int:
    """In how many steps all (layer, KV head) hold blocks of their own."""
    return sum(len({tuple(row) for row in np.sort(step.blocks, 1).tolist()}) == len(step.blocks) for step in request.steps)


def swaps(request: Request) -> np.ndarray:
    """How many blocks came new into each (layer, KV head), int [steps - 1, S]."""
    pairs = zip(request.steps, request.steps[1:])
    return np.array([[len(set(new) - set(old)) for old, new in zip(a.blocks.tolist(), b.blocks.tolist())] for a, b in pairs])


def followed(request: Request, summary: str, *, sink: int, recent: int) -> float:
    """How often a (layer, KV head) held, one step later, exactly the blocks that ``summary`` would have after a step: the pinned
    ones and those of the largest expected mass. Steps before a fold, which evicts one, do not count."""
    kind, pieces, n = SUMMARIES[summary], len(request.keys), request.steps[-1].folded
    raw = kind.build(torch.from_numpy(request.keys[:, : n * PAGE].reshape(pieces, n, PAGE, -1)).float())
    same = []
    with _one_thread():
        for step, after in zip(request.steps, request.steps[1:]):
            if step.folded == after.folded:
                queries = torch.from_numpy(step.q) * step.q.shape[-1] ** -0.5
                mass = block_mass(kind, queries[None, :, None], [raw[:, : step.folded]], step.folded)[0, 0]
                mass[:, [*range(sink), *range(step.folded - recent, step.folded)]] = torch.inf
                chosen = mass.topk(step.working).indices.sort().values.numpy()
                same.append((chosen == np.sort(after.blocks, 1)).all(1))
    return float(np.mean(same))


def controls(request: Request, chance: np.random.Generator, *, sink: int, recent: int, count: int = 50,
             kinds: tuple[str, ...] = ("swapped", "random", "dropped")) -> Iterator[tuple[Step, int]]:
    """Steps that the checker must refuse, with a position to leave out: one block of one head swapped for another, blocks drawn
    at random, K and V of one generated token dropped."""
    for step in (request.steps[at] for at in chance.choice(len(request.steps), count)):
        free = np.arange(sink, step.folded - recent)  # not pinned
        if "swapped" in kinds:
            piece, blocks = chance.integers(len(step.blocks)), step.blocks.copy()
            slot = chance.choice(np.flatnonzero(np.isin(blocks[piece], free)))
            blocks[piece, slot] = chance.choice(np.setdiff1d(free, blocks[piece]))
            yield step._replace(blocks=blocks), -1
        if "random" in kinds:
            pinned = [*range(sink), *range(step.folded - recent, step.folded)]
            drawn = [[*pinned, *chance.choice(free, step.working - len(pinned), replace=False)] for _ in step.blocks]
            yield step._replace(blocks=np.array(drawn)), -1
        if "dropped" in kinds:
            yield step, int(chance.integers(max(request.prompt, step.folded * PAGE), step.length))


@contextmanager
def _one_thread() -> Iterator[None]:
    """For many small torch operations: beside running servers, threads would wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _room(rid: str) -> int:
    found = re.match(r"room-(\d+)-", rid)
    return int(found[1]) if found else -1


def _put(request: Request, pieces: slice, at: slice, keys: np.ndarray, values: np.ndarray) -> None:
    for whole, part in ((request.keys, keys), (request.values, values)):
        assert np.isnan(whole[pieces, at]).all(), "a position was computed twice"
        whole[pieces, at] = part.transpose(1, 0, 2)


def _add_prompts(folder: Path, shape: Shape, known: dict[int, Request]) -> None:
    for file in sorted(folder.glob("prefill-*-layer*.npz")):
        layer = int(file.stem.rpartition("layer")[2])
        pieces = slice(layer * shape.kv_heads, (layer + 1) * shape.kv_heads)
        with np.load(file) as seen:
            k, v = (seen[name].reshape(-1, shape.kv_heads, shape.head_dim) for name in "kv")
            ends = np.cumsum(seen["extend_seq_lens"])
            for rid, before, new, end in zip(seen["rids"], seen["extend_prefix_lens"], seen["extend_seq_lens"], ends):
                if request := known.get(_room(str(rid))):
                    _put(request, pieces, slice(before, before + new), k[end - new : end], v[end - new : end])


def _add_steps(folder: Path, shape: Shape, known: dict[int, Request]) -> None:
    number = re.compile(r"decode-(\d+)-(\d+)-(step|layer\d+)\.npz")
    forwards: dict[str, dict[str, Path]] = defaultdict(dict)
    current = ""
    for match, file in ((number.fullmatch(f.name), f) for f in sorted(folder.glob("decode-*.npz"))):
        if match is None:  # times of reads and forwards
            continue
        name = match[3]
        current = file.name if name == "step" else current
        forwards[current][name] = file
    for files in forwards.values():
        with np.load(files["step"]) as seen:
            step = dict(seen)
        rooms = tuple(step["rooms"].tolist())
        if not known.keys() & set(rooms):
            continue
        layers = [dict(np.load(files[f"layer{layer}"])) for layer in range(shape.layers)]
        for row, room in enumerate(rooms):
            if room not in known:
                continue
            request, length = known[room], int(step["lengths"][row])
            q, out = (np.stack([layer[name][row].reshape(shape.kv_heads, shape.group, -1) for layer in layers]).reshape(shape.pieces, shape.group, -1)
                      for name in ("q", "out"))
            k, v = (np.stack([layer[name][row] for layer in layers]).reshape(shape.pieces, 1, -1).transpose(1, 0, 2) for name in "kv")
            _put(request, slice(None), slice(length - 1, length), k, v)
            working, block_at = int(step["working"][row]), step["block_at"][row]
            request.steps.append(Step(rooms, length, int(step["compact"][row]), int(step["folded"][row]), working,
                                      block_at[:, :working], block_at[:, working:], q, out))
