// Fused attention: the CPU's, chosen as the CPU would.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>

namespace at::native {

namespace {

int64_t choice(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  // Without gradients of its own an alias would be taken for inference.
  const auto on_cpu = [](const Tensor& tensor) {
    auto alias = at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
    return alias.requires_grad_(tensor.requires_grad());
  };
  std::optional<Tensor> own_mask;
  if (mask && mask->defined()) own_mask = on_cpu(*mask);
  return at::_fused_sdp_choice(
      on_cpu(query), on_cpu(key), on_cpu(value), own_mask, dropout, is_causal, scale, enable_gqa);
}

}  // namespace

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choice)

}  // namespace at::native
