"""Recipes: how each operand of a layer's products is cast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..common.validation import (
    check_between,
    check_choice,
    check_keys,
    check_name,
    names_of,
)
from ..torch_internals import Keywords
from .cast import Cast, lines_of
from .tensor_cores import FORMATS, SUMS

AUTO = "auto"
"""Instead of a recipe: chosen by layer or product, as `fp8.convert` and `fp8.autocast` say."""

SAME = "same"
"""The value in a Recipe for the same cast as in the operand's first product."""

PRODUCTS = {
    "forward": ("input", "weight"),
    "grad_input": ("grad", "weight"),
    "grad_weight": ("grad", "input"),
}
"""Product of a layer -> its operands, in the order of the properties of `Recipe` of these names."""

OPERANDS = {
    operand: tuple(name for name, operands in PRODUCTS.items() if operand in operands)
    for operand in ("input", "weight", "grad")
}
"""Operand -> its products."""

_OVERRIDES = ("grad_input_weight", "grad_weight_grad", "grad_weight_input")

Pair = tuple[Cast | None, Cast | None]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The casts of the three products of a layer: output, input gradient, weight gradient.

        y = input weight^T       sums over the inner size
        dinput = grad weight     sums over the outputs
        dweight = grad^T input   sums over the tokens

    A cast of None leaves the operand unchanged. With scales by rows or blocks each product casts
    its operands from high precision, along the axis that it sums over.

    Attributes:
        name: the name shown in reports.
        input: activations, and both operands of a product of two activations.
        weight: the second operand of a linear layer or convolution.
        grad: the gradient of the output.
        accumulate: how linear layers and matrix products of operands in e4m3 and e5m2 sum: as an
            accelerator, "ada" or "hopper", or "exact", in no order
            (`fp8.recipes.tensor_cores`). Other products, and products of an operand that is not
            cast, sum as torch does; with None all do.
        promote: the number of products after which a sum of the accelerator ends and is added in
            float32; 0: after all. Needs ``accumulate``.
        fast_sums: the products ("forward", "grad_input", "grad_weight") that kernels of Hopper sum
            in their accumulator of 14 bits, without float32 sums in between, as torchao and
            TransformerEngine do by default in the forward product. Other devices, and products with
            scales by block, do not differ.
        grad_input_weight, grad_weight_grad, grad_weight_input: a different Cast (or None) of the
            weight, the gradient and the input in the product named first; "same": the cast above.

    Raises:
        TypeError: for a cast that is not a Cast.
        ValueError: for an accelerator without an instruction for the formats of a product, or with
            a rule that reads values; for a second cast with scaling "delayed" or "static"; if the
            two operands of a product are not rotated alike.
    """

    name: str
    input: Cast | None = None
    weight: Cast | None = None
    grad: Cast | None = None
    grad_input_weight: Cast | str | None = SAME
    grad_weight_grad: Cast | str | None = SAME
    grad_weight_input: Cast | str | None = SAME
    accumulate: str | None = None
    promote: int = 0
    fast_sums: tuple[str, ...] = ("forward",)

    # Set per instance, as each product reads them.
    forward: ClassVar[Pair]
    """The casts of (input, weight) in the output."""
    grad_input: ClassVar[Pair]
    """The casts of (grad, weight) in the gradient of the input."""
    grad_weight: ClassVar[Pair]
    """The casts of (grad, input) in the gradient of the weight."""
    casts: ClassVar[tuple[Cast | None, ...]]
    """The casts of all operands of the three products."""
    text: ClassVar[str]
    """The `Cast.text` of `casts`, a line for each."""
    sums: ClassVar[str]
    """`accumulate` and `promote`; "" for torch's sums."""
    is_fast: ClassVar[tuple[bool, ...]]
    """Whether each of `PRODUCTS` is among `fast_sums`."""
    fixed: ClassVar[bool]
    """Whether the scale of every operand is 1 or set by calibration."""
    keeps_history: ClassVar[bool]
    """Whether an operand of a layer has state between passes."""
    changes_scales: ClassVar[bool]
    """Whether a pass changes the scales of later passes: scaling "delayed"."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"Recipe.name must be a name, not {self.name!r}")
        for field in (*OPERANDS, *_OVERRIDES):
            self._check_cast(field, getattr(self, field))
        if not isinstance(self.fast_sums, tuple | list):
            raise TypeError(
                f"fast_sums must be a tuple of products, not {self.fast_sums!r}"
            )
        for name in self.fast_sums:
            check_choice("fast_sums", name, PRODUCTS)
        if self.accumulate is not None:
            check_choice("accumulate", self.accumulate, SUMS)
            check_between("promote", self.promote, 0, 1 << 20)
        elif self.promote:
            raise ValueError(
                "promote needs accumulate, the accelerator whose sums it ends"
            )
        self._derive()

    def _derive(self) -> None:
        """Sets the attributes that follow from the fields."""
        x = self.input
        w = self.weight
        g = self.grad
        second = self.overrides
        again_w = second.get("grad_input_weight", w)
        again_g = second.get("grad_weight_grad", g)
        again_x = second.get("grad_weight_input", x)
        casts = (x, w, g, again_w, again_g, again_x)
        scalings = {cast.scaling for cast in casts if cast is not None}
        first = [cast for cast in (x, w, g) if cast is not None]
        vars(self).update(
            fast_sums=tuple(self.fast_sums),
            forward=(x, w),
            grad_input=(g, again_w),
            grad_weight=(again_g, again_x),
            casts=casts,
            text=lines_of(casts),
            sums=f"{self.accumulate} {self.promote}" if self.accumulate else "",
            is_fast=tuple(name in self.fast_sums for name in PRODUCTS),
            fixed=not scalings.isdisjoint(("unit", "static")),
            keeps_history=any(cast.keeps_history for cast in first),
            changes_scales=any(cast.history for cast in first),
        )
        for product in PRODUCTS:
            self._check_product(product, getattr(self, product))

    def _check_cast(self, field: str, cast: object) -> None:
        is_second = field in _OVERRIDES
        if not isinstance(cast, Cast):
            if cast is not None and not (is_second and cast == SAME):
                others = ', None or "same"' if is_second else " or None"
                raise TypeError(f"Recipe.{field} must be a Cast{others}, not {cast!r}")
        elif is_second and cast.keeps_history:
            raise ValueError(
                f'{field} cannot have scaling "{cast.scaling}": one history, one cast'
            )

    def _check_product(self, product: str, casts: Pair) -> None:
        present = [cast for cast in casts if cast is not None]
        rotations = [(cast.hadamard, cast.signs) for cast in present]
        if len(present) == 1:
            rotations.append((0, "fixed"))
        if len({*rotations}) > 1:
            got = f"got (hadamard, signs)={rotations}"
            raise ValueError(f"{product} needs both operands rotated alike, {got}")
        if self.accumulate is None:
            return
        takes = f"accumulate={self.accumulate!r}"
        for cast in present:
            if cast.is_simulated:
                raise ValueError(
                    f"{takes} takes rules of the largest magnitude, not {cast.rule} ({product})"
                )
        formats = [cast.number_format.name for cast in present]
        if len(formats) == 2 and not {*formats} <= {*FORMATS}:
            got = f"{' by '.join(formats)} ({product})"
            raise ValueError(f"{takes} multiplies {', '.join(FORMATS)}, not {got}")

    @property
    def overrides(self) -> dict[str, Cast | None]:
        """The fields that are not "same"."""
        values = {field: getattr(self, field) for field in _OVERRIDES}
        return {field: cast for field, cast in values.items() if cast != SAME}

    def register(self) -> Recipe:
        """Adds the recipe to `fp8.RECIPES`, so that functions take its name, and policies store it.
        Returns the recipe itself. Raises ValueError if another recipe has the name, or "auto"."""
        if self.name == AUTO or RECIPES.get(self.name, self) != self:
            taken = f"recipe {self.name!r} is registered already"
            raise ValueError(f"{taken}; choose another name")
        return RECIPES.setdefault(self.name, self)

    def to_dict(self) -> Keywords:
        """The recipe as a dict of plain values, for ``json.dumps``."""
        values = {name: getattr(self, name) for name in names_of(Recipe)}
        for name, value in values.items():
            if isinstance(value, Cast):
                values[name] = value.to_dict()
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_dict` wrote; only "name" and the operands are required. Raises as
        Recipe, and ValueError for an unknown or missing key."""
        check_keys("Recipe", values, names_of(Recipe), ("name", *OPERANDS))
        read = dict(values)
        for key, value in values.items():
            if isinstance(value, Mapping):
                read[key] = Cast.from_dict(value)
        return Recipe(**read)


