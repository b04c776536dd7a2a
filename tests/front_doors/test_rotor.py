"""rotor's names: a Sequential trains exactly, within its limit for activations, however its stages are called."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import rockmate.queries.measured_rockmate
from rockmate import BudgetError, BudgetTooSmall, ModelError, NotPlanned, Rockmate, zoo
from rockmate.compat import rotor
from rockmate.compat.rotor.layers import layers_of
from rockmate.units import format_bytes
from tests.module.steps import assert_same_training, peak_of_step, squares, train
from tests.scripts import run_script
from tests.where import placed

MIB = 1 << 20


def images() -> Tensor:
    return placed(torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(7)))


def network() -> nn.Sequential:
    """Nested, in place, with normalisation and dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
            *(
                rotor.models.utils.ReLUAtEnd(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Dropout(0.1)))
                for _ in range(3)
            ),
            nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
        )
        return placed(network.train())


@pytest.fixture(scope="module")
def measured() -> rotor.Checkpointable:
    model = rotor.Checkpointable(network())
    model.measure(images())
    return model


@pytest.fixture(scope="module")
def keep_all_bytes(measured) -> int:
    """What the step takes that forgets nothing."""
    measured.compute_sequence(1 << 30)
    return measured.plan.peak_bytes


@pytest.fixture
def no_measuring(monkeypatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(rockmate.queries.measured_rockmate, "measure", refuse)


@pytest.mark.parametrize("share", [0.9, 0.7])
def test_training_is_eager_s_and_stays_within_the_limit(measured, keep_all_bytes, no_measuring, share):
    limit = int(share * keep_all_bytes)
    sequence = measured.compute_sequence(limit)
    assert (measured.mem_limit, measured.plan.budget_bytes) == (limit, limit)
    assert measured.plan.recomputations > 0
    forwards = [operation.layers for operation in sequence if operation.kind != "B"]
    assert len(forwards) > len(set(forwards))  # some layer ran twice
    model = copy.deepcopy(measured)
    assert_same_training(train(model, [images()] * 3), train(network(), [images()] * 3))
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert peak_of_step(model, (images(),)) <= limit  # above the gradients, which are there


def test_offloading_is_combined_with_recomputation(quick_disk, keep_all_bytes):
    """What rotor's authors announced."""
    limit = int(0.6 * keep_all_bytes)
    model = rotor.Checkpointable(network(), mem_limit=limit, offload="auto", loss=squares)
    assert_same_training(train(model, [images()] * 2), train(network(), [images()] * 2))
    assert model.plan.moves > 0
    assert peak_of_step(model, (images(),)) <= limit
    assert {operation.kind for operation in model.sequence} >= {"Fe", "B"}


def test_without_a_limit_the_first_batch_is_planned_for_what_is_free():
    model = rotor.Checkpointable(network())
    assert model.mem_limit is None
    with pytest.raises(NotPlanned):
        _ = model.sequence
    model(images()).sum().backward()
    assert model.mem_limit is not None
    assert model.mem_limit > MIB
    assert model.plan.recomputations == 0
    assert {operation.kind for operation in model.sequence} == {"Fe", "B"}


def test_with_a_limit_the_first_batch_is_planned_for_it(keep_all_bytes):
    limit = int(0.8 * keep_all_bytes)
    model = rotor.Checkpointable(network(), mem_limit=float(limit))
    assert model.mem_limit == limit
    assert_same_training(train(model, [images()] * 2), train(network(), [images()] * 2))
    assert model.plan.budget_bytes == limit
    assert model.plan.recomputations > 0


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
@pytest.mark.ci
def test_batches_of_another_size_are_planned_within_the_same_limit(keep_all_bytes):
    limit = int(0.8 * keep_all_bytes)
    model = rotor.Checkpointable(network(), limit)
    batches = [images(), images()[:5]]
    assert_same_training(train(model, batches), train(network(), batches))
    assert [plan.budget_bytes for plan in model.plans] == [limit, limit]
    model.measure(batches[1])
    model.compute_sequence()
    assert [plan.budget_bytes for plan in model.plans] == [limit]
    with pytest.raises(BudgetTooSmall, match=f"^budget {format_bytes(limit)} < "):
        model.plan_for(images().repeat(2, 1, 1, 1))


@pytest.mark.ci
def test_a_limit_that_nothing_fits_leaves_the_sequence_as_it_was(measured, keep_all_bytes, no_measuring):
    before = str(measured.compute_sequence(int(0.9 * keep_all_bytes)))
    with pytest.raises(BudgetTooSmall, match="^budget 1000 B < ") as refusal:
        measured.compute_sequence(1000)
    assert 1000 < refusal.value.smallest_budget_bytes < keep_all_bytes
    assert str(measured.sequence) == before
    assert str(measured.compute_sequence()) == before  # the limit before


@pytest.mark.ci
def test_nested_sequentials_are_planned_as_flat_ones(keep_all_bytes):
    limit = int(0.8 * keep_all_bytes)
    flat = nn.Sequential(*(network().get_submodule(path) for path in layers_of(network())))
    model = rotor.Checkpointable(flat, limit)
    nested = rotor.Checkpointable(network(), limit)
    for one in (model, nested):
        one.measure(images())
        one.compute_sequence()
    layers = [[operation.layers for operation in one.sequence if operation.kind == "B"] for one in (model, nested)]
    # Each once: what runs again, and where a backward is interrupted for it, may differ, as times are measured.
    assert list(dict.fromkeys(layers[0])) == list(dict.fromkeys(layers[1]))


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
def test_any_gradient_of_the_output_can_be_given(measured, keep_all_bytes):
    measured.compute_sequence(int(0.8 * keep_all_bytes))
    gradients = []
    for model in (copy.deepcopy(measured), network()):
        torch.manual_seed(3)
        data = images().requires_grad_()
        model(data).backward(torch.linspace(-1, 1, 80).view(8, 10))
        gradients.append([data.grad, *(parameter.grad for parameter in model.parameters())])
    # The batch requires a gradient here, and did not when it was measured: planned again, and exact again.
    assert all(map(torch.equal, *gradients))


def test_random_numbers_are_drawn_again_whatever_is_asked_for(keep_all_bytes):
    model = rotor.Checkpointable(network(), int(0.7 * keep_all_bytes), preserve_rng_state=False)
    assert_same_training(train(model, [images()] * 2), train(network(), [images()] * 2))
    assert model.plan.recomputations > 0


def test_eval_mode_runs_the_model_itself(measured):
    model = copy.deepcopy(measured).eval()
    assert torch.equal(model(images()), model.original(images()))


def test_it_stands_for_its_model_and_can_be_copied_and_pickled(measured, keep_all_bytes):
    measured.compute_sequence(int(0.8 * keep_all_bytes))
    assert isinstance(measured, nn.Sequential | Rockmate)
    assert measured.state_dict().keys() == network().state_dict().keys()
    assert len(measured) == 5
    for twin in (copy.deepcopy(measured), pickle.loads(pickle.dumps(measured))):
        with pytest.raises(NotPlanned, match="call measure"):
            twin.compute_sequence(MIB)
        assert_same_training(train(twin, [images()]), train(network(), [images()]))
        assert str(twin.sequence) == str(measured.sequence)


@pytest.mark.ci
def test_a_module_that_is_no_sequential_is_planned_along_its_graph():
    entry = zoo.get("gpt2-tiny")
    model = rotor.Checkpointable(copy.deepcopy(entry.model), loss=entry.loss)
    model.measure(entry.sample)
    most = model.compute_sequence("1GiB") and model.plan.peak_bytes
    assert len(model.compute_sequence(int(0.9 * most))) > 0
    assert_same_training(
        train(model, [entry.sample] * 2, entry.loss), train(entry.model, [entry.sample] * 2, entry.loss)
    )


@pytest.mark.parametrize("limit", ["much", True, float("nan"), -1, 0, []])
def test_what_is_no_limit_is_refused(limit):
    with pytest.raises(BudgetError, match=r"mem_limit|not positive"):
        rotor.Checkpointable(network(), limit)


@pytest.mark.parametrize("model", ["network", None, nn.Sequential])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(ModelError):
        rotor.Checkpointable(model)


def test_a_planned_module_is_refused(measured):
    with pytest.raises(ModelError, match="planned already"):
        rotor.Checkpointable(measured)


def test_a_limit_before_measuring_is_refused():
    with pytest.raises(NotPlanned, match="call measure"):
        rotor.Checkpointable(network()).compute_sequence(MIB)


# ---- tools -------------------------------------------------------------------------------------------


def test_memory_of_the_process_grows_with_what_it_holds():
    memory = rotor.Memory.MeasureMemory("cpu")
    before = memory.currentValue()
    held = torch.ones(256 * MIB // 4)  # more than what other threads free meanwhile
    after = memory.currentValue()
    assert after - before > 128 * MIB
    del held
    assert memory.maximumValue() >= after > memory.currentValue()


def test_memory_of_other_devices_is_refused():
    with pytest.raises(ValueError, match="'meta'"):
        rotor.Memory.MeasureMemory("meta")


@pytest.mark.parametrize(
    ("build", "same"),
    [
        (lambda: rotor.models.resnet18(10, 8), lambda: zoo.resnet18(10, 8)),
        (lambda: rotor.models.resnet50(10, 8), lambda: zoo.resnet50(10, 8)),
        (lambda: rotor.models.vgg16(zoo.VGGConfig.tiny()), lambda: zoo.VGG(zoo.VGGConfig.tiny())),
        (
            lambda: rotor.models.mobilenet_v2(zoo.MobileNetV2Config.tiny()),
            lambda: zoo.MobileNetV2(zoo.MobileNetV2Config.tiny()),
        ),
        (lambda: rotor.models.googlenet(zoo.GoogLeNetConfig.tiny()), lambda: zoo.GoogLeNet(zoo.GoogLeNetConfig.tiny())),
        (lambda: rotor.models.densenet121(zoo.DenseNetConfig.tiny()), lambda: zoo.DenseNet(zoo.DenseNetConfig.tiny())),
    ],
    ids="resnet18 resnet50 vgg16 mobilenet_v2 googlenet densenet121".split(),
)
def test_models_compute_what_the_zoo_s_do(build, same):
    results = []
    for make in (build, same):
        torch.manual_seed(2)
        model = make().train()
        results.append(model(torch.randn(4, 3, 32, 32)))
    # A pooling module and a mean may add in another order: equal within rounding.
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("name", "count"), [("resnet34", 21_797_672), ("resnet101", 44_549_160), ("resnet152", 60_192_808)]
)
def test_deep_models_have_the_parameters_of_the_literature(name, count):
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in getattr(rotor.models, name)().parameters()) == count


def test_a_relu_at_the_end_is_one_with_its_module():
    module = nn.Linear(4, 4)
    data = torch.randn(2, 4)
    assert torch.equal(rotor.models.utils.ReLUAtEnd(module)(data), module(data).relu())


@pytest.mark.ci
@pytest.mark.slow
def test_the_example_learns_its_digits():
    text = run_script("examples/train_mnist_rotor.py", "--steps", "12", "--batch-size", "32", "--mem-limit", "9MiB")
    losses = [float(line.split("loss ")[1].split()[0]) for line in text.splitlines() if "loss " in line]
    assert losses[-1] < losses[0]
    assert "Fck" in text


def test_a_loss_that_is_given_is_measured():
    model = rotor.Checkpointable(network(), loss=squares)
    model.measure(images())
    model.compute_sequence(1 << 30)
    assert model.plan_file().measured.loss is not None
