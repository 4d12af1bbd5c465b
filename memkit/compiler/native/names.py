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
    "G", "IVDEP", "LT", "N", "SUM", "Team", "above", "abs", "alignas", "alignof", "and", "apart", "asm", "auto", "bitand", "bitor",
    "bool", "break", "case", "catch", "char", "char16_t", "char32_t", "class", "compl", "const", "const_cast", "constexpr",
    "continue", "cos", "decltype", "default", "delete", "do", "double", "dynamic_cast", "else", "enum", "exact_part", "exp",
    "explicit", "export", "extern", "false", "fewer", "float", "for", "for_heads", "friend", "g", "goto", "if", "in", "inline",
    "int", "later", "log", "long", "main", "member", "members", "members_of", "mine", "mutable", "namespace", "new", "noexcept",
    "not", "nullptr", "operator", "or", "out", "own", "part", "private", "product", "product_room", "product_upper", "protected",
    "public", "real", "register", "reinterpret_cast", "return", "room", "short", "signed", "sin", "sizeof", "solve", "spread",
    "sqrt", "static", "static_assert", "static_cast", "struct", "switch", "team", "template", "this", "thread_local", "throw",
    "true", "try", "turned", "typedef", "typeid", "typename", "union", "unsigned", "using", "virtual", "void", "volatile", "wait",
    "wchar_t", "while", "wide", "xor",
)  # fmt: skip
