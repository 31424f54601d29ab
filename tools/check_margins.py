# SPDX-License-Identifier: Apache-2.0
"""Check decoded text in a low precision by teacher forcing: is every token (nearly) the best one?

    python tools/check_margins.py TARGET --prompts FILE... [--drafter DIR] [--dtype bfloat16]

Trees are verified in other matrix shapes than single tokens, and in bfloat16 another shape rounds
otherwise, so two tokens of nearly equal logits may change places. This tool decodes with trees,
runs each finished text through the target once more from nothing, and reports per emitted token the
gap between the best logit and its own. A gap above tau means a wrong token, not a rounding. tau is
twice the largest logit difference between that fresh forward and single-token decoding of the same
text, measured here on the first texts, over the tokens that come into question (the 16 best).

Tokens that are not the best are flips; a token whose logit equals the best one is a tie. A small
target in bfloat16 has both also in autoregressive decoding, so with a drafter both decoders are
measured. Exit code 1 if a gap is above tau, or if trees have more flips that are no ties than
autoregressive decoding, by over 1 % of the tokens.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from treespark.data.formats import first_user_turn
from treespark.data.jsonl import iter_jsonl
from treespark.errors import UsageError
from treespark.serving.llm import LLM, SamplingParams, load_drafter_for
from treespark.target.model import Segment, TargetModel
from treespark.target.template import render_prompt, user_turn_marks
from treespark.tree.policy import TreePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from treespark.drafter.auto import Drafter

# Flips of a tree decoder beyond those of autoregressive decoding, per token.
MAX_EXTRA_FLIP_RATE = 0.01
NUM_CANDIDATES = 16


@dataclass(frozen=True)
class MarginReport:
    """What teacher forcing found.

    num_flips: emitted tokens that are not the fresh forward's argmax (lowest id on ties).
    num_ties: flips of gap 0, whose logit equals the best one: bfloat16 logits of 16 to 32 are 1/8
    apart, so exact ties are common.
    num_above: tokens whose gap is above tau.  max_difference: largest difference, over the fresh
    forward's NUM_CANDIDATES best tokens, of its logits from those of single-token decoding.
    first_flip: (text, output position, gap).
    """

    dtype: str
    num_texts: int
    num_tokens: int
    num_flips: int
    num_ties: int
    num_above: int
    max_gap: float
    max_difference: float
    tau: float
    first_flip: tuple[int, int, float] | None

    @property
    def flip_rate(self) -> float:
        """Flips per emitted token, exact ties left out."""
        return (self.num_flips - self.num_ties) / max(self.num_tokens, 1)

    def text(self) -> str:
        """Return the report in two lines."""
        first = "none"
        if self.first_flip is not None:
            first = "text {}, output position {}, gap {:.4f}".format(*self.first_flip)
        return (
            f"{self.dtype}: {self.num_texts} texts, {self.num_tokens} tokens, {self.num_flips} "
            f"flips, {self.num_ties} of them exact ties ({self.flip_rate:.3%} without), "
            f"{self.num_above} above tau\n"
            f"tau {self.tau:.4f} (largest logit difference {self.max_difference:.4f}), largest gap "
            f"{self.max_gap:.4f}, first flip: {first}"
        )


def measure(
    target: TargetModel,
    drafter: Drafter | None,
    policy: TreePolicy,
    prompts: Sequence[list[int]],
    max_tokens: int,
    *,
    batch_size: int = 1,
    tau: float | None = None,
    num_calibration: int = 2,
    outputs: Sequence[list[int]] | None = None,
) -> MarginReport:
    """Decode `prompts` (or take `outputs` as the decoded ids) and return the margins.

    tau None measures it on the first `num_calibration` texts.
    """
    if outputs is None:
        longest = max(len(prompt) for prompt in prompts) + max_tokens
        llm = LLM(target, drafter, policy, max_num_seqs=batch_size, max_model_len=longest)
        answers = llm.generate(prompts, SamplingParams(max_tokens, ignore_eos=True), progress=True)
        outputs = [answer.token_ids for answer in answers]
    fresh = [_fresh(target, p, o) for p, o in zip(prompts[:num_calibration], outputs, strict=False)]
    difference = max(
        _difference(_stepwise(target, prompts[i], outputs[i]), logits)
        for i, logits in enumerate(fresh)
    )
    limit = 2 * difference if tau is None else tau
    num_flips = num_ties = num_above = num_tokens = 0
    max_gap, first_flip = 0.0, None
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        logits = fresh[i] if i < len(fresh) else _fresh(target, prompt, output)
        ids = torch.tensor(output, device=logits.device)
        gaps = logits.max(-1).values - logits.gather(-1, ids[:, None])[:, 0]
        flips = (logits.argmax(-1) != ids).nonzero().flatten().tolist()
        if flips and first_flip is None:
            first_flip = (i, flips[0], float(gaps[flips[0]]))
        num_flips += len(flips)
        num_ties += int((gaps[flips] == 0).sum())
        num_above += int((gaps > limit).sum())
        num_tokens += len(output)
        max_gap = max(max_gap, float(gaps.max()))
    dtype = str(target.dtype).removeprefix("torch.")
    return MarginReport(
        dtype,
        len(prompts),
        num_tokens,
        num_flips,
        num_ties,
        num_above,
        max_gap,
        difference,
        limit,
        first_flip,
    )


def _difference(logits: Tensor, fresh: Tensor) -> float:
    """Largest absolute difference over the best tokens of each row of `fresh` [n, V]."""
    best = fresh.topk(NUM_CANDIDATES).indices
    return float((logits.gather(-1, best) - fresh.gather(-1, best)).abs().max())


def _fresh(target: TargetModel, prompt: list[int], output: list[int]) -> Tensor:
    """Logits [n, V] that chose each of n output tokens, by one forward without a cache."""
    ids = torch.tensor([prompt + output[:-1]], device=target.device)
    _, hidden = target.sequence_outputs(ids, [ids.shape[1]])
    return target.logits(hidden[0, len(prompt) - 1 :])


@torch.no_grad()
def _stepwise(target: TargetModel, prompt: list[int], output: list[int]) -> Tensor:
    """The same logits by prefill and then one token at a time."""
    cache = target.new_cache(1, len(prompt) + len(output))
    rows = [target.prefill(cache, 0, 0, torch.tensor(prompt, device=target.device)).logits[-1]]
    for start, token in enumerate(output[:-1], len(prompt)):
        one, at = (torch.tensor([n], device=target.device) for n in (token, start))
        rows.append(target.forward_rows([Segment(0, start, one, at)], cache).logits[-1])
    return torch.stack(rows)


def main() -> int:
    """Run the tool; return its exit code."""
    parser = argparse.ArgumentParser(description="Teacher-forced margins of decoded text.")
    parser.add_argument("target", type=Path, help="folder of the target")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--drafter", type=Path, help="folder of the drafter")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--num-prompts", type=int, default=8, help="taken from each file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--tau", type=float, help="default: twice the measured difference")
    args = parser.parse_args()
    target = TargetModel.from_pretrained(args.target, dtype=args.dtype, device=args.device)
    drafter, policy = None, TreePolicy(budget=0)
    if args.drafter is not None:
        drafter = load_drafter_for(args.drafter, target)
        policy = TreePolicy(depth=drafter.config.block_size, budget=args.budget)
    prompts = []
    for path in args.prompts:
        prompts += _read(target, path)[: args.num_prompts]
    options = {"batch_size": args.batch_size, "tau": args.tau}
    baseline = measure(target, None, TreePolicy(budget=0), prompts, args.max_tokens, **options)
    print(f"autoregressive\n{baseline.text()}")
    if drafter is None:
        return int(baseline.num_above > 0)
    report = measure(target, drafter, policy, prompts, args.max_tokens, **options)
    print(f"tree\n{report.text()}")
    return int(not is_within(report, baseline))


def is_within(report: MarginReport, baseline: MarginReport) -> bool:
    """Return whether a tree decoder's text is as good as autoregressive decoding's own."""
    extra = report.flip_rate - baseline.flip_rate
    return report.num_above == 0 and extra <= MAX_EXTRA_FLIP_RATE


def _read(target: TargetModel, path: Path) -> list[list[int]]:
    """Token ids of a JSONL file's prompts."""
    found = []
    for number, row in iter_jsonl(path):
        turn = first_user_turn(row, f"{path}:{number}", lambda: user_turn_marks(target.tokenizer))
        if turn is None:
            raise UsageError(f"{path}:{number}: no user turn")
        found.append(render_prompt(target.tokenizer, turn) if isinstance(turn, str) else turn)
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
