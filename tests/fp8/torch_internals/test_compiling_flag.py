"""The flag of `torch.compiler.is_compiling` in several threads."""

import torch

from fp8.torch_internals.compiling_flag import marked_as_compiling


def test_blocks_that_overlap_in_threads_leave_no_mark_of_compilation():
    """Functions for eager code alone, such as warnings, would be skipped from then on."""
    first, second = (marked_as_compiling(True) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.compiler.is_compiling()
    second.__exit__(None, None, None)
    assert not torch.compiler.is_compiling()
