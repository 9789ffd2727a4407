"""`make test-engines`: an environment for each engine, and its test there.

    python -m tests.engines.environments [NAME ...]

An environment is a folder in ``out/engines``. It sees the packages of the interpreter that runs
this script, and has the engine and what else it needs by itself, so that engines with
requirements that contradict each other, or ours, have no effect on that of the other
tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "out" / "engines"


class Engine(NamedTuple):
    """A row of ENGINES."""

    packages: tuple[str, ...]
    """What pip installs, the first with all that it requires."""
    alone: tuple[str, ...] = ()
    """What pip installs without its requirements, which contradict those of other libraries."""
    compiled: tuple[str, ...] = ()
    """What pip compiles with CUDA's nvcc, at last, against the packages; these then have versions
    of their own, and are not those of constraints.txt."""
    tests: tuple[str, ...] = ()
    """Tests beside tests/engines/test_NAME.py that run there."""
    python: tuple[int, int] = (3, 10)
    """The oldest Python."""


ENGINES = {
    # It imports triton, which torch for CPUs does not bring.
    "torchtitan": Engine(("torchtitan==0.3.0", "triton"), python=(3, 11)),
    # It asks for a huggingface_hub that transformers 5 cannot use.
    "litgpt": Engine(("jsonargparse[signatures]==4.41.0",), alone=("litgpt==0.5.13",)),
    "deepspeed": Engine(("deepspeed==0.19.8",)),
    "trl": Engine(("trl==1.16.0",), python=(3, 11)),
    # It asks for other versions of torch and of nearly all that it imports.
    "axolotl": Engine(
        ("numba==0.68.1", "addict==2.4.0", "datasets==5.2.0"),
        alone=("axolotl==0.19.0", "trl==1.9.0"),
        python=(3, 11),
    ),
    "transformer_engine": Engine(
        (
            *"torch==2.14.1 onnx onnxscript pydantic packaging importlib-metadata".split(),
            *("nvdlfw-inspect", "nvidia-mathdx", "nvidia-cudnn-frontend"),
            *("pybind11", "ninja", "setuptools", "wheel"),
        ),
        alone=("transformer-engine==2.20.2", "transformer-engine-cu13==2.20.2"),
        compiled=("transformer-engine-torch==2.20.2",),
        tests=tuple(
            f"tests/fp8/adapters/test_{name}.py"
            for name in ("te_recipe", "transformer_engine")
        ),
    ),
}
"""Name, that of the module and of tests/engines/test_NAME.py -> what its environment has."""


def create(name):
    """The interpreter of the engine's environment, which is made if it is not complete."""
    engine, folder = ENGINES[name], FOLDER / name
    python, done = folder / "bin" / "python", folder / "complete"
    wanted = repr(engine)
    if done.exists() and done.read_text() == wanted:
        return python
    venv.create(folder, with_pip=True, clear=True)
    inside = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    target = Path(subprocess.check_output(inside, text=True).strip())
    (target / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not engine.compiled:
        pip += ["-c", ROOT / "constraints.txt"]
    if engine.alone:
        subprocess.run([*pip, "--no-deps", *engine.alone], check=True)
    subprocess.run([*pip, *engine.packages], check=True)
    if engine.compiled:
        options = ["--no-build-isolation", "--no-deps"]
        subprocess.run(
            [*pip, *options, *engine.compiled], check=True, env=_cuda(python)
        )
    done.write_text(wanted)
    return python


def _cuda(python):
    """The environment of a compilation against CUDA's headers and libraries in pip's packages."""
    inside = [python, "-c", "import nvidia; print(list(nvidia.__path__)[0])"]
    root = Path(subprocess.check_output(inside, text=True).strip())
    folders = [root / name for name in "cu13 cudnn nccl nvshmem".split()]
    dry = ["nvcc", "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    steps = subprocess.run(dry, capture_output=True, text=True, check=True).stderr
    (toolkit,) = re.findall(r"^#\$ TOP=(.*?)\s*$", steps, re.MULTILINE)
    return os.environ | {
        "CUDA_HOME": str(Path(toolkit).resolve()),
        "CPATH": ":".join(str(folder / "include") for folder in folders),
        "LIBRARY_PATH": ":".join(str(folder / "lib") for folder in folders),
        "NVTE_FRAMEWORK": "pytorch",
        "MAX_JOBS": "2",
    }


def main(names):
    """Runs the tests of the engines; returns the number of those that failed."""
    failed = 0
    for name in names or ENGINES:
        if sys.version_info < ENGINES[name].python:
            print(
                f"{name}: skipped, needs Python {'.'.join(map(str, ENGINES[name].python))}"
            )
            continue
        if ENGINES[name].compiled and shutil.which("nvcc") is None:
            print(f"{name}: skipped, needs CUDA's nvcc")
            continue
        python = create(name)
        tests = [f"tests/engines/test_{name}.py", *ENGINES[name].tests]
        # deepspeed compiles a part of itself at its first run, for minutes
        settings = os.environ | {
            "TORCH_EXTENSIONS_DIR": str(FOLDER / name / "extensions")
        }
        run = [
            python,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--timeout=900",
            *tests,
        ]
        failed += subprocess.run(run, cwd=ROOT, env=settings).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
