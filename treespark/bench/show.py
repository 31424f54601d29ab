# SPDX-License-Identifier: Apache-2.0
"""One request's trees in a terminal, as they are drafted and verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text
from rich.tree import Tree

from treespark.serving.scheduler import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from treespark.serving.engine import Accepted, RoundBatch
    from treespark.serving.llm import LLM
    from treespark.tree.packed import PackedTree

_ACCEPTED, _REFUSED, _BONUS, _ANCHOR = "bold green", "dim", "bold yellow", "bold"


def render_tree(tree: PackedTree, row: int, accepted: Accepted, tokenizer: Any) -> Tree:
    """Return request `row` of a packed tree with its accepted path marked and the bonus under it.

    A node shows its token and the drafter's probability of the whole path down to it.
    """
    valid = tree.valid[row].tolist()
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    shares = tree.scores[row].float().exp().tolist()
    path = set(accepted.nodes)
    root = Tree(Text(f"{_token(tokenizer, tokens[0])} anchor", _ANCHOR), guide_style="dim")
    branches = {0: root}
    # Parents come before their children in packed order.
    for node in range(1, len(tokens)):
        if valid[node]:
            mark, style = ("✓ ", _ACCEPTED) if node in path else ("", _REFUSED)
            label = f"{mark}{_token(tokenizer, tokens[node])} {shares[node]:.0%}"
            branches[node] = branches[parents[node]].add(Text(label, style))
    bonus = _token(tokenizer, accepted.tokens[-1])
    branches[accepted.nodes[-1]].add(Text(f"+ {bonus} by the target", _BONUS))
    return root


def show_rounds(
    llm: LLM, prompt: Sequence[int], num_rounds: int, max_tokens: int, console: Console
) -> str:
    """Decode one prompt, print the trees of its first `num_rounds` rounds, and return its text.

    Other prompts must not run in the same LLM meanwhile.
    """
    tokenizer = llm.target.tokenizer
    seen = 0

    def watch(batch: RoundBatch, tree: PackedTree, accepted: Sequence[Accepted]) -> None:
        nonlocal seen
        seen += 1
        if seen > num_rounds:
            return
        nodes = int(tree.num_nodes[0])
        gained = len(accepted[0].tokens)
        console.print(
            Text(f"\nround {seen}: {nodes} nodes in one forward of the target, {gained} tokens")
        )
        console.print(render_tree(tree, 0, accepted[0], tokenizer))

    llm.engine.on_round = watch
    try:
        (output,) = llm.generate([list(prompt)], SamplingParams(max_tokens))
    finally:
        llm.engine.on_round = None
    return output.text


def _token(tokenizer: Any, token_id: int) -> str:
    return repr(tokenizer.decode([token_id]))
