"""Inference engines: how each casts, multiplies and normalizes, with the source of every rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...common.validation import check_name
from ...recipes.cast import Cast
from ...recipes.recipe import RECIPES, Recipe

__all__ = ["ENGINES", "Engine", "engine_of"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A row of `ENGINES`.

    Attributes:
        name: in `ENGINES`.
        version: of the engine, with the device where kernels differ.
        recipe: the casts: of inputs and weights as the engine has them, of gradients for training.
        norms: where RMS norms multiply by the weight, a name in `fp8.lab.parity.norms.ORDERS`.
        residual: "rounded": a norm reads the sum of residual stream and branch in the dtype of the
            model; "float32": before it is rounded to that.
        reduction: how the partial outputs of several devices are added, a name in
            `fp8.lab.parity.devices.REDUCTIONS`.
        epilogue: the operand whose scale a product is multiplied by first: "input" or "weight"
            (`fp8.lab.parity.epilogue`). Kernels choose by shapes; the rows have "input", as
            recipes with exact sums do.
        source: where the casts and the norm are defined: repository, file and commit.

    The least scales of a token and of a group of 128 are in their rules, but for powers of two: a
    group whose largest magnitude is below 4.5e-8 keeps its precision here.
    """

    name: str
    version: str
    recipe: Recipe
    norms: str = "weight"
    residual: str = "rounded"
    reduction: str = "once"
    epilogue: str = "input"
    source: str

    @property
    def engine(self) -> str:
        """The engine, as `fp8.checkpoints.check.check_layout` names it."""
        return self.name.partition("_")[0]

    @property
    def twin(self) -> str:
        """The name in `fp8.RECIPES` of a recipe with the forward casts of the engine; "" without
        one."""
        for name, recipe in RECIPES.items():
            if recipe.forward == self.recipe.forward:
                return name
        return ""


def _with_inputs(name: str, recipe: str, rule: str) -> Recipe:
    """A recipe whose inputs have another rule in the forward product."""
    base = RECIPES[recipe]
    assert base.input is not None
    return replace(
        base,
        name=name,
        input=replace(base.input, rule=rule),
        grad_weight_input=RECIPES[recipe].grad_weight[1],
    )


_VLLM_ROW = (
    "vllm-project/vllm, csrc/quantization/w8a8/fp8/common.cu (096d3dc9); norms: "
    "csrc/layernorm_kernels.cu (0112cf23)"
)
_VLLM_BLOCK = (
    "vllm-project/vllm, csrc/quantization/w8a8/fp8/per_token_group_quant.cu (0f5257e2); norms: "
    "csrc/layernorm_kernels.cu (0112cf23)"
)
_FLASHINFER = (
    "; norms: flashinfer-ai/flashinfer, include/flashinfer/norm.cuh (09928cf3)"
)

ENGINES: dict[str, Engine] = {
    row.name: row
    for row in (
        Engine(
            name="vllm_row",
            version="vLLM 0.19, and after 0.20.2",
            recipe=RECIPES["row_exact"],
            source=_VLLM_ROW,
        ),
        # Issue 42325, mended by pull request 42379.
        Engine(
            name="vllm_0_20_row",
            version="vLLM 0.20.0 to 0.20.2",
            recipe=RECIPES["row_exact"],
            norms="float32",
            source="vllm-project/vllm, csrc/quantization/w8a8/fp8/common.cu (096d3dc9); norms: "
            "csrc/libtorch_stable/layernorm_kernels.cu (0b9c5412), issue 42325",
        ),
        Engine(
            name="vllm_static",
            version="vLLM 0.19, and after 0.20.2",
            recipe=Recipe(
                name="vllm_static",
                input=Cast(format="e4m3", scaling="static"),
                weight=Cast(format="e4m3", scaling="tensor", rule="exact"),
                grad=Cast(format="e5m2", scaling="tensor"),
            ),
            source=_VLLM_ROW,
        ),
        Engine(
            name="vllm_block",
            version="vLLM 0.19, and after 0.20.2, on Hopper",
            recipe=RECIPES["block_exact"],
            source=_VLLM_BLOCK,
        ),
        Engine(
            name="vllm_block_ue8m0",
            version="vLLM 0.19, and after 0.20.2, on Blackwell",
            recipe=RECIPES["block"],
            source=_VLLM_BLOCK,
        ),
        Engine(
            name="sglang_row",
            version="SGLang 0.4 and 0.5",
            recipe=_with_inputs("sglang_row", "row_exact", "exact_inverse"),
            norms="float32",
            residual="float32",
            source="sgl-project/sglang, sgl-kernel/csrc/gemm/per_token_quant_fp8.cu (0490047f)"
            + _FLASHINFER,
        ),
        Engine(
            name="sglang_block",
            version="SGLang 0.4 and 0.5, on Hopper",
            recipe=_with_inputs("sglang_block", "block_exact", "exact_group"),
            norms="float32",
            residual="float32",
            source="sgl-project/sglang, sgl-kernel/csrc/gemm/per_token_group_quant_8bit.cu "
            "(00568d90)" + _FLASHINFER,
        ),
    )
}
"""Name -> engine. Sums, attention and what else is not in a row are those of torch."""


def engine_of(engine: str | Engine) -> Engine:
    """The engine of this name, or itself. Raises ValueError for an unknown name."""
    if isinstance(engine, Engine):
        return engine
    check_name("engine", engine, ENGINES)
    return ENGINES[engine]
