# SPDX-License-Identifier: Apache-2.0
"""`treespark chat`: a conversation in a terminal, streamed, with the acceptance of each answer."""

from __future__ import annotations

import codecs
import contextlib
import io
import re
import sys
import time
import unicodedata
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from treespark.bench.metrics import acceptance_length
from treespark.bench.workload import changed_policy, check_policy_options
from treespark.errors import UsageError
from treespark.serving.llm import LLM, load_pair
from treespark.target.template import check_utf8, render_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from treespark.serving.params import SamplingParams
    from treespark.serving.records import RequestRecord

_HELP = "/reset starts over, /quit leaves, Ctrl-C stops an answer"
_PLAIN = {
    "sampling": "sampled, without drafts",
    "off": "without drafts",
    "drafter_context": "beyond the drafter's context, without drafts",
}


def run_chat(
    target: Path,
    drafter: Path | None,
    params: SamplingParams,
    *,
    depth: int | None = None,
    branching: int | None = None,
    budget: int | None = None,
    system: str | None = None,
    max_model_len: int | None = None,
    dtype: str | None = "auto",
    device: str | None = None,
) -> None:
    """Hold a conversation on standard input and output until /quit or the end of input.

    Raises UsageError for what does not fit, before anything is asked.
    """
    check_policy_options(drafter, depth=depth, branching=branching, budget=budget)
    check_utf8("--system", system or "")
    model, loaded = load_pair(target, drafter, dtype=dtype, device=device)
    # A target without a chat template is refused here, not at the first message.
    render_prompt(model.tokenizer, "hi")
    llm = LLM(
        model,
        loaded,
        changed_policy(loaded, depth=depth, branching=branching, budget=budget),
        max_num_seqs=1,
        max_model_len=max_model_len,
        # Every turn begins with all turns before it.
        reuse_prefixes=True,
    )
    # A prompt of one token is the shortest there is.
    most = llm.engine.max_model_len - 1
    if params.max_tokens > most:
        raise UsageError(
            f"--max-tokens {params.max_tokens}: allowed: 1..{most}, as conversation and answer "
            f"share a context of {most + 1} tokens"
        )
    if isinstance(sys.stdin, io.TextIOWrapper):
        # An ASCII terminal sends what it does not know as UTF-8, if at all.
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else None, errors="replace")
    with contextlib.suppress(ImportError):
        # Line editing and history of `input`, where the platform has it.
        import readline  # noqa: F401
    Chat(llm, params, system, Console(), lambda: input("> ")).run()


class Chat:
    """The conversation: its messages so far, and where it is held.

    ask: returns the next line of the user; EOFError ends the conversation.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        console: Console,
        ask: Callable[[], str],
    ) -> None:
        self._llm, self._params, self._console, self._ask = llm, params, console, ask
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)

    def run(self) -> None:
        """Answer until the user leaves."""
        self._note(_HELP)
        while True:
            try:
                line = self._ask().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note(f"\n{_HELP}")
                continue
            if line == "/quit":
                return
            if line == "/reset":
                self.messages = list(self._start)
                self._note("the conversation starts over")
            elif re.fullmatch(r"/\w+", line):
                self._note(f"{line}: no such command; {_HELP}")
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        """Stream the answer to a message. Both join the conversation once there is an answer."""
        messages = [*self.messages, {"role": "user", "content": line}]
        text, last = "", None
        try:
            with (
                contextlib.closing(self._llm.stream(messages, self._params)) as outputs,
                status_line(self._console) as show,
            ):
                for last in outputs:
                    self._write(printable(last.text[len(text) :]))
                    text = last.text
                    show(summary(last.metrics))
        except UsageError as problem:
            # The usual one: the conversation has outgrown the context.
            self._note(f"error: {problem}; {_HELP}")
            return
        except KeyboardInterrupt:
            self._write(" ...")
        self._write("\n")
        if last is not None:
            ended = last.finish_reason or "stopped"
            self._note(f"[{ended}: {summary(last.metrics)}]")
        if text:
            self.messages = [*messages, {"role": "assistant", "content": text}]

    def _note(self, text: str) -> None:
        # As Text: square brackets are no markup.
        self._console.print(Text(text, "dim"), soft_wrap=True)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


def summary(record: RequestRecord) -> str:
    """Return length, speed and acceptance of an answer, finished or growing."""
    assert record.first_token_s is not None
    num_tokens = record.num_output_tokens
    parts = [f"{num_tokens} tokens"]
    end_s = time.perf_counter() if record.finished_s is None else record.finished_s
    if num_tokens > 1 and end_s > record.first_token_s:
        parts.append(f"{(num_tokens - 1) / (end_s - record.first_token_s):.1f} tokens/s")
    length = acceptance_length([record])
    if record.num_drafts and length is not None:
        parts.append(f"acceptance length {length:.2f}")
    if record.plain_decoding is not None:
        parts.append(_PLAIN[record.plain_decoding])
    return ", ".join(parts)


def printable(text: str) -> str:
    """Return the text with no control characters but line breaks and tabs: terminals obey them."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


@contextlib.contextmanager
def status_line(console: Console) -> Iterator[Callable[[str], None]]:
    """Reserve the terminal's last line; yields what shows a text there, or nothing elsewhere.

    The lines above scroll by themselves meanwhile (DECSTBM of a VT100).
    """
    width, height = console.size
    if not console.is_terminal or console.is_dumb_terminal or height < 3:
        yield lambda text: None
        return
    out = console.file

    def show(text: str) -> None:
        out.write(f"\x1b7\x1b[{height};1H\x1b[2K\x1b[2m{text[: width - 1]}\x1b[0m\x1b8")
        out.flush()

    # The line break makes room where the cursor is on the last line; setting the region moves it.
    out.write(f"\n\x1b7\x1b[1;{height - 1}r\x1b8\x1b[1A")
    try:
        yield show
    finally:
        out.write(f"\x1b7\x1b[r\x1b[{height};1H\x1b[2K\x1b8")
        out.flush()
