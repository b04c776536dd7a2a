"""What is relied on of PyTorch's private names: each one is asked for here, in the smallest way."""

import ast
import contextlib
import inspect
import pathlib
import subprocess
import sys
import threading
from typing import ClassVar

import pytest
import torch
from torch.autograd import forward_ad, profiler
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode

from rkgb.torch_private import (
    allocators,
    asked,
    attributes,
    autograd,
    flags,
    identity,
    modes,
    modules,
    operations,
    profilers,
    ranks,
)

aten = torch.ops.aten
HERE = pathlib.Path(__file__).parent
PACKAGE = pathlib.Path(operations.__file__).parent


def names_in(file):
    """Public names that a file of the package gives."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named = [target.id for target in targets if isinstance(target, ast.Name)]
        named += [node.name] if isinstance(node, ast.FunctionDef) else []
        yield from (name for name in named if not name.startswith("_"))


@pytest.mark.parametrize("file", sorted(PACKAGE.glob("**/[a-z]*.py")), ids=lambda file: file.stem)
def test_every_name_is_tested(file):
    tested = "".join(tests.read_text(encoding="utf-8") for tests in HERE.glob("test_torch_private*.py"))
    assert not [name for name in names_in(file) if f"{file.stem}.{name}" not in tested]


def test_nothing_here_imports_the_compiler():
    names = ", ".join(file.stem for file in PACKAGE.glob("[a-z]*.py"))
    code = f"import sys; from rkgb.torch_private import {names}; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- attributes ---------------------------------------------------------------------------------------------

HOLDERS = {
    "tensor": torch.zeros(1),
    "operation": aten.add.Tensor,
    "module": torch.nn.Linear(1, 1),
    "dispatch mode": modes.TorchDispatchMode,
}


NOT_IN_ALL_RELEASES = {"_should_skip_dynamo"}


@pytest.mark.parametrize("kind", attributes.ATTRIBUTES)
def test_attributes_are_there(kind):
    missing = {name for name in attributes.ATTRIBUTES[kind] if not hasattr(HOLDERS[kind], name)}
    assert missing <= NOT_IN_ALL_RELEASES


def test_attributes_of_tensors_tell_of_writes_and_views():
    tensor = torch.zeros(2)
    before = tensor._version
    tensor[:1].add_(1)
    assert tensor._version == before + 1
    assert tensor._base is None
    assert tensor[:1]._base is tensor


# ---- operations ---------------------------------------------------------------------------------------------


def test_operations_have_one_class_and_their_names_another():
    assert isinstance(aten.add.Tensor, operations.OpOverload)
    assert isinstance(aten.add, operations.OpOverloadPacket)
    assert aten.add.Tensor.overloadpacket == aten.add
    assert not isinstance(aten.add, operations.OpOverload)


def test_functions_of_c_compute_what_operations_do():
    x = torch.randn(3, 4)
    assert torch.equal(operations.tensor_functions.exp(x), aten.exp.default(x))
    assert torch.equal(operations.nn_functions.gelu(x), aten.gelu.default(x))
    assert torch.equal(operations.tensor_methods.view(x, 12), aten.view.default(x, [12]))


def test_a_negated_view_shares_its_storage():
    x = torch.randn(3)
    view = operations.negated_view(x)
    assert view.is_neg()
    assert torch.equal(view, -x)
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_overloads_are_told_of_what_is_registered():
    assert {"Tensor", "Scalar", "out"} <= operations.overload_names("aten::add")
    assert "default" in operations.overload_names("aten::linear")
    assert operations.overload_names("nobodys::operation") == set()
    assert not hasattr(torch.ops, "__dict__") or "nobodys" not in vars(torch.ops)


def test_a_schema_is_read_from_its_text():
    schema = operations.parsed_schema(str(aten.add.Tensor._schema))
    assert (schema.name, schema.overload_name) == ("aten::add", "Tensor")
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]


def test_composite_operations_are_told_from_those_with_a_backward():
    assert operations.is_composite(aten.chunk.default)
    assert not operations.is_composite(aten.mm.default)


# ---- identity -----------------------------------------------------------------------------------------------


def test_views_share_the_key_of_their_storage_and_copies_do_not():
    x = torch.zeros(4)
    empty, other = torch.zeros(0), torch.zeros(0)
    assert identity.storage_key(x) == identity.storage_key(x[2:]) == identity.storage_key(x.detach())
    assert identity.storage_key(x) != identity.storage_key(x.clone())
    assert identity.storage_key(empty) != identity.storage_key(other)


def test_a_generator_keeps_its_key():
    generator = torch.Generator()
    assert identity.generator_key(generator) != identity.generator_key(torch.Generator())
    assert identity.generator_key(torch.default_generator) == identity.generator_key(torch.default_generator)
    met = []

    class Meets(modes.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            met.append(kwargs["generator"])
            return func(*args, **kwargs)

    with Meets():
        torch.rand(1, generator=generator)
    assert [identity.generator_key(one) for one in met] == [identity.generator_key(generator)]


# ---- modes --------------------------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


class Operations(modes.TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_function_modes_are_told_taken_away_and_put_back():
    assert not modes.function_modes_are_on()
    with torch.device("cpu") as device, Functions() as mode:
        assert modes.function_modes_are_on()
        default, top = modes.function_modes()
        assert isinstance(default, modes.DefaultDevice)
        assert not isinstance(mode, modes.DefaultDevice)
        assert default.device == device
        assert top is mode
        assert modes.pop_function_mode() is mode
        torch.zeros(1)
        assert mode.calls == 0
        modes.push_function_mode(mode)
        torch.zeros(1)
        assert mode.calls == 1
    assert modes.function_modes() == []


def test_dispatch_modes_are_told_and_left_for_a_while():
    assert modes.dispatch_mode_count() == 0
    with Operations() as outer, Operations() as inner:
        assert modes.dispatch_mode_count() == 2
        assert modes.dispatch_modes() == [outer, inner]
        with modes.without_dispatch_modes():
            assert modes.dispatch_mode_count() == 0
            torch.zeros(1)
        assert modes.dispatch_modes() == [outer, inner]
        assert inner.calls == 0
        torch.zeros(1)
    assert inner.calls == 1


def test_the_mode_under_which_saved_tensors_may_change_is_told():
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert any(isinstance(mode, modes.SavedTensorsMayChange) for mode in modes.dispatch_modes())


def test_tensors_made_of_others_are_told_from_plain_ones():
    class Twice(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            return ["inner"], None

        @staticmethod
        def __tensor_unflatten__(inner, *_):
            return Twice(inner["inner"])

        @classmethod
        def __torch_dispatch__(cls, *_):
            raise NotImplementedError

    assert modes.is_wrapper_subclass(Twice(torch.zeros(2)))
    assert not modes.is_wrapper_subclass(torch.zeros(2))
    assert not modes.is_wrapper_subclass(torch.nn.Parameter(torch.zeros(2)))


def test_transforms_and_forward_mode_are_told():
    found = []

    def loss(x):
        found.append(modes.innermost_transform())
        return x.sum()

    torch.func.grad(loss)(torch.zeros(2))
    assert found[0] is not None
    assert modes.innermost_transform() is None
    assert not modes.is_in_forward_mode()
    with forward_ad.dual_level():
        assert modes.is_in_forward_mode()
    assert not modes.is_in_forward_mode()


# ---- autograd -----------------------------------------------------------------------------------------------


def test_hooks_on_saved_tensors_are_a_stack():
    log = []

    def pack(tensor):
        log.append("packed")
        return (tensor,)

    def unpack(packed):
        log.append("unpacked")
        return packed[0]

    x = torch.ones(2, requires_grad=True)
    assert autograd.top_saved_hooks(True) is None
    autograd.push_saved_hooks(pack, unpack)
    try:
        assert autograd.top_saved_hooks(True) == (pack, unpack)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert autograd.top_saved_hooks(True) != (pack, unpack)
        y = x.exp()
    finally:
        autograd.pop_saved_hooks()
    assert autograd.top_saved_hooks(True) is None
    x.exp()
    assert log == ["packed"]
    y.sum().backward()
    assert log == ["packed", "unpacked"]
    assert torch.equal(x.grad, y.detach())


def test_hooks_on_saved_tensors_are_forbidden_and_allowed():
    assert autograd.saved_hooks_are_allowed()
    assert autograd.saved_hooks_refusal() is None
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not autograd.saved_hooks_are_allowed()
        assert autograd.saved_hooks_refusal() == "not here"
        autograd.allow_saved_hooks()
        assert autograd.saved_hooks_are_allowed()
        autograd.forbid_saved_hooks("nor there")
        assert autograd.saved_hooks_refusal() == "nor there"
        with pytest.raises(RuntimeError, match="nor there"):
            autograd.push_saved_hooks(lambda t: t, lambda t: t)
    assert autograd.saved_hooks_are_allowed()


@pytest.mark.parametrize("kept", [False, True])
def test_the_backward_that_runs_is_told(kept):
    told = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda gradient: told.append((autograd.running_backward(), autograd.graph_is_kept())))
    assert autograd.running_backward() == -1
    y.sum().backward(retain_graph=kept)
    ((number, is_kept),) = told
    assert number >= 0
    assert is_kept is kept
    assert autograd.running_backward() == -1


def test_custom_functions_are_made_from_two_classes():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    result = Double.apply(torch.ones(1, requires_grad=True))
    assert isinstance(result.grad_fn, autograd.FunctionBase)
    assert issubclass(Double, autograd.SingleLevelFunction)
    plain = autograd.FunctionBase.__dict__["apply"].__get__(None, Double)
    assert torch.equal(plain(torch.ones(1)), result)
    seen = []

    def apply(cls, *args):
        seen.append(cls)
        return plain(*args)

    of_its_own = torch.autograd.Function.__dict__["apply"] is autograd.FunctionBase.__dict__["apply"]
    holder = torch.autograd.Function if of_its_own else autograd.SingleLevelFunction
    before = holder.__dict__.get("apply")
    holder.apply = classmethod(apply)
    try:
        Double.apply(torch.ones(1))
    finally:
        del holder.apply
        if before is not None:
            holder.apply = before
    assert seen == [Double]


# ---- profilers ----------------------------------------------------------------------------------------------


def test_a_profiler_is_told_in_its_thread_and_in_others():
    told = []

    def elsewhere():
        told.extend((profilers.is_profiled(), profilers.a_profiler_runs()))

    assert (profilers.is_profiled(), profilers.a_profiler_runs()) == (False, False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert (profilers.is_profiled(), profilers.a_profiler_runs()) == (True, True)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert told == [False, True]


def test_operations_are_not_told_to_a_profiler_for_a_while():
    with profiler.profile() as profiled:
        profilers.record_operations(False)
        torch.ones(2).sin()
        profilers.record_operations(True)
        torch.ones(2).cos()
    names = {event.name for event in profiled.function_events}
    assert "aten::cos" in names
    assert "aten::sin" not in names


def test_allocations_are_events_of_their_own():
    with profiler.profile(profile_memory=True) as profiled:
        torch.zeros(1000)
    pending, sizes = list(profiled.kineto_results.experimental_event_tree()), []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        tag, fields = event.typed
        sizes += [fields.alloc_size] if tag == profilers.ALLOCATION else []
    assert 4000 in sizes


def test_profilers_with_a_schedule_count_their_steps():
    assert "ProfilerStep" not in profilers.counting_steps()
    waiting = torch.profiler.schedule(wait=5, warmup=1, active=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=waiting):
        assert "ProfilerStep" in profilers.counting_steps()
    assert "ProfilerStep" not in profilers.counting_steps()


def test_the_legacy_profiler_tells_what_this_thread_allocates():
    if not profilers.has_legacy_profiler():
        pytest.skip("this PyTorch has no legacy profiler")
    profilers.start_legacy_profiler()
    try:
        kept = torch.zeros(1000)
    finally:
        records = profilers.stop_legacy_profiler()
    told = [record for thread in records for record in thread if record.kind() == "memory_alloc"]
    assert [record.cpu_memory_usage() for record in told] == [kept.nbytes]


# ---- allocators ---------------------------------------------------------------------------------------------


def test_settings_of_allocators_are_told_where_this_pytorch_tells_them():
    settings = allocators.settings_in_force()
    assert settings is None or isinstance(settings, str)


@pytest.mark.cuda
def test_settings_of_allocators_are_put_in_force():
    before = allocators.settings_in_force() or ""
    allocators.set_settings(torch.cuda.memory, "max_split_size_mb:64")
    try:
        assert allocators.snapshot(torch.cuda.memory)["allocator_settings"]["max_split_size"] == 64 << 20
    finally:
        allocators.set_settings(torch.cuda.memory, before)


@pytest.mark.cuda
def test_the_history_tells_what_is_allocated():
    memory = torch.cuda.memory
    assert allocators.keeps_history(memory)
    assert not allocators.cuda_history_is_recorded()
    allocators.start_history(memory, 1000)
    try:
        assert allocators.cuda_history_is_recorded()
        torch.zeros(1 << 20, device="cuda")
        device = torch.cuda.current_device()
        trace = allocators.snapshot(memory, device)["device_traces"][device]
        assert [event["size"] for event in trace if event["action"] == "alloc"] == [4 << 20]
    finally:
        allocators.stop_history(memory)
    assert not allocators.cuda_history_is_recorded()


def test_histories_are_asked_of_the_module_that_keeps_them():
    class Memory:
        def __init__(self):
            self.calls = []

        def _snapshot(self, *device):
            return {"of": device}

        def _record_memory_history(self, *args, **kwargs):
            self.calls.append((args, kwargs))

    memory = Memory()
    assert allocators.keeps_history(memory)
    assert not allocators.keeps_history(object())
    assert allocators.keeps_history(torch.cuda.memory)
    assert (allocators.snapshot(memory), allocators.snapshot(memory, 1)) == ({"of": ()}, {"of": (1,)})
    allocators.start_history(memory, 5)
    allocators.stop_history(memory)
    assert memory.calls == [(("all",), {"context": None, "stacks": "python", "max_entries": 5}), ((None,), {})]


# ---- flags --------------------------------------------------------------------------------------------------


def test_flags_are_read_where_this_pytorch_has_them():
    assert flags.flag_getter("nobodys_flag") is None
    before = torch.backends.cuda.flash_sdp_enabled()
    read = flags.flag_getter("flash_sdp_enabled")
    assert read() is before
    torch.backends.cuda.enable_flash_sdp(not before)
    try:
        assert read() is not before
    finally:
        torch.backends.cuda.enable_flash_sdp(before)


def test_precisions_are_read_where_this_pytorch_has_them():
    read = flags.precision_getter("mkldnn", "matmul")
    assert read is None or read() == torch.backends.mkldnn.matmul.fp32_precision


def test_autocast_of_any_kind_is_told():
    assert not flags.autocast_is_on()
    with torch.autocast("cpu"):
        assert flags.autocast_is_on()
        with torch.autocast("cpu", enabled=False):
            assert not flags.autocast_is_on()


def test_devices_of_extensions_have_a_name():
    assert flags.extension_kind() == "privateuseone"


def test_the_order_of_additions_is_fixed_for_a_while():
    before = (flags.cudnn_is_deterministic(), flags.cudnn_tries_out(), torch.are_deterministic_algorithms_enabled())
    try:
        flags.set_cudnn_deterministic(True)
        flags.set_cudnn_tries_out(True)
        assert (flags.cudnn_is_deterministic(), flags.cudnn_tries_out()) == (True, True)
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, True)
        flags.set_deterministic(True, warn_only=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        flags.set_cudnn_deterministic(before[0])
        flags.set_cudnn_tries_out(before[1])
        flags.set_deterministic(before[2], warn_only=False)


# ---- modules ------------------------------------------------------------------------------------------------


def test_all_batch_normalisations_are_of_one_class():
    kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
    assert all(issubclass(kind, modules.BatchNorm) for kind in kinds)
    assert not issubclass(torch.nn.LayerNorm, modules.BatchNorm)


def test_checkpoints_that_are_not_reentrant_go_through_one_function(monkeypatch):
    called = []
    plain = getattr(torch.utils.checkpoint, modules.CHECKPOINT_GENERATOR)
    signature = inspect.signature(plain)  # the place of the flag differs between releases

    def noting(*args, **kwargs):
        called.append(signature.bind(*args, **kwargs).arguments["preserve_rng_state"])
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.utils.checkpoint, modules.CHECKPOINT_GENERATOR, noting)
    x = torch.ones(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False, preserve_rng_state=False)
    assert called == [False]


@pytest.mark.parametrize("has_own", [False, True])
def test_hooks_on_calls_of_all_modules_can_see_keywords(has_own):
    class Keyworded(torch.nn.Module):
        def forward(self, x, *, scale):
            return x * scale

    module, seen = Keyworded(), []
    if has_own:
        module.register_forward_pre_hook(lambda *_: None)
    look = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda *_: seen.append(modules.arguments_of_hook(sys._getframe(1)))
    )
    with look:
        module(1, scale=2)
    assert seen == [((1,), {"scale": 2})]
    assert modules.arguments_of_hook(sys._getframe()) is None
    assert modules.arguments_of_hook(None) is None


def test_hooks_on_calls_of_all_modules_are_in_three_tables():
    tables = (modules.hooks_before_calls, modules.hooks_after_calls, modules.hooks_always_called)
    log = []
    with contextlib.ExitStack() as stack:
        for register in (
            lambda: torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: log.append("before")),
            lambda: torch.nn.modules.module.register_module_forward_hook(lambda *_: log.append("after")),
            lambda: torch.nn.modules.module.register_module_forward_hook(lambda *_: None, always_call=True),
        ):
            stack.callback(register().remove)
        assert [len(table) for table in tables] == [1, 2, 1]
        held = [dict(table) for table in tables]
        for table in tables:
            table.clear()
        torch.nn.Identity()(0)
        assert log == []
        for table, earlier in zip(tables, held, strict=True):
            table.update(earlier)
        torch.nn.Identity()(0)
        assert log == ["before", "after"]
    assert [len(table) for table in tables] == [0, 0, 0]


def test_parametrizations_are_computed_anew_within_a_cache():
    module = parametrizations.weight_norm(torch.nn.Linear(2, 2))
    assert not modules.parametrizations_are_cached()
    with parametrize.cached():
        assert modules.parametrizations_are_cached()
        cached = module.weight
        assert module.weight is cached
        with modules.parametrizations_uncached():
            assert not modules.parametrizations_are_cached()
            assert module.weight is not cached
        assert module.weight is cached
    assert not modules.parametrizations_are_cached()


# ---- ranks --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch is built without torch.distributed")
def test_ranks_have_the_store_that_they_met_by():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        store = ranks.default_store()
        store.set("found", "here")
        store.wait(["found"])
        assert store.get("found") == b"here"
    finally:
        torch.distributed.destroy_process_group()


# ---- what a class of tensors is asked ------------------------------------------------------------------------


class Noting(torch.Tensor):
    """Notes each function that is called with one."""

    noted: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.noted.append(function)
        with asked.not_asked():
            return function(*args, **(kwargs or {}))


@pytest.fixture
def noting():
    tensor = torch.ones(3)
    tensor.__class__ = Noting  # as parameters that come late have it
    Noting.noted.clear()
    return tensor


def test_a_class_is_asked_before_each_function_but_where_it_is_not_to_be(noting):
    noting + 1, torch.add(noting, 1), aten.add.Tensor._op(noting, 1), torch._foreach_add([noting], 1)
    assert len(Noting.noted) == 4
    with asked.not_asked():
        assert type(noting + 1) is torch.Tensor
    with asked.nobody_asked(), Counting() as mode:
        noting + 1
    assert len(Noting.noted) == 4
    assert mode.count == 0
    noting.__class__ = torch.Tensor
    noting + 1
    assert len(Noting.noted) == 4


class Counting(TorchFunctionMode):
    """Counts what it is asked."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_what_tells_of_a_tensor_and_what_sets_its_data_are_known_functions(noting):
    noting.shape, noting.dtype, noting.device, noting.requires_grad, noting._version, noting.grad, noting.size()
    noting.stride(), noting.dim(), noting.numel(), len(noting), torch.is_floating_point(noting), noting.layout
    noting.grad = None
    assert asked.METADATA.issuperset(Noting.noted)
    assert len(Noting.noted) == 14
    Noting.noted.clear()
    noting.data = torch.ones(3)
    noting.requires_grad = True
    assert Noting.noted == [asked.SET_DATA, asked.SET_REQUIRES_GRAD]
    Noting.noted.clear()
    noting.requires_grad = False
    del Noting.noted[:]
    noting.data_ptr(), noting.numpy()
    assert asked.ADDRESSES.issuperset(Noting.noted)
    assert len(Noting.noted) == 2
    assert not asked.ADDRESSES & asked.METADATA


def test_who_is_the_only_holder_of_memory_is_seen():
    tensor = torch.ones(3, requires_grad=True)
    assert identity.is_only_holder(tensor)
    for holder in (tensor.detach, tensor.t, tensor.untyped_storage, lambda: tensor.exp().mul(tensor)):
        held = holder()
        assert not identity.is_only_holder(tensor)
        del held
        assert identity.is_only_holder(tensor)
    graph = tensor.exp()  # which has where its gradient is accumulated, and not the tensor
    assert identity.is_only_holder(tensor)
    del graph
    array = tensor.detach().numpy()
    assert not identity.is_only_holder(tensor)
    del array
