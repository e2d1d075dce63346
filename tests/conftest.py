"""What holds for every test."""

from __future__ import annotations

import os

# Kernels run interpreted, on a CPU, line by line. Triton looks at this once, when it is first imported,
# which torch does too: tests that compile kernels do so in a process of their own.
os.environ["TRITON_INTERPRET"] = "1"
