"""The first line of a verdict, what it saves and why, of candidates made by hand."""

from fp8.lab.forecast.result import Forecast, Variant
from fp8.lab.preflight.findings import Candidate, Findings, Run
from fp8.lab.preflight.verdict import bytes_in_words, decide, recipe_in_words
from tests.shared import parametrize

ROW = "recipe row (8-bit numbers with one scale factor for each row of a matrix)"


def candidate(name, outcome, gap=0.001, kept=0):
    layers = [f"layer{i}" for i in range(kept)]
    ends = (None, None) if gap is None else (gap - 0.004, gap + 0.004)
    return Candidate(
        name, name.split()[0], {"recipe": name.split()[0]}, layers, 0.9, 8.0, {1: 0.1},
        gap, *ends, seeds=0 if outcome == "not trained" else 3, outcome=outcome,
    )  # fmt: skip


def forecast(hardware, low, *names, source="estimate"):
    """3 s in bf16; of policies half of what is saved, and of 9 layers those that get slower."""
    high = Variant(
        recipe="bf16",
        seconds=3.0,
        layers=dict.fromkeys("abcdefghi", 1.0),
        saved=2 * 10**9,
    )
    layers = dict.fromkeys("abcdefghi", low / 3)
    rows = [Variant(recipe=n, seconds=low, layers=layers, saved=10**9) for n in names]
    return Forecast(hardware, source, (high, *rows))


def decided(*candidates, chance=0.0, forecasts=None, steps=200):
    names = [candidate.name for candidate in candidates]
    runs = [
        Run("reference", 0, [1.0], 1.0, seconds=60.0),
        Run("row", 0, [1.0], 1.0, 120.0),
    ]
    findings = Findings(
        model={"dtype": "bfloat16"}, runs=runs,
        settings={"target": 0.01, "chance": chance, "steps": steps, "steps_asked": 200},
        candidates=list(candidates), forecasts=forecasts or [forecast("h100", 2.0, *names)],
    )  # fmt: skip
    decide(findings, lambda seconds, seeds: f"go --budget {seconds:g} {seeds}")
    return findings


def test_yes():
    verdict = decided(candidate("row", "as the reference")).verdict
    assert verdict.answer == f"Yes, with {ROW}, in runs of 200 steps."
    assert verdict.savings == [
        "On h100, the matrix products of a training step are 1.50 times as fast; what it saves for "
        "the backward pass takes 1 GB in place of 2 GB (estimate)."
    ]
    assert verdict.reasons == [
        "Trained with row from the same weights on the same batches, the loss ends 0.0010 above "
        "that of the model in bf16 (3 pairs of runs). It lies between -0.0030 and +0.0050 with 90% "
        "confidence; a difference below 0.01 counts as none."
    ]


@parametrize(
    "kept, words",
    [
        (1, "layer0"),
        (3, "layer0, layer1 and layer2"),
        (5, "layer0, layer1, layer2 and 2 more"),
    ],
)
def test_yes_but(kept, words):
    answer = decided(candidate("row except some", "better", kept=kept)).verdict.answer
    assert (
        answer
        == f"Yes, but keep {words} in bf16; all other layers with {ROW}, in runs of 200 steps."
    )


def test_within_chance():
    verdict = decided(candidate("row", "within chance", 0.02), chance=0.05).verdict
    end = "in runs of 200 steps; the loss differs by less than from seed to seed."
    assert verdict.answer == f"Yes, with {ROW}, {end}"
    assert "the model itself has a standard deviation of 0.0500" in verdict.reasons[0]


def test_transforms_are_mentioned_with_their_outcome():
    row, transform = candidate("row", "better"), candidate("uu", "worse", 0.02)
    transform.policy = {}
    assert decided(row, transform).verdict.reasons[1:] == [
        "Trained as uu, the loss ends 0.0200 above that of the reference (3 pairs of runs): worse."
    ]


def test_no():
    failed = candidate("row", "worse", 0.2), candidate("mxfp4", "diverges", None)
    assert decided(*failed, steps=34).verdict.answer == (
        "No, in runs of 34 of 200 steps: every recipe that was trained ends with a higher loss "
        "(row +0.2000, mxfp4 diverges)."
    )


def test_not_decided_names_the_minutes_and_the_command():
    """Pairs of 3 minutes; a deviation of 1/4 of the target needs few more, one of 4 times many."""
    near = decided(candidate("row", "not decided", 0.008)).verdict.answer
    assert near.startswith("Not decided: run ")
    words = near.split()
    minutes = int(words[3])
    assert words[-2:] == [f"{60 * minutes}", words[-1]]
    assert minutes >= 3
    untried = decided(candidate("row", "not trained", None)).verdict
    assert untried.answer.startswith("Not decided: run ")
    assert untried.savings[0].startswith("If it trains as well: On h100")
    assert "was not trained yet" in untried.reasons[0]


def test_a_candidate_that_all_looks_leave_open():
    row = candidate("row", "not decided", 0.008)
    row.seeds = 256
    assert decided(row).verdict.answer.startswith("Not decided: run 1 more minute ")


def test_nothing_is_trained_yet():
    """No candidate needs a run; without a run, the whole budget."""
    assert decided().verdict.answer == (
        "Not decided: run 1 more minute with this command: go --budget 60 3"
    )
    empty = Findings(settings={"budget": 300.0})
    decide(empty, lambda seconds, seeds: f"go {seconds:g}")
    assert (
        empty.verdict.answer
        == "Not decided: run 5 more minutes with this command: go 300"
    )
    assert str(Findings().verdict) == ""


def test_other_recipes_are_not_mentioned():
    rows = [candidate("row", "as the reference"), candidate("nvfp4", "worse", 0.2)]
    verdict = decided(*rows).verdict
    assert len(verdict.reasons) == 1
    assert "nvfp4" not in str(verdict)


def test_layers_that_get_slower_are_explained():
    row = candidate("row", "as the reference")
    verdict = decided(row, forecasts=[forecast("h100", 3.3, "row")]).verdict
    assert verdict.savings[0].startswith(
        "On h100, no time is saved: the matrix products of a training step are 0.91 times as fast"
    )
    assert "9 of 9 layers on h100" in verdict.reasons[-1]


def test_devices_that_agree_share_a_line_and_the_compiler_replaces_the_estimate():
    row = candidate("row", "as the reference")
    rows = [forecast(name, 2.0, "row") for name in ("h100", "h200", "b200")]
    rows.append(forecast("b200", 2.5, "row", source="compiler"))
    first, second = decided(row, forecasts=rows).verdict.savings
    assert first.startswith("On h100 and h200, the matrix products")
    assert second.startswith(
        "On b200, a training step is 1.20 times as fast; what it saves"
    )
    assert second.endswith("(forecast from the compiler's code).")


def test_words_of_an_unknown_recipe_and_of_bytes():
    assert recipe_in_words("mine") == "recipe mine"
    sizes = [0, 999.4, 999.6, 2.5e6, 3e13]
    assert list(map(bytes_in_words, sizes)) == [
        "0 B",
        "999 B",
        "1 kB",
        "2.5 MB",
        "30 TB",
    ]
