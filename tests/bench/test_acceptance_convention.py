# SPDX-License-Identifier: Apache-2.0
"""The acceptance convention on hand-made logs, from the tokens of rounds to a dataset's number."""

import pytest

from treespark.bench.metrics import acceptance_length, position_rates
from treespark.serving.commit import Proposal, commit
from treespark.serving.records import RequestRecord
from treespark.serving.scheduler import Request, SamplingParams

EOS, BONUS = 99, 50
DEPTH = 4


def log_of(rounds, first=1, max_tokens=100):
    """The record of a request: its prefill token, then (accepted path, bonus) round by round."""
    request = Request("r", [5, 6], SamplingParams(max_tokens))
    request.max_output_len, request.stop_ids = max_tokens, frozenset({EOS})
    request.record = RequestRecord(2, 0.0)
    commit(request, [first], None, 1.0)
    for path, bonus in rounds:
        # A round without drafts proposes nothing; the others a chain of four.
        proposed = 0 if path is None else DEPTH
        path = path or []
        commit(request, [*path, bonus], Proposal(len(path), proposed, proposed), 2.0)
    return request.record


FULL = ([10, 11, 12, 13], BONUS)
NOTHING = ([], BONUS)
NO_DRAFT = (None, BONUS)


@pytest.mark.parametrize(
    ("rounds", "committed", "accepted"),
    [
        pytest.param([FULL, NOTHING], [5, 1], [4, 0], id="bonus-counts"),
        pytest.param([([10, EOS, 12], BONUS)], [2], [2], id="accepted-stop-has-no-bonus"),
        pytest.param([([EOS], BONUS)], [1], [1], id="accepted-stop-at-once"),
        pytest.param([([10, 11], EOS)], [3], [2], id="bonus-stop-counts"),
        pytest.param([([], EOS)], [1], [0], id="bonus-stop-alone"),
        pytest.param([NO_DRAFT], [1], [0], id="empty-tree-is-a-round"),
    ],
)
def test_a_round_counts_what_it_put_out(rounds, committed, accepted):
    record = log_of(rounds)
    assert [r.num_committed for r in record.rounds] == committed
    assert [r.num_accepted for r in record.rounds] == accepted
    assert acceptance_length([record]) == sum(committed) / len(committed)


@pytest.mark.parametrize(
    ("room", "committed", "accepted"), [(5, 5, 4), (4, 4, 4), (3, 3, 3), (1, 1, 1)]
)
def test_a_length_cut_shortens_the_last_round(room, committed, accepted):
    record = log_of([FULL], max_tokens=1 + room)
    assert [(r.num_committed, r.num_accepted) for r in record.rounds] == [(committed, accepted)]
    assert acceptance_length([record]) == committed


def test_a_stop_at_prefill_is_output_of_no_round():
    record = log_of([], first=EOS)
    assert (record.num_output_tokens, record.num_rounds) == (1, 0)
    assert acceptance_length([record]) is None
    other = log_of([FULL])
    assert acceptance_length([record, other]) == 5


def test_a_dataset_is_its_totals_and_not_a_mean_of_means():
    dataset = [log_of([FULL]), log_of([NOTHING] * 4), log_of([], first=EOS)]
    assert acceptance_length(dataset) == (5 + 4) / 5
    means = [acceptance_length([record]) for record in dataset[:2]]
    assert sum(means) / 2 == 3.0


def test_positions_behind_an_accepted_stop_were_not_proposed():
    dataset = [log_of([FULL, ([10, EOS, 12], BONUS)]), log_of([NOTHING, NO_DRAFT])]
    rates = position_rates(dataset, DEPTH)
    assert rates.num_accepting == [2, 2, 1, 1]
    assert rates.num_proposing == [3, 3, 2, 2]
    assert rates.over_proposing == [2 / 3, 2 / 3, 1 / 2, 1 / 2]
    assert rates.over_rounds == [2 / 4, 2 / 4, 1 / 4, 1 / 4]
