"""Causal language models that make logits of a few rows at a time: the same training but for the order of sums."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn

from rockmate import ArgumentError, ChunkError, PeakMemory, PlanOptions, Rockmate, max_batch, smallest_budget, verify
from rockmate.nn import chunk_logits
from rockmate.nn.chunked_logits import chunks_of
from tests.module.steps import FEW_ROUNDS, assert_same
from tests.where import here, placed

slow = pytest.mark.slow
CLASSES = 500
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
# What they do between the linear layer and the loss: nothing, a scale, a cap.
FAMILIES = {
    "GPT2": OF_GPT2,
    "Llama": {},
    "Gemma2": {**GROUPED, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "Cohere": {},
    "Granite": {"logits_scaling": 4.0},
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True},
    "Qwen3": GROUPED,
    "Phi": {},  # its layer has a bias
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "Falcon": {},
    "GPTJ": {**OF_GPT2, "rotary_dim": 4},
    "Mamba": {"state_size": 4},
}


def made(name="Llama", **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **FAMILIES[name], **settings})
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    return placed(getattr(transformers, kind)(config).train())


def text(rows=3, length=40):
    tokens = torch.randint(3, CLASSES, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 5:9] = -100
    return {"input_ids": placed(tokens), "labels": placed(labels)}


def step(model, **said):
    """The loss and all gradients of one step, dropout at work."""
    torch.manual_seed(1)
    model.zero_grad()
    output = model(**text(), **said)
    output.loss.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return output.loss.detach(), gradients


def assert_near(found, expected, share=1e-5):
    """Sums of float32 in another order: each gradient is as near as that, on the scale of the largest of all."""
    assert torch.allclose(found[0], expected[0], rtol=share)
    scale = max(one.abs().max() for one in expected[1].values())
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).abs().max() <= share * scale, name


@pytest.mark.parametrize("name", [one if one == "Gemma2" else pytest.param(one, marks=slow) for one in FAMILIES])
def test_training_is_as_with_whole_logits(name):
    model = made(name)
    whole, of_a_count = step(model), step(model, num_items_in_batch=torch.tensor(77))
    chunk_logits(model, 16)
    assert_near(step(model), whole)
    assert_near(step(model, num_items_in_batch=torch.tensor(77)), of_a_count)
    assert model(**text()).logits is None
    assert None in model(**text(), return_dict=False)
    # What is no training call is as it was.
    tokens = text()["input_ids"]
    assert model(tokens).logits.shape == (*tokens.shape, CLASSES)
    model.eval()
    assert model(**text()).logits.shape == (*tokens.shape, CLASSES)
    chunk_logits(model, None)
    assert "forward" not in vars(model)
    model.train()
    assert_same(dict(step(model)[1]), whole[1])


@pytest.mark.parametrize("name", ["Llama", *(pytest.param(one, marks=slow) for one in ("Gemma2", "GPT2", "Mixtral"))])
def test_a_plan_is_to_the_bit_the_model_with_chunks(name):
    model = made(name)
    planned = Rockmate(model, text(), 0.9, limits=FEW_ROUNDS, loss_chunks=16)
    found = verify(planned, text())
    assert found.exact
    assert 0 < found.from_whole_logits < 1e-5
    assert "with logits in chunks; gradients are" in str(found)
    assert "logits of 16 rows at a time" in str(planned.plan)
    assert planned.plan.measured_peak_bytes <= planned.plan.budget_bytes
    assert_same(step(planned)[1], step(model)[1])


def test_logits_are_never_whole():
    model, peaks = made("Llama", vocab_size=8000), {}
    for chunks in (None, "auto"):
        chunk_logits(model, chunks)
        with PeakMemory(here()) as memory:
            model(**text(8, 64)).loss.backward()
        model.zero_grad()
        peaks[chunks] = memory.peak_bytes
    assert peaks["auto"] < peaks[None] - 2 * 8 * 64 * 8000 * 4  # logits and their gradients


def test_it_may_be_asked_for_by_every_question_and_is_given_back():
    model = made()
    options = PlanOptions(limits=FEW_ROUNDS, loss_chunks="auto")
    assert verify(model, text(), 0.9, options=options, steps=1).from_whole_logits is not None
    assert smallest_budget(model, text(), 1.5, options=options).plan_file is not None
    assert max_batch(model, text(2, 16), "4MiB", options=options, most=4, measurements=1).batch >= 1
    assert chunks_of(model) is None
    assert "forward" not in vars(model)


@slow
def test_copies_and_pickles_are_chunked_too():
    planned = Rockmate(made(), text(), 0.9, limits=FEW_ROUNDS, loss_chunks=16)
    expected = step(planned)
    for other in (copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))):
        assert chunks_of(other.original) == 16
        assert other.original.forward.__self__ is other.original
        assert_same(step(other)[1], expected[1])


@slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_around_it_train_alike():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(0)
    model = peft.get_peft_model(made(), config)
    whole = step(model)
    planned = Rockmate(model, text(), 0.9, limits=FEW_ROUNDS, loss_chunks="auto")
    assert_near(step(planned), whole)
    assert verify(planned, text()).exact


class ReadsItsLogits(transformers.LlamaForCausalLM):
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return self.loss_function(logits=logits - logits.logsumexp(-1, keepdim=True), labels=labels, vocab_size=CLASSES)


def hooked():
    model = made()
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(4, 4), "Linear is no model whose logits can be chunked.*its output layer is none"),
        (hooked, "has hooks, or a forward of its own"),
        (
            lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
            "BertForMaskedLM.* is ForMaskedLMLoss|the loss of BertForMaskedLM is",
        ),
    ],
)
def test_other_models_are_refused_and_left_alone(make, words):
    model = make()
    before = dict(vars(model))
    with pytest.raises(ChunkError, match=words):
        Rockmate(model, budget=0.9, loss_chunks="auto")
    assert vars(model) == before


def test_a_model_that_reads_its_logits_is_refused_by_what_it_reads():
    torch.manual_seed(0)
    model = ReadsItsLogits(transformers.LlamaConfig(**SIZES)).train()
    chunk_logits(model)
    with pytest.raises(ChunkError, match=r"reads its logits \(logsumexp\) before the loss.*scaled by a number"):
        model(**text())
    chunk_logits(model, None)
    assert model(**text()).isfinite()


def test_a_number_of_rows_that_is_none_is_refused():
    with pytest.raises(ArgumentError, match='loss_chunks is 0: give "auto", a positive number of rows, or None'):
        Rockmate(made(), budget=0.9, loss_chunks=0)
