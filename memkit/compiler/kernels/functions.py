"""The text of every pointwise function in Triton's language. All of it is finite where the function is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memkit.compiler.ir import Node, Op
from memkit.specs.errors import KernelError

# functions that need a definition of their own, printed at the head of the module where they are used
HELPERS: Mapping[str, str] = {
    "settle": '''
@triton.jit
def settle():
    """Wait until the stores of this wave are made: on this target a barrier alone does not."""
    tl.inline_asm_elementwise("s_waitcnt vmcnt(0)\\nv_mov_b32 $0, $1", "=v,v", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)
''',
    "log1p": '''
@triton.jit
def log1p(x):
    """Exact for small x: the rounding of 1 + x is divided out again."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * x / tl.where(u == 1.0, 1.0, u - 1.0))
''',
    "expm1": """
@triton.jit
def expm1(x):
    u = tl.exp(x)
    small = tl.abs(x) < 0.5
    safe = tl.where(small & (u != 1.0), u, 2.0)
    return tl.where(small, tl.where(u == 1.0, x, (safe - 1.0) * x / tl.log(safe)), u - 1.0)
""",
    "tanh": """
@triton.jit
def tanh(x):
    e = expm1(-2.0 * tl.abs(x))
    y = -e / (2.0 + e)
    return tl.where(x < 0.0, -y, y)
""",
    "sigmoid": """
@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e)
""",
    "gelu": """
@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
""",
    "gelu_slope": """
@triton.jit
def gelu_slope(x):
    normal = tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / sqrt(2 pi)
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * normal
""",
    "silu": """
@triton.jit
def silu(x):
    return x * sigmoid(x)
""",
    "silu_slope": """
@triton.jit
def silu_slope(x):
    gate = sigmoid(x)
    return gate * (1.0 + x * (1.0 - gate))
""",
    "softplus": """
@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))
""",
    "sinh": """
@triton.jit
def sinh(x):
    e = expm1(tl.abs(x))
    y = 0.5 * (e + e / (e + 1.0))
    return tl.where(x < 0.0, -y, y)
""",
    "power": '''
@triton.jit
def power(x, p):
    """x to the p for x >= 0."""
    return tl.where(x == 0.0, tl.where(p == 0.0, 1.0, 0.0), tl.exp(p * tl.log(tl.where(x == 0.0, 1.0, x))))
''',
    "nearest": '''
@triton.jit
def nearest(x):
    """To the nearest whole number, halves to the even one."""
    up = tl.floor(x + 0.5)
    odd = up - 2.0 * tl.floor(up * 0.5)
    return tl.where((x + 0.5 == up) & (odd == 1.0), up - 1.0, up)
''',
}
NEEDS: Mapping[str, tuple[str, ...]] = {
    "tanh": ("expm1",), "sinh": ("expm1",), "silu": ("sigmoid",), "silu_slope": ("sigmoid",), "softplus": ("log1p",),
}  # fmt: skip

TEXT: Mapping[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}", "reciprocal": "1.0 / {0}",
    "maximum": "tl.maximum({0}, {1})", "minimum": "tl.minimum({0}, {1})", "where": "tl.where({0} != 0.0, {1}, {2})",
    "gt": "tl.where({0} > {1}, 1.0, 0.0)", "ge": "tl.where({0} >= {1}, 1.0, 0.0)", "lt": "tl.where({0} < {1}, 1.0, 0.0)",
    "le": "tl.where({0} <= {1}, 1.0, 0.0)", "eq": "tl.where({0} == {1}, 1.0, 0.0)", "square": "{0} * {0}",
    "sign": "tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, 0.0))", "cosh": "0.5 * (tl.exp({0}) + tl.exp(-{0}))",
    **{fn: f"tl.{fn}({{0}})" for fn in ("exp", "log", "sqrt", "rsqrt", "abs", "erf", "sin", "cos", "floor", "ceil")},
    **{fn: f"{fn}({{0}})" for fn in ("log1p", "expm1", "tanh", "sigmoid", "sinh", "gelu", "gelu_slope", "silu", "silu_slope", "softplus")},
    "round": "nearest({0})",
}  # fmt: skip
COSTLY = (
    "exp", "log", "erf", "sin", "cos", "tanh", "sigmoid", "gelu", "gelu_slope", "silu", "silu_slope", "softplus", "sinh", "cosh", "expm1",
    "log1p",
    "pow", "div",
)  # fmt: skip


def text(node: Node, args: list[str], need: Callable[[str], None]) -> str:
    """The text of a POINTWISE node on operands; `need` is told of every helper.

    Raises:
        KernelError: a function without a form in a kernel.
    """
    fn = node.attrs["fn"]
    if fn == "pow":
        return _power(node, args, need)
    if fn not in TEXT:
        raise KernelError(
            f"the function {fn} in {node.where or 'the equation'}", "functions that a kernel has", "backend: torch", "backend"
        )
    name = "nearest" if fn == "round" else fn
    if name in HELPERS:
        need(name)
    return TEXT[fn].format(*args)


def _power(node: Node, args: list[str], need: Callable[[str], None]) -> str:
    base, exponent = args
    value = node.args[1].attrs["value"] if node.args[1].op is Op.CONST else None
    if value is not None and value == int(value) and 0 < abs(value) <= 8:
        product = " * ".join([base] * int(abs(value)))
        return product if value > 0 else f"1.0 / ({product})"
    if value == 0.0:
        return "1.0"
    if value == 0.5:
        return f"tl.sqrt({base})"
    need("power")
    return f"power({base}, {exponent})"


def definitions(used: set[str]) -> str:
    """The helpers in `used` and what they need, in one order."""
    wanted = used | {n for name in used for n in NEEDS.get(name, ())}
    return "\n".join(HELPERS[name].strip("\n") + "\n\n" for name in HELPERS if name in wanted)
