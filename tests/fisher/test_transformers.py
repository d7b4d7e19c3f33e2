"""Padded batches of Hugging Face models, from small configurations: all closed forms, equal to a float64 loop over their rows."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from torch.nn import functional

from expunge import fisher
from expunge.data.objective import Objective
from expunge.data.tokens import NEXT_TOKENS, TOKENS
from expunge.errors import SlowFisherWarning

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

VOCABULARY, LONGEST, SAMPLES = 61, 9, 5
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LENGTHS = torch.tensor([LONGEST, 3, 6, 1, LONGEST])


def generator():
    return torch.Generator().manual_seed(0)


def text(left=False):
    mask = torch.arange(LONGEST)[None] < LENGTHS[:, None]
    mask = mask.flip(1) if left else mask
    return {"input_ids": torch.randint(3, VOCABULARY, mask.shape, generator=generator()) * mask, "attention_mask": mask.long()}


def classified(left=False):
    return {**text(left), "labels": torch.tensor([0, 1, 2, 1, 0])}


def continued():
    batch = text()
    return {**batch, "labels": torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)}


def translated():
    """The decoder's text is padded, too."""
    target = torch.randint(3, VOCABULARY, (SAMPLES, 7), generator=generator())
    mask = torch.arange(7)[None] < torch.tensor([7, 2, 5, 7, 3])[:, None]
    begun = {"decoder_input_ids": functional.pad(target, (1, -1)), "decoder_attention_mask": mask.long()}
    return {**text(), **begun, "labels": torch.where(mask, target, -100)}


def images():
    return {"pixel_values": torch.randn(SAMPLES, 3, 16, 16, generator=generator()), "labels": torch.tensor([0, 1, 2, 1, 0])}


def built(model, configuration, **settings):
    return getattr(transformers, model)(getattr(transformers, configuration)(**settings))


def bert(model, **settings):
    return built(model, "BertConfig", **SHAPE, intermediate_size=24, max_position_embeddings=16, num_labels=3, **settings)


def gpt2(model):
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return built(model, "GPT2Config", **sizes, num_labels=3, **ENDS)


def llama(model):
    return built(model, "LlamaConfig", **SHAPE, num_key_value_heads=1, intermediate_size=24, num_labels=3, **ENDS)


def t5(**settings):
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return built("T5ForConditionalGeneration", "T5Config", **sizes, decoder_start_token_id=0, pad_token_id=0, **settings)


def swin():  # 8 × 8 patches in windows of 4 × 4, every second block shifted
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
    return built("SwinForImageClassification", "SwinConfig", **sizes, num_labels=3)


def vit():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return built("ViTForImageClassification", "ViTConfig", image_size=16, patch_size=4, **sizes, num_labels=3)


CASES = {
    "bert": lambda: (bert("BertForSequenceClassification"), classified(), Objective()),
    "bert, eager attention": lambda: (bert("BertForSequenceClassification", attn_implementation="eager"), classified(), Objective()),
    "bert, masked tokens": lambda: (bert("BertForMaskedLM"), continued(), TOKENS),
    "gpt2": lambda: (gpt2("GPT2LMHeadModel"), continued(), NEXT_TOKENS),
    "gpt2, classes": lambda: (gpt2("GPT2ForSequenceClassification"), classified(), Objective()),
    "llama": lambda: (llama("LlamaForCausalLM"), continued(), NEXT_TOKENS),
    "llama, classes": lambda: (llama("LlamaForSequenceClassification"), classified(left=True), Objective()),
    "t5": lambda: (t5(), translated(), TOKENS),
    "t5, untied": lambda: (t5(tie_word_embeddings=False), translated(), TOKENS),
    "swin": lambda: (swin(), images(), Objective()),
    "vit": lambda: (vit(), images(), Objective()),
}


def example(name, dtype=torch.float64):
    torch.manual_seed(0)
    model, batch, objective = CASES[name]()
    for value in model.parameters():  # biases and tables begin at zero, norms at one
        value.data.add_(0.1 * torch.randn_like(value))
    return model.to(dtype), {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}, objective


def loop(model, batch, objective):
    """Σ_n (∂ loss of row n)², each row as it stands in the batch, padding and all."""
    model.eval()
    parameters = dict(model.named_parameters())
    totals = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for index in range(SAMPLES):
        row = {key: value[index : index + 1] for key, value in batch.items()}
        logits = model(**{key: value for key, value in row.items() if key != "labels"}).logits
        loss = objective.losses(logits, objective.targets(row)).sum()
        for name, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True), strict=True):
            totals[name] += 0 if gradient is None else gradient**2
    return totals


def assert_equal(sums, expected, limit):
    """Each tensor to `limit` of itself; the bias of attention's keys, whose gradient is 0 but for rounding, to that of the largest."""
    largest = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        assert float((sums[name] - value).norm()) <= limit * max(float(value.norm()), 1e-12 * largest), name


@pytest.mark.parametrize("name", CASES)
def test_padded_batches_have_closed_forms_and_equal_the_loop(name):
    model, batch, objective = example(name)
    plan = fisher.plan(model, batch, objective=objective)
    assert plan.named("closed form") == [key for key, _ in model.named_parameters()], plan
    expected = loop(model, batch, objective)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowFisherWarning)
        parts = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 3), slice(3, None))]
        assert_equal(fisher.diagonal(model, parts, objective=objective).sums, expected, 1e-10)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "swin"])
def test_float32_keeps_the_closed_forms(name):
    model, batch, objective = example(name, torch.float32)
    assert fisher.plan(model, batch, objective=objective).slow == 0
    exact = loop(*example(name)[:2], objective)
    assert_equal(fisher.diagonal(model, [batch], objective=objective).sums, exact, 1e-3)


def test_a_text_alone_has_the_gradient_it_has_beside_longer_ones():
    """Padding is masked: a row of the padded batch equals the same text without padding."""
    model, batch, objective = example("bert")
    short = {key: value[1:2, : int(LENGTHS[1])] if value.dim() == 2 else value[1:2] for key, value in batch.items()}
    alone = fisher.diagonal(model, [short], objective=objective).sums
    others = {key: value[[0, 2, 3, 4]] for key, value in batch.items()}
    whole, rest = (fisher.diagonal(model, [part], objective=objective).sums for part in (batch, others))
    assert_equal({key: whole[key] - rest[key] for key in whole}, alone, 1e-9)


def test_kinds_of_language_models():
    model, batch, objective = example("gpt2")
    sampled = fisher.diagonal(model, [batch], kind="sampled", draws=2, objective=objective)
    assert sampled.kind == "sampled" and all(bool(torch.isfinite(total).all()) for total in sampled.sums.values())
    short = {key: value[:, :2] for key, value in batch.items()}
    exact = fisher.diagonal(model, [short], kind="expected", objective=objective).sums
    model.eval()
    totals = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for index in (0, 1, 2, 4):  # of the fourth text one token is left, and none follows it
        row = {key: value[index : index + 1] for key, value in short.items() if key != "labels"}
        scores = model(**row).logits[0, 0].log_softmax(0)  # the first predicts the second, the second nothing
        for score in scores:
            for name, gradient in zip(totals, torch.autograd.grad(score, list(model.parameters()), retain_graph=True), strict=True):
                totals[name] += score.detach().exp() * gradient**2
    assert_equal(exact, totals, 1e-10)
