"""Scratch memory handed out and taken back, and what must wait for what."""

from __future__ import annotations

from typing import NamedTuple

ALIGN = 16  # numbers; a whole vector


class Memory(NamedTuple):
    """A stretch of one space; two of one space that overlap are the same memory."""

    space: str
    start: int = 0
    stop: int = 1

    def overlaps(self, other: Memory) -> bool:
        return self.space == other.space and self.start < other.stop and other.start < self.stop


class Arena:
    """First fit: what is no longer read makes room for what comes, so that the cache holds all of it."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []
        self.peak = 0

    def take(self, size: int) -> Memory:
        size = -(-max(size, 1) // ALIGN) * ALIGN
        start = 0
        for a, b in sorted(self.taken):
            if a - start >= size:
                break
            start = max(start, b)
        self.taken.append((start, start + size))
        self.peak = max(self.peak, start + size)
        return Memory("mine", start, start + size)

    def give(self, memory: Memory) -> None:
        self.taken.remove((memory.start, memory.stop))


Share = tuple[str, str]  # which part of an array one thread of a team touches: (stride of the axis that is split, its length), or an owner


class Waits:
    """What a team's threads have read and written since they last waited for each other."""

    def __init__(self) -> None:
        self.written: list[tuple[Memory, Share]] = []
        self.read: list[tuple[Memory, Share | None]] = []

    def clear(self) -> None:
        self.written.clear()
        self.read.clear()

    def __bool__(self) -> bool:
        return bool(self.written or self.read)

    def needed(self, reads: list[tuple[Memory, Share | None]], writes: list[tuple[Memory, Share]]) -> bool:
        """Whether threads must wait before a step: what it touches was touched by another thread."""
        for memory, share in reads:
            if any(memory.overlaps(m) and s != share for m, s in self.written):
                return True
        for memory, share in writes:
            if any(memory.overlaps(m) and (s != share or m != memory) for m, s in (*self.written, *self.read)):
                return True
        return False

    def note(self, reads: list[tuple[Memory, Share | None]], writes: list[tuple[Memory, Share]]) -> None:
        self.read += reads
        self.written += writes
