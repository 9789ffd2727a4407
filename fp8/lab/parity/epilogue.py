"""Which of its two scales a product is multiplied by first.

The two orders differ by a rounding in float32, which 4 of a million results in bfloat16 show. They
depend on shapes: vLLM's kernel for Hopper exchanges the operands of up to 64 tokens, whose scale
then comes first, and of more tokens that of the weight (vllm-project/vllm,
csrc/quantization/w8a8/cutlass/c3x/scaled_mm_sm90_fp8_dispatch.cuh, 68f442eb; epilogue:
csrc/cutlass_extensions/epilogue/scaled_mm_epilogues_c3x.hpp, 00c11f4d). torch's kernel exchanges
them for most shapes (pytorch/pytorch, aten/src/ATen/native/cuda/RowwiseScaledMM.cu, 01386a0d).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...common.mixin import Args, Forward, Mixin, add_mixin
from ...common.validation import check_choice
from ...layers.settings import converted
from ...recipes.history import history_of
from ...torch_internals import Keywords
from ..sums.product import multiply, operand

EPILOGUES = ("input", "weight")
"""The values of `Engine.epilogue`: the operand whose scale comes first."""


def set_epilogue(model: nn.Module, epilogue: str) -> None:
    """Gives the linear layers of a converted model the order of an engine, in place. "input" is
    that of `fp8.Recipe.accumulate`. Products with torch's sums have no order: their operands are
    multiplied by the scales before. Without gradients."""
    check_choice("epilogue", epilogue, EPILOGUES)
    for layer in converted(model).values():
        settings = layer.fp8_settings
        linear = settings.is_linear and not settings.is_transposed
        cast = all(settings.recipe.forward)
        if epilogue == "weight" and linear and cast and settings.recipe.sums:
            add_mixin(layer, _WeightFirst)


class _WeightFirst(Mixin):
    """A linear layer whose sums are multiplied by the scale of the weight first."""

    def around(self: Any, forward: Forward, args: Args, kwargs: Keywords) -> Tensor:
        (x,) = (*args, *kwargs.values())
        of_x, of_weight = self.fp8_recipe.forward
        rows = x.reshape(-1, x.shape[-1])
        a = operand(rows, of_x, -1, history_of(self, "input"))
        b = operand(self.weight, of_weight, -1, history_of(self, "weight"))
        # The scale of the first operand comes first.
        y = multiply(b, a, of_weight, of_x, self.fp8_recipe.sums).mT
        y = y.to(x.dtype).reshape(*x.shape[:-1], -1)
        if self.bias is None:
            return y
        return y + self.bias
