"""torchtitan, run for real: its Trainer on the CPU, with our converter, on its debug models."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp8
from fp8.adapters.torchtitan import FP8Converter
from tests.shared import proves, refuses

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip(
        "torchtitan: its own environment, make test-engines", allow_module_level=True
    )

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("torchtitan_worker.py")


def run(folder, model, *cases):
    command = [sys.executable, "-W", "ignore", WORKER, folder, model, *cases]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return run(
        tmp_path_factory.mktemp("llama"), "llama", "plain", "hand", "tensor", "policy"
    )


@proves("the field", "in torchtitan's Trainer", how="library")
def test_recipe(llama):
    """The losses are those of torchtitan's own layers with their products under a mode."""
    assert llama["tensor"] == llama["hand"]
    assert llama["tensor"] != llama["plain"]
    assert llama["tensor"][-1] < llama["tensor"][0]


def test_policy(llama):
    """Its rule leaves lm_head as it is: other losses than under the recipe alone."""
    assert llama["policy"] != llama["tensor"]
    assert llama["policy"] == pytest.approx(
        llama["plain"], rel=2**-4
    )  # e4m3's largest error


def test_deepseek(tmp_path):
    found = run(tmp_path, "deepseek", "plain", "tensor", "policy")
    assert found["tensor"] != found["plain"] != found["policy"]
    assert found["policy"] == pytest.approx(found["plain"], rel=2**-4)
    assert found["policy"][-1] < found["policy"][0]


def test_wrong_arguments():
    with refuses(r"unknown recipe 'tensr'; .* did you mean 'tensor'"):
        FP8Converter("tensr")
    with refuses(r"unknown backend 'torchao'"):
        FP8Converter(backend="torchao")
    with refuses(r"does not call fp8\.advance"):
        FP8Converter(fp8.Policy("tensor", switch=((0.9, "bf16"),)))
