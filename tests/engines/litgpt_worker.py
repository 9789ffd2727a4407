"""One of two processes of test_litgpt: ``python litgpt_worker.py RANK STORE``, as torchrun starts
them. litgpt's pretraining with DistributedDataParallel: our plugin, against a model converted by
hand, and against none."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

RANK, STORE = int(sys.argv[1]), Path(sys.argv[2])
os.environ |= {"RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1], "WORLD_SIZE": "2"}
os.environ |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
os.environ["MASTER_ADDR"] = "127.0.0.1"
sys.argv = ["litgpt", "pretrain", "tiny"]

from litgpt import pretrain  # noqa: E402
from torch import nn  # noqa: E402

import fp8  # noqa: E402
from fp8.adapters.lightning import FP8FabricPrecision  # noqa: E402
from tests.engines.test_litgpt import differs, pretrained  # noqa: E402


def where(name: str, layer: nn.Module) -> bool:
    return name != "lm_head"


def main() -> None:
    fabric = {"devices": 2, "strategy": "ddp"}
    trained = pretrained(STORE / "plugin", [FP8FabricPrecision("tensor", where=where)], **fabric)
    plain = pretrained(STORE / "plain", [], **fabric)
    make = pretrain.GPT
    with mock.patch.object(
        pretrain, "GPT", lambda config: fp8.convert(make(config), "tensor", where=where)
    ):
        by_hand = pretrained(STORE / "hand", [], **fabric)
    assert not differs(trained, by_hand)
    assert differs(trained, plain)
    print("rank", RANK, "done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
