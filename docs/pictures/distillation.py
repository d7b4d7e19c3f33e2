"""Draws distillation.svg: `python docs/pictures/distillation.py`, about 20 s."""

from pathlib import Path

from histories import draw
from torch.optim import Adam

from expunge.methods import SCRUB, BadTeacher
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning

SIZE = 32

if __name__ == "__main__":
    adam = Tuning(Constant(3e-4, 8), SIZE, optimizer=Adam)
    plain = Tuning(Constant(5e-3, 8), SIZE, weight_decay=5e-4)
    methods = {
        "BadTeacher": BadTeacher(tuning=adam),
        "SCRUB, forget batches of 512": SCRUB(tuning=plain),
        "SCRUB, forget batches of 32": SCRUB(forget_batch_size=SIZE, tuning=plain),
    }
    draw(methods, Path(__file__).with_suffix(".svg"))
