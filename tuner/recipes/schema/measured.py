"""What was measured of a model that no formula describes: its parts, and the memory of its layers in bytes of bf16.

`lab` measures it on meta tensors, and `fit` counts with it. It is no key of a recipe: an `Architecture` carries it.
"""

from bisect import bisect_left
from itertools import pairwise
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Curve = Annotated[tuple[tuple[int, float], ...], Field(min_length=1)]
"""Bytes a token, by the tokens of a row that attend to each other: sorted, at least one."""
LARGEST_IN_4_BITS = 2**31 - 1
"""The numbers that bitsandbytes' kernels can count; a larger tensor of experts keeps its 16 bits."""


class Linear(NamedTuple):
    """One linear layer; `name` is its module's inside the decoder layer, or in the model."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    quantizable: bool = True
    """bitsandbytes stores its weight in fewer bits."""

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        return self.weights + self.outputs * self.bias


class Experts(NamedTuple):
    """The experts of one layer, fused in transformers 5 into two tensors: [E, 2 * width, H] and [E, H, width]."""

    num: int
    per_token: int
    hidden: int
    width: int
    bias: bool = False
    matrices: int = 3
    """Of one expert: gate, up and down, or up and down alone."""

    @property
    def parameters(self) -> int:
        return self.num * self._of_one

    @property
    def tensors(self) -> tuple[int, int]:
        """The weights of the two tensors, without biases."""
        down = self.num * self.hidden * self.width
        return (self.matrices - 1) * down, down

    @property
    def quantizable(self) -> int:
        """The weights of the tensors that bitsandbytes can quantize."""
        return sum(size for size in self.tensors if size <= LARGEST_IN_4_BITS)

    @property
    def down(self) -> int:
        """Parameters of the tensor of all down layers; the other tensor has the rest."""
        return self.parameters // self.matrices

    @property
    def idle(self) -> int:
        """Parameters that one token does not pass through."""
        return (self.num - self.per_token) * self._of_one

    @property
    def _of_one(self) -> int:
        return self.matrices * self.hidden * self.width + self.bias * (2 * self.width + self.hidden)


class _Measured(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True)


class Layers(_Measured):
    """Layers that are alike."""

    linears: tuple[Linear, ...]
    experts: Experts | None = None
    others: int = 0
    """Parameters outside of these."""
    inner: int = 0
    """The width of the MLP that a token passes through, its experts and those that it shares among them."""
    output: float
    """Bytes a token that one layer hands on to the next."""
    whole: Curve
    """Kept for backward while all weights are trained."""
    adapter: Curve
    """The same while LoRA of rank 0 is, without dropout."""
    mask: Curve
    """More with a mask that tells pairs of tokens apart."""
    steps: Curve
    """What the backward pass makes beside what was kept, at its peak."""


class Measured(_Measured):
    """A whole model."""

    attention: str
    """That transformers takes if none is named: 'sdpa' or 'eager'."""
    embeddings: str
    """The name of the module."""
    embedding_weights: int
    head: Linear
    linears: tuple[Linear, ...] = ()
    """Outside the layers, the head left out."""
    others: int = 0
    kinds: tuple[Layers, ...]
    layers: tuple[int, ...]
    """The kind of each layer."""
    shared: Curve
    """Bytes a token that are kept outside the layers: masks, positions."""
    shared_mask: Curve
    """More of them with a mask."""
    experts_adapted: tuple[str, ...] = ()
    """Names of the router and of the expert's gate, up and down layers, if PEFT adapts them."""
    seconds: float = 0.0
    """That the measurement took."""

    @model_validator(mode="after")
    def _each_layer_has_a_kind(self) -> Self:
        if not all(0 <= kind < len(self.kinds) for kind in self.layers):
            raise ValueError("a layer is of no kind")
        return self


def at(curve: Curve, row: int) -> float:
    """Return the bytes a token where `row` tokens attend to each other: linear between and beyond what was measured."""
    if len(curve) == 1:
        return curve[0][1]
    pairs = [*pairwise(curve)]
    (short, less), (long, more) = pairs[min(max(bisect_left(curve, (row, 0.0)) - 1, 0), len(pairs) - 1)]
    return max(0.0, less + (more - less) * (row - short) / (long - short))
