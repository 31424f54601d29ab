# SPDX-License-Identifier: Apache-2.0
"""THE serve flow: `Engine.step` is one round for all running requests.

A round drafts a tree per request, verifies all trees in one target forward, and commits per request
the accepted path plus the target's own next token. Decoding without drafts is the same round with
trees that are only their root; sampled requests decode so, among others that draft.

One thread makes all calls, but for `stats`, which any thread may read.

Shapes: R requests in the round, N tree nodes, V vocabulary, m taps, H hidden size.
"""

from __future__ import annotations

import dataclasses
import random
import time
from typing import TYPE_CHECKING

import torch

from treespark.device import synchronize
from treespark.drafter.growing import Growth
from treespark.errors import UsageError
from treespark.serving.accept import Accepted, accept
from treespark.serving.checks import (
    check_drafter,
    check_request,
    check_sizes,
    default_policy,
    text_tokenizer,
)
from treespark.serving.clock import PhaseClock
from treespark.serving.commit import commit
from treespark.serving.detokenize import TextStream
from treespark.serving.prefixes import is_read_ahead, take_prefix
from treespark.serving.records import RequestRecord
from treespark.serving.rounds import OnRound, Propose, RoundBatch
from treespark.serving.scheduler import Request, RequestOutput, RequestState, Scheduler, Slot
from treespark.serving.speculation import SpeculationControl
from treespark.serving.stats import EngineStats, Totals
from treespark.target.model import Segment
from treespark.tree.packed import PackedTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from treespark.drafter.auto import Drafter
    from treespark.target.model import TargetModel
    from treespark.tree.policy import TreePolicy

__all__ = ["Accepted", "Engine", "OnRound", "Propose", "RoundBatch"]


# A slot and the request that holds it.
Held = tuple[Slot, Request]


