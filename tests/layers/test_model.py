"""Blocks and the byte model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memkit.layers.block import Block
from memkit.layers.model import ByteLM
from memkit.specs.errors import MemkitError, ShapeError
from tests.cases import small
from tests.compare import assert_close


def model_of(name: str = "deltanet", **options: object) -> ByteLM:
    torch.manual_seed(0)
    return ByteLM(small(name), dim=16, heads=2, depth=2, **options)  # type: ignore[arg-type]


def test_a_block_is_residual_and_carries_its_state() -> None:
    block, x = Block(small("gated_deltanet"), 8, 2).double(), torch.randn(2, 6, 8, dtype=torch.float64)
    whole, _ = block(x)
    first, state = block(x[:, :2])
    assert_close(torch.cat([first, block(x[:, 2:], state)[0]], 1), whole, 1e-12)
    for parameter in block.parameters():
        torch.nn.init.zeros_(parameter)
    assert torch.equal(block(x)[0], x)
    assert Block(small("deltanet"), 8, 2, hidden=0).mlp is None


@pytest.mark.parametrize("name", ["deltanet", "atlas"])
def test_generation_equals_reading_everything_again(name: str) -> None:
    model = model_of(name)
    made = model.generate(b"ab", 4, temperature=0)
    text = b"ab"
    for byte in made:
        logits, _ = model(torch.tensor([list(text)]))
        best = logits[0, -1].topk(2).values
        assert logits[0, -1, byte] >= best[0] - 1e-4
        text += bytes([byte])
    again = [model.generate(b"", 3, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert again[0] == again[1] and len(again[0]) == 3


def test_it_learns_a_text() -> None:
    model = model_of()
    ids = torch.tensor([list(b"abcabcabcabcabc")] * 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = model.loss(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.0
    assert model.generate(b"abcab", 4, temperature=0) == b"cabc"


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_it_is_the_same(tmp_path: Path, tied: bool) -> None:
    model = model_of(tied=tied)
    assert (model.head is None) == tied
    back = ByteLM.load(model.save(tmp_path / "deep" / "er"))
    ids = torch.randint(0, 256, (2, 5))
    assert torch.equal(back(ids)[0], model(ids)[0])
    assert back.spec == model.spec and back.spec.layer.heads == 2
    with pytest.raises(MemkitError, match=r"model\.safetensors"):
        ByteLM.load(tmp_path)


def test_what_it_refuses() -> None:
    model = model_of()
    for ids in (torch.zeros(1, 3), torch.zeros(3, dtype=torch.long), None):
        with pytest.raises(ShapeError, match="whole numbers"):
            model(ids)
    assert model(torch.zeros(1, 3, dtype=torch.uint8))[0].shape == (1, 3, 256)
    with pytest.raises(ShapeError, match="a state of 1 blocks"):
        model(torch.zeros(1, 1, dtype=torch.long), (None,))
