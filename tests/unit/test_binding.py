"""What is checked before a worker is joined to SGLang, and what new weights do to the tier's content."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from oasis_sglang import config, hooks
from oasis_sglang.binding import check_queue
from transport.errors import ConfigError


def queue(**changes):
    rows = SimpleNamespace(output_ids=torch.zeros(2, 16, device=changes.pop("device", "cpu")))
    return SimpleNamespace(**{"draft_token_to_kv_pool": None, "metadata_buffers": rows} | changes)


def test_state_that_is_not_handed_over_is_refused_by_name():
    check_queue(queue())
    with pytest.raises(ConfigError, match="speculative_algorithm"):
        check_queue(queue(draft_token_to_kv_pool=object()))
    with pytest.raises(ConfigError, match="host memory"):
        check_queue(queue(device="meta"))


@pytest.mark.parametrize("active, forgotten", [("1", 1), ("0", 0)])
def test_kv_of_other_weights_is_not_found_again(monkeypatch, active, forgotten):
    monkeypatch.setenv(config.ACTIVE_ENV, active)
    calls = []
    manager = SimpleNamespace(forget_prefixes=lambda: calls.append(1))
    scheduler = SimpleNamespace(disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=manager))
    decode = SimpleNamespace(hisparse_coordinator=SimpleNamespace(forget=lambda: calls.append(1)))
    done = (True, "Succeeded")
    assert hooks.weights_changed(done, SimpleNamespace(scheduler=scheduler), None, *done) is done
    assert len(calls) == forgotten
    assert hooks.weights_changed(done, SimpleNamespace(scheduler=decode), None, *done) is done
    assert len(calls) == 2 * forgotten
    assert hooks.weights_changed(done, SimpleNamespace(scheduler=SimpleNamespace()), None, *done) is done, "a decode node with mode=exact"
