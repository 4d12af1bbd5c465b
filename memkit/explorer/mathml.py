"""Equations in ASCII, as `memkit.equations` writes them, as MathML."""

from __future__ import annotations

import html
import re

TOKEN = re.compile(
    r"(?P<sum>sum_(?P<under>\{[^}]*\}|\w))"
    r"|(?P<name>[A-Za-z]+(?:_[A-Za-z]{2,})*)(?P<digits>\d*)(?:_(?P<low>\{[^}]*\}|[A-Za-z](?![A-Za-z])|\d+))?"
    r"|(?P<number>\d+(?:\.\d+)?)"
    r"|\^(?P<high>\{[^}]*\}|\d+(?:\.\d+)?|[A-Za-z])"
    r"|(?P<space>\s+)"
    r"|(?P<sign>\|\||\.\.|<=|>=|.)"
)
SIGNS = {"||": "\u2016", "..": "\u2026", "<=": "\u2264", ">=": "\u2265", "-": "\u2212", "*": "\u2217", ".": "\u22c5"}
NAMES = {"phi": "\u03c6", "grad": "\u2207", "sum": "\u2211"}
NOTE = re.compile(r" {3,}|, (?=[a-z_]+ [a-z]+ )|, (?=[a-z]{3,} )| (?=over all )")


def equations(text: str) -> str:
    """One HTML block, a row for each line: the left side, the rest, and words that follow it."""
    rows = []
    for line in text.splitlines():
        left, _, right = line.partition(" = ")
        right, *notes = NOTE.split(right, maxsplit=1)
        note = f"<small>{html.escape(notes[0].strip())}</small>" if notes else ""
        terms = " ".join(math(term) for term in _terms("= " + right.strip()))
        rows.append(f'<div class="left">{math(left.strip())}</div><div>{terms}{note}</div>')
    return f'<div class="equations">{"".join(rows)}</div>'


def _terms(text: str) -> list[str]:
    """The text cut at spaces outside brackets, a sign staying with what follows, so that a long equation can go on in a new line."""
    terms, depth = [""], 0
    for word in text.split(" "):
        last = terms[-1]
        joined = depth > 0 or last == "" or last.rpartition(" ")[2] in ("=", "+", "-", "*", "grad_W")
        terms = [*terms[:-1], f"{last} {word}".strip()] if joined else [*terms, word]
        depth += sum(word.count(c) for c in "({") - sum(word.count(c) for c in ")}")
    return terms


def math(text: str) -> str:
    """A <math> element."""
    atoms: list[str] = []
    for match in TOKEN.finditer(text):
        if match["space"]:
            continue
        if match["high"]:
            base = atoms.pop() if atoms else "<mrow></mrow>"
            atoms.append(f"<msup>{base}{_inside(match['high'])}</msup>")
        else:
            atoms.append(_atom(match, text))
    return f"<math>{''.join(atoms)}</math>"


def _atom(match: re.Match[str], text: str) -> str:
    if match["sum"]:
        return f"<munder><mo>{NAMES['sum']}</mo>{_inside(match['under'])}</munder>"
    if match["number"]:
        return f"<mn>{match['number']}</mn>"
    if match["sign"]:
        sign = SIGNS.get(match["sign"], match["sign"])
        form = ' form="infix"' if match["sign"] in "+-" and text[match.end() : match.end() + 1] == " " else ""
        return f'<mo stretchy="false"{form}>{html.escape(sign)}</mo>'
    name, low = match["name"], match["low"] or match["digits"]
    if len(name) > 2 and not low and name not in NAMES and text[match.end() : match.end() + 1] != "(":
        return f"<mtext>&#160;{html.escape(name)}&#160;</mtext>"
    tag = "mo" if name == "grad" else "mi"
    base = f"<{tag}>{html.escape(NAMES.get(name, name))}</{tag}>"
    return f"<msub>{base}{_inside(low)}</msub>" if low else base


def _inside(text: str) -> str:
    """A sub- or superscript."""
    return math(text.strip("{}")).replace("<math>", "<mrow>").replace("</math>", "</mrow>")
