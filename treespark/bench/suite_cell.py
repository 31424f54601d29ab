# SPDX-License-Identifier: Apache-2.0
"""One cell of an evaluation: a closed loop of requests through an engine of this process.

At most C requests are in the engine, and the next one arrives when one ends. The cell's clock runs
while its requests do; rows are made when it stands.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from typing import TYPE_CHECKING

from treespark.bench.suite_records import CellRow, RequestRow, RoundRow
from treespark.serving.engine import Engine
from treespark.serving.params import SamplingParams
from treespark.serving.scheduler import Request, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from treespark.bench.suite_methods import SuiteMethod
    from treespark.bench.suite_records import CellKey
    from treespark.bench.workload import Prompt
    from treespark.target.model import TargetModel

# Few: every cell of a suite begins so, and prompts are long.
_WARMUP_PROMPTS, _WARMUP_TOKENS = 2, 16


def cell_engine(
    target: TargetModel, method: SuiteMethod, concurrency: int, max_model_len: int, profile: bool
) -> Engine:
    """Return an engine of `concurrency` slots that decodes by a method."""
    return Engine(
        target,
        method.drafter,
        method.policy,
        growth=method.growth_at(concurrency),
        max_num_seqs=concurrency,
        max_model_len=max_model_len,
        profile=profile,
    )


class CellRun:
    """A cell while it runs, in one turn or several.

    keep_ids: keep the output ids in its rows.
    """

    def __init__(self, key: CellKey, engine: Engine, max_tokens: int, keep_ids: bool) -> None:
        self.key, self.engine = key, engine
        self.requests: list[RequestRow] = []
        self.rounds: list[RoundRow] = []
        self._max_tokens, self._keep_ids = max_tokens, keep_ids
        self._wall_s = self._step_s = 0.0

    def warm_up(self, prompts: Sequence[Prompt]) -> None:
        """Decode a few tokens of the shortest prompts, which nothing counts."""
        number = min(self.key.concurrency, _WARMUP_PROMPTS)
        some = sorted(prompts, key=lambda prompt: len(prompt.token_ids))[:number]
        self._loop(some, min(_WARMUP_TOKENS, self._max_tokens), lambda _: True)
        self.engine.clock.reset()
        self._step_s = 0.0

    def run(self, prompts: Sequence[Prompt], goes_on: Callable[[int], bool]) -> bool:
        """Decode prompts; return False, with the cell spoilt, once `goes_on` did.

        goes_on: called after each step with the number of requests that ended in it.
        """
        origin_s = time.perf_counter() - self._wall_s
        finished = self._loop(prompts, self._max_tokens, goes_on)
        self._wall_s = time.perf_counter() - origin_s
        if finished is None:
            self.engine.abort_all()
            return False
        for output in finished:
            self._add_rows(output, origin_s)
        return True

    def _loop(
        self, prompts: Sequence[Prompt], max_tokens: int, goes_on: Callable[[int], bool]
    ) -> list[RequestOutput] | None:
        """The closed loop; returns the final answers in the order in which they ended."""
        params, waiting = SamplingParams(max_tokens), deque(prompts)
        finished: list[RequestOutput] = []
        num_running = 0
        while waiting or num_running:
            while waiting and num_running < self.key.concurrency:
                prompt = waiting.popleft()
                self.engine.add(Request(prompt.name, prompt.token_ids, params))
                num_running += 1
            started_s = time.perf_counter()
            outputs = self.engine.step()
            self._step_s += time.perf_counter() - started_s
            ended = [output for output in outputs if output.finish_reason is not None]
            finished += ended
            num_running -= len(ended)
            if not goes_on(len(ended)):
                return None
        return finished

    def _add_rows(self, output: RequestOutput, origin_s: float) -> None:
        record, prompt_id = output.metrics, output.request_id
        assert output.finish_reason is not None
        times = [record.admitted_s, record.first_token_s, record.finished_s]
        admitted_s, first_token_s, finished_s = (t - origin_s for t in times if t is not None)
        self.requests.append(
            RequestRow(
                **self.key._asdict(),
                prompt_id=prompt_id,
                num_prompt_tokens=record.num_prompt_tokens,
                num_output_tokens=record.num_output_tokens,
                num_prefill_tokens=record.num_prefill_tokens,
                num_rounds=record.num_rounds,
                finish_reason=output.finish_reason,
                plain_decoding=record.plain_decoding,
                arrival_s=record.arrival_s - origin_s,
                admitted_s=admitted_s,
                first_token_s=first_token_s,
                finished_s=finished_s,
                ids_sha256=ids_sha256(output.token_ids),
                token_ids=output.token_ids if self._keep_ids else None,
            )
        )
        self.rounds += [
            RoundRow(
                **self.key._asdict(),
                prompt_id=prompt_id,
                round=number,
                num_committed=one.num_committed,
                num_accepted=one.num_accepted,
                num_proposed=one.num_proposed,
                proposed_depth=one.proposed_depth,
            )
            for number, one in enumerate(record.rounds)
        ]

    def row(self) -> CellRow:
        """Return the cell's own row."""
        clock = self.engine.clock
        return CellRow(
            **self.key._asdict(),
            wall_s=self._wall_s,
            step_s=self._step_s,
            num_requests=len(self.requests),
            num_output_tokens=sum(row.num_output_tokens for row in self.requests),
            num_rounds=clock.num_rounds,
            phase_s=dict(clock.seconds) if clock.enabled else {},
            load_average=os.getloadavg()[0],
        )


def ids_sha256(token_ids: Sequence[int]) -> str:
    """Return the SHA-256 of token ids as hex digits: equal for equal answers."""
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()
