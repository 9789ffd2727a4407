"""Kills itself while it writes a checkpoint: ``python killed_writer.py PATH MOMENT``."""

import os
import signal
import sys

import torch

from fp8.checkpoints.files import save_checkpoint


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(path: str, moment: str) -> None:
    save_checkpoint({"step": 1, "x": torch.ones(1000)}, path)
    if moment == "writing":
        torch.save = lambda _, file: (file.write(b"PK half of a file"), file.flush(), die())
    elif moment == "synced":
        os.replace = die
    elif moment == "renamed":
        replace = os.replace
        os.replace = lambda *paths: (replace(*paths), die())
    save_checkpoint({"step": 2, "x": torch.ones(1000)}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
