"""The modules, by kind. `unit_scaling.modules` has them all."""
