"""`make test` runs the tests in several processes: one thread for each, and for what it starts."""

import gc
import os
import random
import sys
from collections import Counter
from contextlib import ExitStack

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
# Inductor compiles a few small kernels: processes for it take longer to start than they save.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Each of the processes that tests start would compile the packages anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
SPELLED = "str int float bool NoneType dtype Format".split()

gc.disable()  # until the tests are collected


def pytest_collection_finish():
    """What the tests are made of, a million objects, stays: the garbage collector, which walked
    them again and again while something was compiled, is told to leave them alone."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True)
def fresh():
    """Each test begins with the same random numbers, and with nothing compiled: torch compiles one
    function, such as its own wrappers, a few times only."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def needs_native(item):
    """Whether a test needs FP8 products of the CPU, by a mark or by a parameter's name."""
    call = getattr(item, "callspec", None)
    named = "native" in map(str, call.params.values()) if call else False
    return named or item.get_closest_marker("native") is not None


def spelled(val):
    """Whether a value has the same text in each process."""
    if isinstance(val, dict):
        return all(map(spelled, val.items()))
    if isinstance(val, list | tuple):
        return all(map(spelled, val))
    return type(val).__name__ in SPELLED


def pytest_make_parametrize_id(val):
    """Dtypes, formats and short collections are spelled out, which pytest counts."""
    return str(val) if spelled(val) and len(str(val)) < 80 else None


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items):
    sample(items)
    skip_native(items)
    skip_vmap(items)


def sample(items):
    """Marks all but one of every N cases of a test with the marker sampled(N) as exhaustive."""
    cases = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            if cases[name] % mark.args[0]:
                item.add_marker(pytest.mark.exhaustive)
            cases[name] += 1


def skip_native(items):
    """Torch 2.11 has FP8 products for GPUs only."""
    native = [x for x in items if needs_native(x) and not x.get_closest_marker("gpu")]
    if native:
        import torch

        from fp8.kernels.kernel import why_not_device

        if why_not := why_not_device(torch.device("cpu")):
            for item in native:
                item.add_marker(pytest.mark.skip(reason=why_not))


def skip_vmap(items):
    """Torch 2.12 has no vmap of a view in another dtype, which every cast takes."""
    mapped = [item for item in items if item.get_closest_marker("vmap")]
    if mapped:
        import torch

        if torch.__version__ < (2, 13):
            skip = pytest.mark.skip(
                reason="torch 2.12 has no vmap of a view in another dtype"
            )
            for item in mapped:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """4,000 characters of words in random order: something to learn in a few steps."""
    words = random.Random(0).choices(
        ["the ", "quick ", "brown ", "fox ", "jumps.\n"], k=1000
    )
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(words)[:4000])
    return path


@pytest.fixture
def own_rows():
    """Rules and recipes that a test registers are gone after it."""
    from unittest.mock import patch

    from fp8.recipes import recipe, rules

    with ExitStack() as stack:
        for table in (recipe.RECIPES, rules.RULES, rules.LOWERED, rules.FORM_OF):
            stack.enter_context(patch.dict(table))
        yield


@pytest.fixture
def no_code(monkeypatch):
    """Inductor makes no code of its graphs: without a C compiler, and in a tenth of the time. Other
    tests, such as tests/transforms/test_utils.py, compile to the end."""
    import torch

    compile, instead = torch.compile, {"inductor": "aot_eager"}

    def graphs(model=None, *, backend="inductor", **options):
        return compile(model, backend=instead.get(backend, backend), **options)

    monkeypatch.setattr(torch, "compile", graphs)


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_thread():
    """torch computes in one thread, as in the processes that tests start."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
