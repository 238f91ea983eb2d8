"""Pages of a request while it grows, against a plain list of what should be where."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from decode_node.budget import make_budget
from decode_node.page_table import Fold, PageTable

T = 16


class Model:
    """One request, page by page: ``row`` lists (block or None, page) in the order of attention; None: a working-set slot."""

    def __init__(self, pages, prompt, working, most_working, most_tail):
        whole = prompt // T
        self.most_working, self.most_tail = most_working, most_tail
        self.row = [(None, p) for p in pages[:working]]
        self.tail = [(whole, pages[working])] if prompt % T else []
        self.spare = list(pages[working + len(self.tail) :])
        self.next_fold = whole

    def append(self, length):
        block, folds = (length - 1) // T, []
        if block >= self.next_fold + len(self.tail):
            if len(self.tail) == self.most_tail:
                old, page = self.tail.pop(0)
                if len(self.row) < self.most_working:
                    folds.append((old, page, len(self.row)))
                    self.row.append((None, page))
                else:
                    folds.append((old, page, -1))
                    self.spare.insert(0, page)
                self.next_fold += 1
            self.tail.append((block, self.spare.pop(0)))
        page = dict(self.tail)[block]
        return page * T + (length - 1) % T, folds

    def slots(self, length):
        """Physical slots that attention over ``length`` tokens reads."""
        slots = [p * T + i for _, p in self.row for i in range(T)]
        return slots + [p * T + i for b, p in self.tail for i in range(T) if b * T + i < length]


@given(prompt=st.integers(1, 400), new=st.integers(1, 200), budget=st.sampled_from([112, 160, 256]), tail=st.sampled_from([32, 64]), seed=st.integers(0, 9))
def test_every_step_reads_and_writes_what_the_model_says(prompt, new, budget, tail, seed):
    b = make_budget(T, budget, 16, 64, tail, False)
    need = b.need(prompt, new)
    pages = np.random.default_rng(seed).permutation(np.arange(1, 100))[: need.pages]
    table = PageTable(3, 40, T, "cpu")
    working = min(prompt // T, need.working)
    table.bind(1, pages, tokens=prompt, working=working, most_working=need.working, most_tail=need.tail)
    model = Model(pages.tolist(), prompt, working, need.working, need.tail)
    rows = np.array([1])
    for length in range(prompt + 1, prompt + new + 1):
        slot, folds = table.append(rows, np.array([length - 1]))
        expected, expected_folds = model.append(length)
        assert slot.tolist() == [[expected]]
        assert folds == [Fold(1, *f) for f in expected_folds]
        table.upload()
        compact = int(table.lengths(rows, np.array([length]))[0])
        assert table.table[1, :compact].tolist() == model.slots(length)
    assert set(table.pages[1, : need.pages].tolist()) == set(pages.tolist()), "no page is lost or held twice"


def test_rows_of_different_lengths_grow_in_one_call():
    table = PageTable(4, 8, T, "cpu")
    table.bind(1, np.array([5, 6, 7]), tokens=20, working=1, most_working=2, most_tail=2)
    table.bind(3, np.array([2, 3]), tokens=16, working=1, most_working=1, most_tail=4)
    slots, folds = table.append(np.array([3, 1]), np.array([16, 20]))
    assert slots.tolist() == [[3 * T], [6 * T + 4]] and folds == []
    assert table.lengths(np.array([3, 1]), np.array([17, 21])).tolist() == [17, 21]


def test_a_row_without_pages_writes_to_the_padding_page_and_reads_one_token():
    table = PageTable(2, 8, T, "cpu")
    slots, folds = table.append(np.array([1]), np.array([36]))
    assert slots.tolist() == [[4]] and folds == [] and table.lengths(np.array([1]), np.array([37])).tolist() == [1]


def test_a_restored_row_goes_on_where_it_was():
    table = PageTable(3, 20, T, "cpu")
    table.bind(1, np.arange(1, 10), tokens=100, working=6, most_working=7, most_tail=2)
    for length in range(101, 150):
        table.append(np.array([1]), np.array([length - 1]))
    before, counts = table.pages[1, :9].copy(), table.counts(1)
    table.clear(1)
    table.clear(1)
    assert table.lengths(np.array([1]), np.array([150])).tolist() == [1]
    table.restore(2, before + 30, counts)
    table.restore(1, before, counts)
    a, folds_a = table.append(np.array([1]), np.array([149]))
    b, folds_b = table.append(np.array([2]), np.array([149]))
    assert b[0, 0] - a[0, 0] == 30 * T and [f[1:2] + f[3:] for f in folds_a] == [f[1:2] + f[3:] for f in folds_b]
    table.upload()
    assert (table.table[2, : 9 * T] - table.table[1, : 9 * T]).unique().tolist() == [30 * T]
