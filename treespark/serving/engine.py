# SPDX-License-Identifier: Apache-2.0
"""THE serve flow: `Engine.step` is one round for all running requests.

A round drafts a tree per request, verifies all trees in one target forward, and commits per request
the accepted path plus the target's own next token. Decoding without a drafter is the same round
with trees that are only their root.

Shapes: R requests in the round, N tree nodes, V vocabulary, m taps, H hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from treespark.drafter.auto import drafted_logits
from treespark.serving.checks import (
    check_drafter,
    check_request,
    check_sizes,
    default_policy,
    text_tokenizer,
)
from treespark.serving.clock import PhaseClock
from treespark.serving.commit import Proposal, commit
from treespark.serving.detokenize import TextStream
from treespark.serving.records import RequestRecord
from treespark.serving.scheduler import Request, RequestOutput, RequestState, Scheduler, Slot
from treespark.tree.packed import PackedTree
from treespark.tree.policy import TreePolicy, expand, pack
from treespark.tree.verify import accept_greedy

if TYPE_CHECKING:
    from torch import Tensor

    from treespark.drafter.auto import Drafter
    from treespark.target.model import TargetModel


@dataclass(frozen=True)
class RoundBatch:
    """The running requests as a round begins.

    slots: their cache rows.  lengths: committed tokens in front of each anchor.  anchors [R] int64.
    max_depths: deepest draft depth whose tokens could still be output, per request.
    """

    requests: list[Request]
    slots: list[int]
    lengths: list[int]
    anchors: Tensor
    max_depths: list[int]


class Accepted(NamedTuple):
    """One request's verified path: node indices with the root first, tokens with the bonus last."""

    nodes: list[int]
    tokens: list[int]
    proposal: Proposal


# Stands in for the drafter, for tests and experiments: any tree with at most `policy.budget` nodes.
Propose = Callable[[RoundBatch], PackedTree]
# Sees each round between verification and commit, for display; it changes nothing.
OnRound = Callable[[RoundBatch, PackedTree, list[Accepted]], None]
# A slot and the request that holds it.
Held = tuple[Slot, Request]