def _all(
    name: str,
    format: str,
    scaling: str = "unit",
    *,
    weight: Keywords | None = None,
    grad: Keywords | None = None,
    **options: Any,
) -> Recipe:
    """A recipe with one cast for every operand. weight, grad: fields that differ in their casts."""
    cast = Cast(format=format, scaling=scaling, **options)
    of_weight = replace(cast, **weight or {})
    of_grad = replace(cast, **grad or {})
    return Recipe(name=name, input=cast, weight=of_weight, grad=of_grad)


def _nvfp4(name: str, rule: str, back: str) -> Recipe:
    """NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149), section 4: weights
    in 16 x 16 blocks, the same in both products; gradients rounded stochastically; both operands of
    the weight gradient rotated in blocks of 16. back: the rule of the gradients."""
    vector = Cast(format="e2m1", scaling="nv", rule=rule)
    grad = replace(vector, rule=back, rounding="stochastic")
    return Recipe(
        name=name,
        input=vector,
        weight=replace(vector, tile=(16, 16)),
        grad=grad,
        grad_weight_grad=replace(grad, hadamard=16),
        grad_weight_input=replace(vector, hadamard=16),
    )


def _one_way_each(name: str, forward: Cast, back: Cast) -> Recipe:
    """One cast for both operands of the output, another one for all operands of both gradients."""
    second: Keywords = {"grad_input_weight": back, "grad_weight_input": back}
    return Recipe(name=name, input=forward, weight=forward, grad=back, **second)


