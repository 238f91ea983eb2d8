"""The sgl_kernel stand-in against loops written from SGLang's Triton kernels and public algorithms."""

import random
from pathlib import Path

import pytest
import torch

from oasis_sglang.cpu import sgl_kernel as kernels
from oasis_sglang.cpu.sgl_kernel import speculative

POOL = 64


@pytest.fixture(params=range(5))
def rng(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


def table_and_runs(rng):
    table = torch.randperm(8 * POOL).view(8, POOL).int()
    rows = rng.sample(range(8), 3)
    starts = [rng.randrange(20) for _ in rows]
    ends = [s + rng.randrange(7) for s in starts]  # empty runs included
    return table, rows, starts, ends


def test_assign_req_to_token_pool(rng):
    table, rows, starts, ends = table_and_runs(rng)
    total = sum(ends) - sum(starts)
    slots = torch.arange(1000, 1000 + total + 2)  # longer than needed, as SGLang may pass it
    expected, given = table.clone(), slots.tolist()
    for row, start, end in zip(rows, starts, ends):
        for position in range(start, end):
            expected[row, position] = given.pop(0)
    kernels.assign_req_to_token_pool_cpu(
        torch.tensor(rows), table, torch.tensor(starts), torch.tensor(ends).int(), slots, POOL
    )
    assert torch.equal(table, expected)


def test_assign_extend_cache_locs(rng):
    table, rows, starts, ends = table_and_runs(rng)
    expected = [table[r, p].item() for r, s, e in zip(rows, starts, ends) for p in range(s, e)]
    out = torch.full((len(expected) + 2,), -7)
    kernels.assign_extend_cache_locs_cpu(
        torch.tensor(rows), table, torch.tensor(starts), torch.tensor(ends), out, POOL
    )
    assert out.tolist() == [*expected, -7, -7]


def test_assign_draft_cache_locs(rng):
    table, rows, lens, _ = table_and_runs(rng)
    topk, steps = 2, 3
    expected = [table[r, n + i].item() for r, n in zip(rows, lens) for i in range(topk * steps)]
    out = torch.empty(len(expected), dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor(rows), table, torch.tensor(lens), out, POOL, topk, steps
    )
    assert out.tolist() == expected


def test_build_draft_decode_metadata(rng):
    table, rows, lens, _ = table_and_runs(rng)
    topk, steps = 3, 2
    wide = kernels.build_draft_decode_metadata_cpu(
        table, torch.tensor(rows), torch.tensor(lens), topk, steps, POOL
    )
    assert wide.dtype == table.dtype and wide.shape == (len(rows) * topk, POOL)
    for i, (row, length) in enumerate(zip(rows, lens)):
        for branch in range(topk):
            got = wide[i * topk + branch, : length + steps].tolist()
            own = [table[row, length + branch * steps + s].item() for s in range(steps)]
            assert got == table[row, :length].tolist() + own


def test_fill_accept_out_cache_loc():
    index = torch.tensor([[0, 2, -1], [3, -1, -1], [6, 7, 8]])
    slots = torch.arange(100, 109)
    out = torch.full((9,), -1)
    kernels.fill_accept_out_cache_loc_cpu(index, slots, out)
    assert out.tolist() == [100, 102, 103, 106, 107, 108, -1, -1, -1]


def test_fill_bonus_tokens():
    tokens = torch.tensor([11, 12, 0, 21, 0, 0, 31, 32, 33], dtype=torch.int32)
    out = torch.zeros(3, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(tokens, torch.tensor([2, 1, 3]), out, 3)
    assert out.tolist() == [12, 21, 33]


@pytest.mark.parametrize("select", [None, [1, 2, 3]])
def test_rotate_input_ids(select):
    ids = torch.tensor([1, 2, 3, 4, 5])
    kernels.rotate_input_ids_cpu(
        ids,
        torch.tensor([0, 3, 3]),
        torch.tensor([3, 0, 2]),
        torch.tensor([[90], [91], [92]]),
        None if select is None else torch.tensor(select),
    )
    assert ids.tolist() == ([2, 3, 90, 5, 92] if select is None else [2, 90, 3, 92, 5])


def test_copy_all_layer_kv_cache_reads_before_it_writes():
    buffers = [torch.randn(10, 2, 4), torch.randint(0, 99, (10, 6), dtype=torch.int16)]
    source, target = [2, 3, 4, 9], [3, 4, 2, 9]  # overlapping rows
    expected = [b.clone() for b in buffers]
    for before, after in zip(buffers, expected):
        for s, t in zip(source, target):
            after[t] = before[s]
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([b.data_ptr() for b in buffers]),
        torch.tensor([b[0].numel() * b.element_size() for b in buffers]),
        torch.tensor(target),
        torch.tensor(source),
    )
    assert all(torch.equal(b, e) for b, e in zip(buffers, expected))


def test_copy_of_nothing():
    none = torch.empty(0, dtype=torch.int64)
    kernels.copy_all_layer_kv_cache_cpu(torch.tensor([0]), torch.tensor([4]), none, none)


class Tree:
    """A draft tree as EAGLE selects it: candidates with a parent slot, best first."""

    def __init__(self, rng, topk, steps, n):
        self.topk = topk
        # Candidate c has parent slot c // topk; slot s > 0 stands for candidate parents[s].
        self.parents = [-1, *range(topk)]
        level = list(range(topk))
        width = topk
        for _ in range(steps - 1):
            slots = range(len(self.parents) - len(level), len(self.parents))
            children = [s * topk + k for s in slots for k in range(topk)]
            level = sorted(rng.sample(children, topk))
            self.parents += level
            width += len(children)
        reachable = list(range(topk))
        chosen = []
        while len(chosen) < n - 1:
            candidate = rng.choice([c for c in reachable if c not in chosen])
            chosen.append(candidate)
            if candidate in self.parents[1:]:
                slot = self.parents.index(candidate, 1)
                reachable += [slot * topk + k for k in range(topk) if slot < len(self.parents) - topk]
        self.selected = sorted(chosen)

    def parent_nodes(self):
        nodes = [-1]
        for candidate in self.selected:
            slot = candidate // self.topk
            nodes.append(0 if slot == 0 else 1 + self.selected.index(self.parents[slot]))
        return nodes


def ancestors_and_links(parent):
    """Per node: set of itself and its ancestors, first child, next sibling."""
    n = len(parent)
    paths = []
    for node in range(n):
        path = {node}
        while parent[node] >= 0:
            node = parent[node]
            path.add(node)
        paths.append(path)
    child = [next((k for k in range(n) if parent[k] == i), -1) for i in range(n)]
    sibling = [
        next((k for k in range(i + 1, n) if parent[i] >= 0 and parent[k] == parent[i]), -1) for i in range(n)
    ]
    return paths, child, sibling


def outputs(b, n):
    positions = torch.full((b * n,), -9)
    index, child, sibling = (torch.full((b, n), -1) for _ in range(3))
    return positions, index, child, sibling


@pytest.mark.parametrize("topk,steps,n", [(2, 3, 6), (4, 3, 8), (1, 3, 4), (3, 1, 3), (3, 2, 5)])
@pytest.mark.parametrize("full", [False, True])
def test_build_tree(rng, topk, steps, n, full):
    trees = [Tree(rng, topk, steps, n) for _ in range(3)]
    lens = [rng.randrange(1, 9) for _ in trees]
    widths = [length + n if full else n for length in lens]
    mask = torch.ones(sum(w * n for w in widths), dtype=torch.bool)
    got = outputs(3, n)
    # SGLang hands over no parent of the last step's candidates, and none at all for one step.
    parents = torch.tensor([t.parents[: len(t.parents) - (topk if steps > 1 else 0)] for t in trees])
    if steps == 1:
        parents = parents[:, :0]
    kernels.build_tree_kernel_efficient_cpu(
        parents, torch.tensor([t.selected for t in trees]), torch.tensor(lens), mask, *got,
        topk, steps, n, speculative.FULL_MASK if full else speculative.QLEN_ONLY,
    )  # fmt: skip
    positions, index, child, sibling = got
    assert index.tolist() == [[b * n + i for i in range(n)] for b in range(3)]
    at = 0
    for b, (tree, length, width) in enumerate(zip(trees, lens, widths)):
        paths, first, following = ancestors_and_links(tree.parent_nodes())
        assert child[b].tolist() == first and sibling[b].tolist() == following
        assert positions[b * n : (b + 1) * n].tolist() == [length + len(p) - 1 for p in paths]
        block = mask[at : at + n * width].view(n, width)
        at += n * width
        assert block[:, : width - n].all()
        assert block[:, width - n :].tolist() == [[j in path for j in range(n)] for path in paths]


def test_bit_packed_masks_are_refused():
    nothing = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="bit-packed"):
        kernels.build_tree_kernel_efficient_cpu(*[nothing] * 8, 1, 1, 4, 2)


