"""Two processes, started by torchrun: the losses of one, and killed ones continue."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from notebooks.nanogpt.cli import main
from notebooks.nanogpt.parallel import start
from tests.launch import ENVIRONMENT, run_processes

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="built without gloo")

WORKER = Path(__file__).with_name("parallel_worker.py")

#: (variant, communication) -> the largest difference of a loss from that of one process. Sums over
#: processes are rounded in another order, by 2**-24, and what is then rounded to FP8 may fall on
#: the other side of a step: one product in a million differs by 2**-4 of itself. In FP8, gradients
#: differ by up to 2**-4, and AdamW makes of them updates that do, of weights of RMS 1 in
#: 20 steps of at most 0.1; and the weights of the plain model are rounded, by 2**-4.
TOLERANCE = {
    ("fp32", "fp32"): 1e-5,
    ("unit_scaled_fp8", "fp32"): 2e-3,
    ("fp32", "fp8"): 0.05,
    ("unit_scaled_fp8", "fp8"): 0.05,
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def two(commands: list[list[str]]) -> list[tuple[int, str]]:
    """(exit code, what it printed) of two processes that run these command lines."""
    where = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    work = json.dumps([(free_port(), command) for command in commands])
    ranks = [where | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    return run_processes(WORKER, [[work]] * 2, ranks, timeout=600, warnings="default")


def test_torchrun_starts_it(tmp_path: Path, argv, losses) -> None:
    command = argv(variants="fp32", iters=10)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = ["-m", "notebooks.nanogpt", *command, "--parallel=ddp", f"--out={tmp_path / 'two'}"]
    done = subprocess.run(
        [sys.executable, *launch, *program],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results ") == 1  # the first process prints, and it alone
    main([*command, f"--out={tmp_path / 'one'}"])
    check_close(losses(tmp_path / "one"), losses(tmp_path / "two"), "fp32")


def flags(kind: str, communication: str, out: Path) -> list[str]:
    return [f"--parallel={kind}", f"--communication={communication}", f"--out={out}"]


def check_close(expected, got, communication: str) -> None:
    for (variant, seed), (batch_loss, curves, _) in expected.items():
        close = pytest.approx(batch_loss, abs=TOLERANCE[variant, communication])
        assert got[variant, seed][0] == close
        assert got[variant, seed][0] != batch_loss
        close = pytest.approx(curves["val"], abs=TOLERANCE[variant, communication])
        assert got[variant, seed][1]["val"] == close


#: kind -> what it sends gradients in, and which of two processes is killed.
KILLED = {"ddp": ("fp32", 1), "fsdp": ("fp8", 0)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kinds", [["fsdp"], pytest.param(["ddp", "fsdp"], marks=pytest.mark.exhaustive)], ids=str
)
def test_two_processes_train_as_one_and_resume_after_a_kill(
    tmp_path: Path, argv, losses, kinds: list[str]
) -> None:
    """One of two is killed in the middle of a step; the other fails, and nothing is lost: both,
    started again, give the losses of a run that nobody disturbed. (To the bit; in FP8, DDP would
    round otherwise after the start, as it arranges its buckets anew.)"""
    plain = argv(variants="fp32", iters=10, sample=0)
    scaled = argv(variants="unit_scaled_fp8", iters=10, sample=0)
    ways = {("fsdp", "fp32"): scaled, ("fsdp", "fp8"): plain, ("ddp", "fp8"): scaled}
    eight_bit = [*scaled, "--optimizer=8bit", *flags("fsdp", "fp8", tmp_path / "8bit")]
    dropout = argv("--resume", variants="unit_scaled_fp8", dropout=0.2, sample=0)
    killed, undisturbed = (
        {
            kind: [*dropout, *flags(kind, KILLED[kind][0], tmp_path / f"{kind}-{fate}")]
            for kind in kinds
        }
        for fate in ("killed", "undisturbed")
    )
    for kind in kinds:
        victim = KILLED[kind][1]
        results = two([[*killed[kind], f"--dies={victim}"]])
        assert results[victim][0] == -signal.SIGKILL
        assert results[1 - victim][0] not in (0, 2), results[1 - victim][1]
        assert (tmp_path / f"{kind}-killed" / "checkpoints" / "unit_scaled_fp8-seed0.pt").exists()
    names = {way: tmp_path / "-".join(way) for way in ways}
    runs = [[*command, *flags(*way, names[way])] for way, command in ways.items()]
    results = two([*runs, eight_bit, *killed.values(), *undisturbed.values()])
    assert [code for code, _ in results] == [0, 0], "\n".join(printed for _, printed in results)
    for kind in kinds:
        expected = losses(tmp_path / f"{kind}-undisturbed")
        assert losses(tmp_path / f"{kind}-killed") == expected
    main([*plain, f"--out={tmp_path / 'plain'}"])
    main([*scaled, f"--out={tmp_path / 'scaled'}"])
    check_close(losses(tmp_path / "scaled"), losses(tmp_path / "8bit"), "fp8")
    for way, folder in names.items():
        one = tmp_path / ("plain" if ways[way] is plain else "scaled")
        check_close(losses(one), losses(folder), way[1])


def test_bad_input(argv, refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    message = refused(argv("--parallel=ddp"))
    assert "--parallel ddp needs torchrun --nproc-per-node N -m notebooks.nanogpt: RANK" in message
    assert "--communication fp8 needs --parallel" in refused(argv("--communication=fp8"))
    assert "invalid choice: 'tp'" in refused(argv("--parallel=tp"))
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in environment.items() | {("MASTER_PORT", str(free_port()))}:
        monkeypatch.setenv(name, value)
    with start("ddp") as one:
        assert (one.rank, one.world) == (0, 1)
