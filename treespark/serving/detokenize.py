# SPDX-License-Identifier: Apache-2.0
"""Text of a growing answer: whole characters only, cut at the first stop string."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

# What the decoder prints for bytes that are no complete character (yet).
REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one request, grown token by token.

    `text` never ends in half a character. It ends before the first stop string, or right behind it
    if that is kept. Special tokens print nothing. Without a tokenizer the text stays empty.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Sequence[str] = (), *, keep_stop: bool = False
    ) -> None:
        """Start with no text; `stops` are the strings that end it."""
        self.text = ""
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._keep_stop = keep_stop
        self._longest_stop = max(map(len, self._stops), default=0)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ends: list[int] = []

    def push(self, token: int, may_stop: bool = True) -> str | None:
        """Append one token; return the stop string it completed, having cut the text there.

        may_stop: False lets any stop string pass that is complete with this token.
        """
        if self._tokenizer is None:
            return None
        piece = self._decoder.step(self._tokenizer, token)
        stop = self._grow(piece, may_stop) if piece else None
        self._ends.append(len(self.text))
        return stop

    def flush(self, token_ids: Sequence[int], may_stop: bool = True) -> str | None:
        """Append whatever whole characters the decoder still holds back; returns as `push`.

        token_ids: all tokens pushed so far. An unfinished character at the end is dropped.
        """
        if self._tokenizer is None:
            return None
        whole = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        stop = self._grow(whole[len(self.text) :].rstrip(REPLACEMENT), may_stop)
        if self._ends:
            self._ends[-1] = len(self.text)
        return stop

    def num_tokens(self) -> int:
        """Fewest leading tokens whose text covers `text`."""
        return bisect_left(self._ends, len(self.text)) + 1 if self.text else 0

    def settled(self) -> tuple[str, int | None]:
        """Text that no later token can take back, and the tokens that cover it (None = all).

        Only a stop string that is not kept can take text back, at most its length less one
        character.
        """
        if self._longest_stop < 2 or self._keep_stop:
            return self.text, None
        size = max(len(self.text) - self._longest_stop + 1, 0)
        return self.text[:size], bisect_left(self._ends, size) + 1 if size else 0

    def _grow(self, piece: str, may_stop: bool) -> str | None:
        size = len(self.text)
        self.text += piece
        if not may_stop:
            return None
        # Each is looked for where it would end in the new piece: what is older was let pass.
        places = [self.text.find(stop, max(size - len(stop) + 1, 0)) for stop in self._stops]
        start, which = min(((at, i) for i, at in enumerate(places) if at >= 0), default=(-1, -1))
        if start < 0:
            return None
        stop = self._stops[which]
        self.text = self.text[: start + len(stop)] if self._keep_stop else self.text[:start]
        return stop
