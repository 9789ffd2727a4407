"""The layers of the code: which module may import which."""

#: What stands to the right of an arrow may import what stands to the left of it, at any distance.
#: A name stands for everything below it. `unit_scaling` may import all of `fp8`, `fp8` nothing of
#: `unit_scaling`; the modules of one name may import each other where that makes no circle.
LAYERS = """
fp8.names <- fp8.pitfalls <- fp8.recipe, fp8.swap, fp8.files
fp8.names <- fp8.formats, fp8.where, fp8.adapters
fp8.threads <- fp8.function, fp8.tally, fp8.active, fp8.stats
fp8.subclass <- fp8.history
fp8.formats, fp8.function, fp8.random_bits, fp8.rounding <- fp8.quantize <- fp8.scaling
fp8.scaling <- fp8.recipe, fp8.scaled_tensor, fp8.moments, fp8.distributed
fp8.scaled_parts <- fp8.scaled_tensor
fp8.pitfalls, fp8.recipe <- fp8.tally <- fp8.casting
fp8.scaled_tensor, fp8.threads <- fp8.measuring <- fp8.casting
fp8.recipe, fp8.scaled_tensor <- fp8.casting <- fp8.kept <- fp8.native <- fp8.matmul
fp8.checkpoint, fp8.native <- fp8.active <- fp8.matmul
fp8.operands <- fp8.matmul
fp8.casting <- fp8.operands
fp8.casting <- fp8.kernels <- fp8.proof <- fp8.native
fp8.function <- fp8.traced <- fp8.matmul
fp8.function <- fp8.proof
fp8.kept <- fp8.activations
fp8.matmul <- fp8.attention, fp8.convolution, fp8.einsum, fp8.multi_head <- fp8.products
fp8.activations, fp8.products, fp8.history <- fp8.autocast
fp8.report, fp8.subclass <- fp8.swap <- fp8.where
fp8.autocast, fp8.where <- fp8.convert
fp8.convert <- fp8.calibrate
fp8.where <- fp8.adapters.torchao, fp8.adapters.transformer_engine
fp8.autocast, fp8.report, fp8.subclass <- fp8.stats

fp8.function <- fp8.layer_norm2d_kernels <- fp8.layer_norm2d
fp8.layer_norm2d, fp8.matmul <- fp8.norm
fp8.norm, fp8.report, fp8.subclass <- fp8.low_precision

fp8.moments, fp8.scaled_tensor <- fp8.optim_state <- fp8.adam_step <- fp8.adam <- fp8.optim
fp8.optim_state <- fp8.optim_base <- fp8.sgd <- fp8.optim
fp8.optim_state, fp8.subclass <- fp8.scaled_weights
fp8.report, fp8.scaled_tensor, fp8.subclass <- fp8.level_state
fp8.optim <- fp8.level_optimizer
fp8.convert, fp8.level_optimizer, fp8.scaled_weights <- fp8.levels
fp8.convert, fp8.scaled_weights <- fp8.frozen
fp8.convert, fp8.optim_state <- fp8.fsdp
fp8.files

fp8.adapters, fp8.recipe <- fp8.adapters.te_recipe
fp8.subclass <- fp8.adapters.padding
fp8.swap, fp8.adapters.padding, fp8.adapters.te_recipe <- fp8.adapters.transformer_engine
fp8.swap, fp8.adapters.padding, fp8.adapters, fp8.kernels <- fp8.adapters.torchao
fp8.adapters.torchao, fp8.adapters.transformer_engine <- fp8.convert
fp8.adapters, fp8.low_precision <- fp8.adapters.composer
fp8.adapters <- fp8.adapters.bitsandbytes
fp8.convert, fp8.adapters <- fp8.adapters.lightning
fp8.levels, fp8.adapters <- fp8.adapters.msamp <- fp8.adapters.accelerate
fp8.adapters, fp8.convert, fp8.history, fp8.operands, fp8.recipe, fp8.swap <- fp8.export
fp8.adapters, fp8.native, fp8.report <- fp8.doctor
fp8.doctor, fp8.levels, fp8.version <- fp8.__main__

fp8.subclass, fp8.report <- unit_scaling.transforms
fp8.function, unit_scaling.watched <- unit_scaling.scale
unit_scaling.argument_errors <- unit_scaling.watched <- unit_scaling.ops
unit_scaling.argument_errors <- unit_scaling.modules
unit_scaling.version
unit_scaling.batch <- unit_scaling._functional, unit_scaling._modules
unit_scaling.one_call <- unit_scaling._functional
unit_scaling.scale, unit_scaling.constraints <- unit_scaling.ops <- unit_scaling.core
unit_scaling.quadrature, unit_scaling.constant, unit_scaling.ops <- unit_scaling.elementwise
unit_scaling.elementwise <- unit_scaling._functional
unit_scaling.core <- unit_scaling._functional <- unit_scaling.functional
unit_scaling.functional, unit_scaling.parameter <- unit_scaling._modules <- unit_scaling.modules
unit_scaling.constant <- unit_scaling.first_call_checks <- unit_scaling.parameter
unit_scaling.first_call_checks <- unit_scaling.optimizer_checks <- unit_scaling.parameter
unit_scaling.parameter <- unit_scaling.optim
unit_scaling.functional, unit_scaling.parameter, unit_scaling.formats <- unit_scaling.transforms
unit_scaling.transforms <- unit_scaling.analysis, unit_scaling.utils
"""
