"""The passes, in the order they run. Each is a plain function Graph -> Graph."""

from memkit.compiler.simplify import simplify

from .fuse import fuse
from .hoist import hoist
from .prune import prune
from .sink import sink

FORWARD = (simplify, prune, hoist, sink, fuse)
BACKWARD = (simplify, prune, hoist, sink)

__all__ = ["BACKWARD", "FORWARD", "fuse", "hoist", "prune", "simplify", "sink"]
