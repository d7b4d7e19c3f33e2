"""A task file for a LoRA adapter on a frozen text classifier; run as a program it trains one and serves a request.

The file of weights holds what is trained, the adapter and the head; the frozen network below comes from `model()`, here from a seed. What
that network knows is not forgotten.
"""

import torch
from bert import Sentences, adam, loader, test, train, validation  # noqa: F401 (the task's own)
from bert import model as base
from peft import LoraConfig, get_peft_model
from torch import nn

import expunge


def model() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        return get_peft_model(base(), LoraConfig(r=4, target_modules=["query", "value", "dense"], modules_to_save=["classifier"]))


if __name__ == "__main__":
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network = model()
    expunge.train(network, train(), expunge.Tuning(expunge.Constant(0.01, epochs=6), optimizer=adam))
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    save_file({name: value for name, value in network.state_dict().items() if name in trained}, "lora.safetensors")
    settings = expunge.requests.Settings("finetune")
    receipt = expunge.requests.fulfil(
        expunge.requests.Request(__file__, "lora.safetensors", "label=1", "requests", settings=settings), print
    )
    assert all(finding.fits for finding in expunge.requests.verify("requests/receipt.json", task=__file__))
