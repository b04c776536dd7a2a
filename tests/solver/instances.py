"""Problems with stated properties, for the tests and for measuring the solvers."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

from rk_solvers import BackwardOp, Chain, Data, ForwardOp, Problem

MIB = 1 << 20


@dataclass
class Builder:
    """Collects operations as a model would run them, then derives backward operations and gradient bytes."""

    flops_per_ms: float = 12e9  # a device of 12 TFLOP/s
    bytes_per_ms: float = 600e6  # and 600 GB/s
    launch_ms: float = 0.006
    convolution_bytes: int = 32 * MIB  # most workspace of a convolution
    data: list[Data] = field(default_factory=list)
    forward: list[ForwardOp] = field(default_factory=list)
    saves: list[tuple[int, ...]] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    parameter_bytes: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    block: int = 0

    def add(
        self,
        name: str,
        inputs: tuple[int, ...],
        out_bytes: float,
        *,
        flops: float = 0.0,
        saves: str = "",  # letters: x all inputs, y the output
        phantom_bytes: float = 0,
        parameter_bytes: float = 0,
    ) -> int:
        """Append an operation and return the index of its output."""
        index, out = len(self.forward), len(self.data)
        name = f"{name}_{index}"
        self.data.append(Data(f"{name}.out", int(out_bytes), index))
        outputs = [out]
        if phantom_bytes:
            outputs.append(len(self.data))
            self.data.append(Data(f"{name}.saved", int(phantom_bytes), index, "phantom"))
        moved = out_bytes + phantom_bytes + sum(self.data[item].size_bytes for item in inputs)
        time_ms = max(flops / self.flops_per_ms, moved / self.bytes_per_ms) + self.launch_ms
        workspace = min(int(out_bytes), self.convolution_bytes) if name.startswith("conv") else 0
        self.forward.append(ForwardOp(name, time_ms, tuple(sorted(set(inputs))), tuple(outputs), workspace))
        needs = set(outputs[1:])
        needs.update(inputs if "x" in saves else ())
        needs.update([out] if "y" in saves else ())
        self.saves.append(tuple(sorted(needs)))
        self.backward_ms.append(2 * time_ms if flops or saves else time_ms)
        self.parameter_bytes.append(int(parameter_bytes))
        self.blocks.append(self.block)
        return out

    def problem(self, loss_bytes: float = 0) -> tuple[Problem, Chain]:
        """The step whose loss reads the last output, and the chain of the blocks."""
        count = len(self.forward)
        stage_of = {index: count - index for index in range(count)}
        size = [self.data[op.outputs[0]].size_bytes for op in self.forward]
        producer = [item.producer for item in self.data]
        resident = [0] * (count + 2)
        first = {count - 1: 0}  # stage of the first contribution to each gradient
        for index in reversed(range(count)):
            for item in self.forward[index].inputs:
                first.setdefault(producer[item], stage_of[index])
        for index, start in first.items():
            for stage in range(start + 1, stage_of[index] + 1):
                resident[stage] += size[index]
        for index, amount in enumerate(self.parameter_bytes):
            for stage in range(stage_of[index] + 1, count + 2):
                resident[stage] += amount
        last = self.forward[-1].outputs[0]
        backward = [BackwardOp("loss", 0.05, (last,), 0, size[-1] + int(loss_bytes))]
        for index in reversed(range(count)):
            op, stage = self.forward[index], stage_of[index]
            made = sum(self.data[item].size_bytes for item in op.inputs) + self.parameter_bytes[index]
            peak = resident[stage] + made + op.workspace_bytes
            backward.append(BackwardOp(op.name, self.backward_ms[index], self.saves[index], resident[stage], peak))
        problem = Problem(tuple(self.data), tuple(self.forward), tuple(backward), frozenset({last}))
        return problem, self._chain()

    def _chain(self) -> Chain:
        names = sorted(set(self.blocks))
        starts = [self.blocks.index(name) for name in names] + [len(self.blocks)]
        blocks = tuple(range(a, b) for a, b in itertools.pairwise(starts))
        return Chain(blocks, (len(blocks), *(names.index(block) for block in reversed(self.blocks))))


def gpt2(layers: int = 12, batch: int = 8, tokens: int = 512, width: int = 768, vocabulary: int = 50257,
         long_gelu: bool = False) -> tuple[Problem, Chain]:  # fmt: skip
    """A decoder in single precision with eager attention; 16 operations a block (23 with `long_gelu`)."""
    b = Builder()
    rows = batch * tokens
    act, scores, heads = (
        rows * width * 4.0,
        batch * (width // 64) * tokens * tokens * 4.0,
        2.0 * rows * tokens * width,
    )
    dense = 2.0 * rows * width * width
    square = width * width * 4.0
    x = b.add("embed", (), act, parameter_bytes=vocabulary * width * 4)
    x = b.add("dropout", (x,), act, phantom_bytes=act / 4)
    for layer in range(layers):
        b.block = layer + 1
        y = b.add("layer_norm", (x,), act, saves="x", phantom_bytes=rows * 8, parameter_bytes=width * 8)
        qkv = b.add("qkv", (y,), 3 * act, flops=3 * dense, saves="x", parameter_bytes=3 * square)
        s = b.add("scores", (qkv,), scores, flops=heads, saves="x")
        s = b.add("mask", (s,), scores)
        s = b.add("softmax", (s,), scores, saves="y")
        s = b.add("dropout", (s,), scores, phantom_bytes=scores / 4)
        y = b.add("mix", (s, qkv), act, flops=heads, saves="x")
        y = b.add("merge", (y,), act)
        y = b.add("project", (y,), act, flops=dense, saves="x", parameter_bytes=square)
        y = b.add("dropout", (y,), act, phantom_bytes=act / 4)
        x = b.add("add", (x, y), act)
        y = b.add("layer_norm", (x,), act, saves="x", phantom_bytes=rows * 8, parameter_bytes=width * 8)
        y = b.add("linear", (y,), 4 * act, flops=4 * dense, saves="x", parameter_bytes=4 * square)
        y = _gelu(b, y, 4 * act, long_gelu)
        y = b.add("linear", (y,), act, flops=4 * dense, saves="x", parameter_bytes=4 * square)
        y = b.add("dropout", (y,), act, phantom_bytes=act / 4)
        x = b.add("add", (x, y), act)
    b.block = layers + 1
    x = b.add("layer_norm", (x,), act, saves="x", phantom_bytes=rows * 8, parameter_bytes=width * 8)
    logits = rows * vocabulary * 4.0
    b.add("head", (x,), logits, flops=2.0 * rows * width * vocabulary, saves="x")
    return b.problem(loss_bytes=logits)


def _gelu(b: Builder, x: int, size: float, long: bool) -> int:
    if not long:
        return b.add("gelu", (x,), size, saves="x")
    y = b.add("pow", (x,), size, saves="x")
    y = b.add("mul", (y,), size)
    y = b.add("add", (x, y), size)
    y = b.add("mul", (y,), size)
    y = b.add("tanh", (y,), size, saves="y")
    y = b.add("add", (y,), size)
    z = b.add("mul", (x,), size)
    return b.add("mul", (z, y), size, saves="x")


def resnet50(batch: int = 32, layers: tuple[int, ...] = (3, 4, 6, 3), side: int = 224) -> tuple[Problem, Chain]:
    """Bottleneck residual network in single precision: convolutions are dear, the rest is cheap."""
    b = Builder()

    def conv(x: int, inner: int, outer: int, kernel: int, height: int, relu: bool = True) -> int:
        size = batch * height * height * outer * 4.0
        weights = inner * outer * kernel * kernel
        flops = 2.0 * batch * height * height * weights
        x = b.add("conv", (x,) if x >= 0 else (), size, flops=flops, saves="x", parameter_bytes=weights * 4)
        x = b.add("batch_norm", (x,), size, saves="x", phantom_bytes=outer * 8, parameter_bytes=outer * 8)
        return b.add("relu", (x,), size, saves="y") if relu else x

    height = side // 2
    x = conv(-1, 3, 64, 7, height)
    height //= 2
    pooled = batch * height * height * 64 * 4.0
    x, channels = b.add("max_pool", (x,), pooled, saves="x", phantom_bytes=2 * pooled), 64
    for group, count in enumerate(layers):
        width = 64 << group
        for position in range(count):
            b.block += 1
            stride = 2 if group and not position else 1
            y = conv(x, channels, width, 1, height)
            height //= stride
            y = conv(y, width, width, 3, height)
            y = conv(y, width, 4 * width, 1, height, relu=False)
            shortcut = x if position else conv(x, channels, 4 * width, 1, height, relu=False)
            size = batch * height * height * 4 * width * 4.0
            x = b.add("relu", (b.add("add", (shortcut, y), size),), size, saves="y")
            channels = 4 * width
    b.block += 1
    x = b.add("mean", (x,), batch * channels * 4.0)
    b.add(
        "linear",
        (x,),
        batch * 4000.0,
        flops=2000.0 * batch * channels,
        saves="x",
        parameter_bytes=4000 * channels,
    )
    return b.problem(loss_bytes=batch * 4000)


def chain_of(count: int, size_bytes: int = 4, time_ms: float = 1.0) -> Problem:
    """`count` equal operations in a row; the backward of each needs its input (none for the first)."""
    data = tuple(Data(f"y{i}", size_bytes, i) for i in range(count))
    forward = tuple(ForwardOp(f"f{i}", time_ms, (i - 1,) if i else (), (i,)) for i in range(count))
    backward = tuple(
        BackwardOp(f"b{i}", 2 * time_ms, (i - 1,) if i else (), size_bytes, 2 * size_bytes)
        for i in reversed(range(count))
    )
    return Problem(data, forward, backward)


def random_problem(seed: int, count: int = 6, plain: bool = False) -> Problem:
    """A small random step; `plain` leaves out held data, replay bytes and unrecomputable operations."""
    rng = random.Random(seed)
    data: list[Data] = []
    forward: list[ForwardOp] = []
    for index in range(count):
        known = list(range(len(data)))
        inputs = sorted(rng.sample(known, min(len(known), rng.choice([0, 1, 1, 1, 2, 2]))))
        if known and rng.random() < 0.7:
            inputs = sorted({*inputs, known[-1]})
        outputs = []
        for slot in range(rng.choice([0, 1, 1, 1, 1, 2, 2])):
            outputs.append(len(data))
            data.append(
                Data(
                    f"f{index}.{slot}",
                    rng.choice([0, 1, 2, 5, 8, 13]),
                    index,
                    rng.choice(["data", "phantom"]),
                )
            )
        forward.append(
            ForwardOp(
                f"f{index}", float(rng.choice([0, 1, 1, 2, 3, 5])), tuple(inputs), tuple(outputs),
                rng.choice([0, 0, 1, 6]),
                plain or rng.random() > 0.1, 0 if plain else rng.choice([0, 0, 0, 1, 4]),
            )
        )  # fmt: skip
    backward = []
    for stage in range(rng.randint(0 if not plain else 1, count)):
        known = list(range(len(data)))
        needs = tuple(sorted(rng.sample(known, min(len(known), rng.choice([0, 1, 1, 2, 3])))))
        resident = rng.choice([0, 1, 3, 7])
        backward.append(
            BackwardOp(f"b{stage}", float(rng.randint(0, 3)), needs, resident, resident + rng.choice([0, 2, 5]))
        )
    held = frozenset() if plain else frozenset(item for item in range(len(data)) if rng.random() < 0.1)
    problem = Problem(tuple(data), tuple(forward), tuple(backward), held, 0 if plain else rng.choice([0, 3]))
    return problem if plain else with_other_repeats(problem, seed)


def with_other_repeats(problem: Problem, seed: int) -> Problem:
    """`problem`, in which every third operation takes less time, or more, when it is computed again."""
    rng = random.Random(f"repeats {seed}")
    times_ms = [rng.choice([None] * 4 + [0.0, float(rng.randint(0, 8))]) for _ in problem.forward]
    forward = [replace(op, repeat_ms=time_ms) for op, time_ms in zip(problem.forward, times_ms, strict=True)]
    return replace(problem, forward=tuple(forward))


SHAPES = ("chain", "layers", "skips")


def random_step(seed: int, count: int | None = None) -> tuple[Problem, Chain]:
    """A step as autograd makes one, of 3 to 40 operations and any shape, and a partition of it into blocks.

    The backward goes back through the forward and has its gradients. Some data are held or phantoms, some operations
    have workspace or replay bytes or must not be recomputed, and some sizes and times are zero.
    """
    rng = random.Random(seed)
    count = count or min(rng.randint(3, 40), rng.randint(3, 40))
    reads = _reads(rng, rng.choice(SHAPES), count)
    data: list[Data] = []
    forward: list[ForwardOp] = []
    out: list[int] = []  # per operation, the data that others may read
    whole = rng.random() < 0.5  # times with ties, or without
    for index, sources in enumerate(reads):
        out.append(len(data))
        data.append(Data(f"y{index}", rng.choice([0, 1, 1, 1, 4]) * rng.randint(1, 500), index))
        if rng.random() < 0.3:
            data.append(Data(f"saved{index}", rng.choice([0, 1, 1]) * rng.randint(1, 300), index, "phantom"))
        time_ms = rng.choice([0, 1, 1, 2, 7]) * (1.0 if whole else rng.random())
        forward.append(
            ForwardOp(
                f"f{index}", time_ms, tuple(out[source] for source in sources), tuple(range(out[-1], len(data))),
                rng.choice([0, 0, 0, rng.randint(1, 400)]),
                rng.random() > 0.05, rng.choice([0, 0, 0, 0, 0, 0, 0, 16]),
            )
        )  # fmt: skip
    held = {out[-1]} if rng.random() < 0.8 else set()
    held |= {item for item in out if rng.random() < 0.02}
    backward = _backward_of(rng, data, forward, out)
    problem = Problem(tuple(data), tuple(forward), backward, frozenset(held), rng.choice([0, 0, 100]))
    cuts = sorted({0, count, *rng.sample(range(1, count), min(count - 1, rng.randint(0, 8)))})
    blocks = tuple(range(start, stop) for start, stop in itertools.pairwise(cuts))
    homes = [number for number, block in enumerate(blocks) for _ in block]
    problem = with_other_repeats(problem, seed)
    return problem, Chain(blocks, (len(blocks), *reversed(homes)))


def _reads(rng: random.Random, shape: str, count: int) -> list[list[int]]:
    """For each operation those whose output it reads: the one before, some in recent layers, or its mirror image."""
    if shape == "chain":
        return [[index - 1] if index else [] for index in range(count)]
    if shape == "layers":
        return [sorted({max(0, index - rng.randint(1, 6)) for _ in range(rng.randint(1, 3))} - {index})
                for index in range(count)]  # fmt: skip
    mirror = {index: {count - 1 - index} for index in range(count // 2 + 1, count) if rng.random() < 0.6}
    return [sorted({index - 1, *mirror.get(index, ())}) if index else [] for index in range(count)]


def _backward_of(
    rng: random.Random, data: list[Data], forward: list[ForwardOp], out: list[int]
) -> tuple[BackwardOp, ...]:
    """The loss, and the backward of each operation, with the bytes of the gradients of outputs that are alive."""
    size = [item.size_bytes for item in data]
    alive = {out[-1]}
    found = [BackwardOp("loss", 0.5, (out[-1],), 0, size[out[-1]])]
    for index in reversed(range(len(forward))):
        op = forward[index]
        resident = sum(size[item] for item in alive)
        alive.update(op.inputs)
        peak = sum(size[item] for item in alive) + op.workspace_bytes
        needs = {item for item in op.outputs if item != out[index]}
        needs.update(op.inputs if rng.random() < 0.6 else ())
        needs.update(out[index : index + 1] if rng.random() < 0.3 else ())
        found.append(BackwardOp(f"b{index}", rng.choice([1, 2]) * op.time_ms, tuple(sorted(needs)), resident, peak))
        alive.discard(out[index])
    return tuple(found)


def random_plan(problem: Problem, seed: int, rate: float = 0.3) -> tuple[tuple[int, ...], ...]:
    """Any plan for `problem`, not in normal form."""
    rng = random.Random(seed)
    free = [index for index, op in enumerate(problem.forward) if op.recomputable]
    return tuple(tuple(index for index in free if rng.random() < rate) for _ in problem.backward)