class Engine:
    """Decodes requests that join and leave at different times over `max_num_seqs` slots.

    drafter None decodes autoregressively. policy None takes the drafter's own. speculation: one of
    the modes of `SpeculationControl` in place of the policy's budget. max_model_len bounds prompt
    plus output (None = the target's context). Each step prefills at most `prefill_chunk` prompt
    tokens. reuse_prefixes: see `treespark.serving.prefixes`. growth: None grows TreeSpark's trees.
    `propose` replaces drafting. `profile` turns `clock` on. Set `on_round` to watch the rounds.
    Raises UsageError for a drafter or policy that does not fit.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None = None,
        policy: TreePolicy | None = None,
        *,
        speculation: str | None = None,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        prefill_chunk: int = 512,
        reuse_prefixes: bool = False,
        growth: Growth | None = None,
        propose: Propose | None = None,
        profile: bool = False,
    ) -> None:
        self.target, self.propose = target, propose
        self.on_round: OnRound | None = None
        if drafter is None and propose is None:
            # Nothing drafts, whatever the policy.
            policy = None
        self.control = SpeculationControl(policy or default_policy(drafter), speculation, drafter)
        self.policy = self.control.largest
        self.max_model_len = target.max_context if max_model_len is None else max_model_len
        self.prefill_chunk, self.reuse_prefixes = prefill_chunk, reuse_prefixes
        if propose is not None and self.control.learns:
            raise UsageError(f"speculation {speculation}: `propose` cannot follow its choices")
        check_sizes(target, max_num_seqs, self.max_model_len, prefill_chunk)
        check_drafter(target, drafter, self.policy, speculation)
        self.growth = growth or Growth()
        if drafter is not None:
            self.growth.check(drafter, self.policy)
        self.tokenizer = text_tokenizer(target)
        self.scheduler = Scheduler(max_num_seqs)
        self.totals = Totals(num_accepted_per_position=[0] * self.policy.depth)
        self.clock = PhaseClock(target.device, profile)
        # A tree is written behind the committed rows, so the last round needs room for all of it.
        self.kv = target.new_cache(max_num_seqs, self.max_model_len + self.policy.budget)
        # A drafter that never drafts gets no context to keep up.
        self.drafter = drafter if self.policy.budget > 0 else None
        self.context = None
        if self.drafter is not None:
            num_rows = min(self.max_model_len, self.drafter.config.max_position_embeddings)
            self.context = self.drafter.new_cache(max_num_seqs, num_rows)

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raises UsageError, with value and limit, if it cannot be served."""
        check_request(self, request)
        params, num_prompt = request.params, len(request.prompt_token_ids)
        eos = set() if params.ignore_eos else self.target.eos_token_ids
        request.stop_ids = frozenset(eos) | set(params.stop_token_ids)
        request.max_output_len = min(params.max_tokens, self.max_model_len - num_prompt)
        request.seed = random.getrandbits(63) if params.seed is None else params.seed
        request.text = TextStream(
            self.tokenizer, params.stop, keep_stop=params.include_stop_str_in_output
        )
        request.record = RequestRecord(num_prompt, time.perf_counter())
        self.scheduler.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request between two steps; return whether it was there."""
        return self.scheduler.abort(request_id)

    def abort_all(self) -> None:
        """Drop every request; the engine can be used again, even after an interrupted step."""
        self.scheduler.abort_all()

    def stats(self) -> EngineStats:
        """Return what runs now and the totals so far; cheap, from any thread."""
        slots = self.scheduler.slots
        held = [
            0 if slot.is_fresh else slot.kv_length for slot in slots if slot.request is not None
        ]
        return EngineStats(
            num_running=len(held),
            num_waiting=len(self.scheduler.waiting),
            num_free_slots=len(slots) - len(held),
            kv_usage=sum(held) / (len(slots) * self.max_model_len),
            tree_budget=self.control.budget,
            phase_s=dict(self.clock.seconds) if self.clock.enabled else None,
            num_timed_rounds=self.clock.num_rounds,
            **dataclasses.asdict(self.totals),
        )

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one round; return the answers that grew, with a finish reason where they ended."""
        self.clock.start()
        self._tap_target()
        self.scheduler.fill_slots(time.perf_counter())
        grown = self._prefill()
        self.clock.mark("prefill")
        began_s = time.perf_counter()
        running = self.scheduler.in_state(RequestState.RUNNING)
        if running:
            batch = self._round_batch(running)
            self.clock.mark("host")
            # One in the drafter's place sees all that draft.
            rows = batch.drafting_rows(needs_room=self.propose is None)
            policy = self.control.choose(batch.num_drafting, batch.num_plain)
            tree = self._draft(batch, rows, policy)
            verified = self.target.verify(tree, self.kv, batch.slots, batch.lengths)
            accepted = self._accept(batch.requests, tree, verified.logits)
            self.clock.mark("verify")
            if self.on_round is not None:
                self.on_round(batch, tree, accepted)
            self._commit(batch, accepted)
            self.clock.mark("host")
            self._keep_rows(running, accepted, tree, verified.features)
            self.clock.mark("commit")
            self.clock.count_round(len(running))
            self.control.note(batch, rows, accepted, time.perf_counter() - began_s)
        outputs = self._emit(grown + running)
        self.clock.mark("host")
        return outputs

    # ------------------------------------------------------------------ admit, prefill

    def _tap_target(self) -> None:
        """Make the target yield this engine's features; engines may share a target by turns."""
        taps = [] if self.drafter is None else list(self.drafter.config.target_layer_ids or [])
        if list(self.target.target_layer_ids or []) != taps:
            self.target.set_taps(taps)

    def _prefill(self) -> list[Held]:
        """Run the next `prefill_chunk` prompt tokens, oldest requests first, in one forward.

        A complete prompt yields its answer's first token, which belongs to no round. Returns the
        requests that it already ended; the others run from this step's round on.
        """
        room, held, segments = self.prefill_chunk, [], []
        ahead: list[Request] = []
        for slot, request in self.scheduler.in_state(RequestState.PREFILL):
            if room == 0:
                break
            if slot.is_fresh and not self._begin(slot, request, ahead):
                continue
            ahead.append(request)
            chunk = request.prompt_token_ids[slot.kv_length : slot.kv_length + room]
            start, end = slot.kv_length, slot.kv_length + len(chunk)
            ids = torch.tensor(chunk, device=self.target.device)
            positions = torch.arange(start, end, device=self.target.device)
            segments.append(Segment(slot.index, start, ids, positions))
            held.append((slot, request))
            room -= len(chunk)
        if not held:
            return []
        output = self.target.forward_rows(segments, self.kv)
        if self.control.learns:
            # The round behind it is timed, and should not wait for the prompts.
            synchronize(self.target.device)
        counts = [len(segment.token_ids) for segment in segments]
        # Every chunk feeds the drafter, not only the last: its context is the whole prompt.
        keep = self._drafting(held)
        if keep:
            parts = output.features.split(counts)
            slots = [held[i][0] for i in keep]
            features = torch.cat([parts[i] for i in keep])
            ids = torch.cat([segments[i].token_ids for i in keep])
            self._extend_context(slots, [counts[i] for i in keep], features, ids)
        for (slot, _), count in zip(held, counts, strict=True):
            slot.kv_length += count
        return self._first_tokens(held, output.logits)

    def _begin(self, slot: Slot, request: Request, ahead: list[Request]) -> bool:
        """Begin a prompt with what is cached of it; return False to wait for the same one ahead."""
        slots, drafts = self.scheduler.slots, self.control.plain_reason(request) is None
        if not self.reuse_prefixes:
            slot.begin(0, 0)
            return True
        if is_read_ahead(request, ahead):
            return False
        self.totals.num_cached_tokens += take_prefix(slot, slots, self.kv, self.context, drafts)
        return True

    def _first_tokens(self, held: list[Held], logits: Tensor) -> list[Held]:
        """Commit the first token of the complete prompts; return those that it ended.

        logits: [len(held), V], of each request's last row.
        """
        done = [i for i, (slot, r) in enumerate(held) if slot.kv_length == len(r.prompt_token_ids)]
        if not done:
            return []
        requests = [held[i][1] for i in done]
        last = [request.prompt_token_ids[-1] for request in requests]
        roots = PackedTree.root_only(torch.tensor(last, device=logits.device))
        accepted = self._accept(requests, roots, logits[done].unsqueeze(1))
        now_s = time.perf_counter()
        for request, path in zip(requests, accepted, strict=True):
            commit(request, path.tokens, None, now_s, path.logprobs)
            self.totals.num_prompt_tokens += len(request.prompt_token_ids)
            if request.finish_reason is None:
                request.move_to(RequestState.RUNNING)
        return [held[i] for i in done if held[i][1].finish_reason is not None]

    def _round_batch(self, running: list[Held]) -> RoundBatch:
        """Gather what the round needs to know, once both caches are known to end at the anchors."""
        requests = [request for _, request in running]
        reasons = [self.control.plain_reason(request) for request in requests]
        for (slot, request), reason in zip(running, reasons, strict=True):
            has_context = self.context is not None and reason is None
            draft_length = slot.draft_length if has_context else request.length
            assert slot.kv_length == draft_length == request.length, (
                f"slot {slot.index}: {slot.kv_length} target rows and {draft_length} draft rows in "
                f"front of an anchor at position {request.length}"
            )
        anchors = [request.output_token_ids[-1] for request in requests]
        return RoundBatch(
            requests=requests,
            slots=[slot.index for slot, _ in running],
            lengths=[request.length for request in requests],
            anchors=torch.tensor(anchors, device=self.target.device),
            # A bonus follows the deepest draft.
            max_depths=[min(self.policy.depth, r.num_remaining - 1) for r in requests],
            plain_reasons=reasons,
        )

    # ------------------------------------------------------------------ draft, expand, pack

    def _draft(self, batch: RoundBatch, rows: list[int], policy: TreePolicy) -> PackedTree:
        """Return one tree per request, only the root where it is not one of `rows`."""
        if not rows or policy.budget == 0:
            return PackedTree.root_only(batch.anchors)
        drafting = batch.select(rows)
        if self.propose is None:
            tree = self._grow(drafting, policy)
        else:
            tree = self.propose(drafting)
            assert tree.tokens.shape[1] <= policy.budget + 1, "tree above policy.budget"
            self.clock.mark("draft")
        return tree.spread(rows, batch.anchors)

    def _grow(self, batch: RoundBatch, policy: TreePolicy) -> PackedTree:
        """Return trees proposed by one drafter pass, expanded and packed together."""
        assert self.drafter is not None
        hidden = self.drafter.draft_block(
            self.context,
            batch.slots,
            batch.lengths,
            batch.anchors,
            self.growth.num_depths(policy),
        )
        self.clock.mark("draft")
        limits = torch.tensor(batch.max_depths, device=batch.anchors.device)
        _, tree = self.growth.grow(self.drafter, hidden, batch.anchors, policy, limits)
        self.clock.mark("expand")
        return tree

    # ------------------------------------------------------------------ accept, commit, emit

    def _accept(
        self, requests: Sequence[Request], tree: PackedTree, logits: Tensor
    ) -> list[Accepted]:
        """Walk the target's choices down each tree; the round's one transfer to the host."""
        num_nodes = tree.tokens.shape[1] - 1
        depth = num_nodes if self.propose is not None else min(self.policy.depth, num_nodes)
        return accept(requests, tree, logits, depth, ranked=self.control.learns)

    def _commit(self, batch: RoundBatch, accepted: list[Accepted]) -> None:
        """Make tokens output."""
        now_s = time.perf_counter()
        rows = zip(batch.requests, accepted, batch.plain_reasons, strict=True)
        for request, path, reason in rows:
            proposal = path.proposal._replace(plain_decoding=reason)
            commit(request, path.tokens, proposal, now_s, path.logprobs)

    def _keep_rows(
        self,
        running: list[Held],
        accepted: list[Accepted],
        tree: PackedTree,
        features: Tensor | None,
    ) -> None:
        """Keep the accepted rows of the requests that go on: target K/V moved, draft context added.

        The rows are anchor plus accepted path. The bonus has none yet: it is the next anchor.
        """
        going = [i for i, (_, request) in enumerate(running) if request.finish_reason is None]
        if not going:
            return
        slots = [running[i][0] for i in going]
        paths = [accepted[i].nodes for i in going]
        indices, starts = [slot.index for slot in slots], [slot.kv_length for slot in slots]
        self.target.commit(self.kv, indices, starts, paths)
        for slot, path in zip(slots, paths, strict=True):
            slot.kv_length += len(path)
        keep = [going[i] for i in self._drafting([running[i] for i in going])]
        if keep:
            assert features is not None
            picks = [(i, node) for i in keep for node in accepted[i].nodes]
            row, node = torch.tensor(picks, device=features.device).unbind(1)
            counts = [len(accepted[i].nodes) for i in keep]
            slots = [running[i][0] for i in keep]
            self._extend_context(slots, counts, features[row, node], tree.tokens[row, node])

    def _drafting(self, held: list[Held]) -> list[int]:
        """Return which of these need the drafter's context for the rounds to come."""
        if self.context is None:
            return []
        return [i for i, (_, r) in enumerate(held) if self.control.plain_reason(r) is None]

    def _extend_context(
        self, slots: list[Slot], counts: list[int], features: Tensor, token_ids: Tensor
    ) -> None:
        """Add features [sum counts, mH] and their tokens to the context behind what is there."""
        assert self.drafter is not None
        indices, starts = [slot.index for slot in slots], [slot.draft_length for slot in slots]
        self.drafter.extend_contexts(self.context, indices, starts, counts, features, token_ids)
        for slot, count in zip(slots, counts, strict=True):
            slot.draft_length += count

    def _emit(self, grown: list[Held]) -> list[RequestOutput]:
        """Return the answers that grew and free the slots of those that ended."""
        outputs = []
        for slot, request in grown:
            output = RequestOutput.of(request)
            self.totals.count(request, len(output.token_ids))
            outputs.append(output)
            if request.finish_reason is not None:
                self.scheduler.release(slot, RequestState.FINISHED)
        return outputs
