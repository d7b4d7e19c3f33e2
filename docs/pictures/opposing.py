"""Draws opposing.svg: `python docs/pictures/opposing.py`, about 20 s."""

from pathlib import Path

from histories import draw
from torch.optim import Adam

from expunge.methods import GradientAscent, NegGradPlus, RandomLabels, SalUn
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning

SIZE = 32

if __name__ == "__main__":
    methods = {
        "GradientAscent, rate 0.001": GradientAscent(Tuning(Constant(1e-3, 8), SIZE)),
        "GradientAscent, rate 0.01": GradientAscent(Tuning(Constant(1e-2, 8), SIZE)),
        "NegGradPlus, β = 0.9": NegGradPlus(0.9, Tuning(Constant(0.01, 8), SIZE, momentum=0.0, weight_decay=0.0)),
        "RandomLabels": RandomLabels(tuning=Tuning(Constant(1e-4, 8), SIZE, optimizer=Adam)),
        "SalUn": SalUn(tuning=Tuning(Constant(0.013, 8), SIZE, weight_decay=5e-4)),
    }
    draw(methods, Path(__file__).with_suffix(".svg"))
