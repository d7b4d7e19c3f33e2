"""Disks that are full: a real small one, where tests may mount, and a limit on the size of files, which any user may set."""

import resource
import subprocess
from contextlib import contextmanager

import pytest

SMALL = 200_000  # bytes; a ResNet8 has more


@contextmanager
def small_disk(folder, size=SMALL):
    """A folder of its own, on a disk that holds next to nothing."""
    disk = folder / "disk"
    disk.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("only root may mount a disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@contextmanager
def small_files(folder, size=SMALL):
    """A folder; meanwhile no file of this process may become large."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(disk):
    """A disk of `small_disk` that cannot be written meanwhile, by root neither."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
