"""Unit-scaled modules, by kind; `unit_scaling.modules` exports them."""
