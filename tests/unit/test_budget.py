"""What a request holds, computed before it holds anything."""

import pytest

from decode_node.budget import Budget, make_budget, require_possible
from transport.errors import CapacityError, ConfigError

BUDGET = make_budget(16, 1024, 16, 64, 256, wait=False)


def test_options_become_pages():
    assert BUDGET == Budget(page=16, working=64, sink=1, recent=4, tail=16, wait=False, exact=False)
    assert make_budget(32, 1024, 16, 64, 256, True) == Budget(page=32, working=32, sink=1, recent=2, tail=8, wait=True)
    assert make_budget(16, 1030, 17, 65, 250, False)[1:5] == (64, 2, 5, 15), "pins are rounded up, what is bounded is rounded down"


@pytest.mark.parametrize("change, name", [(dict(page=1), "--page-size"), (dict(page=128), "--page-size"), (dict(budget_tokens=95), "budget_tokens"),
                                          (dict(budget_tokens=1 << 20), "budget_tokens"), (dict(tail_tokens=31), "tail_tokens")])
def test_impossible_sizes_are_refused_by_name(change, name):
    sizes = dict(page=16, budget_tokens=1024, sink_tokens=16, recent_tokens=64, tail_tokens=256, wait=False)
    with pytest.raises(ConfigError, match=name):
        make_budget(**{**sizes, **change})


def test_a_request_that_fits_holds_all_its_pages_and_selects_nothing():
    assert BUDGET.need(20, 30) == (4, 4, 4, False, 0)
    assert BUDGET.need(1000, 280) == (80, 80, 80, False, 0), "exactly working set and tail"
    assert BUDGET.need(1000, 281)[:4] == (80, 64, 16, True)
    assert BUDGET.need(1000, 281).generated == 81 - 62, "the partial page counts: when it is full, only this node has it"


def test_a_long_prompt_holds_working_set_and_tail_whatever_its_length():
    assert BUDGET.need(6000, 64) == (80, 64, 16, True, 379 - 375)
    assert BUDGET.need(100_000, 64)[:4] == (80, 64, 16, True)


def test_an_exact_request_holds_everything():
    exact = BUDGET.for_request({"oasis": {"mode": "exact"}})
    assert exact.need(6000, 64) == (379, 379, 379, False, 0)


def test_a_request_may_ask_for_less_or_for_waiting():
    own = BUDGET.for_request({"oasis": {"budget_tokens": 512, "on_miss": "wait"}, "other": 1})
    assert (own.working, own.wait, own.sink, own.tail) == (32, True, 1, 16)
    assert BUDGET.for_request(None) == BUDGET.for_request({}) == BUDGET


@pytest.mark.parametrize("own", [{"budget_tokens": 2048}, {"budget_tokens": 80}, {"budget_tokens": "512"}, {"budget_tokens": True}, {"mode": "dense"},
                                 {"on_miss": "never"}, {"budget": 512}, [1], [], 0, ""])
def test_wrong_options_of_a_request_are_refused(own):
    with pytest.raises(ConfigError, match="custom_params.oasis"):
        BUDGET.for_request({"oasis": own})


def test_what_no_pool_can_hold_is_refused_with_the_room_and_the_limit():
    require_possible(BUDGET.need(6000, 64), 80, page=16, room=3)
    with pytest.raises(CapacityError) as error:
        require_possible(BUDGET.need(6000, 64), 79, page=16, room=3)
    assert error.value.room == 3 and "1264 tokens" in error.value.limit and not error.value.retryable
