"""Build the CUDA kernels of this folder with nvcc and ninja: once per user, source, compiler and kind of card.

CUTLASS's headers come from the package nvidia-cutlass, the extra `[cutlass]`. Compiling needs no card.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rwkv_lightning.kernels.cpu.build import cache_dir

SOURCE = Path(__file__).with_name("w8a16.cu")
FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "--expt-relaxed-constexpr")
BUILD_TIMEOUT = 900.0  # seconds
OLDEST = 80  # compute capability 8.0: fp16 mma.sync with asynchronous copies


class BuildError(Exception):
    """The kernels cannot be built; the message is one sentence with the way out."""


def nvcc() -> str | None:
    """The CUDA compiler: $CUDACXX, else nvcc on the path or in $CUDA_HOME; None when there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    for name in (os.environ.get("CUDACXX"), "nvcc", str(Path(home, "bin", "nvcc"))):
        if name and shutil.which(name):
            return name
    return None


def headers() -> Path | None:
    """The folder of CUTLASS's headers: in $CUTLASS_PATH, else in the package nvidia-cutlass; None without either."""
    spec = importlib.util.find_spec("cutlass_library")
    packages = [Path(folder, "source") for folder in (spec.submodule_search_locations if spec else None) or ()]
    own = os.environ.get("CUTLASS_PATH")
    for folder in [Path(own)] if own else packages:
        if (folder / "include" / "cutlass" / "cutlass.h").is_file():
            return folder / "include"
    return None


def problem() -> str | None:
    """None when the kernels can be built here, else why not and the way out, in one sentence."""
    if headers() is None:
        return "it needs CUTLASS's headers on a GPU: pip install 'rwkv-lightning[cutlass]', or choose --device cpu"
    if nvcc() is None:
        return "it needs the CUDA compiler on a GPU: install nvcc or set CUDACXX, or choose --device cpu"
    return None


def arch(capability: tuple[int, int]) -> str:
    """What nvcc calls a compute capability, e.g. (9, 0) -> '90a'. Raises BuildError for cards that are too old."""
    number = capability[0] * 10 + capability[1]
    if number < OLDEST:
        raise BuildError(
            f"the card has compute capability {capability[0]}.{capability[1]} and mixed-input products need 8.0: "
            "choose --inference-engine gemlite or --device cpu"
        )
    return f"{number}a" if number == 90 else str(number)


@functools.cache
def library(architecture: str) -> ctypes.CDLL:
    """The kernels for an architecture, built if need be. Raises BuildError."""
    reason = problem()
    if reason is not None:
        raise BuildError(reason)
    return ctypes.CDLL(str(build(architecture, cache_dir() / "cuda")))


def build(architecture: str, folder: Path) -> Path:
    """Compile for an architecture into a folder of its own below `folder`, unless that is done already.

    Raises:
        BuildError: the compiler fails; says its first complaint.
    """
    target = folder / _key(architecture) / "w8a16.so"
    if target.exists():
        return target
    work = target.parent / f"build-{os.getpid()}"  # two servers may build at once; the rename decides
    work.mkdir(parents=True, exist_ok=True)
    try:
        _run_ninja(architecture, work)
        os.replace(work / "w8a16.so", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _key(architecture: str) -> str:
    compiler = subprocess.run([_nvcc(), "--version"], capture_output=True, text=True, timeout=60).stdout
    parts = [SOURCE.read_text(), compiler, architecture, *FLAGS, (_headers() / "cutlass/version.h").read_text()]
    return f"sm_{architecture}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def _run_ninja(architecture: str, work: Path) -> None:
    import ninja

    (work / "build.ninja").write_text(_ninja_file(architecture))
    print(f"rwkv-lightning: building the CUDA kernels for sm_{architecture} (once) ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(work)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILD_TIMEOUT)
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if "error" in line.lower()] or done.stdout.splitlines()[-1:]
        raise BuildError(f"building the CUDA kernels failed ({lines[0].strip()}): choose --device cpu")
    print(f"rwkv-lightning: built in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def _ninja_file(architecture: str) -> str:
    def escape(path: Path) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    code = f"-gencode arch=compute_{architecture},code=sm_{architecture}"
    return (
        f"rule nvcc\n  command = {_nvcc()} {' '.join(FLAGS)} {code} -I {escape(_headers())} $in -o $out\n"
        f"build w8a16.so: nvcc {escape(SOURCE)}\n"
    )


def _nvcc() -> str:
    found = nvcc()
    assert found is not None, "problem() was asked before"
    return found


def _headers() -> Path:
    found = headers()
    assert found is not None, "problem() was asked before"
    return found
