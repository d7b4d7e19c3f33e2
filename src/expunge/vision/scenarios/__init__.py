"""Choose what to forget: a class, poisoned or wrongly labelled samples, or any samples."""

from expunge.vision.scenarios.altered import Altered, Corner, Trigger
from expunge.vision.scenarios.kinds import Images, Scenario, category, limited, poisoned, subset
from expunge.vision.scenarios.rows import labels_of
from expunge.vision.scenarios.wrong_labels import mislabelled

__all__ = ["Altered", "Corner", "Images", "Scenario", "Trigger", "category", "labels_of", "limited", "mislabelled", "poisoned", "subset"]
