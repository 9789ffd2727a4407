"""Infrastructure shared by all packages: argument checks, warnings, reports, per-thread state,
module mixins, helpers for torch.compile, and one step of a user's model. Imports nothing else of
``fp8``."""
