"""A plan file of any size, of a network that nobody has: a chain of layers, planned by a quick solver."""

from rk_solvers import BackwardOp, Chain, Chen, Data, ForwardOp, Problem, simulate
from rockmate.plan_files import PlanFile
from rockmate.plan_files.content import (
    FORMAT,
    VERSION,
    Asked,
    ChainRecord,
    GraphRecord,
    Made,
    Measurements,
    OperationRecord,
    Promise,
    ValueRecord,
)

KIB = 1024


def chain_problem(layers: int) -> tuple[Problem, Chain]:
    """Each layer reads the one before and saves a mask; blocks are of ten layers."""
    data: list[Data] = []
    forward: list[ForwardOp] = []
    for index in range(layers):
        inputs = (2 * index - 2,) if index else ()
        data.append(Data(f"layer_{index}", (8 + index % 7) * KIB, index))
        data.append(Data(f"layer_{index}.saved0", (1 + index % 3) * KIB, index, "phantom"))
        forward.append(ForwardOp(f"layer_{index}", 0.1 + index % 5 / 10, inputs, (2 * index, 2 * index + 1), KIB))
    last = 2 * layers - 2
    backward = [BackwardOp("loss", 0.2, (last,), 0, 4 * KIB)]
    for index in reversed(range(layers)):
        needs = (2 * index, 2 * index + 1)
        backward.append(BackwardOp(f"layer_{index}.backward", 0.3, needs, 8 * KIB, 20 * KIB))
    blocks = [range(start, min(start + 10, layers)) for start in range(0, layers, 10)]
    behind = [index // 10 for index in reversed(range(layers))]
    return Problem(tuple(data), tuple(forward), tuple(backward), frozenset({last})), Chain(
        tuple(blocks), (len(blocks), *behind)
    )


def plan_file_of_layers(layers: int, model: str = "Chain", budget: float = 0.4) -> PlanFile:
    """Planned by `Chen` within that part of keep-all's peak, or with the lowest peak that it finds."""
    problem, chain = chain_problem(layers)
    eager_bytes = simulate(problem, Chen(chain).solve(problem, 2**50).schedule).peak_bytes
    solution = Chen(chain).solve(problem, int(budget * eager_bytes))
    operations = tuple(
        OperationRecord(
            name=op.name,
            function="aten::linear.default",
            arguments=f"%layer_{index - 1}, %blocks_{index}_weight, %blocks_{index}_bias",
            makes=(ValueRecord(name=op.name, text="float32[16, 128] grad", size_bytes=KIB, storage=op.name),),
            node=op.name,
            module=f"{model}.blocks.{index // 10}",
            source=f"network.py:{index % 300}",
        )
        for index, op in enumerate(problem.forward)
    )
    return PlanFile(
        format=FORMAT,
        version=VERSION,
        made=Made(rockmate="0.1.0", torch="2.13.0", device="cpu", threads=2),
        asked=Asked(),
        graph=GraphRecord(
            digest="0", model=model, calls="float32[16, 128]", leaves=(), operations=operations, output="%last"
        ),
        measured=Measurements(blocks=(), stages=(), loss=None, eager_peak_bytes=eager_bytes),
        problem=problem,
        chain=ChainRecord(
            blocks=tuple((block.start, block.stop) for block in chain.blocks), backward_block=chain.backward_block
        ),
        promise=Promise(
            budget_bytes=max(solution.peak_bytes, int(budget * eager_bytes)),
            peak_bytes=solution.peak_bytes,
            time_ms=solution.time_ms,
            baseline_peak_bytes=eager_bytes,
            baseline_time_ms=problem.keep_all_time_ms,
            solver=solution.solver,
            planning_s=1.0,
            measured_peak_bytes=None,
            measured_reserved_bytes=None,
            lower_bound_ms=None,
            gap=None,
            memory_split=None,
        ),
        schedule=tuple(map(str, solution.schedule.ops)),
    )
