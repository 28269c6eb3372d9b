"""`HloError`, the only error that reading HLO text raises."""


class HloError(ValueError):
    """The text is not HLO that can be read, at `line` and `column`: counted from 1, and 0 if they are not known."""

    def __init__(self, message: str, line: int = 0, column: int = 0):
        super().__init__(f"line {line}, column {column}: {message}" if line else message)
        self.line, self.column = line, column
