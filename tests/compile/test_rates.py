"""What computing values again takes is measured on the device, whoever asks, and counted by operations and bytes."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from rockmate.division.rates import Rates, main_device_of, rates_of
from tests.compile.joint_graphs import joint_of

CPU = torch.device("cpu")


def test_rates_are_of_real_tensors_while_the_compiler_traces():
    real = rates_of.__wrapped__(CPU)
    with FakeTensorMode():
        asked = rates_of.__wrapped__(CPU)
    # Without any work, both are tens and hundreds of times as high.
    assert asked.bytes < 20 * real.bytes
    assert asked.operations < 10 * real.operations


def product(x: Tensor) -> Tensor:
    return torch.sin(x.t() @ torch.exp(x)) * 2


def test_products_are_counted_by_their_operations_and_all_else_by_bytes():
    graph = joint_of(product, torch.rand(32, 16, requires_grad=True))
    by_name = {node.name: node for node in graph.nodes}
    operations, moved = Rates(operations=1.0, bytes=float("inf")), Rates(operations=float("inf"), bytes=1.0)
    assert operations.time_ms(by_name["mm"]) == 2 * 16 * 32 * 16
    assert operations.time_ms(by_name["sin"]) == 0
    assert moved.time_ms(by_name["mm"]) == 4 * (16 * 16 + 2 * 16 * 32)
    assert moved.time_ms(by_name["sin"]) == pytest.approx(0.5 * 4 * 16 * 16)
    assert moved.time_ms(by_name["t"]) == 0


def test_a_concatenation_is_read_and_written_by_a_loop_of_its_own():
    def joined(x: Tensor) -> Tensor:
        return torch.sin(torch.cat([torch.exp(x), x]))

    (node,) = (node for node in joint_of(joined, torch.rand(32, 16, requires_grad=True)).nodes if node.name == "cat")
    assert Rates(operations=float("inf"), bytes=1.0).time_ms(node) == 2 * 2 * 4 * 32 * 16


def test_the_device_is_that_of_most_bytes():
    graph = joint_of(product, torch.rand(8, 8, requires_grad=True))
    assert main_device_of(graph.nodes) == CPU
    assert main_device_of([]) == CPU
