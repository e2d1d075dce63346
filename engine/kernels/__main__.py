"""`python -m engine.kernels`: which configurations run on this device, and what they were measured at.

    python -m engine.kernels                what earlier starts measured on this device
    python -m engine.kernels --model MODEL  what a model needs, measured now if it was not yet
    python -m engine.kernels --file FILE    what another machine kept

The fastest is marked; so are the lengths at which a kernel is used in place of the vendor's operators.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from baton.errors import ConfigError
from baton.models import ModelDir
from baton.process import report_errors
from engine.cache_plan import one_block
from engine.config import LAYOUTS, EngineConfig
from engine.kernels.environment import Environment
from engine.kernels.measurement_table import table
from engine.kernels.measurements import Measurements
from engine.kernels.model_tuning import store_of, tune_model
from engine.load import torch_dtype


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table. Raises ConfigError where there is nothing to print."""
    options = _options(arguments)
    content = _from_file(options.file) if options.file else _from_device(options)
    shown = json.dumps(content, indent=1) if options.json else _text(content)
    sys.stdout.write(f"{shown}\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.kernels", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="", help="model folder, or the name of a pulled model")
    parser.add_argument("--device", default="cuda", help="a torch device")
    parser.add_argument("--dtype", default="bfloat16", help="of weights: bfloat16 or float16")
    parser.add_argument("--kv-dtype", default="", help="of the KV cache; that of the weights unless given")
    parser.add_argument("--block-size", type=int, default=0, help="tokens per block; 0 chooses by the model")
    parser.add_argument("--layout", default="HND", choices=LAYOUTS, help="order inside a block")
    parser.add_argument("--file", type=Path, help="a file of measurements, of whatever device")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(arguments)


def _from_file(path: Path) -> Any:
    try:
        content = json.loads(path.read_bytes())
        Measurements.from_json(content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="file") from error
    return content


def _from_device(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "there is no GPU here; give --file to see what another machine kept", field="device"
        )
    if options.model:
        _tune(options, device)
    store = store_of(device)
    if store is None:
        raise ConfigError("measurements cannot be kept here; set BATON_CACHE_DIR", field="device")
    known = store.read()
    if not known.races:
        raise ConfigError(
            f"nothing was measured on {Environment.of(device).device} yet; give --model to measure now",
            field="model",
        )
    return store.content(known)


def _tune(options: argparse.Namespace, device: torch.device) -> None:
    model = ModelDir.open(options.model).model_config
    dtype, kv_dtype = (torch_dtype(name) for name in (options.dtype, options.kv_dtype or options.dtype))
    if dtype is None or kv_dtype is None:
        raise ConfigError("dtype and kv-dtype must be bfloat16, float16 or float32", field="dtype")
    config = EngineConfig(block_size=options.block_size, layout=options.layout)
    tune_model(model, one_block(config, model, kv_dtype), dtype, device)


def _text(content: Any) -> str:
    environment = content.get("environment", {})
    title = "  ".join(f"{name} {value}" for name, value in environment.items())
    return f"{title}\n\n{table(Measurements.from_json(content))}"


if __name__ == "__main__":
    sys.exit(report_errors(main))
