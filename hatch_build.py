"""Builds the CPU kernel of the Fisher engine with the C compiler there is; without one the package works all the same, slower."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "src/expunge/fisher/closed_forms/native"


class Kernel(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if build(Path(self.root) / FOLDER):
            build_data["artifacts"].append(f"{FOLDER}/squares.shared")
            build_data["pure_python"], build_data["infer_tag"] = False, True


def build(folder: Path) -> bool:
    """Whether squares.shared is there afterwards, made from the source there is."""
    compiler = shlex.split(os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "")
    if not compiler or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    try:
        target = folder / "squares.shared"
        target.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made, linked = Path(work) / "squares.o", Path(work) / "squares.shared"
            subprocess.run([*compiler, "-O3", "-fPIC", "-fopenmp", "-c", folder / "squares.c", "-o", made], check=True)
            # Not against an OpenMP library: torch's own is in the process, and two would each have their threads.
            subprocess.run([*compiler, "-shared", made, "-o", linked], check=True)
            linked.replace(target)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the CPU kernel was not built: {error}", file=sys.stderr)
        return False
    return True
