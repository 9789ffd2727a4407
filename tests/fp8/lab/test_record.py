"""`fp8.record`: what is written for whom, the page of it, and where two runs part."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fp8
from fp8.__main__ import main
from fp8.casts.watch import Seen, watch_of
from fp8.lab.record.diff import diff
from fp8.lab.record.recorder import merged
from fp8.lab.record.runs import Loss, Run, as_line, read
from tests.shared import linears

LOOKS = [1, 2, 3, 4, 6, 8, 9, 12]
pytestmark = pytest.mark.filterwarnings("ignore::fp8.PitfallWarning")


def train(writer, wrong=False, compiled=False, early=False, steps=12):
    """Trains with a record of each third pass; returns what closes it, and the losses."""
    torch.manual_seed(0)
    model = linears(32, 64, nn.GELU, 32)
    fp8.convert(model, "static", backend="simulate")
    x = torch.randn(64, 32)
    if wrong:
        fp8.calibrate(model, 2**12 * x)
        fp8.calibrate(model, scales=fp8.calibration(model), freeze=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    losses = []
    with fp8.record(run, writer=writer, every=3) as recorder:
        assert watch_of(model).every == 3
        for _ in range(steps):
            loss = run(x).square().mean()
            loss.backward()
            if early:
                recorder.step(loss)
            optimizer.step()
            if not early:
                recorder.step(loss)
            optimizer.zero_grad()
            losses.append(loss.item())
    recorder.close()
    assert not watch_of(model).listeners
    assert not watch_of(model).every
    return losses


@pytest.mark.parametrize("case", ["early", "late", "compiled"])
def test_a_file_has_the_looks_and_the_losses(tmp_path, case):
    path = tmp_path / "run.jsonl"
    losses = train(path, early=case == "early", compiled=case == "compiled")
    run = read(path)
    assert run.header["layers"] == {"0": "static", "2": "static"}
    assert run.header["every"] == 3
    assert run.losses == [Loss(step=i, loss=loss) for i, loss in enumerate(losses, 1)]
    assert list(dict.fromkeys(row.step for row in run.rows)) == LOOKS
    first = [row for row in run.rows if row.step == 1]
    named = {(row.layer, row.operand): row for row in first}
    operands = ("input", "weight", "grad")
    assert named.keys() == {(n, o) for n in "02" for o in operands}
    torch.manual_seed(0)
    linears(32, 64, nn.GELU, 32)
    x = torch.randn(64, 32)
    assert named["0", "input"].rms == pytest.approx(x.square().mean().sqrt().item())
    assert named["0", "input"].largest == pytest.approx(x.abs().max().item())
    with pytest.raises(FileExistsError):
        train(path)


def test_trackers_and_functions_get_the_same_rows():
    records, values, logged = [], {}, []
    train(records.append)
    board = SimpleNamespace(
        add_scalar=lambda *value: values.update({value[::2]: value[1]})
    )
    train(board)
    train(SimpleNamespace(log=logged.append))
    assert [r["kind"] for r in records[:3]] == ["header", "rows", "loss"]
    looks = [r for r in records if r["kind"] == "rows"]
    grad = next(row for row in looks[3]["rows"] if row["operand"] == "grad")
    assert values["fp8/0/grad/sqnr", 4] == grad["sqnr"]
    steps = [one["fp8/step"] for one in logged if "fp8/0/grad/sqnr" in one]
    assert steps == LOOKS
    assert logged[-1]["fp8/loss"] == values["fp8/loss", 12] == records[-1]["loss"]


def test_the_last_look_is_read_without_an_optimizer():
    model, records = linears(32, 32), []
    fp8.convert(model, "static", backend="simulate")
    with fp8.record(model, writer=records.append):
        model(torch.ones(8, 32)).sum().backward()
    assert [record["kind"] for record in records] == ["header", "rows"]


def test_what_is_refused():
    torch.manual_seed(0)
    model = linears(32, 32)
    with pytest.raises(ValueError, match=r"call fp8\.convert first"):
        fp8.record(model, writer=print)
    fp8.convert(model, "static", backend="simulate")
    with pytest.raises(TypeError, match="writer is of type int: expected a path"):
        fp8.record(model, writer=3)
    with pytest.raises(ValueError, match="every must be a whole number from 1"):
        fp8.record(model, writer=print, every=0)
    assert not watch_of(model).every


SEEN = Seen(
    layer="a", operand="input", format="e4m3", step=1, scale=1.0, rms=3.0, largest=4.0,
    zero=0.1, saturated=0.0, nonfinite=0.0, sqnr=30.0,
)  # fmt: skip


def test_the_worst_rank_stays_visible():
    other = replace(SEEN, rms=4.0, largest=math.nan, zero=0.0, saturated=0.5, sqnr=9.0)
    elsewhere = replace(SEEN, layer="b")
    row, rest = merged([SEEN, other, elsewhere])
    assert (row.zero, row.saturated, row.sqnr) == (0.1, 0.5, 9.0)
    assert row.rms == pytest.approx(math.sqrt(12.5))
    assert math.isnan(row.largest)
    assert rest == elsewhere


def test_numbers_that_json_lacks_and_a_truncated_line(tmp_path):
    path = tmp_path / "run.jsonl"
    record = {"kind": "rows", "step": 1, "rows": [vars(replace(SEEN, sqnr=math.inf))]}
    lines = [as_line(r) for r in ({"kind": "header"}, record)]
    lines.append(as_line({"kind": "loss", "step": 1, "loss": math.nan}))
    path.write_text("".join(lines) + lines[1][:50])
    run = read(path)
    assert '"inf"' in lines[1]
    assert run.rows[0].sqnr == math.inf
    assert math.isnan(run.losses[0].loss)
    path.write_text(lines[0] + lines[1][:50] + "\n" + lines[2])
    with pytest.raises(ValueError, match="line 2: not a line of"):
        read(path)
    for text in ("", lines[2]):
        path.write_text(text)
        with pytest.raises(ValueError, match="expected a header"):
            read(path)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"scale": 2.0}, ""),
        ({"scale": 2.1}, "scale 1 and 2.1"),
        ({"saturated": 0.105}, ""),
        ({"saturated": 0.12}, "lost 10.00% and 12.00%"),
        ({"sqnr": 28.5}, "SQNR 30.0 and 28.5 dB"),
        ({"rms": 3.2}, ""),
        ({"rms": math.nan}, "RMS 3 and nan"),
    ],
)
def test_what_counts_as_a_difference(fields, parts):
    a, b = (
        Run(header={}, rows=[row], losses=[Loss(step=2, loss=1.0)])
        for row in (SEEN, replace(SEEN, **fields))
    )
    found = diff(a, b)
    assert (found.step, found.lines) == (
        (1, [f"a input: {parts}"]) if parts else (None, [])
    )
    b.losses[0] = Loss(step=2, loss=1.02)
    assert diff(a, b).step == (1 if parts else 2)
    b.rows[0] = replace(b.rows[0], layer="b")
    with pytest.raises(ValueError, match="in both records"):
        diff(a, b)


def test_commands(tmp_path, capsys):
    good, bad, page = (tmp_path / n for n in ("good.jsonl", "bad.jsonl", "p.html"))
    train(good)
    train(bad, wrong=True, steps=3)
    assert main(["record", "diff", str(good), str(good)]) == 0
    assert "agree at every step" in capsys.readouterr().out
    assert main(["record", "diff", str(good), str(bad)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "The records part at step 1:"
    assert lines[1].startswith("  0 input: scale 1 and 4.1e+03")
    assert lines[-1] == "Only in the first: 5 looks, at steps 4 to 12"
    assert main(["record", "page", str(bad), "-o", str(page)]) == 0
    text = page.read_text()
    row = read(bad).rows[0]
    assert f"0 input (e4m3), step 1: {row.zero:.3%} become zero" in text
    assert text.count("<td class=") == 3 * 6
    much = sum(max(r.zero, r.saturated, r.nonfinite) > 0.1 for r in read(bad).rows)
    assert text.count('<td class="c4"') == much > 0
    assert "src=" not in text
    assert "http" not in text
    assert "<polyline" in text
    bad.write_text(json.dumps({"kind": "header", "layers": {}}))
    assert main(["record", "page", str(bad)]) == 2
    assert "has no look" in capsys.readouterr().err
