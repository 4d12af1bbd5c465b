"""The passes, in the order they run. Each is a plain function Graph -> Graph; `kernel_trick` also takes the features and runs first,
`lodge` runs last where a loop holds the state (in emitted torch, and in kernels with one program a head). `delay`, which runs before
`kernel_trick`, `settle`, `absorb` and `gram`, which runs after `absorb`, are C++'s alone."""

from .absorb import absorb
from .dedupe import dedupe
from .delay import delay
from .fold import fold
from .fuse import fuse
from .gram import gram
from .hoist import hoist, settle
from .kernel_trick import kernel_trick
from .lodge import lodge
from .prune import prune
from .sink import sink

FORWARD = (fold, dedupe, prune, hoist, sink, fold, dedupe, fuse)
BACKWARD = (fold, dedupe, prune, hoist, sink, fold, dedupe)

__all__ = [
    "BACKWARD", "FORWARD", "absorb", "dedupe", "delay", "fold", "fuse", "gram", "hoist", "kernel_trick", "lodge", "prune", "settle", "sink",
]  # fmt: skip
