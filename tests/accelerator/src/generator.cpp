#include "generator.h"

#include <vector>

namespace test_accelerator {

GeneratorImpl::GeneratorImpl(c10::DeviceIndex device, at::Generator engine)
    : c10::GeneratorImpl(c10::Device(kDevice, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      engine(std::move(engine)) {}

void GeneratorImpl::set_current_seed(uint64_t seed) { engine.set_current_seed(seed); }
void GeneratorImpl::set_offset(uint64_t offset) { engine.set_offset(offset); }
uint64_t GeneratorImpl::get_offset() const { return engine.get_offset(); }
uint64_t GeneratorImpl::current_seed() const { return engine.current_seed(); }
uint64_t GeneratorImpl::seed() { return engine.seed(); }
void GeneratorImpl::set_state(const c10::TensorImpl& state) { engine.unsafeGetGeneratorImpl()->set_state(state); }
c10::intrusive_ptr<c10::TensorImpl> GeneratorImpl::get_state() const {
  return engine.unsafeGetGeneratorImpl()->get_state();
}
GeneratorImpl* GeneratorImpl::clone_impl() const { return new GeneratorImpl(device().index(), engine.clone()); }

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* made = [] {
    auto* found = new std::vector<at::Generator>;
    for (int index = 0; index < kDevices; ++index) found->push_back(new_generator(index));
    return found;
  }();
  return made->at(device < 0 ? current_device() : device);
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<GeneratorImpl>(
      device < 0 ? current_device() : device, at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

}  // namespace test_accelerator
