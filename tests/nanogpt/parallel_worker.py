"""One of several processes that run the program: ``python parallel_worker.py COMMANDS``.

COMMANDS: JSON of ports to meet at and command lines. One start serves them all, unless it dies.
"""

import json
import os
import signal
import sys

from notebooks.nanogpt import train
from notebooks.nanogpt.cli import main


def dies(step: int) -> None:
    """Makes this process kill itself in the middle of that step."""
    train_step = train.Training._train_step

    def instead(training: train.Training, number: int) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(training, number)

    train.Training._train_step = instead


if __name__ == "__main__":
    for port, command in json.loads(sys.argv[1]):
        os.environ["MASTER_PORT"] = str(port)
        if f"--dies={os.environ['RANK']}" in command:
            dies(step=13)
        main([part for part in command if not part.startswith("--dies")])
