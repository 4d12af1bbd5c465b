"""A new attentional bias, from outside the package: one class, and it is a YAML key with an inner gradient, a layer and tests."""

import torch

import memkit
from memkit.specs.bias import AttentionalBias


class Pinball(AttentionalBias):
    """sum_j max(q r_j, (q - 1) r_j), r = prediction - target: remembers the q-quantile of what was written."""

    kind = "pinball"
    q: float = 0.5

    def loss(self, prediction, target):
        r = prediction - target
        return torch.maximum(self.q * r, (self.q - 1) * r).sum()


def main(steps: int = 30) -> list[float]:
    """Train a layer with it: repeat what came two tokens before. Returns the losses."""
    torch.manual_seed(0)
    layer = memkit.load("titans_linear", dim=32, heads=2, overrides={"bias": {"kind": "pinball", "q": 0.4}})
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x = torch.randn(4, 16, 32)
    losses = []
    for _ in range(steps):
        y, _ = layer(x)
        loss = (y[:, 2:] - x[:, :-2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(memkit.explain(memkit.spec("titans_linear", {"bias": "pinball"})))
    losses = main()
    print(f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
