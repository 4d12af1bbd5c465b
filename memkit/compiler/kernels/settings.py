"""The configurations that ship: tiles and warps by plan, target and type of products, as `memkit kernels` found them to fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .tile import Config


@dataclass(frozen=True)
class Configs:
    """loop: for kernels that go through the chunks of one head; each: for those with a program for every chunk."""

    loop: Config
    each: Config


def _all(config: Config) -> Config:
    """A thread may have all its registers: else the compiler spills a little so that more programs share a processor."""
    return replace(config, registers=255)


WIDE = Config(rows=64, cols=64, inner=32, warps=8)
HALF = Config(rows=32, cols=64, inner=32, warps=4, roots=2, sums=2)
PAIR = Config(rows=64, cols=64, inner=32, warps=8, roots=2, sums=1)
LEAN = Config(rows=64, cols=64, inner=16, warps=8, roots=1, sums=1)  # one sum at a time: what a long body leaves registers for
NARROW = Config(rows=64, cols=32, inner=16, warps=8, roots=1, sums=1)
WAVES = Config(rows=32, cols=64, inner=32, warps=4, roots=2, sums=1, settle=True)  # 64 lanes a wave: 4 waves hold as much as 8 warps
FULL = _all(LEAN)
# tiles of 16 tokens leave 8 warps little to do: BRIEF for a program a chunk, TURN for a loop
BRIEF = _all(Config(rows=64, cols=32, inner=32, warps=4, roots=2, sums=1))
TURN = replace(FULL, warps=4)
SMALL = replace(TURN, rows=32, cols=32)
EXACT = Config(rows=32, cols=32, inner=16, warps=4, roots=2, sums=1)  # float32 products keep whole operands in registers
# Newton-Schulz makes of a rounding to bfloat16 errors as large as the gradient.
DEEP = replace(_all(EXACT), exact=True)
DEEP_WAVES = replace(EXACT, exact=True, settle=True)

TABLE: Mapping[tuple[str, str], Configs] = {
    ("linear", "sm_80"): Configs(WIDE, WIDE),
    ("linear", "sm_90"): Configs(WIDE, WIDE),
    ("linear", "gfx942"): Configs(WAVES, WAVES),
    ("solve", "sm_80"): Configs(WIDE, HALF),
    ("solve", "sm_90"): Configs(WIDE, HALF),
    ("solve", "gfx942"): Configs(WAVES, WAVES),
    ("frozen", "sm_80"): Configs(LEAN, LEAN),
    ("frozen", "sm_90"): Configs(FULL, PAIR),
    ("frozen", "gfx942"): Configs(WAVES, WAVES),
    ("orthogonal", "sm_80"): Configs(DEEP, DEEP),
    ("orthogonal", "sm_90"): Configs(DEEP, DEEP),
    ("orthogonal", "gfx942"): Configs(DEEP_WAVES, DEEP_WAVES),
}


# From these lengths of an axis on, it is gone through in so many tiles that its addresses, too, take registers.
OVER: Mapping[tuple[str, str], tuple[int, Configs]] = {
    ("linear", "sm_90"): (128, Configs(_all(WIDE), _all(WIDE))),
    ("solve", "sm_80"): (128, Configs(WIDE, _all(HALF))),
    ("solve", "sm_90"): (128, Configs(_all(WIDE), _all(HALF))),
    ("frozen", "sm_80"): (513, Configs(NARROW, LEAN)),
}
SINGLE_OVER: Mapping[tuple[str, str], int] = {("frozen", "sm_90"): 512}  # with float32 products, tiles are shared by 8 warps
BRIEFEST = 16  # tokens of a chunk that fill one tile of a product and no more
UP_TO_BRIEFEST: Mapping[tuple[str, str], tuple[Configs, Configs]] = {  # up to an axis of 128, and beyond
    ("frozen", "sm_90"): (Configs(SMALL, BRIEF), Configs(TURN, BRIEF)),
}


def configs_for(plan: str, target: str, single: bool, widest: int, chunk: int) -> Configs:
    """The shipped configurations. single: products in float32. widest: the longest axis that is not time. chunk: its most tokens."""
    key = plan, target
    if single and not TABLE[key].loop.exact:
        exact = replace(EXACT, settle=True) if TABLE[key].loop.settle else _all(EXACT)
        exact = replace(exact, warps=8) if widest >= SINGLE_OVER.get(key, widest + 1) else exact
        return Configs(exact, exact)
    if chunk <= BRIEFEST and key in UP_TO_BRIEFEST:
        return UP_TO_BRIEFEST[key][widest > 128]
    least, wide = OVER.get(key, (0, TABLE[key]))
    return wide if widest >= least else TABLE[key]
