# SPDX-License-Identifier: Apache-2.0
"""Metrics of hand-made logs, computed by hand."""

import json

import pytest

from treespark.bench import metrics
from treespark.serving.records import RequestRecord, RoundRecord

# A chain of 3: all accepted; none accepted; a stop accepted at depth 2 (so only 2 count as
# proposed); and a clipped last round without drafts.
FIRST = RequestRecord(
    num_prompt_tokens=10,
    arrival_s=100.0,
    num_prefill_tokens=1,
    rounds=[RoundRecord(4, 3, 3, 3), RoundRecord(1, 0, 3, 3), RoundRecord(2, 2, 3, 2)],
    admitted_s=100.5,
    first_token_s=101.0,
    finished_s=102.4,
)
SECOND = RequestRecord(
    num_prompt_tokens=5,
    arrival_s=100.0,
    num_prefill_tokens=1,
    rounds=[RoundRecord(2, 1, 3, 3), RoundRecord(1, 0, 0, 0)],
    admitted_s=100.0,
    first_token_s=103.0,
    finished_s=104.2,
)
# Ended by its first token.
THIRD = RequestRecord(3, 100.0, 1, [], 100.0, 100.2, 100.2)
LOG = [FIRST, SECOND, THIRD]


def test_acceptance_length_is_committed_over_rounds_of_the_whole_log():
    assert metrics.acceptance_length(LOG) == (4 + 1 + 2 + 2 + 1) / 5
    # Not the mean of the requests' means, which is (7 / 3 + 3 / 2) / 2.
    assert metrics.acceptance_length(LOG) != pytest.approx((7 / 3 + 3 / 2) / 2)


def test_prefill_tokens_count_as_output_but_not_as_acceptance():
    assert [record.num_output_tokens for record in LOG] == [8, 4, 1]
    assert metrics.acceptance_length([THIRD]) is None


def test_position_rates_have_both_denominators():
    rates = metrics.position_rates(LOG, 4)
    assert rates.num_accepting == [3, 2, 1, 0]
    assert rates.num_proposing == [4, 4, 3, 0]
    assert rates.num_rounds == 5
    assert rates.over_proposing == [3 / 4, 2 / 4, 1 / 3, None]
    assert rates.over_rounds == [3 / 5, 2 / 5, 1 / 5, 0.0]


def test_positions_over_rounds_sum_to_the_acceptance_length_but_for_missing_bonuses():
    rates = metrics.position_rates(LOG, 7)
    # One round of five ended at a stop inside its path, without a bonus.
    assert 1 + sum(rates.over_rounds) == pytest.approx(metrics.acceptance_length(LOG) + 1 / 5)


def test_acceptance_rate_is_accepted_over_proposed_nodes():
    assert metrics.acceptance_rate(LOG) == (3 + 0 + 2 + 1 + 0) / 12
    assert metrics.acceptance_rate([THIRD]) is None


def test_times_follow_their_definitions():
    assert metrics.ttft_s(FIRST) == pytest.approx(1.0)
    assert metrics.tpot_s(FIRST) == pytest.approx(1.4 / 7)
    assert metrics.tpot_s(THIRD) is None
    assert metrics.output_throughput(LOG, 4.0) == 13 / 4
    waiting = RequestRecord(3, 100.0)
    assert metrics.ttft_s(waiting) is None
    assert metrics.tpot_s(waiting) is None


def test_summary_is_json_and_agrees_with_the_functions():
    summary = json.loads(json.dumps(metrics.summarize(LOG, 4.0, 3), allow_nan=False))
    assert summary["num_output_tokens"] == 13
    assert summary["acceptance_length"] == metrics.acceptance_length(LOG)
    assert summary["mean_ttft_ms"] == pytest.approx(1000 * (1 + 3 + 0.2) / 3)
    assert summary["mean_tpot_ms"] == pytest.approx(1000 * (1.4 / 7 + 1.2 / 3) / 2)
    assert (summary["num_drafts"], summary["num_draft_tokens"], summary["num_accepted_tokens"]) == (
        4,
        12,
        6,
    )
    assert summary["positions"]["over_proposing"] == [3 / 4, 2 / 4, 1 / 3]
    assert summary["positions"]["over_rounds"] == [3 / 5, 2 / 5, 1 / 5]


def test_an_empty_log_has_no_ratios():
    summary = metrics.summarize([], 0.0, 2)
    assert summary["num_requests"] == summary["num_output_tokens"] == 0
    assert summary["acceptance_length"] is None
    assert summary["output_throughput"] is None
