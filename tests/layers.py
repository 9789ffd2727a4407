"""The layers of the code: a name may import those above it, of itself what makes no circle.

A name is a file or a folder of the package. `unit_scaling` may import all of `fp8`, `fp8` nothing
of `unit_scaling`.
"""

LAYERS = {
    "fp8": """
        version
        common
        formats
        sums
        recipes
        tensors
        casts
        native
        context
        products
        selection
        modes
        norms
        surgery
        optim
        levels
        distributed
        checkpoints
        adapters
        studies
        __main__
    """,
    "unit_scaling": """
        version
        common
        constraints
        scale
        rules
        core
        ops
        functional
        checks
        parameter
        layers
        modules
        optim
        formats
        transforms
        analysis
        utils
    """,
}
