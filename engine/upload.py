"""Host arrays on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def uploaded(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; on a CPU without a copy, if it is contiguous.

    The host does not wait for what the device has to do before. Ordinary memory has been read when this
    returns, so the array may change then.
    """
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
