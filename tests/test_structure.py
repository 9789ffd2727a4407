"""The structure of the code: layers, sizes, exports, and what no module may do."""

import ast
import functools
import json
import sys
from graphlib import TopologicalSorter

import fp8
from tests.launch import ROOT, python
from tests.layers import CORE, HOOKS, LAYERS

PACKAGES = ("fp8", "unit_scaling")
NEEDED = ("torch", "numpy", "einops")

#: The modules that `import fp8` loads.
MAX_LOADED = 45

MAX_FUNCTION = 50
MAX_FILE = 650

#: Functions longer than that -> why.
LONG = {
    "fp8/products/attention.py:multi_head_attention_forward": "torch's signature is 27 lines"
}

#: Private names of torch: file -> name -> why it is needed.
PRIVATE = {
    "fp8/modes/control_flow.py": {
        "torch._higher_order_ops": "what a mode sees of torch.compiler.nested_compile_region"
    },
    "fp8/kernels/kernel.py": {
        "torch._scaled_mm": "what the compiler of torch 2.11 and 2.12 generates a call of"
    },
    "fp8/training/fsdp.py": {
        "torch.Tensor._make_wrapper_subclass": "FSDP2's extension asks for a tensor subclass",
        "torch.utils._pytree": "arguments of operations, lists of tensors among them",
    },
    "fp8/modes/dispatch.py": {
        "torch._grouped_mm": "what a mode sees of torch.nn.functional.grouped_mm"
    },
    "fp8/lab/forecast/card.py": {
        "torch._C": "functions that start CUDA",
        "torch._dynamo": "the compiler's questions about a device",
        "torch._functorch": "whether a backward pass is compiled with its forward pass",
        "torch._inductor": "one thread, no cache; constants on the CPU",
        "torch._subclasses": "FakeTensorMode: tensors of a device that is absent",
        "torch.autograd._engine_run_backward": "torch's engine asks the driver for streams",
        "torch.ops.aten._scaled_dot_product_attention_math": "attention that no kernel has",
        "torch.ops.aten._scaled_dot_product_flash_attention": "torch's choice asks the driver",
        "torch.utils._python_dispatch": "TorchDispatchMode: constants on the CPU",
    },
    "fp8/lab/forecast/assembly.py": {
        "torch._inductor": "the grid of a kernel in one of its configurations"
    },
    "fp8/lab/forecast/compiled.py": {
        "torch._inductor": "the kernels that it generates, and their arguments"
    },
    "fp8/lab/forecast/forecast.py": {"torch.utils._pytree": "the tensors of a batch"},
    "fp8/lab/forecast/hollow.py": {
        "torch._subclasses": "FakeTensorMode: torch's functions of shapes",
        "torch.utils._pytree": "arguments of operations",
        "torch.utils._python_dispatch": "TorchDispatchMode: operations without arithmetic",
    },
    "fp8/lab/forecast/replay.py": {
        "torch._inductor": "what loads kernels in generated code"
    },
    "fp8/lab/forecast/memory.py": {
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "a kernel, with dropout too",
    },
    "fp8/lab/trace.py": {
        "torch.utils._python_dispatch": "TorchDispatchMode: what sees the operations of ATen"
    },
    "fp8/casts/scaled_tensor.py": {
        "torch.Tensor._make_wrapper_subclass": "how a tensor of other tensors is made",
        "torch._C": "_disabled_torch_function_impl: what it computes is no ScaledTensor by itself",
        "torch.utils._python_dispatch": "return_and_correct_aliasing: compiled views share memory",
        "torch.utils._pytree": "arguments of operations, lists of tensors among them",
    },
    "fp8/torch_internals/inductor.py": {
        "torch._inductor": "compile(): a thread uses it while dynamo, which has a lock, compiles"
    },
    "fp8/torch_internals/compiling_flag.py": {
        "torch.compiler._is_compiling_flag": "what is_compiling() reads; set by torch 2.13 alone"
    },
    "fp8/torch_internals/decorators.py": {
        "torch._dynamo": "whether the compiler is imported, which takes seconds"
    },
    "fp8/torch_internals/flop_counter.py": {
        "torch.utils._python_dispatch": "the FLOP counters that are open"
    },
    "fp8/torch_internals/hidden_functions.py": {
        "torch._dynamo": "has read torch's list of overridable functions, and keeps it"
    },
    "unit_scaling/transforms/values/ranks.py": {
        "torch.distributed.distributed_c10d._get_default_store": "the store of the job"
    },
}


