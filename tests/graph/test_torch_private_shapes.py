"""What is used of PyTorch's private names where there are no data (`rkgb.shapes`)."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.torch_private import autograd, identity, operations


class Seen(TorchDispatchMode):
    """Notes each operation, and what is asked for while it runs."""

    def __init__(self, ask=lambda args: None):
        super().__init__()
        self.calls = []
        self._ask = ask

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, self._ask(args)))
        return func(*args, **(kwargs or {}))


def test_the_node_whose_backward_runs_is_told():
    assert autograd.running_node() is None
    given = torch.ones(3, requires_grad=True)
    total = given.exp().sum()
    with Seen(lambda args: autograd.running_node()) as seen:
        total.backward()
    names = [node.name() for _, node in seen.calls if node is not None]
    assert "ExpBackward0" in names
    assert autograd.running_node() is None


def test_nodes_are_numbered_in_the_order_in_which_they_are_made():
    given = torch.ones(3, requires_grad=True)
    number = autograd.next_sequence_number()
    made = given.exp()
    assert autograd.sequence_number(made.grad_fn) == number
    with Seen(lambda args: autograd.next_sequence_number()) as seen:
        other = made.sin()
    assert seen.calls[-1][1] == autograd.sequence_number(other.grad_fn) + 1  # it is numbered before it runs


def test_who_holds_a_gathered_gradient_is_counted():
    """More hold it where a view of it is somewhere."""
    tensor = torch.ones(3)
    alone = identity.holders(tensor)
    view = tensor.view(3, 1)
    assert identity.holders(tensor)[0] > alone[0]
    del view
    assert identity.holders(tensor) == alone


@pytest.mark.parametrize(
    ("run", "operation"),
    [
        (lambda t: t[0].item(), operations.read_number),
        (lambda t: t.to(torch.float64), operations.copy_to),
        (lambda t: torch._is_all_true(t > 0), operations.all_true),
        (lambda t: torch._is_any_true(t > 0), operations.any_true),
    ],
)
def test_operations_are_what_their_functions_are(run, operation):
    with Seen() as seen:
        run(torch.ones(3))
    assert operation in [func for func, _ in seen.calls]


def test_convolutions_go_by_the_arguments_that_scratch_memory_is_told_by():
    names = [argument.name for argument in operations.convolution._schema.arguments]
    assert names[:9] == [
        "input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups",
    ]  # fmt: skip
    names = [argument.name for argument in torch.ops.aten.convolution_backward.default._schema.arguments]
    assert names[:10] == [
        "grad_output", "input", "weight", "bias_sizes", "stride", "padding", "dilation", "transposed", "output_padding",
        "groups",
    ]  # fmt: skip


def test_losses_of_paths_give_a_row_of_logarithms_for_each_sample():
    probabilities = torch.randn(6, 2, 5).log_softmax(-1)
    targets, lengths = torch.randint(1, 5, (2, 3)), torch.tensor([6, 6])
    for packet, sizes in ((operations.ctc_loss, (lengths, torch.tensor([3, 3]))),):
        loss, paths = packet.Tensor(probabilities, targets, *sizes)
        assert loss.shape == (2,)
        assert paths.shape == (2, 6, 7)
        gradient = operations.ctc_loss_backward.Tensor(torch.ones(2), probabilities, targets, *sizes, loss, paths, 0)
        assert gradient.shape == probabilities.shape
    loss, paths = operations.ctc_loss.default(probabilities, targets, [6, 6], [3, 2])
    assert paths.shape == (2, 6, 7)


def test_fused_attention_keeps_its_output_and_a_logarithm_for_each_row():
    query = torch.randn(2, 3, 8, 4, device="meta")
    output, logarithm = operations.attention_of_the_cpu(query, query, query, 0.0, True, attn_mask=None, scale=None)
    given = (output, query, query, query, output, logarithm, 0.0, True)
    gradients = operations.attention_of_the_cpu_backward(*given, attn_mask=None, scale=None)
    assert [gradient.shape for gradient in gradients] == 3 * [query.shape]
    assert (output.shape, logarithm.numel()) == (query.shape, 2 * 3 * 8)
    made = operations.attention_of_accelerators(query, query, query, None, True, 0.1, True, scale=None)
    assert made[0].shape == query.shape
    assert made[1].numel() >= 2 * 3 * 8


@pytest.mark.parametrize("kernel", [operations.flash_attention, operations.attention_of_cudnn])
def test_attention_in_half_precision_keeps_its_output_and_a_logarithm_for_each_row(kernel):
    query = torch.randn(2, 3, 8, 16, device="meta", dtype=torch.float16)
    given = (query, query, query) if kernel is operations.flash_attention else (query, query, query, None, True)
    output, logarithm, *_ = kernel(*given, 0.0, True, False, scale=None)
    assert output.shape == query.shape
    assert logarithm.numel() >= 2 * 3 * 8


def test_attention_written_out_is_a_softmax_between_two_products():
    query = torch.randn(2, 3, 8, 4)
    output, weights = operations.attention_written_out(query, query, query, None, 0.0, False, None, scale=1.0)
    torch.testing.assert_close(weights, (query @ query.transpose(2, 3)).softmax(-1))
    torch.testing.assert_close(output, weights @ query)


def test_layers_of_lstms_have_a_function_and_a_derivative():
    rows, weight, bias, state = torch.randn(5, 2, 4), torch.randn(16, 4), torch.randn(16), torch.zeros(2, 4)
    given = (rows, weight, weight, bias, bias, state, state)
    output, hidden, cells, workspace = operations.lstm_layer(*given, False, [], 2, 4, 1, True, False, False, True)
    assert (output.shape, hidden.shape, workspace.dtype) == ((5, 2, 4), (2, 4), torch.uint8)
    made = operations.lstm_layer_backward(
        *given, output, hidden, cells, output, None, None, False, 2, 4, 1, True, True, False, [], False, workspace
    )
    assert [one.shape for one in made[:3]] == [rows.shape, weight.shape, weight.shape]


def test_what_has_a_kernel_for_each_device_is_whole_without_data_for_a_while():
    def called():
        names = []

        class Noting(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                names.append(func._schema.name)
                return func(*args, **(kwargs or {}))

        given = torch.randn(4, device="meta", requires_grad=True)
        made = torch.nn.functional.mish(given)
        with Noting():
            made.backward(torch.ones(4, device="meta"))
        return "aten::mish_backward" in names

    plain = called()
    with operations.whole_without_data():
        with operations.whole_without_data():
            assert called()
        assert called()
    assert called() is plain


@pytest.mark.parametrize("mode", range(3))
def test_bags_of_embeddings_have_their_notes(mode):
    table, indices, offsets = torch.randn(9, 4), torch.randint(9, (12,)), torch.arange(0, 12, 3)
    given = operations.embedding_bag(table, indices, offsets, False, mode)
    assert [one.shape[0] for one in given] == [4, 12 if mode else 0, 4, 4]
    made = operations.embedding_bag_backward(given[0], indices, offsets, *given[1:], 9, False, mode, False, None)
    assert made.shape == table.shape


def test_fourier_transforms_are_told_by_what_goes_in_and_comes_out():
    numbers = torch.randn(2, 8)
    found = operations.fourier_of_numbers(numbers, [1], 0, True)
    assert torch.equal(found, torch.fft.rfft(numbers))
    assert torch.equal(operations.fourier_of_complex(found, [0], 0, True), torch.fft.fft(found, dim=0))
    assert torch.equal(operations.fourier_to_numbers(found, [1], 0, 8), torch.fft.irfft(found, norm="forward"))


def test_distances_are_those_of_points():
    one, other = torch.randn(30, 4), torch.randn(40, 4)
    assert torch.equal(operations.distances(one, other), torch.cdist(one, other))


def test_rows_are_packed_by_their_lengths():
    rows = torch.randn(2, 3, 4)
    data, counts = operations.pack_padded_rows(rows, torch.tensor([3, 1]), True)
    assert (data.shape, counts.tolist()) == ((4, 4), [2, 1, 1])
    assert operations.pad_packed_rows(data, counts, True, 0.0, 3)[0].shape == rows.shape


def test_products_of_groups_have_a_function():
    rows, weights = torch.randn(6, 8), torch.randn(2, 8, 4)
    made = operations.grouped_product(rows, weights, offs=torch.tensor([2, 6], dtype=torch.int32))
    torch.testing.assert_close(made, torch.cat([rows[:2] @ weights[0], rows[2:] @ weights[1]]))


def test_a_memory_format_is_suggested_by_strides():
    images = torch.randn(2, 8, 4, 4)
    assert operations.suggested_format(images) == torch.contiguous_format
    assert operations.suggested_format(images.contiguous(memory_format=torch.channels_last)) == torch.channels_last
    tokens = torch.randn(2, 16, 8).transpose(1, 2).view(2, 8, 4, 4)
    assert operations.suggested_format(tokens) == torch.channels_last
    volumes = torch.randn(2, 8, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d)
    assert operations.suggested_format(volumes) == torch.channels_last_3d


def test_the_softmax_of_attention_gives_zeros_for_rows_of_nothing():
    scores = torch.tensor([[1.0, -torch.inf], [-torch.inf, -torch.inf]])
    assert operations.safe_softmax(scores, -1).tolist() == [[1, 0], [0, 0]]


def test_kernels_of_half_precision_are_those_of_a_processor_that_has_them():
    assert operations.HALF_OF_ONEDNN <= {torch.bfloat16, torch.float16}
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
        assert torch.float16 not in operations.HALF_OF_ONEDNN


def test_softmaxes_and_their_backward():
    scores = torch.randn(3, 5, requires_grad=True)
    for function, backward, plain in zip(
        operations.softmaxes, operations.softmaxes_backward, (torch.softmax, torch.log_softmax), strict=True
    ):
        made, gradient = function(scores, -1, False), torch.randn(3, 5)
        assert torch.equal(made, plain(scores, -1))
        (expected,) = torch.autograd.grad(plain(scores, -1), scores, gradient)
        assert torch.equal(backward(gradient, made, -1, torch.float32), expected)


@pytest.mark.skipif(operations.linear_of_onednn is None, reason="a build without oneDNN")
@pytest.mark.parametrize("bias", [None, torch.arange(3.0)])
def test_a_linear_layer_by_onednn(bias):
    x, weight = torch.arange(8.0).view(1, 2, 4), torch.arange(12.0).view(3, 4)
    expected = torch.nn.functional.linear(x, weight, bias)  # whole numbers: nothing is rounded
    assert torch.equal(operations.linear_of_onednn(x, weight, bias, "none", [], ""), expected)
    across = weight.t().contiguous().t()
    assert torch.equal(operations.linear_of_onednn(x, across, bias, "none", [], ""), expected)
