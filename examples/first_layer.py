"""The first ten minutes: load a layer, run it, cut a sequence in two, read one token at a time."""

import torch

import memkit

layer = memkit.load("deltanet", dim=64, heads=4)
print(layer)

x = torch.randn(2, 12, 64)  # [batch, tokens, dim]; any tensor will do, it need not come from words
y, state = layer(x)

first, carried = layer(x[:, :5])
second, carried = layer(x[:, 5:], carried)
torch.testing.assert_close(torch.cat([first, second], 1), y)

carried, outputs = None, []
for t in range(12):
    out, carried = layer(x[:, t : t + 1], carried)
    outputs.append(out)
torch.testing.assert_close(torch.cat(outputs, 1), y)

print(f"the state of two sequences holds {state.nbytes:,} bytes, however long they are")