#: What asks whether a graph is compiled -> why no decorator of fp8.common.compiler serves.
COMPILING = {
    "fp8/modes/control_flow.py": "both branches of a condition are in a graph, one in eager code",
    "fp8/common/compiler.py": "the decorators, and what else differs in a graph",
    "fp8/torch_internals/autograd_functions.py": "what differs for an autograd function",
    "fp8/torch_internals/decorators.py": "a decorator",
    "fp8/torch_internals/running_calls.py": "which compiler a graph is for",
    "fp8/casts/operands.py": "a graph saves bytes whoever calls the function",
    "fp8/formats/random_bits.py": "an integer of a graph may be symbolic",
    "fp8/training/layer_norm2d.py": "exports have no autograd function, graphs no modes",
}


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


FILES = python_files(*PACKAGES)
SOURCES = [*FILES, *python_files("benchmarks", "docs", "notebooks")]
TESTS = python_files("tests")


def name_of(path):
    """The file relative to the repository, for messages and test ids."""
    return path.relative_to(ROOT).as_posix()


def module_of(path):
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(path): path for path in FILES}


def of_each(paths):
    """Decorator: one test that checks all files and names those that fail."""

    def decorate(check):
        def test():
            problems = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    problems.append(f"{name_of(path)}: {error}")
            assert paths
            assert not problems, "\n".join(problems)

        test.__doc__ = check.__doc__
        return test

    return decorate


each_file = of_each(FILES)
each_source = of_each(SOURCES)


@functools.cache
def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


# Layers


def imported(path):
    """The modules of this project that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(path, node)
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else base for name in inner}
    return {name for name in found if name.partition(".")[0] in PACKAGES}


def _absolute(path, node):
    if not node.level:
        return node.module or ""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *filter(None, [node.module])])


def height(package, module):
    """How many layers of a package or folder a module of it may import."""
    name = module.removeprefix(f"{package}.").split(".")[0]
    names = LAYERS[package].split()
    assert name in names, f"{module} has no place in LAYERS: add it to tests/layers.py"
    return names.index(name)


@each_file
def test_imports_point_down(path):
    module = module_of(path)
    if module in PACKAGES:  # it may import all of its modules
        assert all(name.startswith(f"{module}.") for name in imported(path))
        return
    for name in sorted(imported(path) - {module, HOOKS.get(module)}):
        assert name not in PACKAGES, (
            f"{module} imports the package {name}, not a module of it"
        )
        crosses = module.startswith("unit_scaling.") and name.startswith("fp8.")
        assert crosses or name.partition(".")[0] == module.partition(".")[0]
        for package in LAYERS:
            if module.startswith(f"{package}.") and name.startswith(f"{package}."):
                assert height(package, name) <= height(package, module), (
                    f"{module} imports {name}"
                )


IMPORTED = """
import json, sys, torch
before = set(sys.modules)
import fp8
core = set(sys.modules) - before
import unit_scaling
print(json.dumps([sorted(core), sorted(set(sys.modules) - before)]))
"""


def test_the_core_is_loaded_alone():
    """`import fp8` loads no module of the other tiers; neither package loads a library that is
    optional, nor torch's compiler."""
    core, both = json.loads(python("-c", IMPORTED))
    loaded = {name for name in core if name.partition(".")[0] == "fp8"}
    names = LAYERS["fp8"].split()
    tier = {"fp8", *(f"fp8.{name}" for name in names[: names.index(CORE) + 1])}
    assert {".".join(name.split(".")[:2]) for name in loaded} <= tier
    assert len(loaded) <= MAX_LOADED
    tops = {name.partition(".")[0] for name in both} - set(sys.stdlib_module_names)
    assert tops <= {*PACKAGES, *NEEDED}
    assert not [name for name in both if name.startswith("torch._dynamo")]


