"""docs/papers-numbers.md: numbers that papers publish, and what this library measures.

`NUMBERS` is the only list of them: the tests in tests/published take both columns from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from docs.markdown import table

NUMBERS_PAGE = Path(__file__).with_name("papers-numbers.md")

UNBIASEDNESS = "Quartet II (arXiv:2601.22813), notebooks/unbiasedness.ipynb"
COAT = "COAT (arXiv:2410.19313), table {}"


@dataclass(frozen=True, kw_only=True)
class Number:
    """A row: one published number, or several that belong together.

    Attributes:
        quantity: what is measured.
        source: the publication.
        theirs, ours: the numbers, with the digits that are printed.
        compare: "value": equal within sampling error and half of the last published digit; "order":
            the same order; "bracket": the published number lies between two of ours.
        note: what differs from the published setting.
        miss: why ours is another number; empty where it is the same.
    """

    quantity: str
    source: str
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    compare: str = "value"
    note: str = ""
    miss: str = ""


NUMBERS: dict[str, Number] = {
    "e2m1": Number(
        quantity="mean squared error of N(0, 1) in e2m1 at the best scale, 0.487079",
        source="Quartet (arXiv:2505.14669), notebooks/mse_fitting.ipynb",
        theirs=("0.0126849",),
        ours=("0.0126849",),
    ),
    "nvfp4": Number(
        quantity="relative squared error of N(0, 1) in NVFP4, blocks of 1 x 16 and 16 x 16",
        source=UNBIASEDNESS,
        theirs=("9.0e-3", "12.4e-3"),
        ours=("9.05e-3", "12.46e-3"),
    ),
    "four_over_six": Number(
        quantity="the same with four over six, blocks of 1 x 16 and 16 x 16",
        source=UNBIASEDNESS,
        theirs=("7.6e-3", "12.4e-3"),
        ours=("7.56e-3", "12.45e-3"),
    ),
    "flushed": Number(
        quantity="share of attention probabilities that e4m3 flushes to zero, by the scale S and "
        "the height h of the sink: Φ(h - 6.93 - ln S) at (S, h) = (1, 7), (1, 8), (256, 12), "
        "(256, 13)",
        source="arXiv:2606.06521, abstract",
        theirs=("0.528", "0.858", "0.317", "0.700"),
        ours=("0.529", "0.858", "0.318", "0.699"),
        note='recipes "unit" and "tensor" have S = 1 and S = 256',
    ),
    "stochastic": Number(
        quantity="relative squared error of N(0, 1) in NVFP4 with stochastic rounding, block "
        "scales guarded by 17/16",
        source=UNBIASEDNESS,
        theirs=("23.5e-3",),
        ours=("23.4e-3",),
        note='rule "e4m3_guarded"',
    ),
    "stochastic_recipe": Number(
        quantity='the same under recipe "nvfp4"',
        source=UNBIASEDNESS,
        theirs=("23.5e-3",),
        ours=("22.1e-3",),
        miss="the recipe rounds block scales up to e4m3 values in place of the guard: no value "
        "saturates either, and the error is smaller",
    ),
    "stochastic_misalignment": Number(
        quantity="1 - ⟨x, Q(x)⟩ / ⟨x, x⟩ under both of these casts; 0: unbiased",
        source=UNBIASEDNESS,
        theirs=("0.00000", "0.00000"),
        ours=("0.0001", "0.0002"),
        note="standard errors of 0.0002; published for the guarded cast",
    ),
    "eden": Number(
        quantity="relative squared error of N(0, 1) under MS-EDEN",
        source=UNBIASEDNESS,
        theirs=("9.8e-3",),
        ours=("9.76e-3",),
    ),
    "eden_misalignment": Number(
        quantity="1 - ⟨x, Q(x)⟩ / ⟨x, x⟩ under MS-EDEN",
        source=UNBIASEDNESS,
        theirs=("0.00056",),
        ours=("0.0000",),
        miss="the published code takes the inner products of the correction of values divided by "
        "the scale of their block; ours of the values themselves, which has no bias (standard "
        "error 0.00004)",
    ),
    "eden_emulated": Number(
        quantity="the same by the published code",
        source=UNBIASEDNESS,
        theirs=("0.00056",),
        ours=("0.00057",),
        note="shows the cause above; standard error 0.00005",
    ),
    "averages": Number(
        quantity="bits, -log2 of the relative error, of the mean of N = 1, 4, 16, 64, 256 products "
        "with stochastic rounding",
        source=UNBIASEDNESS,
        theirs=("2.197", "3.196", "4.196", "5.197", "6.197"),
        ours=("2.19", "3.19", "4.19", "5.20", "6.20"),
        note="N = 1024 (7.196) was not run",
    ),
    "four_over_six_averages": Number(
        quantity="the same with four over six and rotations, N = 1, 4, 16, 64",
        source=UNBIASEDNESS,
        theirs=("2.401", "3.389", "4.339", "5.170"),
        ours=("2.40", "3.40", "4.40", "5.39"),
        miss="the published code rounds a block with both scales and keeps the better result, "
        "which depends on the random bits and is a bias; ours chooses the scale before it draws",
    ),
    "four_over_six_emulated": Number(
        quantity="the same by the published code",
        source=UNBIASEDNESS,
        theirs=("2.401", "3.389", "4.339", "5.170"),
        ours=("2.39", "3.38", "4.34", "5.18"),
        note="shows the cause above",
    ),
    "quartet2_input": Number(
        quantity="bits of the gradient of the input under Quartet II, mean of N = 1, 4, 16, 64 "
        "backward passes",
        source=UNBIASEDNESS,
        theirs=("2.847", "3.839", "4.843", "5.840"),
        ours=("2.78", "3.78", "4.76", "5.77"),
        note="256 features in place of 4096 and 1024; one run has a standard error of 0.05 bits",
    ),
    "quartet2_weight": Number(
        quantity="bits of the gradient of the weight",
        source=UNBIASEDNESS,
        theirs=("2.834", "3.848", "4.828", "5.797"),
        ours=("2.89", "3.87", "4.87", "5.87"),
        note="256 features in place of 4096 and 1024; one run has a standard error of 0.05 bits",
    ),
    "concentration": Number(
        quantity="squared error of the mean of N gradients of the first layer, times N, divided by "
        "the error of one; 1: it averages out. NVIDIA's recipe, and four over six in backward",
        source="Quartet II, data/nvidia_concentration.json and data/46_concentration.json, q_proj "
        "of layer 0",
        theirs=("0.79", "85"),
        ours=("0.99", "1.42"),
        compare="order",
        note="theirs: Llama-3.2-1B, N = 1024; ours: two layers, N = 64. The order is the claim. "
        'Recipe "four_over_six" rounds block scales up, which averages out',
    ),
    "sums": Number(
        quantity="largest relative error of sums over K = 4096 in Hopper's accumulator",
        source="DeepSeek-V3 (arXiv:2412.19437), section 3.3.2",
        theirs=("0.02",),
        ours=("0.0023", "0.069"),
        compare="bracket",
        note="the paper gives no distribution: operands N(0, 1), relative to the largest result, "
        "and uniform in [0, 1), relative to each result",
    ),
    "mx_scales": Number(
        quantity="share of block scales that change in MXFP8 -> BF16 -> MXFP8",
        source="Megatron-LM #6666, 52 of 1024 blocks",
        theirs=("0.0508",),
        ours=("0.050",),
        note="log2(232 / 224) = 0.0506 where magnitudes of blocks are uniform in the logarithm: "
        "those whose largest value is rounded to 224",
    ),
    "mx_values": Number(
        quantity="values that change in the same conversion",
        source="Megatron-LM #6666",
        theirs=("0",),
        ours=("0",),
    ),
    "adam": Number(
        quantity="error of m / sqrt(v) with moments in FP8, relative to both in e4m3: second in "
        "e5m2; first in e5m2; both in e5m2",
        source=COAT.format(1) + ": 25.65, 37.02 and 40.30 over 20.10",
        theirs=("1.276", "1.842", "2.005"),
        ours=("1.27", "1.83", "2.00"),
        note="root mean squares, whose ratios the table has. Moments of 60 steps of random "
        "gradients; theirs are from a training run",
    ),
    "adam_order": Number(
        quantity="all 16 pairs of e4m3, e4m3 expanded, e5m2, e5m2 expanded, first moment by second",
        source=COAT.format(1),
        theirs=(
            *("20.10", "18.08", "25.65", "18.16", "15.13", "12.31", "21.96", "12.43"),
            *("37.02", "35.96", "40.30", "36.00", "17.79", "15.48", "23.84", "15.57"),
        ),
        ours=(
            *("20.1", "18.6", "25.6", "18.6", "14.6", "12.4", "21.6", "12.4"),
            *("36.8", "36.0", "40.1", "36.0", "15.2", "13.0", "21.9", "13.0"),
        ),
        compare="order",
        note="scaled so that the first is 20.10; numbers that differ by less than 10 % there are "
        "not compared. The expansion is COAT's, to the range of each format; this library has none",
    ),
    "adam_encodings": Number(
        quantity='the same with "e4m3_block" and "e5m3_block" of `fp8.optim`, against e4m3 and '
        "e4m3",
        source=COAT.format(1) + ": no row of it",
        theirs=("1.00",),
        ours=("1.02",),
        note="as many mantissa bits: the error must equal the error of e4m3",
    ),
    "activations": Number(
        quantity="bytes that a Llama block keeps for backward in BF16, in units of batch x "
        "sequence x width x 2 bytes",
        source=COAT.format(2),
        theirs=("22.66",),
        ours=("22.67",),
        note="68/3, of which the table cuts the digits",
    ),
    "activations_fp8": Number(
        quantity='the same with products in FP8: TransformerEngine; ours under recipe "tensor"',
        source=COAT.format(2),
        theirs=("18.33",),
        ours=("20.83",),
        miss="norms and positions keep 6, TransformerEngine's 4: transformers' norm keeps float32 "
        "and BF16; query, key, value, gate and up share copies (2.83 against 3.33); attention "
        "keeps its output in BF16 beside the copy in FP8 (1). COAT's 13.33 is by activations kept "
        "in FP8, which this library has not",
    ),
}
"""Key, which selects the tests (`pytest tests/published -k KEY`) -> number."""

PREAMBLE = """\
# Numbers of papers

Written by `make docs` from `docs/papers.py`: numbers that papers, notebooks and issues publish, and
what this library measures in their settings on a CPU. `pytest tests/published -k KEY` measures a
row again.

- "same": equal within half of the last published digit and five standard errors of both samples.
- "same order": only the order is compared.
- "between": the published setting is incomplete; the number is between the results of two choices.
- "miss": a different number. The test of the published number is expected to fail, and must fail.

Orders of losses that papers publish of trained models: [the log](log.md#recipes)."""


VERDICTS = {"value": "same", "order": "same order", "bracket": "between"}


def render() -> str:
    """The text of docs/papers-numbers.md."""
    rows = [
        [
            f"`{key}`",
            n.quantity,
            ", ".join(n.theirs),
            ", ".join(n.ours),
            f"miss: {n.miss}"
            if n.miss
            else VERDICTS[n.compare] + (f"; {n.note}" if n.note else ""),
            n.source,
        ]
        for key, n in NUMBERS.items()
    ]
    heads = "key | quantity | theirs | ours | comparison | source"
    return f"{PREAMBLE}\n\n{table(heads, rows)}\n"