def random_parents(rng, n):
    return [-1] + [rng.randrange(i) for i in range(1, n)]


def test_reconstruct_from_mask(rng):
    n, lens = 7, [5, 11, 2]
    described = [ancestors_and_links(random_parents(rng, n)) for _ in lens]
    mask = torch.tensor([[[j in path for j in range(n)] for path in paths] for paths, _, _ in described])
    positions, index, child, sibling = outputs(3, n)
    kernels.reconstruct_indices_from_tree_mask(
        mask.flatten(), torch.tensor(lens), positions, index, child, sibling, 3, n
    )
    for b, (paths, first, following) in enumerate(described):
        assert child[b].tolist() == first and sibling[b].tolist() == following
        assert positions[b * n : (b + 1) * n].tolist() == [lens[b] + len(p) - 1 for p in paths]
    assert index.flatten().tolist() == list(range(3 * n))


def test_reconstruct_accepts_several_roots():
    """NGRAM pads with nodes that have no ancestor."""
    mask = torch.eye(3, dtype=torch.bool)
    positions, index, child, sibling = outputs(1, 3)
    kernels.reconstruct_indices_from_tree_mask(
        mask.flatten(), torch.tensor([4]), positions, index, child, sibling, 1, 3
    )
    assert positions.tolist() == [4, 4, 4]
    assert child.tolist() == sibling.tolist() == [[-1, -1, -1]]


