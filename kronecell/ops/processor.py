"""What the choice of kernels and the cost model know about the processor: the width of its vector registers.

Of the machine they look at nothing else but the maker of the processor (matrices.py), so that two of one kind choose
alike and training resumes bit for bit, if both have the compiled kernels or neither has.
"""

from __future__ import annotations

import torch

LANES = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)  # float32 numbers in a register
