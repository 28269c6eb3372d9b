"""A position in a text that moves forward, with the errors and the bracket matching that the reader needs."""

import re

from flaxasync.check.hlo.error import HloError

_BLANK = re.compile(r"(?:\s+|//[^\n]*|/\*(?s:.*?)\*/)*")
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|/\*.*?\*/|[{}()\[\],\n"]', re.DOTALL)
_CLOSER = {"{": "}", "(": ")", "[": "]"}


class Cursor:
    """A position in a text: `at` is the index of the next character to read."""

    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self._line, self._counted = 1, 0  # the line at an earlier index, so that lines are counted once

    def error(self, message: str, at: int | None = None) -> HloError:
        """Makes an error with the line and column of an index, by default of the current position."""
        at = min(self.at if at is None else at, len(self.text))
        return HloError(message, self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at))

    def line_here(self) -> int:
        """Returns the line of the current position, which must not be before that of the last call."""
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line

    def skip_blank(self) -> None:
        """Steps over blanks, line ends and comments."""
        match = _BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, mark: str) -> bool:
        """Steps over blanks, and then over a mark if it comes next. Returns whether it does."""
        self.skip_blank()
        is_next = self.text.startswith(mark, self.at)
        self.at += len(mark) if is_next else 0
        return is_next

    def excerpt(self) -> str:
        """Returns the text at the current position, for a message."""
        if self.at >= len(self.text):
            return "the end of the text"
        line, end, _ = self.text[self.at : self.at + 40].partition("\n")
        return repr(line) + (", where the text ends" if not end and self.at + 40 >= len(self.text) else "")

    def after_bracket(self, at: int) -> int:
        """Returns the index after the bracket that closes the one at `at`; strings and comments do not count."""
        return self._end(at)

    def end_of_value(self, at: int) -> int:
        """Returns where an attribute's value ends: at a comma, a line's end or a brace that is outside of brackets."""
        return self._end(at, stops=",\n}")

    def _end(self, at: int, stops: str = "") -> int:
        """Returns the index of the first of the stops outside of brackets; without stops, that after one bracket.

        Raises:
          HloError: A bracket or a string is not closed, or another bracket closes first.
        """
        opened: list[re.Match] = []
        for token in _TOKEN.finditer(self.text, at):
            mark = token[0]
            if not opened and mark in stops:
                return token.start()
            if mark in _CLOSER:
                opened.append(token)
            elif mark == '"':  # a string that is closed is one token
                raise self.error("a string is not closed: the text is cut short", token.start())
            elif mark in ("}", ")", "]"):
                if not opened or mark != _CLOSER[opened.pop()[0]]:
                    raise self.error(f"unexpected {mark!r}", token.start())
                if not opened and not stops:
                    return token.end()
        if opened:
            raise self.error(f"{opened[0][0]!r} is not closed: the text is cut short", opened[0].start())
        return len(self.text)
