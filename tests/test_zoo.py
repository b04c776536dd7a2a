"""The zoo's models have the sizes of the literature, are fixed by their seed, and train."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rockmate import zoo

SMALL_ENTRIES = [name for name in zoo.names() if "tiny" in name]


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: zoo.GPT2(zoo.GPT2Config.small()), 124_439_808),
        (lambda: zoo.resnet18(), 11_689_512),
        (lambda: zoo.resnet50(), 25_557_032),
        (lambda: zoo.resnet101(), 44_549_160),
        (lambda: zoo.Mixer(zoo.MixerConfig()), 59_880_472),
        (lambda: zoo.RegNet(zoo.RegNetConfig()), 15_296_552),
        (lambda: zoo.VGG(zoo.VGGConfig()), 138_357_544),
        (lambda: zoo.VGG(zoo.VGGConfig(batch_norm=True)), 138_365_992),
        (lambda: zoo.MobileNetV2(zoo.MobileNetV2Config()), 3_504_872),
        (lambda: zoo.GoogLeNet(zoo.GoogLeNetConfig(large=3)), 6_624_904),  # as torchvision's
        (lambda: zoo.DenseNet(zoo.DenseNetConfig()), 7_978_856),
        (lambda: zoo.ViT(zoo.ViTConfig()), 86_567_656),
        (lambda: zoo.Llama(zoo.LlamaConfig()), 8_030_261_248),
        (lambda: zoo.BERT(zoo.BERTConfig()), 109_512_762),  # 1,536 less than with the embedding of sentences
    ],
    ids=(
        "gpt2-small resnet18 resnet50 resnet101 mixer-b16 regnet-x-3.2gf vgg16 vgg16-bn mobilenet-v2 googlenet "
        "densenet121 vit-b16 llama3-8b bert-base"
    ).split(),
)
def test_parameter_counts_are_those_of_the_literature(build, count):
    with torch.device("meta"):
        assert parameter_count(build()) == count


@pytest.mark.parametrize("name", SMALL_ENTRIES)
def test_backward_reaches_every_parameter(name):
    entry = zoo.get(name)
    loss = entry.loss(entry.model(*entry.sample))
    assert loss.shape == ()
    loss.backward()
    assert gradients(entry.model).keys() == dict(entry.model.named_parameters()).keys()
    assert all(gradient.isfinite().all() for gradient in gradients(entry.model).values())


@pytest.mark.parametrize("name", SMALL_ENTRIES)
def test_the_same_seed_gives_the_same_weights_and_data(name):
    first, again, other = zoo.get(name, seed=3), zoo.get(name, seed=3), zoo.get(name, seed=4)
    for one, two in zip(first.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert all(map(torch.equal, first.sample, again.sample))
    assert torch.equal(first.target, again.target)
    assert not all(map(torch.equal, first.sample, other.sample))


@pytest.mark.parametrize("name", SMALL_ENTRIES)
def test_batches_are_shaped_as_the_sample(name):
    entry = zoo.get(name)
    inputs, target = entry.make_batch(7)
    assert [tensor.shape for tensor in inputs] == [tensor.shape for tensor in entry.sample]
    assert target.shape == entry.target.shape
    assert not torch.equal(inputs[0], entry.sample[0])


@pytest.mark.parametrize("name", SMALL_ENTRIES)
def test_another_batch_changes_the_data_and_nothing_else(name):
    usual, other = zoo.get(name), zoo.get(name, batch=3)
    for one, two in zip(usual.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    for batch in ((*other.sample, other.target), (*other.make_batch(5)[0], other.make_batch(5)[1])):
        for tensor, usually in zip(batch, (*usual.sample, usual.target), strict=True):
            assert tensor.shape == (3, *usually.shape[1:])


def test_a_batch_without_examples_is_refused():
    with pytest.raises(ValueError, match="batch of 0 examples"):
        zoo.get("gpt2-tiny", batch=0)


def test_building_an_entry_leaves_the_random_stream_alone(seed):
    torch.manual_seed(seed)
    expected = torch.rand(3)
    torch.manual_seed(seed)
    zoo.get("gpt2-tiny")
    assert torch.equal(torch.rand(3), expected)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(KeyError, match=r"no 'gpt5'; it has .*gpt2-demo"):
        zoo.get("gpt5")


def test_gpt2_shares_its_head_with_the_token_embedding():
    model = zoo.GPT2(zoo.GPT2Config.tiny())
    assert model.head.weight is model.token_embedding.weight


def test_gpt2_ignores_later_tokens():
    model = zoo.get("gpt2-tiny").model.eval()
    tokens = torch.randint(64, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 64
    before, after = model(tokens), model(changed)
    assert before.shape == (1, 16, 64)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_gpt2_attention_is_the_same_written_out_or_fused():
    explicit, fused = zoo.get("gpt2-tiny"), zoo.get("gpt2-tiny-sdpa")
    torch.testing.assert_close(explicit.model.eval()(*explicit.sample), fused.model.eval()(*fused.sample))


def test_gpt2_initial_loss_is_that_of_a_uniform_guess():
    entry = zoo.get("gpt2-tiny")
    loss = entry.loss(entry.model(*entry.sample))
    torch.testing.assert_close(loss.item(), torch.tensor(64.0).log().item(), rtol=0.01, atol=0.0)


def test_gpt2_refuses_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="width 30 is not a multiple of heads 4"):
        dataclasses.replace(zoo.GPT2Config.tiny(), width=30)
    with pytest.raises(ValueError, match="'flash'"):
        dataclasses.replace(zoo.GPT2Config.tiny(), attention="flash")  # type: ignore[arg-type]  # that is the claim


def test_llama_computes_what_the_library_s_does():
    transformers = pytest.importorskip("transformers")
    ours = zoo.get("llama-tiny").model
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=False,
        )
    )
    by_name = {
        "q_proj": "attention.query",
        "k_proj": "attention.key",
        "v_proj": "attention.value",
        "o_proj": "attention.projection",
        "gate_proj": "feed_forward.gate",
        "up_proj": "feed_forward.expansion",
        "down_proj": "feed_forward.projection",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm",
    }
    outside = {"embed_tokens": "embedding", "norm": "final_norm", "lm_head": "head"}
    own = ours.state_dict()
    weights = {}
    for name in theirs.state_dict():
        parts = name.removeprefix("model.").split(".")
        if parts[0] == "layers":
            weights[name] = own[f"blocks.{parts[1]}.{by_name[parts[-2]]}.weight"]
        else:
            weights[name] = own[outside[parts[0]] + ".weight"]
    theirs.load_state_dict(weights)
    tokens = torch.randint(64, (2, 16))
    # Other kernels for the same formulas: equal within rounding.
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("name", ["vit-tiny", "bert-tiny"])
def test_encoders_see_the_whole_sequence(name):
    entry = zoo.get(name)
    (data,) = entry.sample
    changed = data.clone()
    changed[0, ..., -1] = (data[0, ..., -1] + 1) % 64  # the last token, or the right edge of an image
    before, after = entry.model.eval()(data), entry.model(changed)
    assert not torch.allclose(before[0, 0], after[0, 0])  # what is said of the first token, or of the class
    torch.testing.assert_close(before[1:], after[1:])


def test_resnet_divides_the_resolution_by_32():
    model = zoo.resnet50(classes=10, width=8)
    seen: list[Tensor] = []
    model.blocks[-1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert model(torch.randn(2, 3, 64, 96)).shape == (2, 10)
    assert seen[0].shape == (2, 8 * 8 * 4, 2, 3)


def test_resnet_blocks_start_as_their_shortcut_when_asked():
    block = zoo.resnet50(width=8, zero_initialise_residual=True).blocks[1]
    image = torch.rand(2, 32, 8, 8)
    torch.testing.assert_close(block(image.clone()), image)


def test_unet_keeps_the_size_of_its_input():
    assert zoo.UNet(zoo.UNetConfig.tiny())(torch.randn(1, 3, 16, 24)).shape == (1, 4, 16, 24)


def test_transformer_takes_two_inputs():
    entry = zoo.get("transformer-tiny")
    assert len(entry.sample) == 2
    assert entry.model(*entry.sample).shape == (8, 12, 64)


@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet50-tiny"])
def test_blocks_run_through_the_block_runner(name):
    plain, checkpointed = zoo.get(name), zoo.get(name)
    assert isinstance(checkpointed.model, zoo.GPT2 | zoo.ResNet)
    checkpointed.model.block_runner = lambda block, hidden: checkpoint(block, hidden, use_reentrant=False)
    results = []
    for entry in (plain, checkpointed):
        torch.manual_seed(0)  # the same dropout
        loss = entry.loss(entry.model(*entry.sample))
        loss.backward()
        results.append((loss, gradients(entry.model)))
    torch.testing.assert_close(results[0], results[1], rtol=0.0, atol=0.0)
