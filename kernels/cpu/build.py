"""Build the C++ kernels of this folder into one shared library, once per user, source and processor.

The library has a plain C interface and is called through ctypes, which releases the GIL during a call. It shares
torch's OpenMP pool: torch is imported first, so the loader finds its libgomp already there.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import platformdirs

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wall",
    "-Wno-psabi",
)
BUILD_TIMEOUT = 300.0  # seconds


@dataclass(frozen=True)
class Library:
    """The loaded kernels, or None and the reason why there are none."""

    lib: ctypes.CDLL | None
    why: str


def cache_dir() -> Path:
    """Where built kernels live: RWKV_LIGHTNING_CACHE_DIR, else the user's cache folder."""
    return Path(os.environ.get("RWKV_LIGHTNING_CACHE_DIR") or platformdirs.user_cache_dir("rwkv-lightning"))


def compiler() -> str | None:
    """The C++ compiler to use: $CXX, else g++, else clang++; None when there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None


@functools.cache
def library() -> Library:
    """The kernels, built if need be. Never raises: without a compiler the reference serves, and a log line says so.

    RWKV_LIGHTNING_KERNELS=reference turns the C++ kernels off.
    """
    if os.environ.get("RWKV_LIGHTNING_KERNELS") == "reference":
        return Library(None, "RWKV_LIGHTNING_KERNELS=reference")
    cxx = compiler()
    if cxx is None:
        return _fallback("no C++ compiler found (install g++ or set CXX)")
    try:
        import torch  # noqa: F401  (its OpenMP runtime must be loaded before ours asks for one)

        path = _build(cxx)
        return Library(ctypes.CDLL(str(path)), f"C++ kernels, {path.parent.name}")
    except (OSError, subprocess.SubprocessError) as error:
        return _fallback(f"building the C++ kernels failed: {_last_line(error)}")


def _fallback(why: str) -> Library:
    log.warning("%s; the slower PyTorch reference serves instead", why)
    return Library(None, why)


def _last_line(error: Exception) -> str:
    output = getattr(error, "stdout", None) or str(error)
    lines = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines()
    return lines[0].strip() if lines else repr(error)


def _build(cxx: str) -> Path:
    folder = cache_dir() / "kernels" / _key(cxx)
    target = folder / "kernels.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / f"build-{os.getpid()}"  # two servers may build at once; the rename decides
    work.mkdir(exist_ok=True)
    try:
        _run_ninja(cxx, work)
        os.replace(work / "kernels.so", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _key(cxx: str) -> str:
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(" ".join([cxx, *FLAGS, _compiler_identity(cxx)]).encode())
    return digest.hexdigest()[:16]


def _compiler_identity(cxx: str) -> str:
    """The compiler's version and what -march=native means here."""
    command = [cxx, "-march=native", "-E", "-v", "-x", "c++", os.devnull]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=30).stderr.splitlines()
    return "\n".join(line for line in lines if "cc1plus" in line or "version" in line or "-cc1" in line)


def _run_ninja(cxx: str, work: Path) -> None:
    import ninja

    sources = sorted(SOURCES.glob("*.cpp"))
    (work / "build.ninja").write_text(_ninja_file(cxx, sources))
    print("rwkv-lightning: building the C++ kernels (once) ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(work)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILD_TIMEOUT)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, output=done.stdout)
    print(f"rwkv-lightning: built in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def _ninja_file(cxx: str, sources: list[Path]) -> str:
    def escape(path: Path) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    lines = [
        "rule cxx",
        f"  command = {cxx} {' '.join(FLAGS)} -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "rule link",
        f"  command = {cxx} -shared -fopenmp $in -o $out",
        *(f"build {path.stem}.o: cxx {escape(path)}" for path in sources),
        f"build kernels.so: link {' '.join(f'{path.stem}.o' for path in sources)}",
    ]
    return "\n".join(lines) + "\n"
