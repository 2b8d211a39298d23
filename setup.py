"""Builds csrc/*.cpp into kronecell/_kernels.so: torch operators without Python in them: one wheel serves every Python.

Without a compiler, without torch in the build environment, or when compilation fails, installation goes on without
kernels and says why; KRONECELL_REQUIRE_KERNELS=1 makes that an error. KRONECELL_CXXFLAGS adds compiler flags.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
SOURCES = sorted(HERE.glob("csrc/*.cpp"))
HEADERS = sorted(HERE.glob("csrc/*.h"))
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000"),
    # A product and its sum are rounded once wherever the processor can: a row has the same bits in every block.
    "-ffp-contract=fast",
    # Registers are passed only between functions that are inlined.
    "-Wno-psabi",
]
REASON = HERE / "build" / "no-kernels.txt"  # read by the Makefile, because pip hides what a build prints


class NoKernels(Exception):
    """Why there are none."""


class BuildKernels(build_ext):
    """Compiles with the C++ compiler that is found, in parallel, what is older than its source or a header."""

    def get_ext_filename(self, fullname: str) -> str:
        """Where the library lies; the name of no Python version is part of it."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Build the library, or say why not."""
        target = Path(self.get_ext_fullpath(ext.name))
        REASON.unlink(missing_ok=True)
        try:
            build(target)
        except NoKernels as error:
            text = f"kronecell is installed without its compiled kernels, and runs slower: {error}"
            if os.environ.get("KRONECELL_REQUIRE_KERNELS") == "1":
                raise SystemExit(text) from None
            print(text, file=sys.stderr)
            target.unlink(missing_ok=True)
            (HERE / "kronecell" / "_kernels.so").unlink(missing_ok=True)  # of an older build
            REASON.parent.mkdir(exist_ok=True)
            REASON.write_text(text + "\n")


class PlatformWheel(bdist_wheel):
    """For every Python 3, and for this platform if the library is inside."""

    def get_tag(self) -> tuple[str, str, str]:
        """As above."""
        _, _, platform = super().get_tag()
        return "py3", "none", "any" if REASON.is_file() else platform


def build(target: Path) -> None:
    """Compile and link."""
    if sys.platform == "win32":
        raise NoKernels("they are not ported to Windows")
    compiler = shlex.split(os.environ.get("CXX", "")) or next(
        ([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None
    )
    if not compiler or not shutil.which(compiler[0]):
        raise NoKernels("no C++ compiler was found")
    torch = find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        raise NoKernels("torch is not in the build environment (install torch first, then --no-build-isolation)")
    root = Path(torch.submodule_search_locations[0])
    if not (root / "include/torch/csrc/stable/library.h").is_file():
        raise NoKernels("the installed torch has no stable headers (2.10 or newer has)")
    extra = shlex.split(os.environ.get("KRONECELL_CXXFLAGS", ""))
    command = [*compiler, *FLAGS, *extra, "-isystem", str(root / "include")]
    # A folder for each command: with other flags or another torch, everything is compiled again.
    objects = HERE / "build" / f"kernels-{sha256(shlex.join(command).encode()).hexdigest()[:12]}"
    objects.mkdir(parents=True, exist_ok=True)
    newest = max(path.stat().st_mtime for path in [*HEADERS, Path(__file__)])

    def compiled(source: Path) -> Path:
        path = objects / f"{source.stem}.o"
        if not path.is_file() or path.stat().st_mtime < max(newest, source.stat().st_mtime):
            _run([*command, "-c", str(source), "-o", str(path)])
        return path

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = [*pool.map(compiled, SOURCES)]
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".new")  # a running process keeps the file it has loaded
    link = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [f"-L{root / 'lib'}", "-ltorch_cpu"]
    _run([*compiler, *extra, "-shared", *map(str, paths), "-o", str(fresh), *link])
    os.replace(fresh, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        raise NoKernels(f"compilation failed: {(errors or ['no message'])[0]}")


if sys.platform == "darwin":
    os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", sysconfig.get_config_var("MACOSX_DEPLOYMENT_TARGET") or "11.0")

setup(
    ext_modules=[
        Extension(
            "kronecell._kernels",
            sources=[str(path.relative_to(HERE)) for path in SOURCES],
            depends=[str(path.relative_to(HERE)) for path in HEADERS],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