def _gw_hp(
    scaling: str,
    *,
    grad: Keywords | None = None,
    grad_input_weight: Cast | str = SAME,
) -> Recipe:
    """e4m3 in the forward product and the input gradient, and the gradient of the weight in high
    precision. grad: as in `_all`."""
    recipe = _all(f"{scaling}_gw_hp", "e4m3", scaling, grad=grad)
    return replace(
        recipe,
        grad_input_weight=grad_input_weight,
        grad_weight_grad=None,
        grad_weight_input=None,
    )


_E5M2 = {"format": "e5m2"}
_SQUARE = {"tile": (128, 128)}
_RANDOM: Keywords = {"rounding": "stochastic", "signs": "random"}
_DEEPSEEK = _all("deepseek_v3", "e4m3", "block", rule="exact", weight=_SQUARE)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        # Without scales: for modules of unit_scaling. e4m3 for precision, e5m2 for range
        # (Micikevicius et al. 2022, arXiv:2209.05433, section 3).
        _all("unit", "e4m3", "unit", grad=_E5M2),
        _all("unit_e4m3", "e4m3"),
        _all("tensor", "e4m3", "tensor", grad=_E5M2),
        # Micikevicius et al. 2022, section 3.1, with 16 passes as in FP8-LM.
        _all("delayed", "e4m3", "delayed", grad=_E5M2),
        # Powers of two, measured once: the loss scale of half precision (Micikevicius et al. 2018,
        # arXiv:1710.03740, section 3.2), for each operand.
        _all("static", "e4m3", "static", grad=_E5M2),
        # For models of about 10**8 parameters, where transposed casts may cost more than the
        # product gains (KellerJordan/modded-nanogpt, pull request 363).
        _gw_hp("tensor", grad=_E5M2),
        _gw_hp("static", grad=_E5M2),
        _all("row", "e4m3", "row"),
        # torchao's rowwise_with_gw_hp: one scale for the weight in the input gradient.
        _gw_hp("row", grad_input_weight=Cast(format="e4m3", scaling="tensor")),
        # Engines that serve "row" in FP8 have scales that are the largest magnitude divided by 448.
        # The forward product is that of vLLM: `fp8.lab.parity.engines` has the sources.
        replace(
            _all("row_exact", "e4m3", "row", rule="exact"),
            input=Cast(format="e4m3", scaling="row", rule="exact_token"),
            grad_weight_input=Cast(format="e4m3", scaling="row", rule="exact"),
        ),
        # DeepSeek-V3 (arXiv:2412.19437), section 3.3.2: tiles of 1 x 128 for activations and
        # gradients, 128 x 128 for weights. Scales are powers of two, as section 3.3.3 has them for
        # some activations and DeepGEMM on Blackwell for all.
        _all("block", "e4m3", "block", weight=_SQUARE),
        # The same, as vLLM serves it on Hopper: scales are the largest magnitude divided by 448.
        replace(
            _DEEPSEEK,
            name="block_exact",
            input=Cast(format="e4m3", scaling="block", rule="exact_block"),
        ),
        # As trained there: such scales, and the sums of Hopper's tensor cores, added in float32
        # after every 128 products.
        replace(_DEEPSEEK, accumulate="hopper", promote=128),
        # Mishra et al., "Recipes for pre-training LLMs with MXFP8" (arXiv:2506.08027): e4m3 for all
        # three, scales rounded up.
        _all("mxfp8", "e4m3", "mx"),
        # e2m3, the more precise format, in the forward pass; e3m2, the wider one, for gradients.
        _all("mxfp6", "e2m3", "mx", grad={"format": "e3m2"}),
        # Exactly OCP MX specification 1.0, section 6.3: e2m1, scales by the floor rule.
        _all("mxfp4", "e2m1", "mx", rule="floor"),
        # Gradients with scales rounded up, which makes stochastic rounding unbiased.
        _nvfp4("nvfp4", "e4m3", "e4m3_up"),
        # The published recipe, and TransformerEngine's: all scales are rounded to nearest.
        _nvfp4("nvfp4_nvidia", "e4m3", "e4m3"),
        # For the end of training, after "nvfp4" (arXiv:2509.25149, appendix D): the forward product
        # in high precision removes most of the gap in loss, the backward ones none of it.
        replace(
            _nvfp4("nvfp4_forward_hp", "e4m3", "e4m3_up"),
            input=None,
            weight=None,
            grad_input_weight=Cast(format="e2m1", scaling="nv", tile=(16, 16)),
        ),
        # Cook et al. (arXiv:2512.02010), section 3: "nvfp4" with scales chosen by error in all
        # casts.
        _nvfp4("four_over_six", "e4m3_4_6", "e4m3_4_6_up"),
        # Quartet II (arXiv:2601.22813) and its published code: four over six, without square
        # blocks; MS-EDEN for gradients.
        _one_way_each(
            "quartet2",
            Cast(format="e2m1", scaling="nv", rule="e4m3_4_6"),
            Cast(
                format="e2m1",
                scaling="nv",
                rule="e4m3_eden",
                hadamard=128,
                signs="random",
            ),
        ),
        # TetraJet-v2 (arXiv:2510.27527) and its published code; gradients as in "nvfp4".
        _one_way_each(
            "tetrajet2",
            Cast(format="e2m1", scaling="nv"),
            Cast(format="e2m1", scaling="nv", rule="e4m3_up", hadamard=16, **_RANDOM),
        ),
        _all("bf16", "bf16"),
        _all("fp16", "fp16"),
    )
}
"""Name -> recipe."""

