"""Memory that is taken again and again."""

import weakref

import torch

from expunge.fisher.closed_forms import scratch as scratches
from expunge.fisher.closed_forms.scratch import Scratch


def test_a_name_keeps_its_memory_and_outgrows_it():
    scratch, like = Scratch(), torch.empty(0)
    first = scratch.take("products", (4, 3), like)
    assert scratch.take("products", (2, 5), like).data_ptr() == first.data_ptr()
    held = weakref.ref(scratch._buffers[("products", torch.float32, like.device)])
    del first
    assert scratch.take("products", (40, 3), like).shape == (40, 3)
    assert held() is None


def test_what_a_graph_was_captured_with_stays(monkeypatch):
    """A replay writes there, though the name has outgrown it: freed, it would be somebody else's."""
    scratch, like = Scratch(), torch.empty(0)
    with monkeypatch.context() as patched:
        patched.setattr(scratches, "_in_capture", lambda held: True)
        place = scratch.take("products", (4, 3), like).data_ptr()
    larger = [scratch.take("products", (size, 3), like) for size in (40, 400)]
    assert [each.data_ptr() for each in scratch._in_graphs.values()] == [place]
    assert place not in [each.data_ptr() for each in larger]
