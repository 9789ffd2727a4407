"""`fp8.record`: what is written for whom, the page of it, and where two runs part."""

import json
import math
import sys
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fp8
from fp8.__main__ import main
from fp8.casts.watch import Seen, watch_of
from fp8.lab.record.diff import diff
from fp8.lab.record.page import page
from fp8.lab.record.recorder import merged
from fp8.lab.record.runs import Loss, Run, as_line, read
from tests.launch import needs_gloo, run_ranks
from tests.shared import assert_same, linears, normal, parametrize, refuses, seeded

LOOKS = [1, 2, 3, 4, 6, 8, 9, 12]
pytestmark = pytest.mark.filterwarnings("ignore::fp8.PitfallWarning")


class Backwards(nn.Module):
    """Its layers are registered from the last to the first."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, x):
        return self.last(F.gelu(self.first(x)))


def made():
    """A converted model, and a batch."""
    torch.manual_seed(0)
    model, x = Backwards(), torch.randn(64, 32)
    return fp8.convert(model, "static", backend="simulate"), x


def train(
    writer, wrong=False, compiled=False, early=False, steps=12, start=0, ask=None
):
    """Trains with a record of each third pass; returns the losses. ask: after each step, of the
    recorder, the model and the batch."""
    model, x = made()
    if wrong:
        fp8.calibrate(model, 2**12 * x)
        fp8.calibrate(model, scales=fp8.calibration(model), freeze=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    another = fp8.convert(linears(8, 8), "static")  # trains in this process, too
    other = torch.optim.SGD(another.parameters())
    run = torch.compile(model, backend="aot_eager") if compiled else model
    losses = []
    with fp8.record(run, writer=writer, every=3, start=start) as recorder:
        assert watch_of(model).every == 3
        for _ in range(start, steps):
            loss = run(x).square().mean()
            other.step()
            other.step()
            loss.backward()
            if early:
                recorder.step(loss)
            optimizer.step()
            if not early:
                recorder.step(loss)
            losses.append(loss.item())
            if ask is not None:
                ask(recorder, run, x)
            optimizer.zero_grad()
    recorder.close()
    assert not watch_of(model).listeners
    assert not watch_of(model).every
    return losses


@parametrize("case", ["early", "late", "compiled"])
def test_a_file_has_the_looks_and_the_losses(tmp_path, case):
    path = tmp_path / "run.jsonl"
    losses = train(path, early=case == "early", compiled=case == "compiled")
    run = read(path)
    assert run.header["layers"] == {"last": "static", "first": "static"}
    assert run.header["every"] == 3
    assert run.losses == [Loss(step=i, loss=loss) for i, loss in enumerate(losses, 1)]
    assert list(dict.fromkeys(row.step for row in run.rows)) == LOOKS
    first = [row for row in run.rows if row.step == 1]
    operands = ("input", "weight", "grad")
    assert [(row.layer, row.operand) for row in first] == [
        (layer, operand) for layer in ("first", "last") for operand in operands
    ]
    _, x = made()
    assert first[0].rms == pytest.approx(x.square().mean().sqrt().item())
    assert first[0].largest == pytest.approx(x.abs().max().item())
    with refuses("start=N", FileExistsError):
        train(path)


def test_a_killed_run_goes_on(tmp_path):
    path = tmp_path / "run.jsonl"
    train(path)
    path.write_bytes(path.read_bytes()[:-9])
    losses = train(path, start=7, steps=9)
    run = read(path)
    assert [row.step for row in run.losses] == list(range(1, 10))
    assert [row.loss for row in run.losses[7:]] == losses
    assert list(dict.fromkeys(row.step for row in run.rows)) == LOOKS[:-1]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is of Linux")
def test_a_full_disk_does_not_end_a_training():
    with pytest.warns(fp8.PitfallWarning, match="full ends at step 1: .*No space"):
        assert len(train("/dev/full", start=1)) == 11


def test_what_another_recipe_would_lose(tmp_path):
    def state(run):
        watch = watch_of(run)
        tensors = [*run.state_dict().values(), *(p.grad for p in run.parameters())]
        return [*tensors, torch.get_rng_state(), watch.step, watch.looks]

    def ask(recorder, run, x):
        before = deepcopy(state(run))
        asked.append(recorder.what_if("row", x, lambda y: y.square().mean()))
        assert_same(state(run), before)

    asked, records = [], []
    path = tmp_path / "run.jsonl"
    assert train(path, ask=ask) == train([].append)
    assert str(read(path).what_ifs) == str(asked)
    assert "What other recipes would lose in step 13" in page(read(path), "run")
    model, x = made()
    with fp8.record(model, writer=records.append) as recorder:
        rows = recorder.what_if("row", x).rows
    fp8.convert(model, "row", backend="simulate")
    with fp8.record(model, writer=records.append):
        y = model(x)
        y.backward(torch.randn(y.shape, generator=seeded(0)))
    assert str([vars(row) for row in rows]) == str(records[-1]["rows"])


def rank_trains(rank, store):
    """Each process has its own input; the second one has a record of its own, too."""
    groups = [dist.new_group([number]) for number in range(2)]
    model, x = made()
    both, own = [], []
    for group, records in ((None, both), (groups[rank], own)):
        with fp8.record(model, writer=records.append, group=group) as recorder:
            for step in range(5):
                model(x * (1 + rank)).sum().backward()
                recorder.step(step + rank)
    with refuses("not in the group"):
        fp8.record(model, writer=print, group=groups[1 - rank])
    losses = [[r["loss"] for r in each if r["kind"] == "loss"] for each in (both, own)]
    looks = [[r["rows"] for r in each if r["kind"] == "rows"] for each in (both, own)]
    if rank == 0:
        assert losses == [[0.5, 1.5, 2.5, 3.5, 4.5], [0, 1, 2, 3, 4]]
        assert looks[0][0][0]["largest"] == 2 * looks[1][0][0]["largest"]
    else:
        assert both == []
        assert losses[1] == [1, 2, 3, 4, 5]
    print(f"rank {rank} done")


@needs_gloo
def test_the_looks_of_all_processes_are_one_record(tmp_path):
    run_ranks(rank_trains, 2, tmp_path / "store", warnings="default")


def test_trackers_and_functions_get_the_same_rows():
    records, values, logged = [], {}, []
    train((records.append, [].append))
    board = SimpleNamespace(
        add_scalar=lambda *value: values.update({value[::2]: value[1]})
    )
    train(board)
    train(SimpleNamespace(log=logged.append))
    assert [r["kind"] for r in records[:3]] == ["header", "rows", "loss"]
    looks = [r for r in records if r["kind"] == "rows"]
    grad = next(row for row in looks[3]["rows"] if row["operand"] == "grad")
    assert values["fp8/first/grad/sqnr", 4] == grad["sqnr"]
    steps = [one["fp8/step"] for one in logged if "fp8/first/grad/sqnr" in one]
    assert steps == LOOKS
    assert logged[-1]["fp8/loss"] == values["fp8/loss", 12] == records[-1]["loss"]


def test_the_last_look_is_read_without_an_optimizer():
    (model, x), records = made(), []
    with fp8.record(model, writer=records.append):
        model(x).sum().backward()
    assert [record["kind"] for record in records] == ["header", "rows"]


def test_what_is_refused():
    model = linears(32, 32)
    with refuses(r"call fp8\.convert first"):
        fp8.record(model, writer=print)
    fp8.convert(model, "static", backend="simulate")
    with refuses("writer is of type int: expected a path", TypeError):
        fp8.record(model, writer=3)
    with refuses("every must be a whole number from 1"):
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
    with refuses("line 2: not a line of"):
        read(path)
    for text in ("", lines[2]):
        path.write_text(text)
        with refuses("expected a header"):
            read(path)


@parametrize(
    "fields, parts",
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
    with refuses("in both records"):
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
    assert lines[1].startswith("  first input: scale 1 and 4.1e+03")
    places = [line.split()[0] for line in lines[1:-1]]
    assert places == ["first", "last", "loss", "last", "first"]
    assert lines[-1] == "Only in the first: 5 looks, at steps 4 to 12"
    assert main(["record", "page", str(bad), "-o", str(page)]) == 0
    text = page.read_text()
    row = read(bad).rows[0]
    assert f"first input (e4m3), step 1: {row.zero:.3%} become zero" in text
    assert text.count('<td colspan="3" class=') == 6
    assert text.count('class="c4" title="first input') == 1
    assert text.index("first</th>") < text.index("last</th>")
    assert "src=" not in text
    assert "http" not in text
    assert "<polyline" in text
    bad.write_text(json.dumps({"kind": "header", "layers": {}}))
    assert main(["record", "page", str(bad)]) == 2
    assert "has no look" in capsys.readouterr().err


def test_a_record_leaves_the_scales_of_a_run():
    """Its own looks, as in the 6th and 7th pass, measure nothing anew."""
    model = fp8.convert(linears(32, 32), "static")
    found = []
    with fp8.record(model, writer=lambda record: None, every=1):
        for size in (1, 1, 1, 1, 1, 128, 128):
            model(size * normal(64, 32)).sum().backward()
            found.append(fp8.calibration(model))
        assert watch_of(model).looks
    assert found[-1] == found[1]
