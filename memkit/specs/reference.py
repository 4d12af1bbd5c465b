"""The oracle: what a spec means, as a loop over tokens. Slow, differentiable, any dtype; every faster form is held against it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from .rule import Rule
from .state import MemoryState, Span

Tree = dict[str, Any]


class ReferenceRule(Rule):
    """The token loop. Same calls as a compiled rule.

    Weights over infinite features are kept as coefficients on the keys of all N tokens, W phi(x) = sum_n d_n kernel(k_n, x): for them
    `f` is the vector of kernels, padded with a second half that is one-hot at the token's own key and meets zero weights; the gradient
    of that half is the gradient in the space of the features.
    """

    plan = "reference"

    def run(self, q: Tensor, k: Tensor, v: Tensor, gates: Tree, params: Tree, state: MemoryState) -> tuple[Tensor, MemoryState]:
        recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(recording):
            if any(t.is_inference() for t in (q, k, v, *gates.values(), *state.weights.values())):
                q, k, v = q.clone(), k.clone(), v.clone()
                gates, params = {n: g.clone() for n, g in gates.items()}, {n: p.clone() for n, p in params.items()}
                state = state.clone()
            return self._loop(q, k, v, gates, params, state)

    def _loop(self, q: Tensor, k: Tensor, v: Tensor, gates: Tree, params: Tree, state: MemoryState) -> tuple[Tensor, MemoryState]:
        spec, tokens, c = self.spec, q.shape[1], self.spec.window.size
        W, S, anchor, every = self._unpack(state, k)
        keys, values = torch.cat([state.keys, k], 1), torch.cat([state.values, v], 1)  # row t + c - 1 is token t
        outputs = []
        for t in range(tokens):
            now = {n: g[:, t] for n, g in gates.items()} | {n: v.new_full(v.shape[:1] + v.shape[2:3], x) for n, x in self.constants.items()}
            position, first = state.position + t, state.position + t - c + 1
            if spec.update.grad_at == "chunk" and position % spec.update.chunk_size == 0:
                anchor = W
            at = {"token": W, "decayed": self._retain(W, now), "chunk": anchor}[spec.update.grad_at]
            weigh = torch.stack([now["window_gate"] if now["window_gate"].dim() == 2 else now["window_gate"][..., j] for j in range(c)])
            inside = torch.arange(first, first + c, device=v.device) >= 0
            weigh = torch.where(inside[:, None, None], weigh, 0.0)
            slots = t + torch.arange(c, device=v.device).where(inside, c - 1)  # before the start: this token, weighed 0, so never 0 * inf
            seen, index = self._seen(every, state, t)
            G = self._gradient(at, keys[:, slots], values[:, slots], weigh, params, seen, index)
            moves, S = self._step(G, S, now)
            before, W = W, {n: w + moves[n] for n, w in self._retain(W, now).items()}
            outputs.append(self._read(before if spec.update.read == "before" else W, q[:, t], params, seen))
        if spec.update.grad_at == "chunk" and (state.position + tokens) % spec.update.chunk_size == 0:
            anchor = W  # the next token begins a chunk
        after = self._pack(W, S, anchor, every, keys[:, tokens:], values[:, tokens:], state.position + tokens)
        return torch.stack(outputs, 1), after

    def _predict(self, W: Tree, x: Tensor, params: Tree, every: Tensor | None, own: Tensor | None) -> Tensor:
        """The memory's answer for one token and head; `own` is the row of its key among all keys, -1 for none."""
        split = {family: {n.split(".", 1)[1]: p for n, p in params.items() if n.startswith(family)} for family in ("features", "memory")}
        if every is None:
            f = self.spec.features(x, **split["features"])
        else:
            kernels = vmap(lambda key: self.spec.features.kernel(key, x, **split["features"]))(every)  # type: ignore[attr-defined]
            f = torch.cat([kernels, (torch.arange(len(every), device=x.device) == (-1 if own is None else own)).to(x)])
        return self.spec.memory.predict(W, f, x, **split["memory"])

    def _gradient(
        self, at: Tree, keys: Tensor, values: Tensor, weigh: Tensor, params: Tree, every: Tensor | None, index: Tensor | None
    ) -> Tree:
        """Sum over the window's tokens of gate * d loss / dW, all at the weights `at`."""
        wide = {n: torch.cat([w, torch.zeros_like(w)], -1) if n in self.infinite else w for n, w in at.items()}

        def loss(W: Tree, key: Tensor, value: Tensor, p: Tree, seen: Tensor | None, own: Tensor | None) -> Tensor:
            return self.spec.bias.loss(self._predict(W, key, p, seen, own), value)

        per_head = {n: 0 if p.dim() > self._plain_dim(n) else None for n, p in params.items()}
        seen, own = (None if every is None else 0), (None if index is None else 0)
        by_slot = vmap(grad(loss), in_dims=(None, 0, 0, None, None, own))  # window tokens
        by_head = vmap(by_slot, in_dims=(0, 1, 1, per_head, None if every is None else 1, None))
        by_row = vmap(by_head, in_dims=(0, 0, 0, None, seen, None))
        each = by_row(wide, keys, values, params, every, index)  # [B, H, c, out, in]
        total = {n: torch.einsum("cbh,bhcoi->bhoi", weigh, g) for n, g in each.items()}
        return {n: g[..., g.shape[-1] // 2 :] if n in self.infinite else g for n, g in total.items()}

    def _read(self, W: Tree, x: Tensor, params: Tree, every: Tensor | None) -> Tensor:
        wide = {n: torch.cat([w, torch.zeros_like(w)], -1) if n in self.infinite else w for n, w in W.items()}
        per_head = {n: 0 if p.dim() > self._plain_dim(n) else None for n, p in params.items()}
        seen = None if every is None else 0
        by_head = vmap(lambda w, x, p, e: self._predict(w, x, p, e, None), in_dims=(0, 0, per_head, None if every is None else 1))
        return vmap(by_head, in_dims=(0, 0, None, seen))(wide, x, params, every)

    def _retain(self, W: Tree, now: Tree) -> Tree:
        if "retain" not in now:
            return {n: vmap(vmap(self.spec.retention.retain))(w) for n, w in W.items()}
        return {n: _per_head(self.spec.retention.retain)(w, now["retain"]) for n, w in W.items()}

    def _step(self, G: Tree, S: Tree, now: Tree) -> tuple[Tree, Tree]:
        update = _per_head(self.spec.optimizer.update)
        gates = {n: now[n] for n in self.spec.optimizer.roles()}
        both = {n: update(g, S[n], gates) for n, g in G.items()}
        return {n: move for n, (move, _) in both.items()}, {n: slots for n, (_, slots) in both.items()}

    def _plain_dim(self, name: str) -> int:
        return self.init_params()[name].dim()

    # ---- infinite features: the state's span of keys becomes columns of ordinary weights, and back

    def _unpack(self, state: MemoryState, k: Tensor) -> tuple[Tree, Tree, Tree, Tensor | None]:
        W, S, anchor = dict(state.weights), dict(state.slots), dict(state.anchor)
        if state.span is None:
            return W, S, anchor, None
        grow = torch.nn.functional.pad
        new = k.shape[1]
        W |= {n: grow(w, (0, new)) for n, w in state.span.weights.items()}
        S |= {n: {s: grow(x, (0, new)) for s, x in slots.items()} for n, slots in state.span.slots.items()}
        anchor |= {n: grow(w, (0, new)) for n, w in state.span.anchor.items()}
        return W, S, anchor, torch.cat([state.span.keys, k], 1)

    def _seen(self, every: Tensor | None, state: MemoryState, t: int) -> tuple[Tensor | None, Tensor | None]:
        """All keys at token t, those still to come as zeros, and the rows of the window's tokens among them."""
        if every is None or state.span is None:
            return None, None
        last = state.span.keys.shape[1] + t
        known = torch.arange(every.shape[1], device=every.device) <= last
        index = torch.arange(last - self.spec.window.size + 1, last + 1, device=every.device)
        return every.where(known[:, None, None], 0.0), index

    def _pack(self, W: Tree, S: Tree, anchor: Tree, every: Tensor | None, keys: Tensor, values: Tensor, position: int) -> MemoryState:
        def finite(tree: Tree) -> Tree:
            return {n: x for n, x in tree.items() if n not in self.infinite}

        def infinite(tree: Tree) -> Tree:
            return {n: x for n, x in tree.items() if n in self.infinite}

        span = None if every is None else Span(every, infinite(W), infinite(S), infinite(anchor))
        return MemoryState(finite(W), finite(S), finite(anchor), keys, values, position, span)


def _per_head(fn: Any) -> Any:
    """A function of one weight, over rows and heads."""
    return vmap(vmap(fn))
