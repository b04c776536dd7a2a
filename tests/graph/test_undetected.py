"""Nothing is silently wrong: what a trace cannot hold for other data is guarded, refused or told."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from rkgb import RockmateError, make_all_graphs
from rkgb.errors import GuardError, TraceWarning
from tests.graph.programs import Program, bytes_of, linear, rows
from tests.models.factories import padded_tokens, tokens
from tests.models.hidden_reads import HIDDEN, outer
from tests.models.hugging_face import bert, gpt2, llama, t5
from tests.models.side_effects import EFFECTS, EXACT, REFUSED, WARNED
from tests.models.tracing import differences, exact_graph, output_differences, sample_of, step_difference, tried

# What reads something else at every run may become one operation as a whole, which is told.
pytestmark = pytest.mark.filterwarnings("ignore:submodule 'inner' is one operation:rkgb.TraceWarning")

SEED = 5
NO_SHIFTS = "no program of this release of PyTorch, such as 2.9: its roll takes no tensor for its shifts"
# Where a message may point: the submodule, or a line of the files in which the scenarios are.
PLACE = re.compile(r"\binner\b|(hidden_reads|side_effects|test_undetected)\.py:\d+")
# Reads of which each run asks the same question: they must stay usable for data that answer it alike.
ANSWERED = (
    "if_tensor if_bool if_not while_tensor nan_check equal allclose format mask_all integer_mask_all "
    "mask_through_numpy mask_as_an_array lengths_as_a_list number_of_unique"
).split()


def assert_named(error, places=PLACE):
    """An error that does not say where helps nobody."""
    assert isinstance(error, RockmateError), f"no error where one was due, but {error!r}"
    assert places.search(str(error)), f"{type(error).__name__} names no place: {error}"


def read_from(name):
    """Module, sample, other data, and the graph with its refusal, of which one is None."""
    scenario = HIDDEN[name]()
    sample, other = (sample_of(scenario.module, data, {}) for data in (scenario.sample, scenario.other))
    return scenario.module, sample, other, *tried(exact_graph, scenario.module, sample)


def takes_a_tensor_as_shifts():
    """Whether eager code may say so: PyTorch 2.9 answers "`shifts` required"."""
    try:
        rows().roll(torch.tensor(1), dims=1)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("roll_by_a_tensor", marks=pytest.mark.skipif(not takes_a_tensor_as_shifts(), reason=NO_SHIFTS))
        if name == "roll_by_a_tensor"
        else name
        for name in HIDDEN
    ],
)
def test_what_the_sample_hides_is_followed_guarded_or_refused(name):
    module, sample, other, graph, refusal = read_from(name)
    if graph is None:
        assert_named(refusal)
        return
    assert step_difference(graph, module, sample, SEED) is None
    difference, guard = tried(step_difference, graph, module, other, SEED)
    assert difference is None
    if guard is not None:
        assert_named(guard)


@pytest.mark.parametrize("name", ANSWERED)
def test_a_question_to_the_data_becomes_a_guard_that_lets_like_data_through(name):
    module, sample, other, graph, refusal = read_from(name)
    assert refusal is None
    assert step_difference(graph, module, sample, SEED) is None
    with pytest.raises(GuardError, match=PLACE):
        step_difference(graph, module, other, SEED)


def test_a_branch_on_random_numbers_is_followed_guarded_or_refused_for_every_seed():
    module = outer(lambda m, x: m.layer(x) if torch.rand(()) < 0.8 else x * m.layer.weight[0])
    sample = sample_of(module, (rows(),), {})
    graph, refusal = tried(exact_graph, module, sample)
    if graph is None:
        assert_named(refusal)
        return
    runs = [tried(step_difference, graph, module, sample, seed) for seed in range(20)]
    assert all(difference is None for difference, _ in runs)
    for _, guard in runs:
        if guard is not None:
            assert_named(guard)
    assert any(guard is None for _, guard in runs)


@pytest.mark.parametrize("name", EFFECTS)
def test_side_effects_are_exact_refused_or_told(name):
    wanted, build = EFFECTS[name]
    got, message = outcome(build(), rows())
    assert got in wanted, message


@pytest.mark.parametrize("name", EFFECTS)
def test_a_refusal_or_warning_names_the_place(name):
    got, message = outcome(EFFECTS[name][1](), rows())
    assert got == EXACT or PLACE.search(message), f"it names no place: {message}"


def outcome(module, data):
    """What became of a module: a word, and the message that came with it."""
    sample = sample_of(module, (data,), {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            graph = exact_graph(module, sample)
        except RockmateError as error:
            return REFUSED, str(error)
    assert torch.is_grad_enabled(), "tracing left the gradient mode of the module's forward behind"
    assert torch.get_default_dtype() == torch.float32
    difference = step_difference(graph, module, sample, SEED)
    if difference is not None:
        return "wrong", difference
    told = [str(warning.message) for warning in caught if issubclass(warning.category, TraceWarning)]
    return (WARNED, " ".join(told)) if told else (EXACT, "the trace was accepted without a word")


@pytest.fixture(autouse=True)
def gradients_as_before():
    """A scenario switches them off for good."""
    yield
    torch.set_grad_enabled(True)


# ---- what a model keeps or returns -------------------------------------------------------------------------


class Box:
    """A container that is no tuple, list, dictionary or dataclass."""

    def __init__(self, value):
        self.value = value


def test_tensors_in_an_object_that_is_returned_are_those_of_each_run():
    module = Program(lambda m, x: (m.layer(x), Box(m.layer(x).exp())), layer=linear())
    sample, other = (sample_of(module, (rows(),), {}) for _ in range(2))
    graph, refusal = tried(exact_graph, module, sample)
    assert refusal is not None or output_differences(graph, module, other, SEED) == []


def test_tensors_in_an_object_that_is_given_are_those_of_each_run():
    module = Program(lambda m, x, box: m.layer(x) * box.value, layer=linear())
    sample, other = (sample_of(module, (rows(), Box(rows())), {}) for _ in range(2))
    graph, refusal = tried(exact_graph, module, sample)
    assert refusal is not None or step_difference(graph, module, other, SEED) is None


def test_a_module_that_is_traced_computes_the_same_afterwards():
    """Attributes that its forward sets while it is traced must not hold tensors of the tracer."""
    for name in ("lazy_constant", "compiled_submodule", "hooks_of_its_own"):
        traced, untouched = EFFECTS[name][1](), EFFECTS[name][1]()
        untouched.load_state_dict(traced.state_dict())
        outcome(traced, rows())
        x = rows()
        assert not list(differences(untouched(x), traced(x), "output", set())), name
        traced(x).sum().backward()


@pytest.mark.parametrize(
    "write",
    [
        torch.relu_,
        lambda x: x.view(-1)[:2].zero_(),
        lambda x: x.data.mul_(2),
        lambda x: x.detach().numpy().fill(1.0),
        lambda x: x.t().copy_(torch.ones(4, 3)),
    ],
    ids=["relu", "view", "data", "numpy", "transposed"],
)
def test_a_forward_that_writes_into_its_input_is_refused_and_the_sample_kept(write):
    module = outer(lambda m, x: (write(x), m.layer(x))[1])
    sample = rows()
    kept = bytes_of(sample)
    with pytest.raises(RockmateError, match=PLACE):
        make_all_graphs(module, sample)
    assert bytes_of(sample) == kept


def test_a_buffer_written_where_no_dispatcher_sees_it_is_refused_or_exact():
    module = outer(lambda m, x: (m.n.numpy().__iadd__(1), m.layer(x) * m.n)[1], n=torch.zeros(4))
    sample = sample_of(module, (rows(),), {})
    graph, refusal = tried(exact_graph, module, sample)
    if graph is None:
        assert_named(refusal)
        return
    assert step_difference(graph, module, sample, SEED) is None


class Packed(nn.Module):
    """A recurrent layer that skips the padding: it wants the longest sentence first, at least one token in each."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 6, batch_first=True), linear(6)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        unpacked, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.size(1))
        return self.head(unpacked)


