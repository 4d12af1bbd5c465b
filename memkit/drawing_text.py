"""Equations in ASCII as graphviz labels: `W_{t-1}` becomes W with a small t-1."""

from __future__ import annotations

import html
import re
import textwrap

MARKS = re.compile(r"_(?P<low>\{[^}]*\}|[A-Za-z]\d*(?![A-Za-z0-9_])|\d+)|\^(?P<high>[123](?![.\d]))")
POWERS = {"1": "&#185;", "2": "&#178;", "3": "&#179;"}  # letters of every font; a raised small digit is not raised by every program
MAX_LINES = 4


def label_html(text: str, size: float) -> str:
    """One line of text for an HTML-like label, at `size` points, with small subscripts."""
    parts, at = [], 0
    for match in MARKS.finditer(text):
        parts.append(html.escape(text[at : match.start()]))
        if match["high"]:
            parts.append(POWERS[match["high"]])
        else:
            small = html.escape(match["low"].strip("{}"))
            parts.append(f'<SUB><FONT POINT-SIZE="{size * 0.72:.3g}">{small}</FONT></SUB>')
        at = match.end()
    return "".join([*parts, html.escape(text[at:])])


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, at most MAX_LINES of them; what is cut off is marked."""
    lines = textwrap.wrap(text, width, break_long_words=True, break_on_hyphens=False) or [""]
    return lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], lines[MAX_LINES - 1][: width - 3] + " .."]


def count(number: float, unit: str = "") -> str:
    """A number for a person: `1,234 B` as it is, then `12.3 kB`, `4.6 MB`, `7.9 GB`, `1.2 TB`."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if letter == 'k' else limit):.3g} {letter}{unit}"
    return f"{number:,.0f} {unit}".rstrip()