def test_the_package_has_few_names():
    assert len(fp8.__all__) <= 41


def test_late_names_are_those_that_are_typed():
    """The imports that a type checker reads are those that `fp8` makes when a name is read."""
    checked = next(
        node
        for node in parse(ROOT / "fp8/__init__.py").body
        if isinstance(node, ast.If)
    )
    typed = {}
    for node in checked.body:
        module = f"fp8.{node.module}" if node.module else "fp8"
        names = [alias.name for alias in node.names]
        typed |= {name: module if node.module else f"fp8.{name}" for name in names}
    assert typed == fp8.LATE
    assert all(getattr(fp8, name) is not None for name in typed)


def test_imports_make_no_circle():
    graph = {
        module: imported(path) - {module, HOOKS.get(module)}
        for module, path in MODULES.items()
        if path.name != "__init__.py"
    }
    # Raises CycleError, naming the circle.
    list(TopologicalSorter(graph).static_order())


# Sizes


@functools.cache
def code_lines(path):
    """The numbers of the lines that are neither blank nor only a comment."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return {
        number
        for number, line in lines
        if line.strip() and not line.lstrip().startswith("#")
    }


def functions(path):
    """Every function and its lines of code, signature included and docstring not."""
    code = code_lines(path)
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = code & set(range(node.lineno, node.end_lineno + 1))
            if ast.get_docstring(node) is not None:
                lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
            yield node.name, len(lines)


@each_source
def test_functions_are_short(path):
    sizes = {f"{name_of(path)}:{name}": size for name, size in functions(path)}
    long = {name: size for name, size in sizes.items() if size > MAX_FUNCTION}
    assert long.keys() == LONG.keys() & sizes, f"more than {MAX_FUNCTION} lines: {long}"


@of_each([*SOURCES, *TESTS])
def test_files_are_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE


# What no module does


def dotted(node):
    """`a.b.c` of an attribute chain; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def torch_names(tree):
    """Everything of torch that a module names: imports, attributes and strings."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {
                a.asname or a.name.partition(".")[0]: a.name for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            aliases |= {
                a.asname or a.name: f"{node.module}.{a.name}" for a in node.names
            }
    names = set(aliases.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = dotted(node).partition(".")
            names.add(f"{aliases.get(head, head)}.{rest}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value} if " " not in node.value else set()
    return {name for name in names if name.partition(".")[0] == "torch"}


def private(name):
    """The name up to its first private part, or None where all of it is public."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.startswith("_") and not part.endswith("__"):
            return ".".join(parts[: i + 1])
    return None


@each_file
def test_private_names_of_torch_are_listed(path):
    used = {private(name) for name in torch_names(parse(path))} - {None}
    assert used == PRIVATE.get(name_of(path), {}).keys()


@each_file
def test_what_differs_in_compiled_code_is_decided_in_few_places(path):
    names = {name.rpartition(".")[2] for name in torch_names(parse(path))}
    assert ("is_compiling" in names) == (name_of(path) in COMPILING)


@each_file
def test_configuration_is_not_read_from_the_environment_or_kept_in_globals(path):
    for node in ast.walk(parse(path)):
        assert not isinstance(node, ast.Global), (
            f"line {node.lineno}: a global statement"
        )
        name = dotted(node)
        assert name not in ("os.environ", "os.getenv"), f"line {node.lineno}: {name}"


@each_file
def test_optional_libraries_are_not_imported(path):
    """Core needs torch, numpy and einops. Whatever else a module needs it imports when it does."""
    for node in parse(path).body:
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [node.module]
        for name in found:
            top = name.partition(".")[0]
            assert top in {*sys.stdlib_module_names, *PACKAGES, *NEEDED}, name
