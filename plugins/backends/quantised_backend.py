"""What the engines for converted files share: check the file and the device, choose types, build the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rwkv_lightning.core.errors import CheckpointError
from rwkv_lightning.core.layout import engine_of
from rwkv_lightning.core.rwkv7 import RWKV7
from rwkv_lightning.core.tensor_file import open_tensors
from rwkv_lightning.kernels.triton import graphs
from rwkv_lightning.plugins.backends.precision import Precision
from rwkv_lightning.plugins.backends.quantised_weights import QuantisedSource
from rwkv_lightning.plugins.backends.weights import loading_bar

if TYPE_CHECKING:
    from rwkv_lightning.core.interfaces import Linear, LoadOptions, Model
    from rwkv_lightning.core.quantised_checkpoint import QuantisedCheckpoint
    from rwkv_lightning.kernels.quantisation import QuantisedWeight

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Operators:
    """How an engine makes its operators, and a clause for the banner that says which."""

    make: Callable[[QuantisedWeight], Linear]
    why: str


def load_model(
    checkpoint: QuantisedCheckpoint, options: LoadOptions, precision: Precision, operators: Operators
) -> Model:
    """Build the model of an open file."""
    start = time.perf_counter()
    device, manifest = torch.device(options.device), checkpoint.manifest
    with loading_bar(checkpoint) as advance:
        source = QuantisedSource(
            checkpoint,
            device=device,
            dtype=precision.dtype,
            make=operators.make,
            deterministic=options.deterministic,
            on_read=advance,
        )
        model = RWKV7(
            source,
            device=device,
            dtype=precision.dtype,
            state_dtype=precision.state_dtype,
            description=f"{manifest.scheme} weights, {precision.why}; linears: {operators.why}",
            # --deterministic is promised by the eager loop; nothing else about these engines forbids a graph.
            capture=None if options.deterministic else graphs.capture_for(device),
        )
    log.info("loaded %s in %.2f s", checkpoint.path.name, time.perf_counter() - start)
    return model


def engine_for(path: Path) -> str | None:
    """The engine that a converted file names; None for any other file."""
    try:
        return engine_of(open_tensors(path).metadata)
    except CheckpointError:  # loading will say it
        return None
