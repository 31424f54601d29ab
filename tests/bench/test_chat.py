# SPDX-License-Identifier: Apache-2.0
"""A conversation by script: history, commands, an interrupt in the middle, a full context."""

import io
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from tests.bench.bench_world import text_target, write_drafter
from treespark import LLM, SamplingParams
from treespark.bench.chat import Chat, printable, run_chat, status_line
from treespark.errors import UsageError

PARAMS = SamplingParams(12, ignore_eos=True)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """Folder of a random drafter."""
    return write_drafter(tmp_path_factory.mktemp("chat") / "d")


@pytest.fixture
def llm(draft) -> LLM:
    """One slot of 120 tokens."""
    return LLM(text_target(), draft, max_num_seqs=1, max_model_len=120)


def talk(llm: LLM, lines: list, params: SamplingParams = PARAMS, system: str | None = None):
    """Say the lines, of which exceptions are raised; return the chat and what was printed."""
    console, script = Console(file=io.StringIO(), width=200), iter(lines)

    def ask() -> str:
        line = next(script)
        if not isinstance(line, str):
            raise line
        return line

    chat = Chat(llm, params, system, console, ask)
    chat.run()
    assert list(script) == []
    assert not llm.engine.has_work
    return chat, console.file.getvalue()


def test_every_turn_sees_the_conversation_so_far(llm):
    chat, shown = talk(llm, ["hi", "more", "/quit"])
    roles = [message["role"] for message in chat.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert [m["content"] for m in chat.messages[::2]] == ["hi", "more"]
    for end in (1, 3):
        (whole,) = llm.generate([chat.messages[:end]], PARAMS)
        assert chat.messages[end]["content"] == whole.text
        assert printable(whole.text) in shown
    assert shown.count("acceptance length") == shown.count("[length: 12 tokens") == 2


def test_a_system_message_stays_in_front(llm):
    chat, _ = talk(llm, ["hi", "/reset", "again", EOFError()], system="be brief")
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    assert [m["content"] for m in chat.messages[:2]] == ["be brief", "again"]


def test_reset_forgets_and_unknown_commands_and_empty_lines_say_nothing_to_the_target(llm):
    chat, shown = talk(llm, ["hi", "/reset", "", "  ", "/rset", EOFError()])
    assert chat.messages == []
    assert "/rset: no such command" in shown
    assert shown.count("tokens/s") == 1


def test_interrupt_stops_the_answer_and_not_the_program(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "step", interrupted_at(llm.engine.step, 4))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        chat, shown = talk(llm, ["hi", "more", KeyboardInterrupt(), "/quit"])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert shown.count("[stopped") == shown.count("[length") == 1
    # What was there of the first answer is part of the conversation.
    (whole,) = llm.generate([chat.messages[:1]], PARAMS)
    partial = chat.messages[1]["content"]
    assert whole.text.startswith(partial)
    assert 0 < len(partial) < len(whole.text)
    (second,) = llm.generate([chat.messages[:3]], PARAMS)
    assert chat.messages[3]["content"] == second.text


def interrupted_at(step, number):
    """An engine's step during which the user presses Ctrl-C, the `number`-th time."""
    calls = []

    def pressed():
        calls.append(1)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return step()

    return pressed


def test_a_conversation_that_outgrows_the_context_says_so_and_goes_on(llm):
    chat, shown = talk(llm, ["hi", "x" * 200, "more", "bad \udcff", "/quit"])
    assert "error: request '0': the prompt has" in shown
    assert "/reset starts over" in shown
    assert "is not UTF-8" in shown
    assert [m["content"] for m in chat.messages[::2]] == ["hi", "more"]


def test_a_sampled_answer_says_that_nothing_was_drafted(llm):
    params = SamplingParams(8, temperature=1.0, seed=1, ignore_eos=True)
    _, shown = talk(llm, ["hi", "/quit"], params)
    assert "sampled, without drafts" in shown
    assert "acceptance length" not in shown


def test_control_characters_of_an_answer_do_not_reach_the_terminal():
    assert printable("a\x1b[2J\x07b\r\n\tc\x9b1m안🙂") == "a[2Jb\n\tc1m안🙂"


def test_the_last_line_is_reserved_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for is_terminal in (False, True):
        console = Console(
            file=io.StringIO(),
            force_terminal=is_terminal,
            width=20,
            height=10,
            legacy_windows=False,
        )
        with status_line(console) as show:
            show("a status of more than twenty characters")
        written = console.file.getvalue()
        if not is_terminal:
            assert written == ""
            continue
        assert "\x1b[1;9r" in written
        assert "\x1b[10;1H\x1b[2K\x1b[2ma status of more th\x1b[0m" in written
        # The whole screen scrolls again, and the cursor is back among the text.
        assert written.endswith("\x1b[r\x1b[10;1H\x1b[2K\x1b8")


def test_what_does_not_fit_is_refused_before_the_first_question(draft):
    for options, word in [
        ({"system": "\udcff"}, "--system"),
        ({"budget": 3, "drafter": None}, "--budget 3"),
        ({"max_model_len": 10**6}, "--max-model-len 1000000"),
        ({"max_model_len": 12}, "--max-tokens 12: allowed: 1..11"),
    ]:
        with pytest.raises(UsageError, match=word):
            run_chat(text_target().path, options.pop("drafter", draft), PARAMS, **options)


def test_the_command_holds_a_conversation_on_its_standard_streams(draft):
    command = [sys.executable, "-m", "treespark", "chat", str(text_target().path)]
    done = subprocess.run(
        [*command, "--drafter", str(draft), "--max-tokens", "9", "--device", "cpu"],
        input="hello\n/reset\nagain\n/quit\nnever\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("> ") == 4
    assert done.stdout.count("acceptance length") == 2
    assert "the conversation starts over" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_terminal_that_knows_ascii_alone_takes_and_shows_everything(draft):
    command = [sys.executable, "-m", "treespark", "chat", str(text_target().path)]
    done = subprocess.run(
        [*command, "--drafter", str(draft), "--max-tokens", "9", "--device", "cpu"],
        input="caf\u00e9 \u4f60\n".encode() + b"half \xe4\xbd\n/quit\n",
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"acceptance length") == 2
    assert b"error" not in done.stdout
    assert done.stdout.isascii()
