"""ByteLM: a language model over bytes, memory blocks all the way, with generation that carries its state token by token."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from memkit.specs.errors import MemkitError, ShapeError
from memkit.specs.io import Source, dump_yaml, load_spec
from memkit.specs.layer import LayerSpec

from .block import Block, RMSNorm
from .memory_layer import LayerState, RuleFactory, make_rule

BYTES = 256
ModelState = tuple[LayerState, ...]


class ByteLM(nn.Module):
    """Byte embedding, `depth` blocks, norm, head.

    Args:
        spec: the memory's spec, the same for every block: a LayerSpec, or a preset's name, a path or a dict.
        dim: D. depth: number of blocks. heads: H, the spec's own unless given.
        hidden: width of each block's MLP, 2 D unless given; 0 leaves the MLPs out.
        tied: whether the head is the embedding's transpose.

    Shapes: ids [B, T] of whole numbers in 0..255 -> logits [B, T, 256], state
    """

    def __init__(
        self, spec: Source, dim: int = 64, depth: int = 2, heads: int | None = None, hidden: int | None = None, tied: bool = False,
        rule_factory: RuleFactory = make_rule,
    ) -> None:
        super().__init__()
        self.config = {"dim": dim, "depth": depth, "heads": heads, "hidden": hidden, "tied": tied}
        self.embed = nn.Embedding(BYTES, dim)
        spec = spec if isinstance(spec, LayerSpec) else load_spec(spec)
        self.blocks = nn.ModuleList(Block(spec, dim, heads, hidden, rule_factory) for _ in range(depth))
        self.spec = spec.model_copy(update={"layer": spec.layer.model_copy(update={"heads": heads or spec.layer.heads})})
        self.norm = RMSNorm(dim)
        self.head = None if tied else nn.Linear(dim, BYTES, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1 if tied else 0.5)
        self.apply(partial(_start, depth=depth))

    def forward(self, ids: Tensor, state: ModelState | None = None) -> tuple[Tensor, ModelState]:
        """Logits for the byte after each of `ids`, and the state after the last."""
        _check_ids(ids)
        if state is not None and len(state) != len(self.blocks):
            raise ShapeError(f"a state of {len(state)} blocks", f"one of {len(self.blocks)}", "", "state")
        x, after = self.embed(ids.long()), []
        for i, block in enumerate(self.blocks):
            x, block_state = block(x, None if state is None else state[i])
            after.append(block_state)
        x = self.norm(x)
        logits = F.linear(x, self.embed.weight) if self.head is None else self.head(x)
        return logits, tuple(after)

    def loss(self, ids: Tensor) -> Tensor:
        """Mean negative log likelihood, in nats a byte, of ids[:, 1:] given what precedes: ids [B, T + 1] -> []."""
        logits, _ = self(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten().long())

    @torch.inference_mode()
    def generate(self, prompt: bytes, count: int, *, temperature: float = 1.0, generator: torch.Generator | None = None) -> bytes:
        """`count` bytes after `prompt`: one pass over the prompt, then one byte at a time on the carried state. 0 takes the likeliest."""
        ids = torch.tensor([list(prompt or b"\n")], device=self.embed.weight.device)
        made, state = bytearray(), None
        for _ in range(count):
            logits, state = self(ids, state)
            last = logits[0, -1].float()
            if temperature > 0:
                ids = torch.multinomial(torch.softmax(last / temperature, 0), 1, generator=generator)[None]
            else:
                ids = last.argmax()[None, None]
            made.append(int(ids))
        return bytes(made)

    def save(self, folder: str | Path) -> Path:
        """Write spec.yaml, model.json (sizes) and model.safetensors (weights) into `folder`, made if need be."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.yaml").write_text(dump_yaml(self.spec), encoding="utf-8")
        (folder / "model.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        save_file({name: t.detach().contiguous() for name, t in self.state_dict().items()}, folder / "model.safetensors")
        return folder

    @classmethod
    def load(cls, folder: str | Path, rule_factory: RuleFactory = make_rule) -> ByteLM:
        """The model that `save` wrote.

        Raises:
            MemkitError: where a file is missing. SpecError: where the spec cannot be read.
        """
        folder = Path(folder)
        missing = [name for name in ("spec.yaml", "model.json", "model.safetensors") if not (folder / name).is_file()]
        if missing:
            raise MemkitError(f"no {', '.join(missing)} in {folder}", "a folder that ByteLM.save wrote", "", "folder")
        config = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        model = cls(load_spec(folder / "spec.yaml"), **config, rule_factory=rule_factory)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model


def _start(module: nn.Module, depth: int) -> None:
    """What a block adds to the residual starts scaled down by the number of additions."""
    if isinstance(module, Block):
        for linear in (module.memory.output, *([module.mlp.down] if module.mlp is not None else [])):
            nn.init.normal_(linear.weight, std=1 / (linear.in_features * 2 * depth) ** 0.5)


def _check_ids(ids: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ShapeError(got, "whole numbers [B, T]", "", "ids")