#: The recipes that "auto" selects: for plain models, for modules and functions of `unit_scaling`,
#: and for layers that are calibrated or in a model of ``unit_scale``.
PLAIN, UNIT, STATIC = RECIPES["tensor"], RECIPES["unit"], RECIPES["static"]


def get_recipe(recipe: str | Recipe) -> Recipe:
    """The row of `RECIPES` with this name; a Recipe is returned unchanged. Raises ValueError for an
    unknown name and for "auto", which needs a model, TypeError for other arguments."""
    found = recipe_unless_auto(recipe)
    if found is None:
        raise ValueError(
            'recipe "auto" is "unit", "static" or "tensor", by the layer: give it to a function '
            f"that takes a model; here choose one of {', '.join(map(repr, RECIPES))}"
        )
    return found


def recipe_unless_auto(recipe: str | Recipe) -> Recipe | None:
    """`get_recipe`; None for "auto", which is resolved at the product."""
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        from ..common.libraries import who_takes  # late, as few programs need it

        kind = type(recipe).__name__
        raise TypeError(
            f"a recipe must be a name or a Recipe, not {kind}{who_takes(recipe)}"
        )
    note = f"; for one of your own, call fp8.Recipe(name={recipe!r}, ...).register() before"
    check_name("recipe", recipe, (AUTO, *RECIPES), note)
    return RECIPES.get(recipe)


def needs_unit_scale(recipe: Recipe) -> bool:
    """Whether a cast to 8 bits or fewer has no scale."""
    for cast in recipe.casts:
        if cast and cast.scaling == "unit" and cast.number_format.bits <= 8:
            return True
    return False
