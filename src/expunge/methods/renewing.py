"""Re-initialise the weights whose gradients hardly tell forget from remain data, then train on the remain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from expunge import curvature
from expunge.data.batches import Data, as_batches, device_of
from expunge.editing import masks, scores
from expunge.editing.masks import Mask
from expunge.editing.patches import Patch
from expunge.methods.context import Run, check_tuning, needs_remain
from expunge.methods.training import built
from expunge.model.renewal import fresh_values
from expunge.runtime.modes import seeded
from expunge.training import holding
from expunge.training.loop import Phase
from expunge.training.schedules import OneCycle
from expunge.training.tuning import Tuning
from expunge.validate import check_builder, check_number, check_seed, make_plain


@dataclass(frozen=True)
class MSG:
    """Masked small gradients: fresh values for the share `ratio` of every convolution, the rest of it trained slowly.

    M = in each convolution the weights with the smallest |∂L_r/∂w_j − ∂L_f/∂w_j|; w_j ← a fresh value for j in M. Then training on the
    remain data, in which a convolution's other weights move by the share `kept_rate` of every step; norms, biases and the classifier move
    as usual. Of a model without convolutions M is taken in each weight matrix but the classifier's, which is ours. `fresh` builds the
    network with new weights; without it `reset_parameters` of the modules is called. `seed` decides the fresh values.

    Second in the NeurIPS 2023 unlearning challenge; named, described and compared by Cadet et al. 2024, arXiv:2410.01276 (DeepUnlearn).

    Defaults: those of the challenge's entry: ratio 0.3, a tenth of the rate, 5 epochs up to 1e-3 and down again, batches of 64. That
    comparison searches all of them anew for each network, rates up to 0.1: tune the rate to yours.
    Departures: the program sums mean gradients of batches over the forget data and as many remain samples, drawn; here both are means over
    all samples, in eval mode. Its fresh values are He's by fan-out. It scales gradients, so that weight decay is whole and Adam would
    undo the scale; here steps are scaled, whatever the optimizer.
    """

    ratio: float = 0.3
    kept_rate: float = 0.1
    seed: int = 0
    tuning: Tuning | None = Tuning(OneCycle(1e-3, 5, rise=0.5), batch_size=64, weight_decay=5e-4)
    fresh: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, 0, 1)
        check_number("kept_rate", self.kept_rate, 0, 1, ends="[]")
        check_seed("seed", self.seed)
        check_tuning(self.tuning)
        check_builder("fresh", self.fresh, "must be a function that builds the network with new weights, or None")
        make_plain(self)

    def __call__(self, model: nn.Module, forget: Data, remain: Data | None, run: Run) -> Patch:
        needs_remain(remain, "MSG")
        mask = self._mask(model, forget, remain, run)
        patch = run.edit(model, self._renewed(model, mask))
        if self.tuning is None:
            run.begin()
            return patch
        phase = Phase(as_batches(remain, "remain", self.tuning.batch_size), "remain")
        kept = {name: ~part for name, part in mask.items()}
        run.train_phases(model, lambda epoch: [phase], self.tuning, partial(holding.slow, model, kept, self.kept_rate))
        return patch

    def _mask(self, model: nn.Module, forget: Data, remain: Data, run: Run) -> Mask:
        names = _convolutions(model) or masks.candidates(model, run.head_of(model, forget))
        forget_gradient, _ = curvature.gradient(model, run.batches(forget, "forget"), run.objective, run.progress)
        remain_gradient, _ = curvature.gradient(model, run.batches(remain, "remain"), run.objective, run.progress)
        gap = scores.saliency({name: remain_gradient[name] - forget_gradient[name] for name in names})
        return masks.select({name: -part for name, part in gap.items()}, self.ratio, scope="layer")

    def _renewed(self, model: nn.Module, mask: Mask) -> dict[str, Tensor]:
        chosen = [name for name, part in mask.items() if part.any()]
        with seeded(self.seed, device_of(model)):
            fresh = fresh_values(model, chosen, None if self.fresh is None else built(self.fresh))
        return {name: torch.where(mask[name], fresh[name], model.get_parameter(name).detach()) for name in chosen}


def _convolutions(model: nn.Module) -> tuple[str, ...]:
    """The weights of convolutions that may move, a shared one once."""
    weights = {id(module.weight) for module in model.modules() if isinstance(module, _ConvNd)}
    return tuple(name for name, value in model.named_parameters() if id(value) in weights and value.requires_grad)
