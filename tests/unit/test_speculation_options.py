"""Options that cannot serve are refused before a model is loaded; what a node without working sets counts is shown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from oasis_sglang import plugin
from oasis_sglang.config import OasisConfig
from oasis_sglang.top import Look, figures
from transport.errors import ConfigError


def view(**changes) -> SimpleNamespace:
    fields = dict(pp_size=1, dcp_size=1, attn_cp_size=1, enable_hisparse=False, disaggregation_enable_kv_checksum=False, enable_pd_role_switch=False,
                  disaggregation_decode_enable_radix_cache=False, disaggregation_decode_host_receive_threshold=1, disaggregation_decode_allocation_policy="x",
                  speculative_algorithm=None, disaggregation_mode="decode", page_size=16, enable_mixed_chunk=False, enable_pdmux=False,
                  enable_two_batch_overlap=False, disable_overlap_schedule=False, speculative_num_draft_tokens=None)
    return SimpleNamespace(**(fields | changes))


def test_ngram_of_sglang_is_refused_on_a_decode_worker_in_any_mode():
    with pytest.raises(ConfigError, match="speculative_algorithm.*OASIS_NGRAM"):
        plugin._refuse_unsupported(view(speculative_algorithm="NGRAM"))


def test_more_drafts_than_a_page_are_refused_before_the_model_is_loaded():
    with pytest.raises(ConfigError, match="speculative_num_draft_tokens=17"):
        plugin._sparse_decode(view(speculative_algorithm="OASIS_NGRAM", speculative_num_draft_tokens=17), OasisConfig())


def test_speculation_of_a_node_without_working_sets_is_shown():
    oasis = {"role": "decode", "totals": {}, "config": {"mode": "exact"}, "tiers": {},
             "speculation": {"verify_steps": 10, "drafts_proposed": 30, "drafts_accepted": 9, "tokens_accepted": 20}}
    info = {"internal_states": [{"oasis": oasis}], "speculative_algorithm": "OASIS_NGRAM"}
    total = figures(Look(0.0, info), Look(1.0, info))["total"]
    assert total["tokens_per_verify"] == 2.0 and total["drafts_accepted_share"] == 0.3
