"""How far a chain of drafts is believed, by what its rows miss."""

import numpy as np
import pytest
import torch

from oasis_sglang.selection.trust import missed_share, trusted_rows
from oasis_sglang.speculation.worker import cut_chains

EVERY = torch.arange(40)


def missed(*rows: float, heads: int = 40) -> torch.Tensor:
    """One request whose first two heads miss ``rows``, the others 0.3 in every row."""
    values = torch.full((1, len(rows), heads), 0.3)
    values[0, :, :2] = torch.tensor(rows)[:, None]
    return values


def test_the_missed_share_of_each_row_is_its_mass_on_blocks_that_are_not_there():
    mass = torch.tensor([[[[3.0, 1, 0, 0]], [[0, 0, 1, 1]]]])
    assert missed_share(mass, torch.tensor([[[True, False, True, True]]])).tolist() == [[[0.25], [0.0]]]
    assert missed_share(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 4, dtype=torch.bool)).tolist() == [[[0.0]]]


@pytest.mark.parametrize("rows, believed", [((0.2, 0.3, 0.4, 0.44), 3), ((0.2, 0.3, 0.46, 0.2), 1), ((0.2, 0.5, 0.2, 0.2), 0), ((0.9, 0.9, 0.9, 0.9), 3),
                                            ((0.9, 0.1, 0.0, 1.0), 3)])
def test_a_chain_is_believed_up_to_the_first_row_that_misses_much_more_than_the_newest_real_one(rows, believed):
    assert trusted_rows(missed(*rows), EVERY, 0.25).tolist() == [believed]


def test_the_twentieth_of_the_heads_where_it_is_worst_decides_and_heads_that_do_not_select_do_not():
    values = missed(0.2, 0.9)
    assert trusted_rows(values, EVERY, 0.25).tolist() == [0]
    values[0, 1, 1] = 0.2  # one of forty: on average over two, .35
    assert trusted_rows(values, EVERY, 0.25).tolist() == [0] and trusted_rows(values, EVERY, 0.36).tolist() == [1]
    assert trusted_rows(missed(0.2, 0.9), EVERY[2:], 0.25).tolist() == [1]
    assert trusted_rows(missed(0.2, 0.9), EVERY[:0], 0.25).tolist() == [1], "nothing selects, nothing is missed"


def test_nothing_is_believed_at_a_limit_of_nought_and_everything_at_one():
    assert trusted_rows(missed(0.2, 0.2, 0.2), EVERY, 0).tolist() == [0]
    assert trusted_rows(missed(0.0, 0.99, 0.99), EVERY, 1.0).tolist() == [2]


def test_a_cut_chain_ends_after_the_believed_rows():
    links = torch.tensor([[1, 2, 3, -1]] * 4)
    cut_chains(links, np.array([0, 1, 2, 3]))
    assert links.tolist() == [[-1, -1, -1, -1], [1, -1, -1, -1], [1, 2, -1, -1], [1, 2, 3, -1]]
