// Operations of the device: those of the CPU, on the device's memory, once the current stream has done all before.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

#include "allocator.h"
#include "generator.h"
#include "streams.h"

namespace test_accelerator {

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::IValue;
using c10::SymIntArrayRef;

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

// The same memory as a tensor of the CPU.
Tensor on_cpu(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  auto alias = at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// New memory of the device with what a tensor of the CPU holds.
Tensor on_device(const Tensor& tensor, c10::Device device) {
  c10::DeviceGuard guard(device);
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device).pinned_memory(false));
  on_cpu(made).copy_(tensor);
  return made;
}

// What was told before is done, and the operation takes its time.
void begin(c10::Device device) {
  queue_of(current_stream(device.index())).wait();
  const int64_t least_ns = speeds().operation_ns;
  if (least_ns) std::this_thread::sleep_for(std::chrono::nanoseconds(least_ns));
}

// ---- tensors and views ------------------------------------------------------------------------------------

Tensor empty(
    IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

Tensor view(const Tensor& self, SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize_(const Tensor& self, SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(self, std::move(storage), offset, size, stride);
}

Tensor& set_to_storage(Tensor& self, at::Storage storage) { return at::native::set_(self, std::move(storage)); }

Tensor& set_to_tensor(Tensor& self, const Tensor& other) { return at::native::set_tensor_(self, other); }

void record_stream(Tensor& self, c10::Stream stream) {
  allocator()->recordStream(self.storage().data_ptr(), stream);
}

at::Scalar local_scalar(const Tensor& self) {
  begin(self.device());
  return on_cpu(self).item();
}

// ---- copies ------------------------------------------------------------------------------------------------

// Whether both are one piece of memory each, of the same elements in the same order.
bool is_one_piece(const Tensor& one, const Tensor& other) {
  return one.dtype() == other.dtype() && one.sizes() == other.sizes() && one.strides() == other.strides() &&
      one.is_non_overlapping_and_dense() && !one.is_conj() && !other.is_conj() && !one.is_neg() && !other.is_neg();
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const c10::Device device = is_ours(to) ? to.device() : from.device();
  const Tensor& of_host = is_ours(to) ? from : to;
  const auto stream = current_stream(device.index());
  const bool crosses = !(is_ours(from) && is_ours(to));
  if (from.numel() == 0) return to;
  if (non_blocking && crosses && is_one_piece(from, to) && is_pinned(of_host.data_ptr())) {
    // Addresses alone, as a driver has them: whose memory it is by then is for the caller to see to.
    void* target = to.data_ptr();
    const void* source = from.data_ptr();
    const size_t size = from.nbytes();
    queue_of(stream).tell(
        [=] {
          take_time_of_copy(size);
          std::memcpy(target, source, size);
        },
        false);
    pinned_used_on(of_host.data_ptr(), stream);
    return to;
  }
  begin(device);
  if (is_ours(from) && is_ours(to) && from.device() != to.device()) queue_of(current_stream(from.get_device())).wait();
  if (crosses) take_time_of_copy(from.nbytes());
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// ---- all other operations ----------------------------------------------------------------------------------

// Those that draw random numbers without a generator among their arguments take the CPU's: it is lent the device's.
class LentState {
 public:
  explicit LentState(c10::DeviceIndex device)
      : cpu_(at::detail::getDefaultCPUGenerator()), ours_(default_generator(device)), before_(cpu_.get_state()) {
    cpu_.set_state(ours_.get_state());
  }
  ~LentState() {
    ours_.set_state(cpu_.get_state());
    cpu_.set_state(before_);
  }

 private:
  at::Generator cpu_;
  at::Generator ours_;
  Tensor before_;
};

bool draws(const c10::OperatorHandle& op) {
  static auto* known = new std::unordered_map<c10::OperatorName, bool>;
  static std::mutex mutex;
  std::lock_guard<std::mutex> guard(mutex);
  const auto place = known->find(op.operator_name());
  if (place != known->end()) return place->second;
  bool found = false;
  for (const auto tag : op.getTags()) found = found || tag == at::Tag::nondeterministic_seeded;
  for (const auto& argument : op.schema().arguments()) {
    const auto& type = argument.type();
    if (type->kind() == c10::TypeKind::GeneratorType || type->str().find("Generator") != std::string::npos) {
      found = false;  // it is given one
      break;
    }
  }
  return (*known)[op.operator_name()] = found;
}

struct Call {
  std::optional<c10::Device> device;
  std::vector<std::pair<Tensor, Tensor>> aliases;  // tensors of the device, and the same memory as the CPU's
  std::vector<std::pair<Tensor, Tensor>> sized;    // empty ones that are written into, and what is to give them a size

  Tensor to_cpu(const Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    if (!device) device = tensor.device();
    aliases.emplace_back(tensor, on_cpu(tensor));
    return aliases.back().second;
  }
  Tensor to_be_sized(const Tensor& tensor) {
    if (!device) device = tensor.device();
    sized.emplace_back(tensor, at::empty({0}, tensor.options().device(at::kCPU)));
    return sized.back().second;
  }
  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (const auto& [ours, made] : sized) {
      if (made.is_same(tensor)) {
        ours.resize_(made.sizes());
        on_cpu(ours).copy_(made);
        return ours;
      }
    }
    for (const auto& [ours, alias] : aliases) {
      if (alias.is_same(tensor)) return ours;
    }
    return on_device(tensor, *device);
  }
};

IValue argument_for_cpu(Call& call, const IValue& value) {
  if (value.isTensor()) return call.to_cpu(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorList()) made.push_back(call.to_cpu(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
      made.push_back(tensor ? std::optional<Tensor>(call.to_cpu(*tensor)) : std::nullopt);
    }
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kDevice) {
    const auto device = value.toDevice();
    if (!call.device) call.device = c10::Device(kDevice, device.has_index() ? device.index() : current_device());
    return c10::Device(at::kCPU);
  }
  if (value.isGenerator()) {
    auto generator = value.toGenerator();
    if (generator.defined() && generator.device().type() == kDevice) {
      return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->engine;
    }
  }
  return value;
}

IValue result_for_device(Call& call, const IValue& value) {
  if (value.isTensor()) return call.to_device(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorList()) made.push_back(call.to_device(tensor));
    return made;
  }
  return value;
}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  Call call;
  for (size_t place = first; place < stack->size(); ++place) {
    auto& value = (*stack)[place];
    const bool is_sized = schema.arguments()[place - first].is_out() && value.isTensor() &&
        is_ours(value.toTensor()) && value.toTensor().numel() == 0;
    value = is_sized ? IValue(call.to_be_sized(value.toTensor())) : argument_for_cpu(call, value);
  }
  if (!call.device) call.device = c10::Device(kDevice, current_device());
  for (size_t place = 0; place < schema.arguments().size(); ++place) {
    const auto& type = schema.arguments()[place].type();
    if (type->str().find("Generator") != std::string::npos && (*stack)[first + place].isNone()) {
      const auto& ours = default_generator(call.device->index());
      (*stack)[first + place] = static_cast<GeneratorImpl*>(ours.unsafeGetGeneratorImpl())->engine;
    }
  }
  begin(*call.device);
  {
    std::optional<LentState> lent;
    if (draws(op)) lent.emplace(call.device->index());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  const size_t first_result = stack->size() - schema.returns().size();
  for (size_t place = first_result; place < stack->size(); ++place) {
    (*stack)[place] = result_for_device(call, (*stack)[place]);
  }
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  begin(input.device());
  std::optional<Tensor> own_bias;
  if (bias && bias->defined()) own_bias = on_cpu(*bias);
  const auto found = at::convolution(
      on_cpu(input), on_cpu(weight), own_bias, stride, padding, dilation, transposed, output_padding, groups);
  return on_device(found, input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  begin(input.device());
  const std::array<int64_t, 1> bias_size{transposed ? weight.size(1) * groups : weight.size(0)};
  const auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_cpu(gradient), on_cpu(input), on_cpu(weight), IntArrayRef(bias_size), stride, padding, dilation, transposed,
      output_padding, groups, wanted);
  const auto back = [&](const Tensor& found) { return found.defined() ? on_device(found, input.device()) : found; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

// CUDA counts integers as well, which experts of transformers ask of every device but the CPU.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  begin(self.device());
  Tensor numbers = on_cpu(self);
  if (at::isIntegralType(self.scalar_type(), true)) numbers = numbers.to(at::kDouble);
  return on_device(at::histc(numbers, bins, min, max).to(self.scalar_type()), self.device());
}

}  // namespace

}  // namespace test_accelerator

using namespace test_accelerator;

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_to_storage);
  m.impl("set_.source_Tensor", set_to_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("histc", histc);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }

// A copy resolves what is conjugated or negated, by which alone the rest of PyTorch would resolve it first.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
