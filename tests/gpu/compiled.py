"""Compiles every kernel for NVIDIA and AMD processors, which takes no GPU: `python tests/gpu/compiled.py [TARGET ...]`.

The kernels are called as the server calls them, on a CPU, with their launches recorded instead of run; each recorded
launch is then compiled down to machine code. Prints one line per kernel and target.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_recurrent import Shift, TimeMix, noise, rows_of

from rwkv_lightning.kernels.recurrent import Kernels
from rwkv_lightning.kernels.sampling_rows import Row, Rule
from rwkv_lightning.kernels.triton import sampling
from rwkv_lightning.kernels.triton.linear import DeviceLinear, gathered
from rwkv_lightning.kernels.triton.low_rank import LowRankPairs
from rwkv_lightning.kernels.triton.recurrent import TritonNormRows, TritonShiftMix, TritonWkv7

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
FORMS = Kernels(TritonShiftMix, TritonWkv7, TritonNormRows, "Triton")
LAUNCH_OPTIONS = {"num_warps", "enable_fp_fusion"}
Launch = tuple[JITFunction[Any], tuple[Any, ...], dict[str, Any]]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches made inside are noted here and do not happen."""
    launches: list[Launch] = []
    run = JITFunction.run

    def note(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((kernel, args, options))

    JITFunction.run = note  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


def every_launch() -> list[Launch]:
    """One launch of each kernel, in float16, in each of its forms."""
    with recorded() as launches:
        for lengths in ([1, 1], [2, 1]):
            tokens = sum(lengths)
            Shift.make(tokens, 3, 6, 4096, torch.float16).run(FORMS, rows_of(lengths, [2, 0]), torch.float16)
        for first, state_dtype in ((True, torch.float32), (False, torch.float16)):
            case = TimeMix.make(3, 2, first=first, dtype=torch.float16, state_dtype=state_dtype)
            case.run(FORMS, rows_of([2, 1], [1, 0]))
        norm = TritonNormRows(noise(1, 2048), noise(2, 2048))
        norm(noise(3, 4, 2048), torch.tensor([3, 1]), noise(4, 2, 2048).half(), torch.empty(2, 2048).half())
        norm(noise(3, 4, 2048), None, None, torch.empty(4, 2048))
        gathered(noise(5, 2, 8192).half(), noise(6, 8192, 2048).half(), torch.empty(2, 2048).half())
        halves = [[DeviceLinear(noise(7, *shape), torch.float16)] for shape in ((96, 2048), (2048, 96))]
        LowRankPairs(*halves, ["tanh"], [3])(noise(8, 6, 2, 2048).half())
        for rule in Rule:
            row = Row(1, 0, temperature=1.0)
            memory = sampling._Memory(1, 65536, torch.device("cpu"))
            sampling._draw(rule, torch.zeros(1, 65536), [row], memory, torch.zeros(1, dtype=torch.int32))
    return launches


def compile_for(target: GPUTarget, launch: Launch) -> Any:
    """The compiled kernel. Raises what the compiler raises."""
    kernel, args, options = launch
    own = {name: value for name, value in options.items() if name not in LAUNCH_OPTIONS}
    bound = inspect.signature(kernel.fn).bind(*args, **own).arguments
    constants = {param.name for param in kernel.params if param.is_constexpr}
    signature, fixed = {}, {}
    for name in kernel.arg_names:
        value = bound[name]
        if name in constants or value is None:
            signature[name], fixed[name] = "constexpr", value
        else:
            signature[name] = triton.runtime.jit.mangle_type(value)
    chosen = {name: options[name] for name in LAUNCH_OPTIONS & options.keys()}
    return triton.compile(ASTSource(kernel, signature, constexprs=fixed), target=target, options=chosen)


def main(names: list[str]) -> int:
    launches = every_launch()
    for name in names or list(TARGETS):
        for launch in launches:
            begun = time.perf_counter()
            compiled = compile_for(TARGETS[name], launch)
            size = len(compiled.kernel)
            print(f"{name} {launch[0].__name__}: {size} bytes in {time.perf_counter() - begun:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
