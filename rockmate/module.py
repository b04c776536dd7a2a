"""Rockmate: a module that trains like the one it wraps, under a memory budget."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch

from rk_solvers import Limits, Solver
from rkgb import ModelError, make_sample
from rkgb.ir.opaque import opaque_paths
from rkgb.process.uncompiled import called_as_one
from rkgb.torch_private.tracers import as_constant, is_exporting, is_tracing
from rockmate.calls.fallbacks import Fallback, FallbackCounts
from rockmate.calls.specialization import Specialization
from rockmate.calls.specializations import Specializations
from rockmate.errors import ArgumentError, BudgetError, IntegrationError, NotPlanned, PickleWarning, PinError
from rockmate.kernels.option import Kernels
from rockmate.layouts.option import Layout
from rockmate.memory.budget import Budget
from rockmate.memory.optimizer_state import OptimizerLike, with_parameters
from rockmate.memory.split import MemorySplit, Scope
from rockmate.nn.chunked_logits import Chunks, chunk_logits
from rockmate.offload.option import Offload
from rockmate.options import PlanOptions, Shapes
from rockmate.plan_files.content import PlanFile
from rockmate.plan_files.files import load, save
from rockmate.planning.costs import LossFunction
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured, borrowed_with_gradients
from rockmate.planning.pins import Pins, check_pins
from rockmate.planning.plan import Plan
from rockmate.planning.request import PlanRequest
from rockmate.progress import ProgressCallback, no_progress
from rockmate.proxy import ModuleProxy

_NOT_COMPILED = (
    "a planned module runs its own generated code in training, as one call between compiled graphs: compile without "
    "fullgraph=True, or compile submodules before the model is planned"
)


class Rockmate(ModuleProxy):
    """`model` with the same outputs, gradients, buffers and random stream, and a peak within `budget`.

    The wrapper shares the model's parameters, buffers and submodules, under the same names, and answers for the rest
    as the model would: its attributes, the signature of its forward, ``isinstance`` of its class. In
    training it runs generated code (`code`) that forgets and recomputes as `plan` says; in eval mode
    and without gradients it runs the model itself, which is `original`.

    A plan holds for one kind of call: shapes, types and structure of the arguments, autocast, the module's modes and
    which parameters train. Others are planned when they first come, within the same bytes.

    Args:
        model: any module that `rkgb` can trace. It is left as it was.
        sample: a tensor, a tuple of positional arguments, or a dict of keyword arguments of one step. None to plan
            with the first training batch.
        budget: most bytes that a training step may allocate above what was resident before it: an int,
            a size such as "2GiB", a float fraction of the eager peak, or None or "auto" for the free memory when the
            first plan is made, less 10 %.
        scope: "step" for a budget as above. "total" for one that bounds parameters, their gradients, buffers, the
            inputs and the optimizer's state as well: a fraction is then of what eager training takes in all.
            "reserved" for one of what the device's caching allocator holds for a step above what was allocated before
            it, gaps between tensors included: a fraction is then of what it holds for the eager step.
        optimizer: under scope "total", whose state is counted: an optimizer of the model's parameters, a class such
            as torch.optim.AdamW, or a function that makes one from a list of parameters. It is left as it was.
        loss: called on the model's output, returns the scalar of which training takes the backward. It
            is run once to measure what the loss itself allocates; without it, a cross-entropy's
            needs are assumed.
        solver: "auto" for the best of several, the name of one ("greedy", "rotor", "knapsack", "chen",
            "checkmate", "intervals", "keep-all", "keep-none"), or an instance of `rk_solvers.Solver`.
        time_limit: seconds that one search for a plan may take. By default 15, and up to 45 more for as long as a
            plan could be faster by more than 2.5 %. Ctrl-C ends it with the best plan so far.
        gap: the search ends earlier once no plan is faster by more than this share of the step's time: 0.01 by default.
        limits: in place of these two, a record of all that searches, bounds and proofs may take (`rk_solvers.Limits`).
        progress: True to show a progress display, or a callable told (stage, done, total).
        pin: what is always saved and never recomputed, beside what must not be anyway: submodules of `model`
            (all that runs while they are called), operators such as ``torch.ops.aten.topk``, and operations
            by their names in the graphs, such as "softmax_3".
        offload: where data may be moved while nothing reads them, beside recomputation, each as takes least time:
            "auto" for a file on a disk if the module is on the CPU, and for pinned memory of the host if it is on an
            accelerator; or an `Offload`, which says where, and how many bytes at most. None: nothing moves.
        layout: "auto" to have the weights of convolutions in channels_last where their part of the model is measured to
            be faster so, "channels_last" to have all of them; outputs and gradients are then the model's own in that
            layout, to the bit, which are rounded otherwise. Parameters stay what they are, in another order in memory;
            "as given" leaves it alone, or gives it back.
        kernels: "auto" to have operations run by other kernels of PyTorch's where those are measured to be faster, such
            as products by oneDNN on a CPU that the BLAS library was not made for. Outputs and gradients are then those
            of the model with these kernels and without a plan, to the bit, which are rounded otherwise than eager ones.
        compile: True to have what lies between products and convolutions compiled by inductor, each part where it is
            measured to pay; nothing that draws is ever compiled or drawn again. Outputs and gradients are then those of
            the model with these parts compiled and without a plan, to the bit, which are rounded otherwise than eager
            ones. Needs a C++ compiler on the CPU; where a part cannot be compiled, it stays as it is.
        loss_chunks: "auto", or a number of rows, to have a causal language model of transformers make its logits of so
            many rows at a time, in training calls with labels, whose output has no logits then; the loss and gradients
            are its own but for the order of sums. It is changed in place (`rockmate.nn.chunk_logits`). None leaves it.
        opaque: submodules whose call is one operation, kept or recomputed as a whole, as those that `torch.compile`
            has compiled are anyway: for code that cannot be traced, or that depends on its data.
        shapes: what happens to a call that no plan holds for. "replan" plans it, within the bytes of the first plan;
            "nearest" traces it, but follows the decisions of the plan next in size, which takes no search; "eager"
            runs the model itself, without a budget; "error" raises. All but the last warn (`ReplanWarning`).
        plan: a plan file, or the path of one, for calls like `sample` (or the first training batch): it is compared
            with the module and run, without measuring or solving. Its budget is for all plans; calls of another shape
            are planned as the other arguments say.
        options: all of the above but `plan` as one record, in place of them.
        cache: False to neither look for the plan in the user's cache (`rockmate.plan_files.cache`) nor keep it there.
        plan_in_background: False to have the best plan before the first step. Else training begins with what a short
            search has found; a process of its own, at the lowest priority, looks for better plans, which are taken
            between steps. It is off where there is one core, on several ranks, for a solver that is named, under
            ``torch.use_deterministic_algorithms``, and where the environment has ``ROCKMATE_BACKGROUND=0``.

    Raises:
        BudgetError: the budget or its scope cannot be read.
        BudgetTooSmall: no schedule fits; the error names the smallest budget found.
        SampleError, TraceError, NothingToTrain: the module cannot be planned on this sample.
        PlanFileError, PlanFileMismatch: the plan file is damaged, or was made for another module or sample.
        OffloadError: nothing can be moved to where `offload` says.
        LayoutError: the model does not run in channels_last, and that was asked for.
        ChunkError: the model is none whose logits can be made a few rows at a time, and that was asked for.
        ModelError, LossError, SolverError, PinError, OptimizerError, ShapesError: an argument is not what it should be.
    """

    _family: Specializations

    def __init__(
        self,
        model: torch.nn.Module,
        sample: Any = None,
        budget: Budget = None,
        *,
        loss: LossFunction | None = None,
        solver: Solver | str = "auto",
        time_limit: float | None = None,
        gap: float | None = None,
        limits: Limits | None = None,
        progress: bool | ProgressCallback = False,
        pin: Pins = (),
        scope: Scope = "step",
        optimizer: OptimizerLike | None = None,
        shapes: Shapes = "replan",
        opaque: torch.nn.Module | Iterable[torch.nn.Module] = (),
        plan: PlanFile | str | os.PathLike[str] | None = None,
        cache: bool = True,
        plan_in_background: bool = True,
        offload: Offload | Literal["auto", "disk", "host"] | None = None,
        layout: Layout = "as given",
        kernels: Kernels = "as given",
        compile: bool = False,
        loss_chunks: Chunks = None,
        options: PlanOptions | None = None,
    ) -> None:
        said = {
            "loss": loss,
            "solver": solver,
            "limits": limits,
            "progress": progress,
            "pin": pin,
            "scope": scope,
            "optimizer": optimizer,
            "shapes": shapes,
            "opaque": opaque,
            "cache": cache,
            "plan_in_background": plan_in_background,
            "offload": offload,
            "layout": layout,
            "kernels": kernels,
            "compile": compile,
            "loss_chunks": loss_chunks,
        }
        options = PlanOptions.of(options, said, time_limit, gap)
        request = options.request(budget)
        _check_model(model)
        if options.loss_chunks is not None:
            chunk_logits(model, options.loss_chunks)
        request = replace(request, opaque=opaque_paths(model, options.opaque))
        check_pins(model, request.pin)
        family = Specializations(model, request, options.shapes, options.progress, options.cache)
        if plan is not None:
            _check_alone(plan, request)
            family.take(plan if isinstance(plan, PlanFile) else load(plan))
        if sample is not None:
            family.plan_for(make_sample(model, sample))
        self._adopt(model, family)

    @classmethod
    def _following(
        cls, model: torch.nn.Module, measured: Measured, planned: LoweredPlan, shapes: Shapes = "error"
    ) -> Self:
        """`model` under a plan that is there already."""
        family = Specializations(model, PlanRequest(planned.plan.budget_bytes), shapes, False)
        family.adopt(Specialization.of(model, measured, planned))
        module = cls._empty()
        module._adopt(model, family)
        return module

    def _of_an_equal(self, model: torch.nn.Module) -> Self:
        """`model`, which differs from this one in the values of its parameters alone, under the same plans."""
        twin = self._own_class()._empty()
        twin._adopt(model, self._family.copy_for(model))
        return twin

    @classmethod
    def _empty(cls) -> Self:
        return cls.__new__(cls)

    def _adopt(self, model: torch.nn.Module, family: Specializations) -> None:
        """Become `model`, with these plans."""
        self._stand_for(model)
        self.__dict__["_family"] = family

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward.

        Raises what the model raises, and for the first call, if no sample was given, what planning raises. After the
        first plan nothing else ends a call: see `fallbacks`. Under shapes "error" it raises `InputMismatch` for
        arguments unlike the sample's, `PlanMismatch` for a model unlike the one that was planned, and `GuardError`
        where the data would take another branch of the model than the sample took.
        """
        # While another thread plans, modes and what tells that a tracer is at work are not what they are.
        compiling = torch.compiler.is_compiling()
        with contextlib.nullcontext() if compiling else self._family.turn():
            if not self.original.training or not torch.is_grad_enabled():
                return self.original.forward(*args, **kwargs)  # hooks are called around this one
            tracer = _tracer_at_work(compiling)
            if tracer is not None:
                _tell_of_tracer(self._family, tracer)
                return self.original.forward(*args, **kwargs)
        return _run_planned(self._family, *args, **kwargs)

    def backward(self, *_: Any, **__: Any) -> None:
        """Nothing: ``loss.backward()`` is enough. Accepted for code written for older versions."""

    # ---- plans -----------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan used last, or made last. Raises `NotPlanned` where there is none yet."""
        return self._member.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans, the one used last first; none before the first training batch."""
        return self._family.plans

    def plan_for(self, sample: Any) -> Plan:
        """Plan calls like `sample` ahead, within the same budget: the longest sequence first, or each bucket's.

        `sample` is as for the constructor. Raises as planning does.
        """
        return self._family.member_for(make_sample(self.original, sample)).plan

    def replan(self, budget: Budget, sample: Any = None) -> None:
        """Train within another budget from now on. What was traced and measured is kept, and solved anew.

        Calls are planned when they come next, as with a first budget; those like `sample` at once. The budget is as
        for the constructor: a fraction is of the eager peak of the call that is planned first.

        Raises:
            BudgetError: the budget cannot be read; then nothing has changed.
            BudgetTooSmall: no schedule fits for the `sample`, or later for a first call.
        """
        self._family.replan(budget)
        if sample is not None:
            self.plan_for(sample)

    def plan_file(self) -> PlanFile:
        """`plan` with all that is known of it, to be kept as a file, looked at, and used again."""
        return self._family.plan_file_of(self._member)

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write `plan_file` to `path`, for ``Rockmate(model, sample, plan=path)``; packed if it ends in ".gz"."""
        save(self.plan_file(), path)

    def report(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        sample: Any = None,
        loss: LossFunction | None = None,
        operations: bool = False,
    ) -> str | Path:
        """What people want to see of `plan`: text, or a file whose name ends in ".html", ".png", ".pdf" or ".svg".

        Without a path it returns text for a terminal. A page of HTML is one file, for any browser, without a network.
        With a `sample`, as for the constructor, the plan is the one for such calls, and real steps of it and of the
        module itself are run and shown beside the prediction; `loss` is then as for the constructor, and that one by
        default. With `operations`, a page shows their times measured anew, too. The module is left as it was. The path
        of the file is returned.

        Raises:
            ArgumentError: the path ends otherwise, or there is something to measure, and no sample.
            NotPlanned: there is no plan yet. With a sample, as planning does.
        """
        from rockmate.reports import measured_operations, observe, write_report  # with what draws, which few want

        if sample is None:
            if loss is not None or operations:
                raise ArgumentError("a step is to be measured, and no sample is given: give one batch, as for planning")
            return write_report(self.plan_file(), path)
        call = make_sample(self.original, sample)
        member = self._family.member_for(call)
        file = self._family.plan_file_of(member)
        loss = self._family.request.loss if loss is None else loss
        measured, device = member.measured, member.measured.device
        graph = measured.graphs.D_graph
        borrow = partial(borrowed_with_gradients, self.original, {device}, graph, measured.gradients)
        with self._family.alone():
            seen = observe(self.original, member.runner, call, loss, device, borrow)
            if operations:
                times_ms = measured_operations(self.original, call, loss, self._family.request.opaque)
                seen = replace(seen, operation_ms=times_ms)
        return write_report(file, path, seen)

    @property
    def code(self) -> str:
        """The generated source of `plan`: the forward, and one function per recomputation."""
        return self._member.runner.source

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The calls in training that did not run by a plan within the budget, counted by reason; most calls first.

        Empty while all is well. After the first plan, what cannot be planned within the budget is run by the module
        itself, or by the plan of lowest peak that was found; a `FallbackWarning` comes with the first of each kind.
        """
        return self._family.fallbacks.records

    @property
    def memory_split(self) -> MemorySplit | None:
        """What a budget for all of training (scope "total") is divided into; None of a budget for the step."""
        return self.plan.memory_split

    @property
    def _member(self) -> Specialization:
        if not self._family.members:
            raise NotPlanned(
                f"{type(self.original).__name__} is planned with its first training batch, which has not come yet. "
                "Give a sample when it is wrapped, or call plan_for(sample)."
            )
        return self._family.members[0]

    # ---- copies ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Rockmate:
        twin = self._own_class()._empty()
        memo[id(self)] = twin
        with self._family.turn():  # or the copy would be of what planning has put in
            original = copy.deepcopy(self.original, memo)
        twin._adopt(original, self._family.copy_for(original))
        for name, value in self._notes().items():
            twin.__dict__[name] = copy.deepcopy(value, memo)
        return twin

    def __copy__(self) -> Rockmate:
        """As of any module: another one that holds the same parameters, buffers and submodules."""
        twin = self._own_class()._empty()
        original = copy.copy(self.original)
        twin._adopt(original, self._family.copy_for(original))
        twin.__dict__.update(self._notes())
        return twin

    def _notes(self) -> dict[str, Any]:
        """Attributes of the wrapper's own: what a library, or a class made of this one, has put on it."""
        usual = type(self)._empty()
        usual._stand_for(self.original)
        return {name: value for name, value in self.__dict__.items() if name not in (*usual.__dict__, "_family")}

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """What `torch.jit.script` takes in its place."""
        if self.original.training:
            self._family.tell_of_tracer("torch.jit.script")
        return self.original

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The model and what planning was asked for; it is planned again where it is loaded, with these decisions."""
        return _restored, (
            self._own_class(),
            self.original,
            _picklable(self._family.request, self.original),
            self._family.shapes,
            self._family.decisions(),
            {name: value for name, value in self._notes().items() if not callable(value)},
            self.fallbacks,
            self._family.saved(),
        )

    def _replicate_for_data_parallel(self) -> Self:
        raise IntegrationError(
            f"torch.nn.DataParallel copies a module to every device in every step, and {type(self.original).__name__} "
            "is planned: its plan is for one. Use DistributedDataParallel, with one process for each device (torchrun, "
            "accelerate launch), or let the process see one device (CUDA_VISIBLE_DEVICES=0): where trainers see "
            "several, some take DataParallel by themselves."
        )

    def extra_repr(self) -> str:
        """The plan, on one line."""
        return str(self.plan) if self._family.members else "planned with the first training batch"


def _tracer_at_work(compiling: bool) -> str | None:
    """Who records the calls of this thread, and is to meet the module itself; None where it simply runs."""
    if is_exporting():
        return "torch.export"
    return None if compiling or not is_tracing() else "torch.jit.trace"


def _by_plan(family: Specializations, *args: Any, **kwargs: Any) -> Any:
    return family(*args, **kwargs)


_run_planned = called_as_one(_by_plan, _NOT_COMPILED)


def _tell_of_tracer(family: Specializations, tracer: str) -> None:
    family.tell_of_tracer(tracer)


as_constant(_tell_of_tracer)  # what it does is no part of what torch.export records


def _check_alone(plan: object, request: PlanRequest) -> None:
    """A plan file tells its budget, and what is pinned, opaque and counted."""
    if not isinstance(plan, PlanFile | str | os.PathLike):
        raise ArgumentError(f"plan is a {type(plan).__name__}; give a PlanFile, or the path of one.")
    if request.budget is not None:
        raise BudgetError(
            f"a budget of {request.budget!r} and a plan are given, but a plan has its budget. Leave one of them out."
        )
    if request.pin or request.opaque:
        raise PinError(
            "operations or submodules are to be pinned or opaque, and a plan is given, which says that itself. Leave "
            "the plan out, and plan anew."
        )


def _check_model(model: object) -> None:
    if isinstance(model, Rockmate):
        raise ModelError(
            f"this {type(model.original).__name__} is planned already. Plan model.original instead, or call "
            "model.plan_for(sample)."
        )
    if not isinstance(model, torch.nn.Module):
        make_sample(model, None)  # type: ignore[arg-type]  # raises


def _picklable(request: PlanRequest, model: torch.nn.Module) -> PlanRequest:
    """`request` without what cannot be pickled, such as a loss that is a lambda; warns of it.

    Of an optimizer goes what tells how much it keeps, and not what it keeps: it is saved by itself, as ever.
    """
    itself = {id(parameter): parameter for parameter in model.parameters()}
    request = replace(request, optimizer=with_parameters(request.optimizer, itself))
    plain = PlanRequest(request.budget)
    names = [name for name in ("loss", "solver", "optimizer", "pin") if not _can_be_pickled(getattr(request, name))]
    if names:
        warnings.warn(
            f"the {' and '.join(names)} given for planning cannot be pickled: what is saved will be planned without. "
            "Make it a function at the top of a module, or plan model.original anew once it is loaded.",
            PickleWarning,
            stacklevel=2,
        )
    lost = {name: getattr(plain, name) for name in names}
    return replace(request, progress=no_progress, follow=None, **lost)


class _Trial(pickle.Pickler):
    """Sees whether something can be pickled; of tensors and modules, which can be, no byte is copied."""

    def persistent_id(self, held: Any) -> int | None:
        return id(held) if isinstance(held, torch.Tensor | torch.nn.Module) else None


def _can_be_pickled(held: Any) -> bool:
    try:
        _Trial(io.BytesIO()).dump(held)
    except Exception:  # noqa: BLE001  whatever the objects of the user's raise
        return False
    return True


def _restored(
    kind: type[Rockmate],
    model: torch.nn.Module,
    request: PlanRequest,
    shapes: Shapes,
    decisions: Any,
    notes: Any = None,
    fallbacks: tuple[Fallback, ...] = (),
    saved: PlanFile | None = None,
) -> Rockmate:
    """A planned module that was pickled."""
    if request.loss_chunks is not None:
        chunk_logits(model, request.loss_chunks)
    family = Specializations(model, request, shapes, False)
    family.expect(decisions, saved)
    family.fallbacks = FallbackCounts(fallbacks)
    module = kind._empty()
    module._adopt(model, family)
    module.__dict__.update(notes or {})
    return module
