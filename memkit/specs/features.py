"""Feature maps: phi, applied to keys and queries before they meet the memory."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from .component import Component


class FeatureMap(Component):
    """Root of the feature maps. A member writes `__call__` and `width`, or only `kernel` (infinite features), or all three.

    Where both exist, kernel(a, b) must equal phi(a).phi(b); the compiler then uses it inside a chunk. Learned scalars are named in
    `params` and arrive as keyword arguments.
    """

    family: ClassVar[str] = "features"
    positive: ClassVar[tuple[str, ...]] = ()  # learned scalars that must stay > 0; a layer learns their logarithms

    def __call__(self, x: Tensor) -> Tensor:
        """phi(x): x [K] -> [F]."""
        raise NotImplementedError

    def width(self, key_dim: int) -> int:
        """F for a given K."""
        return key_dim

    def params(self) -> dict[str, Tensor]:
        """Learned scalars and their start, by the name of the keyword argument."""
        return {}

    def equation(self) -> str:
        return f"phi(x) = {self.kind}(x)"

    @classmethod
    def finite(cls) -> bool:
        """False when only the kernel exists."""
        return cls.__call__ is not FeatureMap.__call__

    @classmethod
    def has_kernel(cls) -> bool:
        return hasattr(cls, "kernel")


class Elementwise(FeatureMap):
    """Powers of each entry, summed; the width stays K. Not the polynomial kernel.

    Equation:  phi(x)_j = sum_{i=1..degree} x_j^i / i!
    Source:    memkit; several public re-implementations use it under the name of polynomial features
    Shapes:    x [K] -> [K]
    Ranges:    degree 1 to 8
    """

    kind = "elementwise"
    degree: int = Field(default=2, ge=1, le=8, description="highest power")
    examples = ({}, {"degree": 3})

    def __call__(self, x: Tensor) -> Tensor:
        total, power = x, x
        for i in range(2, self.degree + 1):
            power = power * x
            total = total + power / math.factorial(i)
        return total

    def equation(self) -> str:
        return "phi(x) = " + " + ".join(["x", *(f"x^{i}/{math.factorial(i)}" for i in range(2, self.degree + 1))]) + ", entry by entry"


class Elu1(FeatureMap):
    """elu(x) + 1, the positive map of linear attention.

    Equation:  phi(x) = elu(x) + 1
    Source:    Katharopoulos et al. (arXiv 2006.16236), eq. 7
    Shapes:    x [K] -> [K]
    """

    kind = "elu1"

    def __call__(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, torch.exp(torch.clamp(x, max=0.0)))

    def equation(self) -> str:
        return "phi(x) = elu(x) + 1"


class Exponential(FeatureMap):
    """The infinite features of softmax attention: only their kernel exists.

    Equation:  phi(a).phi(b) = exp(a.b)
    Source:    Atlas (arXiv 2505.23735), eqs. 22-23; the factor 1/sqrt(K) is left to the queries
    Shapes:    a [K], b [K] -> []
    """

    kind = "exponential"

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.exp((a * b).sum())

    def equation(self) -> str:
        return "phi(a).phi(b) = exp(a.b)"


class Identity(FeatureMap):
    """No features.

    Equation:  phi(x) = x
    Source:    memkit
    Shapes:    x [K] -> [K]
    """

    kind = "identity"

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def equation(self) -> str:
        return "phi(x) = x"


@lru_cache(maxsize=64)
def monomials(key_dim: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """For each monomial of degree 0..`degree` in x_1..x_K: the indices of its factors, padded with K (which stands for 1)."""
    rows: list[tuple[int, ...]] = []
    for i in range(degree + 1):
        rows += [(*c, *(key_dim,) * (degree - i)) for c in combinations_with_replacement(range(key_dim), i)]
    return tuple(rows)


@lru_cache(maxsize=64)
def multinomial_roots(key_dim: int, degree: int) -> tuple[float, ...]:
    """sqrt(i! / beta!) for each monomial x^beta of degree i, so that phi(a).phi(b) = sum_i (a.b)^i."""
    roots = []
    for row in monomials(key_dim, degree):
        factors = [j for j in row if j < key_dim]
        ways = math.factorial(len(factors))
        for j in set(factors):
            ways //= math.factorial(factors.count(j))
        roots.append(math.sqrt(ways))
    return tuple(roots)


class Polynomial(FeatureMap):
    """All monomials up to `degree`, weighted so that the kernel is a polynomial of the plain product.

    Equation:  phi(a).phi(b) = sum_{i=0..degree} a_i (a.b)^i,  a_i learned, started at 1/i!
    Source:    Atlas (arXiv 2505.23735), section 3.1 and eqs. 4-5; the multinomial weights make eq. 5 hold
    Shapes:    x [K] -> [F],  F = binomial(K + degree, degree)
    Ranges:    degree 1 to 6; coefficients > 0 (phi holds their square roots)
    """

    kind = "polynomial"
    positive = ("coefficients",)
    degree: int = Field(default=2, ge=1, le=6, description="highest degree of a monomial")
    coefficients: Literal["learned", "taylor"] = Field(default="learned", description="a_i learned from 1/i!, or fixed at 1/i!")
    examples = ({}, {"degree": 3, "coefficients": "taylor"}, {"degree": 1})

    def params(self) -> dict[str, Tensor]:
        return {"coefficients": self._taylor()} if self.coefficients == "learned" else {}

    def _taylor(self) -> Tensor:
        return torch.tensor([1 / math.factorial(i) for i in range(self.degree + 1)], dtype=torch.float64)

    def width(self, key_dim: int) -> int:
        return math.comb(key_dim + self.degree, self.degree)

    def __call__(self, x: Tensor, coefficients: Tensor | None = None) -> Tensor:
        rows = monomials(x.shape[-1], self.degree)
        padded = torch.cat([x, torch.ones_like(x[:1])])
        degrees = [sum(j < x.shape[-1] for j in row) for row in rows]
        a = self._taylor().to(x) if coefficients is None else coefficients
        out = torch.tensor(multinomial_roots(x.shape[-1], self.degree), dtype=x.dtype, device=x.device)
        out = out * torch.sqrt(a)[torch.tensor(degrees, device=x.device)]
        for place in range(self.degree):
            out = out * padded[torch.tensor([row[place] for row in rows], device=x.device)]
        return out

    def kernel(self, a: Tensor, b: Tensor, coefficients: Tensor | None = None) -> Tensor:
        weights = self._taylor().to(a) if coefficients is None else coefficients
        product = (a * b).sum()
        total = weights[self.degree]
        for i in range(self.degree - 1, -1, -1):
            total = total * product + weights[i]
        return total

    def equation(self) -> str:
        learned = self.coefficients == "learned"
        names = [f"a{i} " if learned else f"{1 / math.factorial(i):.4g} " if i > 1 else "" for i in range(self.degree + 1)]
        terms = [names[0].strip() or "1", f"{names[1]}a.b", *(f"{names[i]}(a.b)^{i}" for i in range(2, self.degree + 1))]
        return "phi(a).phi(b) = " + " + ".join(terms) + (", a_i learned from 1/i!" if learned else "")


class Relu(FeatureMap):
    """The positive part.

    Equation:  phi(x) = max(x, 0)
    Source:    Kasai et al. (arXiv 2103.13076)
    Shapes:    x [K] -> [K]
    """

    kind = "relu"

    def __call__(self, x: Tensor) -> Tensor:
        return torch.relu(x)
