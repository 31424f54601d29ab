# SPDX-License-Identifier: Apache-2.0
"""How many nodes pay: what rounds cost here, against what their drafts bring, both as seen so far.

A bandit whose arms are budgets. What an arm brings is counted over all loads, what it costs under
each load of its own: more requests at a time make rows dearer, not drafts better. Sources: the
choice by measured round times of SGLang's chains; discounted upper confidence bounds after Garivier
and Moulines (2011).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# What was seen two hundred rounds ago counts for a third: requests differ, so do their drafts. Many
# requests at a time show as much in one round, but what they showed is not to be believed longer.
_MEMORY, _MOST_SEEN = 0.995, 200
# Prices: the middle one of the last few, as a machine that is shared has slow moments.
_KEPT_PRICES = 5
# A price that is older, in rounds of its load, is asked for again: the one in use is always new.
_OLDEST_PRICE = 500
# Standard deviation of what a round brings, by the smallest tree and by each larger one beside it,
# held for as likely as that of so many rounds seen.
_UNSEEN_FIRST, _UNSEEN_MORE, _UNSEEN_WEIGHT = 0.8, 0.5, 4
# Standard errors that a budget is hoped to be better than it looks. With more of them small trees
# on two cores were tried for longer than they were worth (answers of SmolLM2, replayed).
_HOPE = 0.5


@dataclass
class _Gain:
    """Tokens per round and request that a budget adds to the next smaller one's, discounted."""

    unseen: float
    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, tokens: int) -> None:
        self.weight += 1
        self.total += tokens
        self.squares += tokens * tokens

    def forget(self) -> None:
        """Let a round pass."""
        kept = min(_MEMORY, _MOST_SEEN / self.weight if self.weight else 1.0)
        # Below that nothing is known, and the smallest numbers no longer shrink.
        kept = kept if self.weight * kept > 1e-6 else 0.0
        self.weight *= kept
        self.total *= kept
        self.squares *= kept

    def bound(self) -> float:
        """What it may well be: more than the mean, the less has been seen the more."""
        mean = self.total / self.weight if self.weight else 0.0
        squares = max(self.squares - self.total * mean, 0.0) + _UNSEEN_WEIGHT * self.unseen**2
        variance = squares / (self.weight + _UNSEEN_WEIGHT)
        return mean + _HOPE * math.sqrt(variance / (self.weight + 1))


@dataclass
class _Load:
    """Prices under one load: per budget (round of the load, seconds), the newest last."""

    prices: list[deque[tuple[int, float]]]
    num_rounds: int = 0


@dataclass
class BudgetPricing:
    """Chooses among `budgets`, which ascend from 0, the one that puts out most tokens a second.

    A budget without a price costs at least what the next smaller one does. Where one could be best
    at that, the smallest without a price is tried first, and what is dearer may never be. All
    numbers come from `note`: equal notes give equal choices. num_plain, in both methods: requests
    of the round that draft in none.
    """

    budgets: Sequence[int]
    _loads: dict[tuple[int, int], _Load] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Start with nothing seen."""
        assert self.budgets[0] == 0
        assert list(self.budgets) == sorted(set(self.budgets))
        self._gains = [
            _Gain(_UNSEEN_MORE if i else _UNSEEN_FIRST) for i in range(len(self.budgets) - 1)
        ]

    def choose(self, num_drafting: int, num_plain: int) -> int:
        """Return the budget of the next round of so many requests."""
        if num_drafting == 0:
            return 0
        load = self._load(num_drafting, num_plain)
        for gain in self._gains:
            gain.forget()
        prices = [self._price(load, i) for i in range(len(self.budgets))]
        tokens, lowest, best, best_speed = float(num_drafting + num_plain), 0.0, 0, -1.0
        for i, price in enumerate(prices):
            tokens += num_drafting * self._gains[i - 1].bound() if i else 0
            lowest = price or lowest
            speed = tokens / lowest if lowest else math.inf
            if speed > best_speed:
                best, best_speed = i, speed
        untried = [i for i in range(best + 1) if not prices[i]]
        return self.budgets[untried[0] if untried else best]

    def note(
        self,
        num_drafting: int,
        num_plain: int,
        budget: int,
        seconds: float,
        ranks: Sequence[Sequence[int]],
    ) -> None:
        """Learn from a round that was chosen.

        seconds: what it took.  ranks: of each request that got a tree the places of its accepted
        nodes among the tree's nodes, 1 for the best.
        """
        load = self._load(num_drafting, num_plain)
        load.num_rounds += 1
        index = self.budgets.index(budget)
        load.prices[index].append((load.num_rounds, seconds))
        for accepted in ranks:
            counts = [0] * len(self.budgets)
            for rank in accepted:
                counts[bisect_left(self.budgets, rank)] += 1
            # A tree shows what all smaller ones would have brought: they are its best nodes.
            for gain, tokens in zip(self._gains[:index], counts[1:], strict=False):
                gain.add(tokens)

    def _load(self, num_drafting: int, num_plain: int) -> _Load:
        key = _step(num_drafting), _step(num_plain)
        if key not in self._loads:
            self._loads[key] = _Load([deque(maxlen=_KEPT_PRICES) for _ in self.budgets])
        return self._loads[key]

    def _price(self, load: _Load, index: int) -> float:
        """Return seconds of a round; 0 where too little is known."""
        prices = load.prices[index]
        while prices and load.num_rounds - prices[0][0] > _OLDEST_PRICE:
            prices.popleft()
        seconds = [price for _, price in prices]
        if len(seconds) < 2:
            return 0.0
        # The first rounds of a shape may be slow once.
        return min(seconds) if len(seconds) == 2 else statistics.median(seconds)


def _step(count: int) -> int:
    """Return `count` rounded up to 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: loads that cost alike."""
    if count <= 4:
        return count
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power
