"""The layers of the code: a name may import those above it, of itself what makes no circle.

A name is a file or a folder of the package or of the folder. `unit_scaling` may import all of
`fp8`, `fp8` nothing of `unit_scaling`.
"""

LAYERS = {
    "fp8": """
        version frame torch_internals common warnings formats recipes casts kernels
        products modes layers
        optim training checkpoints adapters
        lab __main__
    """,
    "fp8.lab": """
        sums hardware stats page doctor setups trace record parity forecast preflight blame
        alarm
    """,
    "unit_scaling": """
        version common constraints scale rules core ops functional checks parameter layers modules
        optim formats transforms analysis utils
    """,
    "unit_scaling.transforms": """
        install record replace compile values
        simulate utils unit_scale preflight verify track_scales
    """,
}

CORE = "layers"
"""The last name of the core of `fp8`, which `import fp8` loads; what follows is loaded late."""

HOOKS = {"fp8.products.matmul": "fp8.lab.sums.product"}
"""A module of the core -> what it imports of another tier, inside of a function."""
