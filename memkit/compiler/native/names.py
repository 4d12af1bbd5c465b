"""Identifiers of emitted C++."""

from __future__ import annotations

from memkit.compiler.names import unused


class Names:
    """Identifiers that are all different."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def new(self, hint: str) -> str:
        return unused(hint, self.taken, WORDS)


# C++'s own, and what emitted functions call what they are given
WORDS = (
    "G", "LT", "N", "Team", "above", "abs", "and", "apart", "asm", "auto", "bool", "break", "case", "catch", "char", "class", "const",
    "continue", "cos", "default", "delete", "do", "double", "else", "enum", "exact_part", "exp", "fewer", "float", "for", "for_heads",
    "g", "goto", "if", "in", "int", "later", "log", "long", "main", "member", "members", "members_of", "mine", "new", "not", "or", "out",
    "own", "part", "private", "product", "product_room", "public", "real", "register", "return", "room", "short", "signed", "sin", "sizeof",
    "solve", "spread", "sqrt", "static", "struct", "switch", "team", "template", "this", "try", "turned", "typedef", "union", "unsigned",
    "using", "void", "volatile", "wait", "while", "wide", "xor",
)  # fmt: skip
