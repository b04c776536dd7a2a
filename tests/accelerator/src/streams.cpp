#include "streams.h"

#include <array>
#include <map>

namespace test_accelerator {

namespace {

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Queues live as long as the process: a stream may be told something while the interpreter ends.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::unique_ptr<Queue>> queues;
  c10::StreamId last = 0;
};

Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

thread_local c10::DeviceIndex the_device = 0;
thread_local std::array<c10::StreamId, kDevices> the_streams{};

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id);
}

}  // namespace

void Moment::reach() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    time_ns_ = now_ns();
  }
  reached_.notify_all();
}

bool Moment::is_reached() const { return time_ns_ != 0; }

void Moment::wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  reached_.wait(lock, [this] { return is_reached(); });
}

int64_t Moment::time_ns() const { return time_ns_; }

Queue::Queue() = default;

Queue::~Queue() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    is_closed_ = true;
  }
  changed_.notify_all();
  if (thread_) thread_->join();
}

void Queue::tell(std::function<void()> work, bool may_be_now) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (may_be_now && !is_working_ && waiting_.empty()) {
    is_working_ = true;
    lock.unlock();
    work();
    lock.lock();
    is_working_ = false;
    lock.unlock();
    changed_.notify_all();
    return;
  }
  waiting_.push_back(std::move(work));
  if (!thread_) thread_.emplace([this] { run(); });
  lock.unlock();
  changed_.notify_all();
}

bool Queue::is_idle() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return !is_working_ && waiting_.empty();
}

void Queue::wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !is_working_ && waiting_.empty(); });
}

void Queue::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_closed_ || (!is_working_ && !waiting_.empty()); });
    if (is_closed_) return;
    auto work = std::move(waiting_.front());
    waiting_.pop_front();
    is_working_ = true;
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
    is_working_ = false;
    changed_.notify_all();
  }
}

c10::Stream new_stream(c10::DeviceIndex device) {
  auto& known = registry();
  std::lock_guard<std::mutex> guard(known.mutex);
  return stream_of(device, ++known.last);
}

c10::Stream default_stream(c10::DeviceIndex device) { return stream_of(device, 0); }

c10::Stream current_stream(c10::DeviceIndex device) { return stream_of(device, the_streams.at(device)); }

c10::Stream exchange_stream(c10::Stream stream) {
  const auto device = stream.device_index();
  const auto before = current_stream(device);
  the_streams.at(device) = stream.id();
  return before;
}

c10::DeviceIndex current_device() { return the_device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  TORCH_CHECK(device < kDevices, "there are ", kDevices, " devices, and none of index ", int(device));
  const auto before = the_device;
  if (device >= 0) the_device = device;
  return before;
}

Queue& queue_of(const c10::Stream& stream) {
  auto& known = registry();
  std::lock_guard<std::mutex> guard(known.mutex);
  auto& queue = known.queues[{stream.device_index(), stream.id()}];
  if (!queue) queue = std::make_unique<Queue>();
  return *queue;
}

MomentPointer moment_on(const c10::Stream& stream) {
  auto moment = std::make_shared<Moment>();
  queue_of(stream).tell([moment] { moment->reach(); }, true);
  return moment;
}

void wait_for_device(c10::DeviceIndex device) {
  std::vector<Queue*> found;
  {
    auto& known = registry();
    std::lock_guard<std::mutex> guard(known.mutex);
    for (auto& [key, queue] : known.queues) {
      if (key.first == device) found.push_back(queue.get());
    }
  }
  for (auto* queue : found) queue->wait();
}

Speeds& speeds() {
  static auto* made = new Speeds;
  return *made;
}

void take_time_of_copy(size_t size_bytes) {
  const double rate = speeds().copy_bytes_per_s;
  if (rate > 0) std::this_thread::sleep_for(std::chrono::duration<double>(double(size_bytes) / rate));
}

}  // namespace test_accelerator
