"""Pack CIFAR-10's training images to carry to a GPU machine: python -m benchmarks.forgetting.sheets DATA FOLDER

Ten sheets of 50 × 100 pictures as lossless WebP, 8.7 MB each, in FOLDER/first and FOLDER/second: 43 MB a call, under its 64 MiB.
`images.load` reads them from one folder, pixel for pixel.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import numpy
from PIL import Image

SAMPLES = 5000


def main() -> None:
    data, folder = map(Path, sys.argv[1:3])
    for number in range(10):
        content = pickle.loads((data / f"data_batch_{number // 2 + 1}").read_bytes(), encoding="bytes")
        rows = slice(number % 2 * SAMPLES, (number % 2 + 1) * SAMPLES)
        pictures = numpy.asarray(content[b"data"])[rows].reshape(50, 100, 3, 32, 32)
        sheet = numpy.ascontiguousarray(pictures.transpose(0, 3, 1, 4, 2).reshape(1600, 3200, 3))
        target = folder / ("first" if number < 5 else "second")
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(sheet).save(target / f"{number + 1}.webp", lossless=True, quality=50, method=2)
        (target / f"{number + 1}.json").write_text(json.dumps([int(label) for label in content[b"labels"][rows]]))


if __name__ == "__main__":
    main()
