"""Text of a model or of data, as a terminal may have it."""

from __future__ import annotations


def printable(text: str) -> str:
    """Returns the text with a code for each unprintable character except line breaks.

    A terminal would obey control characters: clear the screen, say, or hide a link.
    """
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)
