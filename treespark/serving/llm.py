# SPDX-License-Identifier: Apache-2.0
"""Offline decoding: a list of prompts in, their answers out, in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from treespark.errors import UsageError
from treespark.serving.engine import Engine
from treespark.serving.params import SamplingParams
from treespark.serving.scheduler import Request, RequestOutput
from treespark.target.model import TargetModel
from treespark.target.template import check_utf8, render_prompt

if TYPE_CHECKING:
    import torch

    from treespark.drafter.auto import Drafter
    from treespark.tree.policy import TreePolicy

__all__ = ["LLM", "Prompt", "RequestOutput", "SamplingParams", "load_pair"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Plain text, token ids, or chat messages of `role` and `content`."""


class LLM:
    """A target, optionally with a drafter, ready to answer lists of prompts.

    target, drafter: folders or loaded objects.  policy: None takes the drafter's own.  dtype,
    device: for what is loaded here.  max_num_seqs: requests decoded at a time.  max_model_len: most
    tokens of prompt plus answer (None = the target's context).  speculation, reuse_prefixes,
    profile: see `Engine`.
    Raises UsageError for what does not fit.
    """

    def __init__(
        self,
        target: str | Path | TargetModel,
        drafter: str | Path | Drafter | None = None,
        policy: TreePolicy | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        speculation: str | None = None,
        reuse_prefixes: bool = False,
        profile: bool = False,
    ) -> None:
        target, drafter = load_pair(target, drafter, dtype=dtype, device=device)
        self.target = target
        self.engine = Engine(
            target,
            drafter,
            policy,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            speculation=speculation,
            reuse_prefixes=reuse_prefixes,
            profile=profile,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Return one answer per prompt, in order; one prompt alone is a list of one.

        Text is encoded as it stands, chat messages through the target's chat template. params: for
        all prompts, or one per prompt. An interrupt drops what runs; the LLM can be used again.
        Raises UsageError before anything runs if a prompt or its params cannot be served.
        """
        many = cast("Sequence[Prompt]", [prompts] if _is_one_prompt(prompts) else prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise UsageError(f"params: {len(params)} given for {len(many)} prompts; one per prompt")
        try:
            for i, (prompt, param) in enumerate(zip(many, params, strict=True)):
                self.engine.add(Request(str(i), self.encode(prompt), param))
            outputs = self._drain(len(many), progress)
        except BaseException:
            self.engine.abort_all()
            raise
        return [outputs[str(i)] for i in range(len(many))]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the answer to one prompt each time it has grown; the last has a finish reason.

        Leaving the iteration early, also by an interrupt, drops the request. Nothing else may run
        in this LLM meanwhile. Raises UsageError as `generate` does, at the first step.
        """
        try:
            self.engine.add(Request("0", self.encode(prompt), params or SamplingParams()))
            while self.engine.has_work:
                yield from self.engine.step()
        finally:
            self.engine.abort_all()

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of one prompt. Raises UsageError for an empty or mixed one."""
        if isinstance(prompt, str):
            check_utf8("prompt", prompt)
            return list(self.target.tokenizer(prompt)["input_ids"])
        if prompt and all(isinstance(part, Mapping) for part in prompt):
            return render_prompt(self.target.tokenizer, prompt)  # type: ignore[arg-type]
        if all(isinstance(part, int) and not isinstance(part, bool) for part in prompt):
            return list(prompt)  # type: ignore[arg-type]
        kinds = sorted({type(part).__name__ for part in prompt})
        raise UsageError(f"prompt of {', '.join(kinds)}: allowed: text, token ids or chat messages")

    def _drain(self, num_prompts: int, progress: bool) -> dict[str, RequestOutput]:
        """Run rounds until every request has ended; return the final answers by request id."""
        finished: dict[str, RequestOutput] = {}
        num_tokens = 0
        with tqdm(total=num_prompts, unit="request", disable=not progress) as bar:
            while self.engine.has_work:
                for output in self.engine.step():
                    if output.finish_reason is not None:
                        finished[output.request_id] = output
                        num_tokens += len(output.token_ids)
                        bar.set_postfix(tokens=num_tokens, refresh=False)
                        bar.update()
        return finished


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, Mapping)))


def load_pair(
    target: str | Path | TargetModel,
    drafter: str | Path | Drafter | None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[TargetModel, Drafter | None]:
    """Return target and drafter, loading those given as folders.  Raises UsageError on a misfit."""
    if isinstance(target, (str, Path)):
        target = TargetModel.from_pretrained(target, dtype=dtype, device=device)
    if isinstance(drafter, (str, Path)):
        drafter = load_drafter_for(drafter, target)
    return target, drafter


def load_drafter_for(folder: str | Path, target: TargetModel) -> Drafter:
    """Load a drafter folder for drafting next to its target, in its dtype and on its device."""
    from treespark.drafter.auto import load_drafter

    drafter = load_drafter(
        folder,
        target.embed_weight,
        target.head_weight,
        target.fingerprint,
        target.dtype,
        target.device,
        target.num_layers,
    )
    shares_head = drafter.lm_head.weight.data_ptr() == target.head_weight.data_ptr()
    drafter.prepack(target.head if shares_head else None)
    return drafter
