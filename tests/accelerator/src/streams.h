// Streams of work on threads of their own, and events between them.
//
// Operations run on the thread that calls them, once their own stream has done what it was told before. Copies that
// nobody is to wait for run on the stream's thread: they take their time, and write at its end, so that whoever reads
// too early reads what was there before.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace test_accelerator {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;

// One recording of an event; later ones are other objects, as whoever waits means the one that was there.
class Moment {
 public:
  void reach();
  bool is_reached() const;
  void wait() const;
  // In ns on a clock that never goes back; 0 before it is reached.
  int64_t time_ns() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable reached_;
  std::atomic<int64_t> time_ns_{0};
};

using MomentPointer = std::shared_ptr<Moment>;

// What a stream was told, in order.
class Queue {
 public:
  Queue();
  ~Queue();
  // Done at once where nothing is before it, and `may_be_now`.
  void tell(std::function<void()> work, bool may_be_now);
  bool is_idle() const;
  void wait() const;

 private:
  void run();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool is_working_ = false;
  bool is_closed_ = false;
  std::optional<std::thread> thread_;
};

c10::Stream new_stream(c10::DeviceIndex device);
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
// Of this thread; returns the one before.
c10::Stream exchange_stream(c10::Stream stream);
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

Queue& queue_of(const c10::Stream& stream);
MomentPointer moment_on(const c10::Stream& stream);
void wait_for_device(c10::DeviceIndex device);

// How long copies and operations take at least.
struct Speeds {
  std::atomic<double> copy_bytes_per_s{0.0};  // 0: as fast as they are
  std::atomic<int64_t> operation_ns{0};
};
Speeds& speeds();
// Sleeps for what a copy of that size is to take.
void take_time_of_copy(size_t size_bytes);

}  // namespace test_accelerator