def test_verify_tree_greedy(rng):
    b, n, width, vocabulary = 4, 7, 5, 3
    trees = [ancestors_and_links(random_parents(rng, n)) for _ in range(b)]
    drafted = torch.randint(0, vocabulary, (b, n))
    target = torch.randint(0, vocabulary, (b, n))
    predicts = torch.full((b * n,), -1, dtype=torch.int32)
    accepted = torch.full((b, width), -1, dtype=torch.int32)
    count = torch.zeros(b, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accepted, accept_token_num=count, candidates=drafted,
        retrive_index=torch.arange(b * n).view(b, n),
        retrive_next_token=torch.tensor([t[1] for t in trees]),
        retrive_next_sibling=torch.tensor([t[2] for t in trees]),
        target_predict=target,
    )  # fmt: skip
    for r in range(b):
        path, (_, child, sibling) = [0], trees[r]
        for _ in range(width - 1):
            options = []
            node = child[path[-1]]
            while node >= 0:
                options.append(node)
                node = sibling[node]
            agreeing = [o for o in options if drafted[r, o] == target[r, path[-1]]]
            if not agreeing:
                break
            path.append(agreeing[0])
        assert count[r] == len(path) - 1
        assert accepted[r].tolist() == [r * n + p for p in path] + [-1] * (width - len(path))
        written = {p: target[r, p].item() for p in path}
        assert predicts[r * n : (r + 1) * n].tolist() == [written.get(p, -1) for p in range(n)]


def murmur3_of_bytes(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 over whole words, in Python integers."""
    h = 0
    for at in range(0, len(data), 4):
        k = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 % 2**32
        k = (k * 2**15 + k // 2**17) % 2**32 * 0x1B873593 % 2**32
        h ^= k
        h = ((h * 2**13 + h // 2**19) % 2**32 * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    h = (h ^ h // 2**16) * 0x85EBCA6B % 2**32
    h = (h ^ h // 2**13) * 0xC2B2AE35 % 2**32
    return h ^ h // 2**16


def test_murmur_hash():
    assert murmur3_of_bytes(bytes(4)) == 0x2362F9DE  # published test vector
    seeds, positions, columns = (
        [0, 1, 2**63 - 1, -5, 2**40 + 3],
        [0, 7, 2**31, 12, 5],
        [0, 1, 49151, 2**31 - 1],
    )
    got = torch.ops.sgl_kernel.murmur_hash32_cpu.default(
        torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns)
    )
    assert got.dtype == torch.uint32
    for i, (seed, position) in enumerate(zip(seeds, positions)):
        head = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(4, "little")
        assert got[i].tolist() == [murmur3_of_bytes(head + c.to_bytes(4, "little")) for c in columns]


def test_unknown_kernel_fails_when_called_and_names_itself():
    from oasis_sglang.cpu.sgl_kernel import some_new_kernel

    with pytest.raises(NotImplementedError, match="sgl_kernel.some_new_kernel"):
        some_new_kernel(torch.empty(1))


def test_amx_kernels_stay_unavailable():
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


def test_every_name_has_a_test():
    tested = Path(__file__).read_text()
    assert [name for name in kernels.__all__ if f"kernels.{name}(" not in tested] == []