class Engine:
    """Decodes requests that join and leave at different times, greedily, over `max_num_seqs` slots.

    drafter None decodes autoregressively. policy None takes the drafter's own. max_model_len bounds
    prompt plus output (None = the target's context). Each step prefills at most `prefill_chunk`
    prompt tokens. `propose` replaces drafting. `profile` turns `clock` on. Set `on_round` to watch
    the rounds.
    Raises UsageError for a drafter or policy that does not fit.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None = None,
        policy: TreePolicy | None = None,
        *,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        prefill_chunk: int = 512,
        propose: Propose | None = None,
        profile: bool = False,
    ) -> None:
        self.target, self.drafter, self.propose = target, drafter, propose
        self.on_round: OnRound | None = None
        self.policy = policy or default_policy(drafter)
        self.max_model_len = target.max_context if max_model_len is None else max_model_len
        self.prefill_chunk = prefill_chunk
        check_sizes(target, max_num_seqs, self.max_model_len, prefill_chunk)
        check_drafter(target, drafter, self.policy)
        self.tokenizer = text_tokenizer(target)
        self.scheduler = Scheduler(max_num_seqs)
        self.clock = PhaseClock(target.device, profile)
        is_drafting = drafter is not None or propose is not None
        # A tree is written behind the committed rows, so the last round needs room for all of it.
        num_rows = self.max_model_len + (self.policy.budget if is_drafting else 0)
        self.kv = target.new_cache(max_num_seqs, num_rows)
        self.context = None
        if drafter is not None:
            self.context = drafter.new_cache(max_num_seqs, self.max_model_len)

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
        request.text = TextStream(self.tokenizer, params.stop)
        request.record = RequestRecord(num_prompt, time.perf_counter())
        self.scheduler.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request between two steps; return whether it was there."""
        return self.scheduler.abort(request_id)

    def abort_all(self) -> None:
        """Drop every request; the engine can be used again, even after an interrupted step."""
        self.scheduler.abort_all()

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one round; return the answers that grew, with a finish reason where they ended."""
        self.clock.start()
        grown = self._admit()
        self.clock.mark("prefill")
        running = self.scheduler.in_state(RequestState.RUNNING)
        if running:
            batch = self._round_batch(running)
            self.clock.mark("host")
            tree = self._draft(batch)
            verified = self.target.verify(tree, self.kv, batch.slots, batch.lengths)
            accepted = self._accept(tree, verified.logits)
            self.clock.mark("verify")
            if self.on_round is not None:
                self.on_round(batch, tree, accepted)
            now_s = time.perf_counter()
            for request, path in zip(batch.requests, accepted, strict=True):
                commit(request, path.tokens, path.proposal, now_s)
            self.clock.mark("host")
            self._keep_rows(running, accepted, tree, verified.features)
            self.clock.mark("commit")
            self.clock.count_round(len(running))
        outputs = self._emit(grown + running)
        self.clock.mark("host")
        return outputs

    # ------------------------------------------------------------------ admit

    def _admit(self) -> list[Held]:
        """Waiting requests take free slots; prefill up to `prefill_chunk` prompt tokens.

        Returns the requests that their first token already ended. That token is prefill's own and
        belongs to no round; the other requests run from this step's round on.
        """
        self._tap_target()
        self.scheduler.fill_slots(time.perf_counter())
        room, ended = self.prefill_chunk, []
        for slot, request in self.scheduler.in_state(RequestState.PREFILL):
            if room == 0:
                break
            chunk = request.prompt_token_ids[slot.kv_length : slot.kv_length + room]
            ids = torch.tensor(chunk, device=self.target.device)
            output = self.target.prefill(self.kv, slot.index, slot.kv_length, ids)
            slot.kv_length += len(chunk)
            room -= len(chunk)
            # Every chunk feeds the drafter, not only the last: its context is the whole prompt.
            self._extend_context([slot], [len(chunk)], output.features, ids)
            if slot.kv_length < len(request.prompt_token_ids):
                continue
            commit(request, [int(output.logits[-1].argmax())], None, time.perf_counter())
            if request.finish_reason is None:
                request.move_to(RequestState.RUNNING)
            else:
                ended.append((slot, request))
        return ended

    def _tap_target(self) -> None:
        """Make the target yield this engine's features; engines may share a target by turns."""
        taps = [] if self.drafter is None else list(self.drafter.config.target_layer_ids or [])
        if list(self.target.target_layer_ids or []) != taps:
            self.target.set_taps(taps)

    def _round_batch(self, running: list[Held]) -> RoundBatch:
        """Gather what the round needs to know, once both caches are known to end at the anchors."""
        for slot, request in running:
            draft_length = request.length if self.context is None else slot.draft_length
            assert slot.kv_length == draft_length == request.length, (
                f"slot {slot.index}: {slot.kv_length} target rows and {draft_length} draft rows in "
                f"front of an anchor at position {request.length}"
            )
        requests = [request for _, request in running]
        anchors = [request.output_token_ids[-1] for request in requests]
        return RoundBatch(
            requests=requests,
            slots=[slot.index for slot, _ in running],
            lengths=[request.length for request in requests],
            anchors=torch.tensor(anchors, device=self.target.device),
            max_depths=[self._max_depth(request) for request in requests],
        )

    def _max_depth(self, request: Request) -> int:
        """Return the deepest useful draft: a bonus follows it, and the drafter's context ends."""
        if self.drafter is not None:
            config = self.drafter.config
            if request.length + config.block_size >= config.max_position_embeddings:
                return 0
        return min(self.policy.depth, request.num_remaining - 1)

    # ------------------------------------------------------------------ draft, expand, pack

    def _draft(self, batch: RoundBatch) -> PackedTree:
        """Return one tree per request: proposed by one drafter pass, then grown and packed."""
        if self.propose is not None:
            tree = self.propose(batch)
            assert tree.tokens.shape[1] <= self.policy.budget + 1, "tree above policy.budget"
            self.clock.mark("draft")
            return tree
        if self.drafter is None or self.policy.budget == 0 or max(batch.max_depths) == 0:
            return PackedTree.root_only(batch.anchors)
        hidden = self.drafter.draft_block(self.context, batch.slots, batch.lengths, batch.anchors)
        self.clock.mark("draft")
        node_logits = drafted_logits(self.drafter, hidden, batch.anchors)
        pool = expand(node_logits, batch.anchors, self.policy)
        limits = torch.tensor(batch.max_depths, device=batch.anchors.device)
        tree = pack(pool, self.policy.budget, limits)
        self.clock.mark("expand")
        return tree

    # ------------------------------------------------------------------ accept, commit, emit

    def _accept(self, tree: PackedTree, logits: Tensor) -> list[Accepted]:
        """Walk the target's choices down each tree; the round's one transfer to the host."""
        num_nodes = tree.tokens.shape[1] - 1
        depth = num_nodes if self.propose is not None else min(self.policy.depth, num_nodes)
        path = accept_greedy(tree, logits, depth)
        columns = (path.num_accepted, tree.num_nodes, tree.depths.amax(1))
        counts = torch.stack([column.long() for column in columns], 1)
        rows = torch.cat([counts, path.retrieve_indices, path.tokens], 1).tolist()
        first, accepted = 3 + depth + 1, []
        for row in rows:
            num_rows = row[0] + 1
            nodes, tokens = row[3 : 3 + num_rows], row[first : first + num_rows]
            accepted.append(Accepted(nodes, tokens, Proposal(*row[:3])))
        return accepted

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
        if self.context is not None:
            assert features is not None
            picks = [(i, node) for i, path in zip(going, paths, strict=True) for node in path]
            row, node = torch.tensor(picks, device=features.device).unbind(1)
            counts = [len(path) for path in paths]
            self._extend_context(slots, counts, features[row, node], tree.tokens[row, node])

    def _extend_context(
        self, slots: list[Slot], counts: list[int], features: Tensor | None, token_ids: Tensor
    ) -> None:
        """Add features [sum counts, mH] and their tokens to the context behind what is there."""
        if self.context is None:
            return
        assert self.drafter is not None
        assert features is not None
        indices, starts = [slot.index for slot in slots], [slot.draft_length for slot in slots]
        self.drafter.extend_contexts(self.context, indices, starts, counts, features, token_ids)
        for slot, count in zip(slots, counts, strict=True):
            slot.draft_length += count

    def _emit(self, grown: list[Held]) -> list[RequestOutput]:
        """Return the answers that grew and free the slots of those that ended."""
        outputs = []
        for slot, request in grown:
            outputs.append(RequestOutput.of(request))
            if request.finish_reason is not None:
                self.scheduler.release(slot, RequestState.FINISHED)
        return outputs
