"""Run `expunge data get`: fetch a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expunge.runtime.exits import uninterrupted
from expunge.storage.files import check_folder


@dataclass(frozen=True)
class Data:
    """A dataset to get, and the folder it goes to."""

    name: str
    folder: str | None


def data_command(do: Literal["get"], name: str, /, data: str | None = None) -> Data:
    """Get a dataset from where it is published: cifar10, cifar100, mnist, fashion-mnist or tiny-imagenet.

    Args:
        do: What to do: get it.
        name: Of the dataset.
        data: Folder for the datasets; without it EXPUNGE_DATA, else ./data.
    """
    return Data(name, data)


def run_data(options: Data) -> None:
    with uninterrupted():
        from expunge.vision.datasets import data_folder
        from expunge.vision.datasets.downloads import get

    check_folder("data", data_folder() if options.folder is None else options.folder)
    for path in get(options.name, options.folder, progress=True):
        print(path)
