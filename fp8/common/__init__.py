"""Infrastructure shared by all packages: argument checks, warnings, reports, module mixins, helpers
for torch.compile, and one step of a user's model. Imports `fp8.torch_internals` and `fp8.frame`."""
