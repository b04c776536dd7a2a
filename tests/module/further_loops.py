"""Further events of training loops: scalers, optimizers that step twice, hooks, gradients of gradients, other calls."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.tree import leaves
from tests.module.further_habits import Nested
from tests.module.habit_loops import Event, Run, Shape, Within, batch, seed_streams, squares, train
from tests.module.habits import Checkpointed


def called(run: Run, seed: int, shape: Shape | None = None) -> Any:
    seed_streams(seed)
    return run.model(**batch(seed, shape or run.shape))


def trainable(run: Run) -> list[nn.Parameter]:
    return [one for one in run.model.parameters() if one.requires_grad]


def scaled_loss(run: Run, seed: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    run.optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = called(run, seed)
    loss = squares(output)
    scaler.scale(loss).backward()
    scaler.unscale_(run.optimizer)
    run.outputs += [loss, torch.nn.utils.clip_grad_norm_(trainable(run), 1.0)]
    scaler.step(run.optimizer)
    scaler.update()


def two_sizes(run: Run, seed: int) -> None:
    """Two towers of other sizes before one backward."""
    run.optimizer.zero_grad()
    first = called(run, seed)
    second = called(run, seed + 1, Shape(run.shape.batch - 2, run.shape.length))
    (squares(first) + squares(second)).backward()
    run.outputs += [first, second]
    run.step()


def two_sizes_under_autocast(run: Run, seed: int) -> None:
    """In a region for each: in one, eager would share the casts of weights."""
    run.optimizer.zero_grad()
    outputs = []
    for place, shape in enumerate((run.shape, Shape(run.shape.batch - 2, run.shape.length))):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(called(run, seed + place, shape))
    sum(map(squares, outputs)).backward()
    run.step()


def backwards_in_another_order(run: Run, seed: int) -> None:
    run.optimizer.zero_grad()
    outputs = [called(run, seed + place) for place in range(2)]
    for output in outputs:
        squares(output).backward()
    run.step()


def sharpness_aware(run: Run, seed: int) -> None:
    """A step up the gradient, another backward, and the step from where it began."""
    run.optimizer.zero_grad()
    squares(called(run, seed)).backward()
    moved = [(one, 0.05 * one.grad) for one in trainable(run) if one.grad is not None]
    with torch.no_grad():
        for parameter, by in moved:
            parameter.add_(by)
    run.optimizer.zero_grad()
    squares(called(run, seed)).backward()
    with torch.no_grad():
        for parameter, by in moved:
            parameter.sub_(by)
    run.step()


def of_some_parameters(run: Run, seed: int) -> None:
    run.optimizer.zero_grad()
    output = called(run, seed)
    some = trainable(run)[::2]
    if some:
        torch.autograd.backward(squares(output), inputs=some)
    run.step()


class Interrupted(Exception):
    pass


def interrupted_backward(run: Run, seed: int) -> None:
    """A hook on a parameter raises once; the loop goes on with the next batch."""

    def raising(_: Tensor) -> None:
        raise Interrupted

    run.optimizer.zero_grad()
    parameter = trainable(run)[len(trainable(run)) // 2]
    handle = parameter.register_hook(raising)
    with contextlib.suppress(Interrupted):
        squares(called(run, seed)).backward()
    handle.remove()
    train(run, seed + 1)


def functional_call(run: Run, seed: int) -> None:
    """With other weights for one call; a checkpoint within would take those of the module in its backward."""
    if any(isinstance(part, Checkpointed | Nested) for part in run.network.parts):
        return
    run.optimizer.zero_grad()
    network = run.network
    others = {name: (one * 0.9).detach().requires_grad_() for name, one in network.named_parameters()}
    prefix = (
        "original."
        if run.is_planned and any(n.startswith("original.") for n, _ in run.model.named_parameters())
        else ""
    )
    seed_streams(seed)
    renamed = {f"{prefix}{name}": one for name, one in others.items()}
    output = torch.func.functional_call(run.model, renamed, (), batch(seed, run.shape))
    loss = squares(output)
    run.outputs += [output, torch.autograd.grad(loss, list(others.values()), allow_unused=True)]


def all_frozen(run: Run, seed: int) -> None:
    held = trainable(run)
    for parameter in held:
        parameter.requires_grad_(False)
    run.outputs.append(called(run, seed))
    for parameter in held:
        parameter.requires_grad_(True)
    train(run, seed + 1)


def only_input(run: Run, seed: int) -> None:
    """The gradient of the input alone, as for saliency."""
    arguments = batch(seed, Shape(requires_grad=True))
    seed_streams(seed)
    loss = squares(run.model(**arguments))
    run.outputs.append(torch.autograd.grad(loss, arguments["x"]))


def gradient_penalty(run: Run, seed: int) -> None:
    """The gradient of the input, and that of its size."""
    run.optimizer.zero_grad()
    arguments = batch(seed, Shape(requires_grad=True))
    seed_streams(seed)
    output = run.model(**arguments)
    (gradient,) = torch.autograd.grad(squares(output), arguments["x"], create_graph=True)
    penalty = squares(output) + gradient.square().sum()
    penalty.backward()
    run.outputs += [gradient, penalty]
    run.step()


def after_each_gradient(run: Run, seed: int) -> None:
    """An optimizer that steps within the backward."""
    run.optimizer.zero_grad()
    rate, handles = 0.01, []

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad.clamp(-1, 1), alpha=-rate)
        parameter.grad = None

    for parameter in trainable(run):
        handles.append(parameter.register_post_accumulate_grad_hook(step))
    squares(called(run, seed)).backward()
    for handle in handles:
        handle.remove()


def hooks_on_the_module(run: Run, seed: int) -> None:
    """For one step, hooks on the whole and on a submodule."""
    seen: list[Any] = []
    handles = [
        run.model.register_forward_hook(lambda module, arguments, output: seen.append(len(leaves(output)))),
        run.model.register_forward_pre_hook(lambda module, arguments: seen.append("before")),
    ]
    train(run, seed)
    for handle in handles:
        handle.remove()
    run.outputs.append(seen)
    train(run, seed + 1)


def hook_on_a_part(run: Run, seed: int) -> None:
    """A forward hook that is added to a submodule between two steps, and taken away again."""
    handle = run.network.parts[-1].register_forward_hook(lambda module, arguments, output: output * 0.5)
    train(run, seed)
    handle.remove()
    train(run, seed + 1)


def another_optimizer(run: Run, seed: int) -> None:
    run.optimizer = torch.optim.AdamW(trainable(run), 1e-3, foreach=bool(seed % 2))
    train(run, seed)


def averaged(run: Run, seed: int) -> None:
    average = torch.optim.swa_utils.AveragedModel(run.network)
    train(run, seed)
    average.update_parameters(run.network)
    run.outputs += [one.detach().clone() for one in average.module.parameters()]


def weights_swapped(run: Run, seed: int) -> None:
    """Evaluation with averaged weights, by their data, and back."""
    held = [one.data for one in run.model.parameters()]
    for parameter in run.model.parameters():
        parameter.data = parameter.data * 0.9
    run.model.eval()
    with torch.no_grad():
        run.outputs.append(called(run, seed))
    run.model.train()
    for parameter, data in zip(run.model.parameters(), held, strict=True):
        parameter.data = data
    train(run, seed + 1)


def one_part_in_evaluation(run: Run, seed: int) -> None:
    run.network.parts[0].eval()
    train(run, seed)
    run.network.parts[0].train()
    train(run, seed + 1)


def large_then_small(run: Run, seed: int) -> None:
    for place, (rows, length) in enumerate(((1, 1), (3, 2), (16, 5))):
        train(run, seed + place, Shape(rows, length))


def graph_kept(run: Run, seed: int) -> None:
    """Of two losses of one forward, each with a backward of its own."""
    run.optimizer.zero_grad()
    output = called(run, seed)
    first = next(one for one in leaves(output) if one.requires_grad)
    first.float().abs().mean().backward(retain_graph=True)
    squares(output).backward()
    run.step()


def output_written(run: Run, seed: int) -> None:
    """The output is written into before the loss, as padding often is."""
    run.optimizer.zero_grad()
    output = called(run, seed)
    first = next(one for one in leaves(output) if one.requires_grad)
    first.mul_(0.5)
    squares(first).backward()
    run.step()


def gradients_zeroed_in_place(run: Run, seed: int) -> None:
    squares(called(run, seed)).backward()
    held = [one.grad for one in trainable(run)]
    run.model.zero_grad(set_to_none=False)
    squares(called(run, seed + 1)).backward()
    run.outputs += held
    run.step()


EVENTS: list[Event] = [
    train,
    scaled_loss,
    two_sizes,
    two_sizes_under_autocast,
    backwards_in_another_order,
    sharpness_aware,
    of_some_parameters,
    interrupted_backward,
    functional_call,
    all_frozen,
    only_input,
    gradient_penalty,
    after_each_gradient,
    hooks_on_the_module,
    hook_on_a_part,
    another_optimizer,
    averaged,
    weights_swapped,
    one_part_in_evaluation,
    large_then_small,
    graph_kept,
    output_written,
    gradients_zeroed_in_place,
    Within("autocast"),
    Within("save_on_cpu"),
]