def test_lengths_that_must_be_in_order_are_followed_guarded_or_refused():
    module = Packed()
    sample, other = (sample_of(module, (rows(3, 5, 4), torch.tensor(k)), {}) for k in ([5, 3, 2], [4, 4, 1]))
    graph, refusal = tried(exact_graph, module, sample)
    if graph is None:
        assert re.search(r"lengths|pack", str(refusal)), refusal
        return
    assert step_difference(graph, module, sample, SEED) is None
    assert tried(step_difference, graph, module, other, SEED)[0] is None


# ---- masks of model libraries ------------------------------------------------------------------------------

FULL_AND_PADDED = {
    "bert": (lambda: bert(16, 16), lambda: {**padded_tokens(16, 9, width=16), "labels": torch.tensor([0, 1])}),
    "gpt2": (
        lambda: (gpt2(use_cache=False), (), {**padded_tokens(16, 16, width=16), "labels": tokens(2, 16)}),
        lambda: {**padded_tokens(16, 9, width=16), "labels": tokens(2, 16)},
    ),
    "llama": (
        lambda: with_mask(llama(use_cache=False)),
        lambda: {**padded_tokens(16, 9, width=16), "labels": tokens(2, 16)},
    ),
    "t5": (
        lambda: with_mask(t5()),
        lambda: {**padded_tokens(12, 7, width=12), "labels": tokens(2, 8)},
    ),
}


def with_mask(model):
    module, args, kwargs = model
    return module, args, {**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])}


@pytest.mark.parametrize("name", FULL_AND_PADDED)
def test_a_graph_made_from_full_sentences_is_never_wrong_for_padded_ones(name):
    build, padded = FULL_AND_PADDED[name]
    module, args, kwargs = build()
    graph = exact_graph(module, sample_of(module, args, kwargs))
    assert step_difference(graph, module, sample_of(module, args, kwargs), SEED) is None
    difference, guard = tried(step_difference, graph, module, sample_of(module, (), padded()), SEED)
    assert difference is None
    if guard is not None:
        assert_named(guard, re.compile(r"at \S+ \w+\.py:\d+"))


@pytest.mark.parametrize("name", FULL_AND_PADDED)
def test_a_graph_made_from_padded_sentences_is_exact_for_other_padding(name):
    build, padded = FULL_AND_PADDED[name]
    module, _, _ = build()
    graph = exact_graph(module, sample_of(module, (), padded()))
    for _ in range(2):
        other = padded()
        turned = {key: value.flip(0) for key, value in other.items()}  # the other sentence is the short one
        assert step_difference(graph, module, sample_of(module, (), turned), SEED) is None


def test_augmentation_by_other_random_numbers_is_refused_or_told():
    """As SpecAugment does: what it hides is drawn by NumPy, outside of PyTorch's stream."""

    def hide(m, x):
        places = torch.from_numpy(np.random.choice(x.size(1), 2, replace=False))
        return m.layer(x.index_fill(1, places, 0.0))

    assert outcome(nn.Sequential(linear(), Program(hide, layer=linear())), rows())[0] in (REFUSED, WARNED)
