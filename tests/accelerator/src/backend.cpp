// What PyTorch asks of a device: guards, streams, events, hooks; and what Python asks of it.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/extension.h>

#include "allocator.h"
#include "generator.h"
#include "streams.h"

namespace test_accelerator {

namespace {

// What PyTorch keeps of an event.
struct EventState {
  MomentPointer moment;
};

const MomentPointer& moment_of(void* event) { return static_cast<EventState*>(event)->moment; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kDevice, exchange_device(device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(kDevice, current_device()); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(device.index()); }
  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(index_of(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(index_of(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(index_of(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new EventState;
    static_cast<EventState*>(*event)->moment = moment_on(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto moment = moment_of(event);
    if (!moment->is_reached()) queue_of(stream).tell([moment] { moment->wait(); }, false);
  }
  bool queryEvent(void* event) const override { return !event || moment_of(event)->is_reached(); }
  void synchronizeEvent(void* event) const override {
    if (event) moment_of(event)->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start && end, "both events must be recorded before the time between them is asked for");
    for (void* event : {start, end}) TORCH_CHECK(moment_of(event)->is_reached(), "an event is still to come");
    return double(moment_of(end)->time_ns() - moment_of(start)->time_ns()) * 1e-6;
  }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { queue_of(stream).wait(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait_for_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator()->recordStream(pointer, stream);
  }

 private:
  static c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(kDevice, current_device()); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto made = allocator()->allocate(size);
    std::memcpy(made.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

pybind11::dict event_told(const Event& event) {
  pybind11::dict told;
  told["action"] = event.action;
  told["addr"] = event.address;
  told["size"] = event.size;
  told["time_us"] = event.time_ns / 1000;
  told["stream"] = event.stream;
  return told;
}

pybind11::list segments_told(c10::DeviceIndex device) {
  pybind11::list told;
  for (const auto& segment : pool_of(device).segments()) {
    pybind11::list blocks;
    for (const auto& [address, size, requested, is_allocated] : pool_of(device).blocks(segment)) {
      pybind11::dict block;
      block["address"] = address;
      block["size"] = size;
      block["requested_size"] = requested;
      block["state"] = is_allocated ? "active_allocated" : "inactive";
      blocks.append(block);
    }
    pybind11::dict one;
    one["device"] = int(device);
    one["address"] = reinterpret_cast<size_t>(segment.address);
    one["total_size"] = segment.size;
    one["stream"] = segment.stream;
    one["segment_type"] = segment.is_small ? "small" : "large";
    one["blocks"] = blocks;
    told.append(one);
  }
  return told;
}

}  // namespace

}  // namespace test_accelerator

using namespace test_accelerator;

static c10::impl::DeviceGuardImplRegistrar guard_registered(kDevice, new Guard);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static auto* hooks = new Hooks;
  c10::SetAllocator(kDevice, allocator());
  at::RegisterPrivateUse1HooksInterface(hooks);

  module.def("device_count", [] { return kDevices; });
  module.def("current_device", [] { return int(current_device()); });
  module.def("exchange_device", [](int device) { return int(exchange_device(device)); });
  module.def("synchronize", [](int device) { wait_for_device(device); }, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("default_generator", [](int device) {
    return pybind11::reinterpret_steal<pybind11::object>(THPGenerator_initDefaultGenerator(default_generator(device)));
  });
  module.def("mem_get_info", [](int device) {
    return std::pair<size_t, size_t>(pool_of(device).free_bytes(), pool_of(device).total_bytes());
  });
  module.def("record_history", [](int device, bool is_on) { pool_of(device).record_history(is_on); });
  module.def("records_history", [](int device) { return pool_of(device).records_history(); });
  module.def("history", [](int device) {
    pybind11::list told;
    for (const auto& event : pool_of(device).history()) told.append(event_told(event));
    return told;
  });
  module.def("segments", [](int device) { return segments_told(device); });
  module.def("limit", [](int device, size_t total_bytes) { pool_of(device).limit(total_bytes); });
  module.def("set_copy_rate", [](double bytes_per_s) { speeds().copy_bytes_per_s = bytes_per_s; });
  module.def("set_operation_us", [](double time_us) { speeds().operation_ns = int64_t(time_us * 1e3); });
  module.def("fail_allocation", [](int64_t number) { faults().fail_in = number; });
  module.def("never_merge", [](bool is_on) { faults().never_merge = is_on; });
  module.def("poison", [](bool is_on) { faults().poisons = is_on; });
}
